"""Cohere's Command R and its successor: one layer norm per block, parallel residuals, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.decoder.spec import DecoderSpec, NormSpec
from unspool.models.families.base import DecoderFamily, fixed
from unspool.models.families.llama import NAMES, read_llama_config, with_window
from unspool.models.settings import Settings
from unspool.protocols import LayerKind


def _read_cohere(config: Settings, family: str = "cohere") -> DecoderSpec:
    norm = NormSpec("layer", config.number("layer_norm_eps", default=1e-5))
    spec = read_llama_config(config, family, norm=norm, theta=500_000.0, is_interleaved=True, is_head_tied=True)
    has_qk_norm = family == "cohere" and config.boolean("use_qk_norm", default=False)
    return replace(
        spec,
        residual="parallel",
        has_ffn_norm=False,
        logit_scale=config.number("logit_scale", default=0.0625),
        qk_norm=norm if has_qk_norm else None,
        qk_norm_span="each",
    )


def _read_cohere2(config: Settings) -> DecoderSpec:
    """Windows in three of four layers; the others do not rotate queries and keys."""
    spec = _read_cohere(config, "cohere2")
    pattern = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
    default: list[LayerKind] = ["sliding" if (layer + 1) % pattern else "full" for layer in range(spec.num_layers)]
    spec = with_window(spec, config, config.optional_integer("sliding_window", default=4096), default)
    return replace(spec, unturned=frozenset(i for i in range(spec.num_layers) if spec.kind_of(i) == "full"))


COHERE = DecoderFamily(
    name="cohere",
    architectures=("CohereForCausalLM",),
    model_types=("cohere",),
    read_config=_read_cohere,
    find_names=fixed(NAMES),
)
COHERE2 = DecoderFamily(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    model_types=("cohere2",),
    read_config=_read_cohere2,
    find_names=fixed(NAMES),
)
