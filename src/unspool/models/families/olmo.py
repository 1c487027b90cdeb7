"""OLMo 1 to 3: norms without weights, then norms of what residuals add and of whole queries and keys, then windows."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.frequencies import read_two_ropes
from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed
from unspool.models.families.llama import NAMES, read_llama_config, with_window
from unspool.models.settings import Settings
from unspool.protocols import LayerKind

_NORM_EPS = 1e-5
_AFTER_NAMES = replace(NAMES, post_attn_norm="post_attention_layernorm", post_ffn_norm="post_feedforward_layernorm")


def _read_olmo(config: Settings) -> DecoderSpec:
    if config.has("clip_qkv"):
        config.refuse("clip_qkv", config.find("clip_qkv"), because="queries, keys and values are not clipped here")
    return read_llama_config(config, "olmo", norm=NormSpec("layer", _NORM_EPS, has_weight=False))


def _read_olmo2(config: Settings) -> DecoderSpec:
    return _normed_after(read_llama_config(config, "olmo2"))


def _read_olmo3(config: Settings) -> DecoderSpec:
    """OLMo 2 with a window in three of four layers; only the others' rotation is scaled."""
    flat = Settings({**config.values, "rope_parameters": None, "rope_scaling": None}, config.where)
    spec = _normed_after(read_llama_config(flat, "olmo3"))
    full, local = read_two_ropes(config, spec.head_dim, theta=500_000.0, local_theta=500_000.0)
    default: list[LayerKind] = ["sliding" if (layer + 1) % 4 else "full" for layer in range(spec.num_layers)]
    spec = replace(spec, rope=full, local_rope=local)
    return with_window(spec, config, config.optional_integer("sliding_window", default=4096), default)


def _normed_after(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, norm_placement="after", qk_norm=spec.norm, qk_norm_span="whole")


OLMO = DecoderFamily(
    name="olmo",
    architectures=("OlmoForCausalLM",),
    model_types=("olmo",),
    read_config=_read_olmo,
    find_names=fixed(NAMES),
)
OLMO2 = DecoderFamily(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    model_types=("olmo2",),
    read_config=_read_olmo2,
    find_names=fixed(_AFTER_NAMES),
)
OLMO3 = DecoderFamily(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    model_types=("olmo3",),
    read_config=_read_olmo3,
    find_names=fixed(_AFTER_NAMES),
)
