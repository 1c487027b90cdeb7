"""Decoders whose feed-forward is a mixture of experts: Mixtral, Qwen's, OLMo's, Granite's, GLM's, ERNIE's, gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from unspool.errors import LoadError
from unspool.models.bounds import MOST_LAYERS
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.mixture import MixtureNames
from unspool.models.decoder.spec import DecoderSpec, MixtureSpec
from unspool.models.families.base import DecoderFamily, fixed, refuse_quantised
from unspool.models.families.gguf import read_gguf_decoder
from unspool.models.families.llama import NAMES, read_llama_config, read_qwen2_config, with_window
from unspool.models.families.llama_kin import read_granite_config
from unspool.models.settings import Settings
from unspool.models.weights import WeightSource
from unspool.protocols import LayerKind

_EXPERTS = MixtureNames(
    router="mlp.gate",
    up=("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    down="mlp.experts.{e}.down_proj",
    stacked_up=("mlp.experts.gate_up_proj",),
    stacked_down="mlp.experts.down_proj",
    choice_bias="mlp.gate.e_score_correction_bias",
)
_QWEN = replace(NAMES, mixture=_EXPERTS)
_QWEN_SHARED = replace(
    NAMES,
    mixture=replace(
        _EXPERTS,
        shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate="mlp.shared_expert_gate",
    ),
)
_SHARED = replace(
    _EXPERTS,
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
_GLM = replace(NAMES, mixture=_SHARED)
_ERNIE_FILES = replace(NAMES, mixture=replace(_SHARED, choice_bias="mlp.moe_statics.e_score_correction_bias"))
_ERNIE_OBJECTS = replace(NAMES, mixture=replace(_SHARED, choice_bias="mlp.gate.moe_statics.e_score_correction_bias"))
_FLEX_OLMO = replace(_QWEN, post_attn_norm="post_attention_layernorm", post_ffn_norm="post_feedforward_layernorm")
_GPT_OSS = replace(
    NAMES,
    sinks="self_attn.sinks",
    mixture=MixtureNames(
        router="mlp.router", turned_up="mlp.experts.gate_up_proj", turned_down="mlp.experts.down_proj"
    ),
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MIXTRAL_FILES = replace(
    NAMES,
    mixture=MixtureNames(
        router="block_sparse_moe.gate",
        up=("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        down="block_sparse_moe.experts.{e}.w2",
    ),
)
_GRANITE_FILES = replace(
    NAMES,
    mixture=MixtureNames(
        router="block_sparse_moe.router.layer",
        stacked_up=("block_sparse_moe.input_linear.weight",),
        stacked_down="block_sparse_moe.output_linear.weight",
    ),
)
_GRANITE_OBJECTS = replace(
    NAMES,
    mixture=MixtureNames(
        router="block_sparse_moe.router",
        stacked_up=("block_sparse_moe.experts.gate_up_proj",),
        stacked_down="block_sparse_moe.experts.down_proj",
    ),
)


def _read_mixture(
    config: Settings,
    *,
    inner: str,  # the setting that has the width of an expert
    is_normalised: bool,
    experts: tuple[str, ...] = ("num_local_experts", "num_experts"),
    chosen: tuple[str, ...] = ("num_experts_per_tok",),
) -> MixtureSpec:
    """Experts as most configs describe them."""
    num_experts, num_chosen = config.integer(*experts), config.integer(*chosen)
    if num_chosen > num_experts:
        raise LoadError(f"{config.where} has {num_experts} experts and chooses {num_chosen} of them for a token")
    return MixtureSpec(num_experts, num_chosen, config.integer(inner), is_normalised=is_normalised)


def _read_mixtral(config: Settings) -> DecoderSpec:
    """A Mistral of experts, with a window only if the config has one."""
    spec = read_llama_config(config, "mixtral", theta=1e6)
    spec = replace(spec, mixture=_read_mixture(config, inner="intermediate_size", is_normalised=True))
    return _with_window_everywhere(spec, config, config.optional_integer("sliding_window"))


def _with_window_everywhere(spec: DecoderSpec, config: Settings, window: int | None) -> DecoderSpec:
    default: list[LayerKind] = ["full" if window is None else "sliding"] * spec.num_layers
    return with_window(spec, config, window, default)


def _read_qwen2_moe(config: Settings) -> DecoderSpec:
    """A Qwen 2 of experts, one of which every token runs through."""
    spec = read_qwen2_config(config)
    mixture = _read_qwen_mixture(config, spec.num_layers)
    shared = config.integer("shared_expert_intermediate_size", default=5632)
    has_bias = config.boolean("qkv_bias", default=True)
    return replace(
        spec,
        family="qwen2_moe",
        has_qkv_bias=has_bias,
        mixture=replace(mixture, shared_size=shared, is_shared_gated=True),
    )


def _read_qwen3_moe(config: Settings) -> DecoderSpec:
    """A Qwen 3 of experts."""
    spec = read_llama_config(config, "qwen3_moe")
    spec = replace(spec, qk_norm=spec.norm, mixture=_read_qwen_mixture(config, spec.num_layers))
    is_on = config.boolean("use_sliding_window", default=False)
    return _with_window_everywhere(spec, config, config.optional_integer("sliding_window") if is_on else None)


def _read_qwen_mixture(config: Settings, num_layers: int) -> MixtureSpec:
    """Experts in every `decoder_sparse_step`-th layer, but for those that are listed."""
    mixture = _read_mixture(
        config,
        inner="moe_intermediate_size",
        is_normalised=config.boolean("norm_topk_prob", default=False),
        experts=("num_experts", "num_local_experts"),
    )
    step = config.integer("decoder_sparse_step", default=1)
    listed = config.find("mlp_only_layers") or []
    is_sound = isinstance(listed, list | tuple) and len(listed) <= MOST_LAYERS
    if not is_sound or any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        raise LoadError(f"{config.where}'s mlp_only_layers are not a list of layers")
    dense = {layer for layer in range(num_layers) if layer in listed or (layer + 1) % step}
    return replace(mixture, dense_layers=frozenset(dense))


def _read_olmoe(config: Settings) -> DecoderSpec:
    """Experts with norms of whole queries and keys."""
    if config.has("clip_qkv"):
        config.refuse("clip_qkv", config.find("clip_qkv"), because="queries, keys and values are not clipped here")
    spec = read_llama_config(config, "olmoe")
    is_normalised = config.boolean("norm_topk_prob", default=False)
    mixture = _read_mixture(
        config, inner="intermediate_size", is_normalised=is_normalised, experts=("num_experts", "num_local_experts")
    )
    return replace(spec, qk_norm=spec.norm, qk_norm_span="whole", mixture=mixture)


def _read_granitemoe(config: Settings) -> DecoderSpec:
    """A Granite of experts."""
    spec = replace(read_granite_config(config), family="granitemoe")
    return replace(spec, mixture=_read_mixture(config, inner="intermediate_size", is_normalised=True))


def _read_flex_olmo(config: Settings) -> DecoderSpec:
    """An OLMo 2 of experts: norms of what residuals add, and of whole queries and keys."""
    return replace(_read_olmoe(config), family="flex_olmo", norm_placement="after")


def _read_ernie4_5_moe(config: Settings) -> DecoderSpec:
    """Rotation of neighbours; experts chosen with a bias, and some that every token runs through."""
    config.refuse("use_bias", True, because="experts beside biases are not built")
    spec = read_llama_config(config, "ernie4_5_moe", theta=500_000.0, is_interleaved=True, is_head_tied=True)
    mixture = _read_mixture(
        config,
        inner="moe_intermediate_size",
        is_normalised=True,
        experts=("moe_num_experts", "num_experts"),
        chosen=("moe_k", "num_experts_per_tok"),
    )
    first, step = config.integer("moe_layer_start_index", default=1), config.integer("moe_layer_interval", default=1)
    end = config.integer("moe_layer_end_index", default=-1)
    last = spec.num_layers - 1 if end == -1 else end
    sparse = {layer for layer in range(first, min(last + 1, spec.num_layers)) if (layer + 1) % step == 0}
    mixture = replace(
        mixture,
        has_choice_bias=True,
        shared_size=config.integer("moe_num_shared_experts", default=2) * mixture.ffn_size,
        dense_layers=frozenset(range(spec.num_layers)) - sparse,
    )
    return replace(spec, has_qkv_bias=False, has_out_bias=False, has_ffn_bias=False, mixture=mixture)


def _read_glm4_moe(config: Settings) -> DecoderSpec:
    """Half of each head rotated; experts scored one by one, and some that every token runs through."""
    spec = read_llama_config(config, "glm4_moe", rotary_fraction=0.5)
    if config.boolean("use_qk_norm", default=False):
        spec = replace(spec, qk_norm=spec.norm)
    return replace(spec, has_out_bias=False, mixture=_read_scored_alone(config, spec.num_layers))


def _read_dots1(config: Settings) -> DecoderSpec:
    """A Qwen 3 with experts of GLM's kind."""
    spec = read_llama_config(config, "dots1")
    spec = replace(spec, qk_norm=spec.norm, mixture=_read_scored_alone(config, spec.num_layers, num_shared=0))
    return with_window(spec, config, config.optional_integer("sliding_window"), ["full"] * spec.num_layers)


