"""GPT-J and CodeGen: attention and feed-forward read the same norm; rope rotates neighbours."""

from __future__ import annotations

from dataclasses import replace

from unspool.errors import LoadError
from unspool.models.decoder.frequencies import make_rope, plain_frequencies
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed, read_ids, read_sizes, refuse_unbuilt
from unspool.models.head_order import CODEGEN_PARTS
from unspool.models.settings import Settings

NAMES = WeightNames(
    embedding="transformer.wte",
    layer="transformer.h.{i}.",
    attn_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    final_norm="transformer.ln_f",
    prefix="transformer.",
)


def _read_config(config: Settings, family: str = "gptj") -> DecoderSpec:
    refuse_unbuilt(config)
    sizes = read_sizes(
        config,
        hidden=("n_embd", "hidden_size"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
    )
    hidden_size, head_dim = sizes["hidden_size"], sizes["head_dim"]
    width = config.integer("rotary_dim", default=64)
    if width % 2 or width > head_dim:
        raise LoadError(f"{config.where} rotates {width} of {head_dim} numbers a head; pairs need an even part")
    return DecoderSpec(
        family=family,
        **sizes,
        ffn_size=config.integer("n_inner", default=4 * hidden_size),
        max_context=config.integer("n_positions", "max_position_embeddings", default=2048),
        norm=NormSpec("layer", config.number("layer_norm_epsilon", default=1e-5), has_bias=True),
        residual="parallel",
        has_ffn_norm=False,
        rope=make_rope(plain_frequencies(width, 10_000.0), is_interleaved=True),
        attention_scale=head_dim**-0.5,
        is_gated=False,
        activation=config.text("activation_function", default="gelu_new"),
        has_ffn_bias=True,
        is_head_tied=config.boolean("tie_word_embeddings", default=False),
        has_head_bias=True,
        **read_ids(config),
    )


def _read_codegen(config: Settings) -> DecoderSpec:
    spec = _read_config(config, "codegen")
    if spec.num_heads % CODEGEN_PARTS:
        raise LoadError(f"{config.where} has {spec.num_heads} heads, and CodeGen's are stored in {CODEGEN_PARTS} parts")
    return spec


GPTJ = DecoderFamily(
    name="gptj",
    architectures=("GPTJForCausalLM",),
    model_types=("gptj",),
    read_config=_read_config,
    find_names=fixed(NAMES),
)
CODEGEN = DecoderFamily(
    name="codegen",
    architectures=("CodeGenForCausalLM",),
    model_types=("codegen",),
    read_config=_read_codegen,
    find_names=fixed(replace(NAMES, qkv=("attn.qkv_proj",), qkv_layout="codegen")),
)
