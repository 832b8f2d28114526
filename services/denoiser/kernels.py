"""The operations of a decoder, behind one seam: torch's own on every device, vLLM's where it is installed with a GPU.

Which of them run is chosen once, at load, by `choose_kernels`; the decoder calls both by the same names.
docs/kernels.md says what runs where.

Shapes: T rows of a pass, H query heads, K key heads, D head size, d width, C columns in, O columns out, F MLP columns,
S slots of the pool, n a number of sequences.
"""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from services.denoiser.linears import Linear, PlainLinear, linear_on_cpu

logger = logging.getLogger(__name__)

KernelsName: TypeAlias = Literal["auto", "torch", "vllm"]
Quantization: TypeAlias = Literal["", "fp8"]

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_CAPABILITY = (8, 9)  # of GPUs that multiply it
FLASH_CAPABILITY = (8, 0)  # of GPUs that FlashAttention runs on
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # not 0, where a row is
NUM_SPLITS = 1  # of a sequence's keys: with more of them a request's output would depend on who rides along
_FIRST_POSITIONS = 1024  # of the rotary table, before a longer canvas comes


class Varlen(Protocol):
    """Attention of many sequences in one call: every row of a sequence sees all of its keys."""

    def __call__(
        self,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        cu_query: Tensor,
        cu_key: Tensor,
        max_query: int,
        max_key: int,
    ) -> Tensor:
        """[T, H, D].

        `cu_query` and `cu_key`, int32 [n + 1]: where the rows and keys of each sequence begin, ascending, and where the
        last one's end. A sequence may have no rows, or no keys and no rows. `max_query` and `max_key` are at least the
        most rows and keys of a sequence that has rows.
        """


