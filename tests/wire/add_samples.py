"""python -m tests.wire.add_samples: puts the encodings that are not on record yet beside the old ones."""

import msgspec

from contracts import codec
from tests.wire.builders import EXAMPLES
from tests.wire.test_compatibility import SAMPLES, as_map


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    for example in EXAMPLES:
        name, encoded = type(example).__name__, codec.encode(example)
        known = sorted(SAMPLES.glob(f"{name}.*.msgpack"))
        if encoded not in [path.read_bytes() for path in known]:
            path = SAMPLES / f"{name}.{len(known) + 1}.msgpack"
            path.write_bytes(encoded)
            path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(as_map(example))) + b"\n")
            print("added", path.name)


if __name__ == "__main__":
    main()
