"""Phi 1, 1.5 and 2: attention and feed-forward read the same norm, half of each head is rotated. Phi 3 and 4."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.frequencies import read_rope
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.families.llama import NAMES as LLAMA_NAMES
from unspool.models.families.llama import read_llama_config, with_window
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource

NAMES = WeightNames(
    embedding="model.embed_tokens",
    layer="model.layers.{i}.",
    attn_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.dense",
    up=("mlp.fc1",),
    down="mlp.fc2",
    final_norm="model.final_layernorm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    prefix="model.",
)


def _read_config(config: Settings) -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(config, kv_heads=("num_key_value_heads",))
    head_dim = sizes["head_dim"]
    norm = NormSpec("layer", config.number("layer_norm_eps", default=1e-5), has_bias=True)
    return DecoderSpec(
        family="phi",
        **sizes,
        ffn_size=config.integer("intermediate_size"),
        max_context=config.integer("max_position_embeddings", default=2048),
        norm=norm,
        qk_norm=norm if config.boolean("qk_layernorm", default=False) else None,
        residual="parallel",
        has_ffn_norm=False,
        rope=read_rope(config, head_dim, rotary_fraction=0.5),
        attention_scale=head_dim**-0.5,
        has_qkv_bias=True,
        has_out_bias=True,
        is_gated=False,
        activation=config.text("hidden_act", default="gelu_new"),
        has_ffn_bias=True,
        is_head_tied=config.boolean("tie_word_embeddings", default=False),
        has_head_bias=True,
        **read_ids(config),
    )


def _read_gguf(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="phi", norm="layer", activation="gelu_new")
    return replace(spec, residual="parallel", has_ffn_norm=False)


def _read_phi3(config: Settings) -> DecoderSpec:
    """A Llama with q, k and v in one matrix, gate and up in another, and a window if there is one."""
    spec = read_llama_config(config, "phi3")
    window = config.optional_integer("sliding_window")
    return with_window(spec, config, window, ["full" if window is None else "sliding"] * spec.num_layers)


PHI = DecoderFamily(
    name="phi",
    architectures=("PhiForCausalLM",),
    model_types=("phi",),
    read_config=_read_config,
    find_names=fixed(NAMES),
    gguf=("phi2",),
    read_gguf=_read_gguf,
)
PHI3 = DecoderFamily(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    model_types=("phi3",),
    read_config=_read_phi3,
    find_names=fixed(replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))),
)