class Rotary(Protocol):
    """Turns queries and keys to their positions."""

    def at(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        """[T, ...]: what `rotate_` needs for the positions [start, end) of these windows, one after the other."""

    def rotate_(self, heads_THD: Tensor, rotary_T: Tensor) -> None:
        """In place: (first half, second half) pairs of each head. A row's heads lie side by side."""


class Kernels:
    """Torch's own."""

    name = "torch"

    def __init__(self, device: torch.device, quantization: Quantization = "") -> None:
        self.device, self.quantization = device, quantization

    def rms_norm(self, x_Td: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        """Normalise in float32, cast back, multiply by the weight."""
        if x_Td.dtype == torch.float32:
            return functional.rms_norm(x_Td, weight_d.shape, weight_d, eps)
        return functional.rms_norm(x_Td.float(), weight_d.shape, None, eps).to(x_Td.dtype) * weight_d

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        """silu(first half) * second half, of each row."""
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rotary(self, *, head_dim: int, theta: float, max_positions: int, dtype: torch.dtype, rounded: bool) -> Rotary:
        """For heads of activations of this dtype, to which sines and cosines are `rounded`."""
        return TableRotary(
            head_dim, theta, max_positions, device=self.device, rounded_to=dtype if rounded else torch.float32
        )

    def linear(self, weight_OC: Tensor, bias_O: Tensor | None = None) -> Linear:
        """Quantised, if that was asked for. Its weights may be a copy of these."""
        if self.quantization:
            return Fp8Linear(self, *self.quantize_fp8(weight_OC), bias_O)
        return self.full_linear(weight_OC, bias_O)

    def full_linear(self, weight_OC: Tensor, bias_O: Tensor | None = None) -> Linear:
        """Never quantised."""
        kind = linear_on_cpu(weight_OC.dtype) if self.device.type == "cpu" else PlainLinear
        return kind(weight_OC, bias_O)

    def quantize_fp8(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Each row in 8 bits (E4M3) and its scale, float32 [T, 1]: x is their product."""
        scale_T1 = x_TC.abs().amax(-1, keepdim=True).float().div_(FP8_MAX).clamp_min_(_SMALLEST_SCALE)
        return (x_TC / scale_T1).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale_T1

    def fp8_linear(self, x_TC: Tensor, weight_OC: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> Tensor:
        """x @ weight.T + bias, x quantised on the way."""
        quantized_TC, scale_T1 = self.quantize_fp8(x_TC)
        by_row = ScalingType.RowWise
        return functional.scaled_mm(
            quantized_TC, weight_OC.t(), scale_T1, by_row, scale_O1.t(), by_row, bias=bias_O, output_dtype=x_TC.dtype
        )

    def varlen(self, head_dim: int, dtype: torch.dtype) -> Varlen | None:
        """One call for all requests of a pass, or None where torch has no such kernel."""
        return torch_varlen() if self.runs_flash(head_dim, dtype) else None

    def runs_flash(self, head_dim: int, dtype: torch.dtype) -> bool:
        """Whether FlashAttention takes such heads on this device."""
        return (
            self.device.type == "cuda"
            and dtype in (torch.bfloat16, torch.float16)
            and head_dim % 8 == 0
            and head_dim <= 256
            and torch.version.cuda is not None  # else it is ROCm that calls itself so
            and torch.cuda.get_device_capability(self.device) >= FLASH_CAPABILITY
        )


class Fp8Linear:
    """A `Linear` in 8 bits: each output has a scale, and each row of x gets one as it comes."""

    def __init__(self, kernels: Kernels, weight_OC: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> None:
        self._kernels, self._weight_OC, self._scale_O1, self._bias_O = kernels, weight_OC, scale_O1, bias_O

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self._kernels.fp8_linear(x_TC, self._weight_OC, self._scale_O1, self._bias_O)

    def add_to_(self, x_TO: Tensor, h_TC: Tensor) -> Tensor:
        return x_TO.add_(self(h_TC))


class TableRotary:
    """A `Rotary` that looks sines and cosines up once a layout: [T, 2, 1, D], float32."""

    def __init__(
        self, head_dim: int, theta: float, max_positions: int, *, device: torch.device, rounded_to: torch.dtype
    ) -> None:
        self._head_dim, self._theta, self._max_positions = head_dim, theta, max_positions
        self._device, self._rounded_to = device, rounded_to
        self._table = self._make(min(_FIRST_POSITIONS, max_positions))

    def at(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        longest = max(end for _, end in windows)
        if longest > len(self._table):
            self._table = self._make(min(1 << (longest - 1).bit_length(), self._max_positions))
        pieces = [self._table[start:end] for start, end in windows]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rotate_(self, heads_THD: Tensor, rotary_T: Tensor) -> None:
        """In float32: (a, b) becomes (a cos - b sin, b cos + a sin), a and b being the halves of a head.

        Rolling a head by half its size swaps them, and the minus sits in the sines.
        """
        cos, sin = rotary_T.unbind(1)
        full = heads_THD.float()  # heads_THD itself if it is float32
        swapped = full.roll(heads_THD.shape[-1] // 2, -1)
        turned = full.mul_(cos).addcmul_(swapped, sin)
        if turned is not heads_THD:
            heads_THD.copy_(turned)

    def _make(self, num_positions: int) -> Tensor:
        angle = rotary_angles(self._head_dim, self._theta, num_positions, self._device)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).unsqueeze(2)
        return table.to(self._rounded_to).float()


def rotary_angles(head_dim: int, theta: float, num_positions: int, device: torch.device) -> Tensor:
    """[positions, D / 2] float32: by how much each pair of a head is turned."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    position = torch.arange(num_positions, dtype=torch.float32, device=device)
    return torch.outer(position, 1.0 / theta**exponent)


def torch_varlen() -> Varlen:
    """Torch's FlashAttention: half precision, on a GPU."""
    from torch.nn.attention.varlen import varlen_attn  # brings a good part of torch's compiler: 1 s, 70 MB

    def varlen(
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        cu_query: Tensor,
        cu_key: Tensor,
        max_query: int,
        max_key: int,
    ) -> Tensor:
        output = varlen_attn(
            query_THD, key_SKD, value_SKD, cu_query, cu_key, max_query, max_key, enable_gqa=True, num_splits=NUM_SPLITS
        )
        assert isinstance(output, Tensor)  # a tuple only where more is asked for
        return output

    return varlen


def choose_kernels(
    name: KernelsName, device: torch.device, dtype: torch.dtype, quantization: Quantization = ""
) -> Kernels:
    """Raises ValueError, saying what is missing, where the machine cannot do what is asked for.

    "auto": vLLM's on a GPU where they can be used, else torch's.
    """
    if quantization == "fp8":
        _check_fp8(device, dtype)
    if name == "torch" or (name == "auto" and (device.type != "cuda" or importlib.util.find_spec("vllm") is None)):
        return Kernels(device, quantization)
    try:
        from services.denoiser.kernels_vllm import VllmKernels  # takes 10 s and more, and is not everywhere

        return VllmKernels(device, quantization)
    except (ImportError, ValueError) as error:
        if name == "vllm":
            raise ValueError(f'kernels = "vllm" cannot be used: {error}; "torch" needs nothing more') from error
        logger.warning("vLLM is installed but cannot be used, torch's own kernels run: %s", error)
        return Kernels(device, quantization)


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda":
        return
    if (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        found, wanted = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
        raise ValueError(
            f'quantization = "fp8" takes a GPU of compute capability {wanted} or more, this one has {found}'
        )
    if dtype != torch.bfloat16:
        raise ValueError('quantization = "fp8" on a GPU takes dtype = "bfloat16"')
