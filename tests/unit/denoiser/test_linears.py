"""Both kinds of product compute the same, the packed one with few numbers of rows."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from services.denoiser import linears
from services.denoiser.kernels import Kernels
from services.denoiser.linears import Linear, PackedLinear, PlainLinear, bfloat16_gain, linear_on_cpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
FULL, HALF = torch.float32, torch.bfloat16


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    if linear_on_cpu(HALF) is PlainLinear:
        pytest.skip("oneDNN does not multiply bfloat16 here")
    return PackedLinear(weight, bias)


@pytest.mark.parametrize(("kind", "dtype"), [(PlainLinear, FULL), (PlainLinear, HALF), (packed, HALF)])
@settings(deadline=None, max_examples=50)
@given(
    rows=st.sampled_from([0, 1, 3, 32, 33, 200]),
    columns=st.integers(1, 70),
    outputs=st.integers(1, 70),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_with_the_weights_as_they_were(
    kind: Callable[..., Linear], dtype: torch.dtype, rows: int, columns: int, outputs: int, with_bias: bool, seed: int
) -> None:
    weight, x = numbers(outputs, columns, seed=seed, dtype=dtype), numbers(rows, columns, seed=seed + 1, dtype=dtype)
    bias = numbers(outputs, seed=seed + 2, dtype=dtype) if with_bias else None
    product = x.double() @ weight.double().T
    expected = product + (0 if bias is None else bias.double())
    found = kind(weight, bias)(x)
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    tolerance = TOLERANCE[dtype] * (1 + columns**0.5)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=tolerance)
    y = numbers(rows, outputs, seed=seed + 3, dtype=dtype)
    expected_sum = y.double() + product
    assert kind(weight).add_to_(y, x) is y
    torch.testing.assert_close(y.double(), expected_sum, rtol=TOLERANCE[dtype], atol=2 * tolerance)


def test_packed_weights_are_a_copy() -> None:
    weight, x = numbers(7, 16, seed=0, dtype=HALF), numbers(3, 16, seed=1, dtype=HALF)
    linear = packed(weight)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)
    assert before.abs().min() > 0


@given(st.integers(0, 4096))
def test_rows_are_padded_to_few_numbers(num_rows: int) -> None:
    padded = linears.padded_rows(num_rows)
    assert padded % 16 == 0
    assert num_rows <= padded <= max(num_rows + 15, 1.125 * num_rows)
    assert linears.padded_rows(padded) == padded
    assert linears.padded_rows(num_rows + 1) >= padded


def test_forty_numbers_are_enough_for_a_pass_and_are_all_that_is_multiplied() -> None:
    class Seen(TorchDispatchMode):
        rows: ClassVar[set[int]] = set()

        def __torch_dispatch__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function is torch.ops.mkldnn._linear_pointwise.default:
                self.rows.add(len(args[0]))
            return function(*args, **(kwargs or {}))

    linear = packed(numbers(3, 4, seed=0, dtype=HALF))
    with Seen():
        for rows in range(1, 600):
            assert len(linear(torch.zeros(rows, 4, dtype=HALF))) == rows
    assert Seen.rows == {linears.padded_rows(rows) for rows in range(1, 600)}
    assert len({linears.padded_rows(rows) for rows in range(1, 2049)}) == 40


def test_the_gain_of_bfloat16_is_what_products_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    class Timed:
        def __init__(self, weight: torch.Tensor) -> None:
            self.dtype = weight.dtype

        def __call__(self, rows: torch.Tensor) -> None:
            nonlocal clock
            assert rows.dtype == self.dtype
            clock += 3.0 if rows.dtype == FULL else 2.0

    monkeypatch.setattr(linears, "linear_on_cpu", lambda dtype: Timed)
    monkeypatch.setattr(linears.time, "perf_counter", lambda: clock)
    assert bfloat16_gain.__wrapped__() == 1.5


def test_kernels_on_a_cpu_take_the_kind_for_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_on_cpu(FULL) is PlainLinear
    for supported, kind in ((True, PackedLinear), (False, PlainLinear)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        assert linear_on_cpu(HALF) is kind
    with monkeypatch.context() as without:
        without.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        without.setattr(torch.ops, "mkldnn", None)  # such a build has no operation of that name
        assert linear_on_cpu(HALF) is PlainLinear
    for kind in (PlainLinear, PackedLinear):
        monkeypatch.setattr("services.denoiser.kernels.linear_on_cpu", lambda _, kind=kind: kind)
        kernels = Kernels(torch.device("cpu"))
        assert isinstance(kernels.linear(torch.ones(3, 4)), kind)
        assert isinstance(Kernels(torch.device("cpu"), "fp8").full_linear(torch.ones(3, 4)), kind)
