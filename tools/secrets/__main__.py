"""python -m tools.secrets FOLDER: makes what is missing of the keys and certificates of a deployment.

python -m tools.secrets secrets --host nats --host '*.nats' --host tediserve.example.org
python -m tools.secrets secrets --kubernetes | kubectl apply -n tediserve -f -
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from tools.secrets.kubernetes import manifests
from tools.secrets.store import Secrets, make_secrets

HERE = ("localhost", "127.0.0.1", "::1")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.secrets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where they lie; what is there stays as it is")
    parser.add_argument(
        "--host", action="append", default=[], help="a name or address of the servers, for new certificates; repeat it"
    )
    parser.add_argument("--kubernetes", action="store_true", help="print them as Secrets, for kubectl apply")
    options = parser.parse_args(words)
    try:
        made = make_secrets(options.folder, [*HERE, *options.host])
    except (OSError, ValueError) as error:
        print(f"secrets: {error}", file=sys.stderr)
        return 1
    if options.kubernetes:
        yaml.safe_dump_all(manifests(made), sys.stdout, sort_keys=False)
    else:
        print(_told(made))
    return 0


def _told(made: Secrets) -> str:
    return (
        f"{made.nkeys}: keys of the services ([nats] nkeys); {made.nats_env}: their public halves, for nats-server\n"
        f"{made.ca.parent}: certificates ([nats] tls_ca, [gateway] tls_certificate, tls_key)\n"
        f"{made.api_key}: the key for clients; {made.key_file}: [gateway] key_file"
    )


if __name__ == "__main__":
    sys.exit(main())
