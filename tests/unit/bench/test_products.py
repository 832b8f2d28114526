"""What the benchmark of matrix products measures."""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from services.denoiser.linears import PackedLinear, PlainLinear
from tools.bench.engine import products
from tools.bench.engine.workload import Workload

SMALL = Workload(num_layers=2, width=64, mlp_width=192)


class Here(ProcessPoolExecutor):
    """Runs in this process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, function: Any, /, *arguments: Any) -> Any:
        result = function(*arguments)

        class Done:
            def result(self, limit_s: float) -> Any:
                return result

        return Done()

    def __exit__(self, *_: object) -> None:
        pass


def test_every_product_of_a_pass_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    call = PlainLinear.__call__

    def spy(self: PlainLinear, x: torch.Tensor) -> torch.Tensor:
        y = call(self, x)
        shapes.append((x.shape[1], y.shape[1]))
        return y

    monkeypatch.setattr(PlainLinear, "__call__", spy)
    measured = products._measure(SMALL, "float32", "plain", (3, 5), torch.get_num_threads())
    assert (measured.rows, measured.weights) == ("3 to 5, 2 passes", "plain")
    assert measured.seconds > 0
    assert shapes == 3 * 2 * [(64, 192), (64, 64), (64, 384), (192, 64)]  # one to begin with, then two


@pytest.mark.parametrize("kind", [PlainLinear, PackedLinear])
def test_packed_weights_are_measured_where_there_are_some(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(products, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(products, "SAME_ROWS", (4,))
    monkeypatch.setattr(products, "OTHER_ROWS", (3, 5))
    monkeypatch.setattr(products, "linear_on_cpu", lambda dtype: kind)
    monkeypatch.setattr(PackedLinear, "__init__", lambda self, weight: None)
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: x)
    found = products.measure(SMALL, ["bfloat16"], torch.get_num_threads())
    kinds = ["plain", "packed"] if kind is PackedLinear else ["plain"]
    assert [(one.rows, one.weights) for one in found] == [
        *(("4", name) for name in kinds),
        *(("3 to 5, 2 passes", name) for name in kinds),
    ]