def _read_scored_alone(config: Settings, num_layers: int, *, num_shared: int = 1) -> MixtureSpec:
    """Experts whose scores do not depend on each other; `num_shared` run for every token unless the config says so."""
    for name in ("n_group", "topk_group"):
        if config.integer(name, default=1) != 1:
            config.refuse(name, config.find(name), because="experts are chosen among all, not group by group")
    mixture = _read_mixture(
        config,
        inner="moe_intermediate_size",
        is_normalised=config.boolean("norm_topk_prob", default=True),
        experts=("n_routed_experts", "num_local_experts"),
    )
    num_dense = min(config.integer("first_k_dense_replace", default=num_shared), num_layers)
    return replace(
        mixture,
        scoring="sigmoid",
        has_choice_bias=True,
        weight_scale=config.number("routed_scaling_factor", default=1.0),
        shared_size=config.integer("n_shared_experts", default=num_shared) * mixture.ffn_size,
        dense_layers=frozenset(range(num_dense)),
    )


def _read_gpt_oss(config: Settings) -> DecoderSpec:
    """Attention sinks, a window in every other layer, biases, and experts with a gate of their own."""
    method = config.part("quantization_config")
    if method is not None and method.find("quant_method") != "mxfp4":
        refuse_quantised(config)
    rope = config.find("rope_parameters", "rope_scaling") or _GPT_OSS_ROPE
    plain = Settings({**config.values, "quantization_config": None, "rope_parameters": rope}, config.where)
    spec = read_llama_config(plain, "gpt_oss", theta=150_000.0)
    has_bias = config.boolean("attention_bias", default=True)
    mixture = replace(
        _read_mixture(config, inner="intermediate_size", is_normalised=True),
        has_router_bias=True,
        gate_limit=config.number("swiglu_limit", default=7.0),
        gate_gain=config.number("swiglu_alpha", default=1.702),
    )
    spec = replace(
        spec, mixture=mixture, has_sinks=True, has_qkv_bias=has_bias, has_out_bias=has_bias, has_ffn_bias=True
    )
    default: list[LayerKind] = ["full" if layer % 2 else "sliding" for layer in range(spec.num_layers)]
    return with_window(spec, config, config.optional_integer("sliding_window", default=128), default)


