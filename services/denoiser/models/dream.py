"""Dream: Qwen2's layers without the causal mask (query, key and value have biases); row p predicts position p + 1."""

from typing import Any

import msgspec

from services.denoiser.models.spec import DecoderSpec, EosIds, Names, Positive, eos_ids, read_fields

NAMES = Names(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_norm="model.layers.{}.input_layernorm",
    query="model.layers.{}.self_attn.q_proj",
    key="model.layers.{}.self_attn.k_proj",
    value="model.layers.{}.self_attn.v_proj",
    attention_out="model.layers.{}.self_attn.o_proj",
    mlp_norm="model.layers.{}.post_attention_layernorm",
    gate="model.layers.{}.mlp.gate_proj",
    up="model.layers.{}.mlp.up_proj",
    down="model.layers.{}.mlp.down_proj",
    num_heads="num_attention_heads",
    num_kv_heads="num_key_value_heads",
    mlp_width="intermediate_size",
    vocab_size="vocab_size",
)


class DreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that change what is computed; those with one supported value are checked."""

    hidden_size: Positive
    num_attention_heads: Positive
    num_hidden_layers: Positive
    intermediate_size: Positive
    max_position_embeddings: Positive
    vocab_size: Positive
    mask_token_id: int
    eos_token_id: EosIds = None
    num_key_value_heads: Positive | None = None  # each query head has its own
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    rope_scaling: Any = None
    use_mrope: bool = False
    use_sliding_window: bool = False


_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}


def dream_spec(architecture: str, config: dict[str, Any], generation: dict[str, Any]) -> DecoderSpec:
    """From config.json and generation_config.json. Raises ValueError for what is not supported."""
    fields = read_fields(config, DreamConfig, _SUPPORTED)
    if fields.hidden_size % fields.num_attention_heads:
        raise ValueError(
            f"config.json: num_attention_heads = {fields.num_attention_heads} "
            f"must divide hidden_size = {fields.hidden_size}"
        )
    return DecoderSpec(
        architecture=architecture,
        names=NAMES,
        width=fields.hidden_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.hidden_size // fields.num_attention_heads,
        mlp_width=fields.intermediate_size,
        vocab_size=fields.vocab_size,
        max_positions=fields.max_position_embeddings,
        mask_id=fields.mask_token_id,
        eos_ids=eos_ids(fields.eos_token_id, generation),
        norm_eps=fields.rms_norm_eps,
        rope_theta=fields.rope_theta,
        tied=fields.tie_word_embeddings,
        qkv_bias=True,
        shifted=True,
        rotary_in_dtype=True,
    )
