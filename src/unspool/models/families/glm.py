"""GLM 4: half of each head is rotated, gate and up are one matrix; its second form has norms on both sides."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.spec import DecoderSpec
from unspool.models.families.base import DecoderFamily, fixed
from unspool.models.families.llama import NAMES, read_llama_config
from unspool.models.settings import Settings

_GLM_NAMES = replace(NAMES, up=("mlp.gate_up_proj",))


def _read_glm(config: Settings, family: str = "glm") -> DecoderSpec:
    spec = read_llama_config(config, family, rotary_fraction=0.5, is_interleaved=True)
    return replace(spec, has_qkv_bias=config.boolean("attention_bias", default=True), has_out_bias=False)


def _read_glm4(config: Settings) -> DecoderSpec:
    return replace(_read_glm(config, "glm4"), norm_placement="sandwich")


GLM = DecoderFamily(
    name="glm",
    architectures=("GlmForCausalLM",),
    model_types=("glm",),
    read_config=_read_glm,
    find_names=fixed(_GLM_NAMES),
)
GLM4 = DecoderFamily(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    model_types=("glm4",),
    read_config=_read_glm4,
    find_names=fixed(
        replace(_GLM_NAMES, post_attn_norm="post_self_attn_layernorm", post_ffn_norm="post_mlp_layernorm")
    ),
)
