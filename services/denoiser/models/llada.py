"""LLaDA (Base, Instruct, 1.5): a decoder without biases, whose row p predicts position p."""

from typing import Any

import msgspec

from services.denoiser.models.spec import DecoderSpec, EosIds, Names, Positive, eos_ids, read_fields

NAMES = Names(
    embedding="model.transformer.wte",
    final_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    attention_norm="model.transformer.blocks.{}.attn_norm",
    query="model.transformer.blocks.{}.q_proj",
    key="model.transformer.blocks.{}.k_proj",
    value="model.transformer.blocks.{}.v_proj",
    attention_out="model.transformer.blocks.{}.attn_out",
    mlp_norm="model.transformer.blocks.{}.ff_norm",
    gate="model.transformer.blocks.{}.ff_proj",
    up="model.transformer.blocks.{}.up_proj",
    down="model.transformer.blocks.{}.ff_out",
    num_heads="n_heads",
    num_kv_heads="n_kv_heads",
    mlp_width="mlp_hidden_size",
    vocab_size="embedding_size",
)


class LladaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that change what is computed; those with one supported value are checked."""

    d_model: Positive
    n_heads: Positive
    n_layers: Positive
    max_sequence_length: Positive
    vocab_size: Positive
    mask_token_id: int
    eos_token_id: EosIds = None
    n_kv_heads: Positive | None = None  # each query head has its own
    mlp_hidden_size: Positive | None = None
    mlp_ratio: Positive = 4
    embedding_size: Positive | None = None  # the embedding may have more rows than there are tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    weight_tying: bool = False
    activation_type: str = "silu"
    block_type: str = "llama"
    layer_norm_type: str = "rms"
    rope: bool = True
    alibi: bool = False
    attention_layer_norm: bool = False
    include_bias: bool = False
    include_qkv_bias: bool = False
    input_emb_norm: bool = False
    scale_logits: bool = False
    multi_query_attention: bool | None = None


_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "multi_query_attention": (None, False),
}


def llada_spec(architecture: str, config: dict[str, Any], generation: dict[str, Any]) -> DecoderSpec:
    """From config.json and generation_config.json. Raises ValueError for what is not supported."""
    fields = read_fields(config, LladaConfig, _SUPPORTED)
    if fields.d_model % fields.n_heads:
        raise ValueError(f"config.json: n_heads = {fields.n_heads} must divide d_model = {fields.d_model}")
    return DecoderSpec(
        architecture=architecture,
        names=NAMES,
        width=fields.d_model,
        num_layers=fields.n_layers,
        num_heads=fields.n_heads,
        num_kv_heads=fields.n_kv_heads or fields.n_heads,
        head_dim=fields.d_model // fields.n_heads,
        mlp_width=fields.mlp_hidden_size or fields.mlp_ratio * fields.d_model,
        vocab_size=fields.embedding_size or fields.vocab_size,
        max_positions=fields.max_sequence_length,
        mask_id=fields.mask_token_id,
        eos_ids=eos_ids(fields.eos_token_id, generation),
        norm_eps=fields.rms_norm_eps,
        rope_theta=fields.rope_theta,
        tied=fields.weight_tying,
        qkv_bias=False,
        shifted=False,
        rotary_in_dtype=False,
    )
