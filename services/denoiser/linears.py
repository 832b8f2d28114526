"""Products of activations with a layer's weights, and how fast this processor makes them.

Shapes: T rows, C columns in, O columns out.
"""

import time
from functools import lru_cache
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

LEAST_GAIN = 1.1  # less is not worth the digits, and might be another one next time
_PRODUCT = (1024, 512)  # outputs and inputs
_PRODUCTS = 8
_BLOCK_ROWS, _PASS_ROWS = 32, 128  # of one request's cache step, and of several
_LEAST_STEP, _STEPS = 16, 8  # between numbers of rows: at least so many rows, and so many steps to the double


class Linear(Protocol):
    """x @ weight.T + bias."""

    def __call__(self, x_TC: Tensor) -> Tensor:
        """[T, O]."""

    def add_to_(self, x_TO: Tensor, h_TC: Tensor) -> Tensor:
        """x += h @ weight.T: for layers without a bias."""


class PlainLinear:
    """A `Linear` in the activations' dtype, with the weights as they come."""

    def __init__(self, weight_OC: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OC, self._bias_O = weight_OC, bias_O
        self._weight_CO = weight_OC.t()

    def __call__(self, x_TC: Tensor) -> Tensor:
        return functional.linear(x_TC, self._weight_OC, self._bias_O)

    def add_to_(self, x_TO: Tensor, h_TC: Tensor) -> Tensor:
        return x_TO.addmm_(h_TC, self._weight_CO)


class PackedLinear:
    """A `Linear` in bfloat16 on a CPU, by oneDNN, which is what torch calls there.

    1. The weights are a copy in the order that oneDNN reads them in. It puts plain ones in order for each product anew,
       which takes as long as the product where rows are few. Torch's own compiler does the same to weights that stay.
    2. oneDNN compiles a program for each number of rows, in some milliseconds, and keeps the last thousand, of
       about a megabyte each. So rows are padded to one of few numbers.
    """

    def __init__(self, weight_OC: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight, self._bias_O = torch.ops.mkldnn._reorder_linear_weight(weight_OC, _BLOCK_ROWS), bias_O

    def __call__(self, x_TC: Tensor) -> Tensor:
        num_rows = len(x_TC)
        if missing := padded_rows(num_rows) - num_rows:
            x_TC = functional.pad(x_TC, (0, 0, 0, missing))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TC, self._weight, self._bias_O, "none", [], "")
        return product[:num_rows]

    def add_to_(self, x_TO: Tensor, h_TC: Tensor) -> Tensor:
        return x_TO.add_(self(h_TC))


LinearType: TypeAlias = type[PlainLinear] | type[PackedLinear]


def padded_rows(num_rows: int) -> int:
    """The next number of rows that there is a program for: at most an eighth more, and a multiple of 16."""
    step = max(_LEAST_STEP, (1 << max(num_rows - 1, 0).bit_length()) // (2 * _STEPS))
    return -(-num_rows // step) * step


def linear_on_cpu(dtype: torch.dtype) -> LinearType:
    """The kind of `Linear` for a CPU and this number format."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # not in every build of torch
    if dtype != torch.bfloat16 or not has_onednn:
        return PlainLinear
    return PackedLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else PlainLinear


@lru_cache(maxsize=1)
def bfloat16_gain() -> float:
    """How many times as fast as float32 this processor multiplies bfloat16, by a product as layers have it.

    Measured, for its instructions do not tell: with AMX it is four and more, with AVX512-BF16 and no AMX it was 0.6 on
    an Intel Xeon, and a processor with neither took ten times as long as in float32.
    """
    return _product_s(torch.float32) / _product_s(torch.bfloat16)


@torch.inference_mode()
def _product_s(dtype: torch.dtype) -> float:
    """Seconds, the least of some."""
    rows = torch.ones(_PASS_ROWS, _PRODUCT[1], dtype=dtype)
    linear = linear_on_cpu(dtype)(torch.ones(*_PRODUCT, dtype=dtype))
    seconds = []
    for _ in range(1 + _PRODUCTS):  # the first one makes what the others use
        began = time.perf_counter()
        linear(rows)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
