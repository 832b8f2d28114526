"""vLLM's kernels, called without its engine: importing this module imports vLLM.

Its layers (RMSNorm, SiluAndMul, rotary embedding) choose an implementation by a configuration that only its engine sets
up, and end in the functions that are called here directly. They are no public interface: pyproject.toml names the
versions that they are taken from.

Shapes: as in kernels.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from services.denoiser.kernels import NUM_SPLITS, Kernels, Quantization, Rotary, Varlen, rotary_angles, torch_varlen

_CPU_HEAD_DIM = 16


class VllmKernels(Kernels):
    """Fused norm, rotary embedding and SiLU; on a GPU FlashAttention and fp8 matrices too, else torch's own.

    Raises ValueError if this build of vLLM is for another kind of device.
    """

    name = "vllm"

    def __init__(self, device: torch.device, quantization: Quantization = "") -> None:
        if (built_for := current_platform.device_type) != device.type:
            raise ValueError(f"this build of vLLM is for {built_for or 'no device here'}, not for {device.type}")
        super().__init__(device, quantization)

    def rms_norm(self, x_Td: Tensor, weight_d: Tensor, eps: float) -> Tensor:
        output_Td = torch.empty_like(x_Td)
        ops.rms_norm(output_Td, x_Td, weight_d, eps)
        return output_Td

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        output_TF = gate_up_TF.new_empty(len(gate_up_TF), gate_up_TF.shape[-1] // 2)
        torch.ops._C.silu_and_mul(output_TF, gate_up_TF)
        return output_TF

    def rotary(self, *, head_dim: int, theta: float, max_positions: int, dtype: torch.dtype, rounded: bool) -> Rotary:
        table_dtype = dtype if rounded else torch.float32
        if self.device.type == "cpu":
            if head_dim % _CPU_HEAD_DIM:  # the kernel would end the process
                raise ValueError(
                    f'kernels = "vllm" on a CPU takes heads of a multiple of {_CPU_HEAD_DIM}, not {head_dim}'
                )
            table_dtype = dtype  # and no other
        return PositionRotary(head_dim, theta, max_positions, device=self.device, dtype=table_dtype)

    def quantize_fp8(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        if self.device.type == "cpu":  # the build for CPUs has the function, but not for rows
            return super().quantize_fp8(x_TC)
        quantized_TC, scale_T1 = ops.scaled_fp8_quant(x_TC, use_per_token_if_dynamic=True)
        return quantized_TC, scale_T1

    def fp8_linear(self, x_TC: Tensor, weight_OC: Tensor, scale_O1: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.device.type == "cpu":
            return super().fp8_linear(x_TC, weight_OC, scale_O1, bias_O)
        quantized_TC, scale_T1 = self.quantize_fp8(x_TC)
        output_TO: Tensor = ops.cutlass_scaled_mm(
            quantized_TC, weight_OC.t(), scale_T1, scale_O1, out_dtype=x_TC.dtype, bias=bias_O
        )
        return output_TO

    def varlen(self, head_dim: int, dtype: torch.dtype) -> Varlen | None:
        return _flash_attention(head_dim) if self.runs_flash(head_dim, dtype) else None


class PositionRotary:
    """A `Rotary` that hands positions to the kernel: [T] int64. Its table has all positions and never moves."""

    def __init__(
        self, head_dim: int, theta: float, max_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._head_dim, self._device = head_dim, device
        angle = rotary_angles(head_dim, theta, max_positions, device)
        self._table = torch.cat((angle.cos(), angle.sin()), -1).to(dtype)

    def at(self, windows: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([torch.arange(start, end) for start, end in windows]).to(self._device, non_blocking=True)

    def rotate_(self, heads_THD: Tensor, rotary_T: Tensor) -> None:
        heads = heads_THD.view(len(heads_THD), -1)  # on a CPU the kernel takes no third dimension
        ops.rotary_embedding(rotary_T, heads, None, self._head_dim, self._table, True)


def _flash_attention(head_dim: int) -> Varlen:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version(head_size=head_dim)
    if version is None:  # it has none for this GPU
        return torch_varlen()
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def varlen(
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        cu_query: Tensor,
        cu_key: Tensor,
        max_query: int,
        max_key: int,
    ) -> Tensor:
        output: Tensor = flash_attn_varlen_func(
            query_THD,
            key_SKD,
            value_SKD,
            max_seqlen_q=max_query,
            cu_seqlens_q=cu_query,
            max_seqlen_k=max_key,
            cu_seqlens_k=cu_key,
            causal=False,
            num_splits=NUM_SPLITS,
            fa_version=version,
        )
        return output

    return varlen