def _choose_names(marker: str, files: WeightNames, objects: WeightNames) -> Callable[..., WeightNames]:
    """The names of files, which have a tensor that ends like `marker`, or those of objects in memory."""

    def find(_config: Settings, source: WeightSource) -> WeightNames:
        return files if any(name.endswith(marker) for name in source.names()) else objects

    return find


def _make(
    name: str,
    architecture: str,
    read: Callable[[Settings], DecoderSpec],
    names: WeightNames | Callable[..., WeightNames],
    gguf: tuple[str, Callable[[Settings, WeightSource], DecoderSpec]] | None = None,  # architecture and reader
) -> DecoderFamily:
    return DecoderFamily(
        name=name,
        architectures=(f"{architecture}ForCausalLM",),
        model_types=(name,),
        read_config=read,
        find_names=fixed(names) if isinstance(names, WeightNames) else names,
        gguf=(gguf[0],) if gguf is not None else (),
        read_gguf=gguf[1] if gguf is not None else None,
    )


def _read_gguf_olmoe(header: Settings, source: WeightSource) -> DecoderSpec:
    spec = read_gguf_decoder(header, source, family="olmoe", normalises=False)
    return replace(spec, qk_norm_span="whole")


MIXTURES = (
    _make(
        "mixtral",
        "Mixtral",
        _read_mixtral,
        _choose_names(".block_sparse_moe.gate.weight", _MIXTRAL_FILES, _QWEN),
    ),
    _make(
        "qwen2_moe",
        "Qwen2Moe",
        _read_qwen2_moe,
        _QWEN_SHARED,
        ("qwen2moe", partial(read_gguf_decoder, family="qwen2_moe", normalises=False)),
    ),
    _make(
        "qwen3_moe",
        "Qwen3Moe",
        _read_qwen3_moe,
        _QWEN,
        ("qwen3moe", partial(read_gguf_decoder, family="qwen3_moe", normalises=True)),
    ),
    _make("olmoe", "Olmoe", _read_olmoe, _QWEN, ("olmoe", _read_gguf_olmoe)),
    _make(
        "granitemoe",
        "GraniteMoe",
        _read_granitemoe,
        _choose_names(".block_sparse_moe.input_linear.weight", _GRANITE_FILES, _GRANITE_OBJECTS),
    ),
    _make("flex_olmo", "FlexOlmo", _read_flex_olmo, _FLEX_OLMO),
    _make(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        _read_ernie4_5_moe,
        _choose_names(".mlp.moe_statics.e_score_correction_bias", _ERNIE_FILES, _ERNIE_OBJECTS),
    ),
    _make("glm4_moe", "Glm4Moe", _read_glm4_moe, _GLM),
    _make("dots1", "Dots1", _read_dots1, _GLM),
    _make("gpt_oss", "GptOss", _read_gpt_oss, _GPT_OSS),
)
"""Each family's entry."""
