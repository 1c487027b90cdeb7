"""The description of a transformers model, from its config, its signature and the names in its code. Nothing is run."""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import nn

from unspool.errors import UnsupportedError
from unspool.models.adapters.rotation import Rotation, find_rotation
from unspool.protocols import FeatureShape, LayerKind, ModelInfo

KIND_NAMES: Final[dict[str, LayerKind]] = {"full_attention": "full", "sliding_attention": "sliding"}
_DYNAMIC_MASKS = "prepare_dynamic_mask"  # of Doge's attention
_MASK_MAKER = "create_causal_mask"  # since 4.53; it passes a 4-D mask through unchanged
_POSITION_MAKERS = ("create_position_ids_from_input_ids", "make_positions")  # methods of such tables
_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer")
_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head")
_KEY_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
# A decoder's own number stands before one that its encoder may have named.
_CONTEXTS = ("max_target_positions", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class Description:
    """What an adapter must know about its model."""

    info: ModelInfo
    config: Any  # of the text decoder
    arguments: frozenset[str]  # of its forward
    # Why keys of ragged rows can't stay in place, and are shifted to end in one column; None if they can.
    why_aligned: str | None
    mask_names: dict[LayerKind, str] = field(default_factory=dict)  # if layers of two kinds take different masks
    rotation: Rotation | None = None
    asks_for_mask: bool = False  # without a mask it looks for padding, which synchronises with the device
    can_switch: bool = False  # attention weights are available by switching its attention implementation
    attends_itself: bool = True  # by code of its own, which may view keys as those that transformers joins allow
    counts_columns: bool = False  # run as its own generate() runs it, some layers count masked columns: windows
    uncounted_id: int | None = None  # a token of a pair's texts that has no position, nor counts in those behind it
    lacks_order: bool = False  # tokens of one pass over a cache see each other, so each has a pass of its own
    # Of keys and of values, by layer, where they differ: our caches hold both in the wider one. Passes find them out.
    widths: dict[int, tuple[int, int]] = field(default_factory=dict)


def describe(model: Any) -> Description:
    """Everything that is known about a model before it has run; raises for models that no adapter can decode."""
    config = find_text_config(model)
    refuse(model, config)
    if getattr(model.config, "is_encoder_decoder", False):
        return _describe_pair(model, config)
    names, arguments = _find_names(model), _find_arguments(model)
    kinds = _find_kinds(config, names)
    why_aligned = _explain_alignment(model, config, names, arguments, kinds)
    rotation = find_rotation(model, config) if why_aligned is None else None
    mask_names: dict[LayerKind, str] = {}
    if len(set(kinds)) > 1:
        mask_names = {kind: name for name, kind in KIND_NAMES.items()}
    can_switch = _can_switch(model, config)
    has_streams = has_leading_streams(config)
    reads_states = int(getattr(_find_head(model), "in_features", 0)) == int(config.hidden_size) and not has_streams
    can = {"hidden_states"}
    for capability, is_there in (
        ("inputs_embeds", "inputs_embeds" in arguments),
        ("last_states", not has_streams),
        ("early_logits", reads_states),
        ("attentions", can_switch or _name_attention(model) == "eager"),
        ("shifted_keys", rotation is not None),
        ("early_exit", "num_hidden_layers" in names["masking"]),
    ):
        if is_there:
            can.add(capability)
    info = ModelInfo(
        **_read_sizes(model, config),
        num_layers=int(config.num_hidden_layers),
        num_heads=int(config.num_attention_heads),
        max_context=None if _has_alibi(config) else _find_context(config),
        ends_at_context=not _computes_positions(model),
        window=int(config.sliding_window) if "sliding" in kinds else None,
        layer_kinds=kinds,
        can=frozenset(can),
    )
    asks = "warn_if_padding_and_no_attention_mask" in names["all"]
    attends_itself = not _chooses_attention(model)
    return Description(info, config, arguments, why_aligned, mask_names, rotation, asks, can_switch, attends_itself)


def _describe_pair(model: Any, config: Any) -> Description:
    """The same for an encoder-decoder, whose positions come from the cache alone."""
    num_layers = _find_decoder_number(model, config, _LAYERS)
    if any("router" in name for name in _find_names(model)["all"]):
        raise UnsupportedError(
            f"the decoder of {type(model).__name__} reads its encoder's routing; use its own generate()"
        )
    is_relative = hasattr(config, "relative_attention_num_buckets")
    can_switch = _can_switch(model, config)
    features = _find_features(model)
    can = {"hidden_states", "last_states"} | ({"inputs_embeds"} if features is None else set())
    if can_switch or _name_attention(model) == "eager":
        can.add("attentions")
    info = ModelInfo(
        **_read_sizes(model, config),
        num_layers=num_layers,
        num_heads=_find_decoder_number(model, config, _HEADS),
        max_context=None if is_relative else _find_context(config),
        ends_at_context=not _computes_positions(model),
        layer_kinds=_repeat("full", num_layers),
        is_encoder_decoder=True,
        features=features,
        can=frozenset(can),
    )
    attends_itself = not _chooses_attention(model)
    return Description(
        info,
        config,
        _find_arguments(model),
        None,
        can_switch=can_switch,
        attends_itself=attends_itself,
        uncounted_id=_find_uncounted(model),
        lacks_order=_lacks_order(model),
    )


def describe_half(model: Any) -> Description:
    """The same for a decoder alone that reads the states of another model's encoder."""
    config = find_text_config(model)
    refuse(model, config)
    found = _describe_pair(model, config)
    info = replace(found.info, features=None, can=found.info.can - {"inputs_embeds"} | {"borrowed_states"})
    return replace(found, info=info)


def reads_states(model: Any) -> bool:
    """Whether a model is a decoder alone that takes the states of an encoder, as distilled Whispers are loaded."""
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    return not is_pair and {"encoder_outputs", "past_key_values"} <= _find_arguments(model)


def describe_loosely(model: Any) -> Description:
    """What is known of a model that is run as its own generate() runs it: nothing is required of its config."""
    config = find_text_config(model)
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    can_switch = _can_switch(model, config)
    sizes = _read_sizes(model, config)
    weights = set() if "cache_params" in _find_arguments(model) else {"attentions"}  # a model of states attends nowhere
    info = ModelInfo(
        **sizes,
        num_layers=_find_decoder_number(model, config, _LAYERS),
        num_heads=_find_decoder_number(model, config, _HEADS),
        is_encoder_decoder=is_pair,
        can=frozenset({"hidden_states", "last_states", "inputs_embeds", "early_logits"} | weights),
    )
    return Description(
        info,
        config,
        _find_arguments(model),
        None,
        can_switch=can_switch,
        counts_columns=_counts_columns(model, config),
        lacks_order=_lacks_order(model),
    )


def _find_decoder_number(model: Any, config: Any, names: tuple[str, ...]) -> int:
    """A decoder's number: by the names of pairs in the model's whole config, otherwise in its decoder's; 1 for none.

    The part that transformers makes of a pair's flat config has lost what began with "decoder", and answers with
    the defaults of its class.
    """
    whole = model.config if getattr(model.config, "is_encoder_decoder", False) else config
    named = tuple(name for name in names if "decoder" in name)
    return _find_number(whole, named, 0) or _find_number(config, names, 1)


def _find_number(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), otherwise)


def _find_features(model: Any) -> FeatureShape | None:
    """The features that an encoder of sound reads through convolutions; None for one that reads tokens."""
    mels, positions = (getattr(model.config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if getattr(model, "main_input_name", "") != "input_features" or not mels or not positions:
        return None
    convolutions = [part for part in model.get_encoder().children() if isinstance(part, nn.Conv1d)]
    stride = math.prod(part.stride[0] for part in convolutions)
    return FeatureShape(int(mels), int(positions) * stride, stride)


def _read_sizes(model: Any, config: Any) -> dict[str, Any]:
    """The sizes in every model's config."""
    return {
        "family": str(getattr(config, "model_type", "unknown")),
        "vocab_size": _find_vocabulary(model, config),
        "hidden_size": _find_number(config, ("hidden_size", "d_model", "n_embd", "dim"), 1),
        "embedding_size": _find_embedding_size(model),
        "has_tied_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "bos_token_id": _read_id(config, "bos_token_id"),
        "eos_token_id": _read_ids(config, "eos_token_id"),
        "pad_token_id": _read_id(config, "pad_token_id"),
        "decoder_start_token_id": _read_id(model.config, "decoder_start_token_id"),  # the decoder's part has lost it
        # ProphetNet predicts several tokens ahead, from one at a time.
        "why_single": f"{type(model).__name__} reads one token at a time"
        if hasattr(config, "ngram") or _lacks_order(model)
        else "",
    }


def _find_uncounted(model: Any) -> int | None:
    """The pad token of a decoder that makes positions of the tokens themselves, as M2M-100's and FSMT's do."""
    for part in model.get_decoder().modules():
        if any(hasattr(type(part), name) for name in _POSITION_MAKERS):
            found = getattr(part, "padding_idx", None)
            return None if found is None else int(found)
    return None


def _lacks_order(model: Any) -> bool:
    """Whether tokens that are read together with a cache see each other: FSMT makes its causal mask without one."""
    return "_prepare_fsmt_decoder_inputs" in _find_names(model)["all"]


def _find_embedding_size(model: Any) -> int | None:
    """How many numbers a token's embedding has; None if the model has no one table of them."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return table.embedding_dim if isinstance(table, nn.Embedding) else None


def _find_vocabulary(model: Any, config: Any) -> int:
    head = _find_head(model)
    size = getattr(head, "out_features", 0) or getattr(config, "vocab_size", 0)
    if not isinstance(size, int) or size < 1:
        weight = getattr(head, "weight", None)
        size = 0 if weight is None else weight.shape[0]
    if size < 1:
        raise UnsupportedError(f"{type(model).__name__} names no size of its vocabulary; use its own generate()")
    return int(size)


def refuse(model: Any, config: Any) -> None:
    """Raise for a model that no adapter can decode, with what to use instead."""
    kind, family = type(model).__name__, str(getattr(config, "model_type", "unknown"))
    if keeps_states(model, config):
        instead = (
            "Save it with save_pretrained(folder) and load it natively: unspool.load(folder)"
            if family in ("mamba", "mamba2", "falcon_mamba")
            else "Use a model whose layers attend to keys, or Mamba, which unspool has natively"
        )
        raise UnsupportedError(
            f"{kind} keeps states instead of keys, and the adapter gives a transformers model only keys. {instead}"
        )
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedError(
            f"{kind} has layers that attend to pictures, and the adapter gives a transformers model keys of tokens "
            "only; use its own generate()"
        )
    if not getattr(model, "can_generate", lambda: True)():
        raise UnsupportedError(
            f"{kind} has no head that gives logits for a next token; load the model with AutoModelForCausalLM"
        )
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main != "input_ids" and _find_features(model) is None:
        raise UnsupportedError(f"{kind} reads `{main}`, and the adapter gives a model tokens; use its own generate()")
    if "past_key_values" not in _find_arguments(model):
        raise UnsupportedError(
            f"{kind} takes no `past_key_values`, so it can't keep the keys of what it has read; use its own generate()"
        )


def keeps_states(model: Any, config: Any) -> bool:
    """Whether some layers of a model keep states, which nothing can be taken out of."""
    if getattr(model, "_is_stateful", False) or "cache_params" in _find_arguments(model):
        return True
    types = set(getattr(config, "layer_types", None) or ())
    return bool(types & {"linear_attention", "mamba", "mamba2", "recurrent"}) or _wants_other_layers(config)


def _wants_other_layers(config: Any) -> bool:
    """Whether transformers' own cache for such a model has layers that hold more than keys and values."""
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except (TypeError, AttributeError):  # a release whose cache knows no configs, or a config without layers
        return False
    return any(type(layer).__name__ not in _KEY_LAYERS for layer in layers)


def has_leading_streams(config: Any) -> bool:
    """Whether hidden states have a dimension of streams before the rows (AltUp)."""
    return hasattr(config, "altup_num_inputs")


def find_text_config(model: Any) -> Any:
    """The config of a model's text decoder, which may be one of several in its config."""
    config = model.config
    if not hasattr(config, "get_text_config"):
        return config
    try:
        if "decoder" in inspect.signature(config.get_text_config).parameters:
            return config.get_text_config(decoder=True)  # a model may have a text encoder beside its decoder
        return config.get_text_config()
    except ValueError as error:  # it has several, and says so
        decoder = getattr(config, "decoder", None)
        if decoder is None:
            raise UnsupportedError(f"{type(model).__name__}: {error}") from error
        return decoder


def _find_arguments(model: Any) -> frozenset[str]:
    return frozenset(inspect.signature(type(model).forward).parameters)


def _find_names(model: Any) -> dict[str, frozenset[str]]:
    """The names in the code of its modules: of all of them ("all"), and of the one that makes masks ("masking")."""
    everything: set[str] = set()
    masking: set[str] = set()
    for kind in {type(part) for part in model.modules()}:
        names = set(_find_code_names(kind))
        everything |= names
        if _MASK_MAKER in names:
            masking |= names
    return {"all": frozenset(everything), "masking": frozenset(masking)}


def _chooses_attention(model: Any) -> bool:
    """Whether its attention is one of transformers' functions, chosen at every call from the config."""
    return "ALL_ATTENTION_FUNCTIONS" in _find_names(model)["all"]


def _can_switch(model: Any, config: Any) -> bool:
    """Whether another attention runs while the config names another one.

    Falcon's own code asks the config too. With sdpa it adds a mask of truth values to the scores when it is to return
    weights, so that every token sees those that follow it; eager masks are numbers. (Over those it adds ALiBi twice.)
    """
    if _chooses_attention(model):
        return True
    asks = any(
        {"_attn_implementation", "scaled_dot_product_attention"} <= set(_find_code_names(kind))
        for kind in {type(part) for part in model.modules()}
    )
    return asks and not _has_alibi(config)


def _find_code_names(kind: type[nn.Module]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return () if code is None else tuple(code.co_names)


def _flattens_masks(model: Any) -> bool:
    """Whether its code makes a 2-D mask of a mask before it asks how many dimensions that has, as ImageGPT's does."""
    for kind in {type(part) for part in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        if _MASK_MAKER in names and "view" in names and "ndim" not in names:
            with suppress(OSError, TypeError):  # its source is not there
                if " attention_mask.view(" in inspect.getsource(forward):
                    return True
    return False


def _find_kinds(config: Any, names: dict[str, frozenset[str]]) -> tuple[LayerKind, ...]:
    """Every layer's kind; unknown kinds are left to the model, which then makes its masks itself."""
    full = _repeat("full", int(config.num_hidden_layers))
    listed = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if listed:
        return tuple(KIND_NAMES.get(name, "full") for name in listed) if window else full
    return _repeat("sliding", len(full)) if _has_window(config, names) else full


def _has_window(config: Any, names: dict[str, frozenset[str]]) -> bool:
    """Whether every layer sees a window, by its config and by the masks that its code makes."""
    is_asked = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return bool(is_asked) and "create_sliding_window_causal_mask" in names["masking"]


def _counts_columns(model: Any, config: Any) -> bool:
    """Whether some layers see the last columns alone, by the model's own masks, which count masked columns too."""
    listed = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    return bool(listed - {"full_attention", "global"}) if listed else _has_window(config, _find_names(model))


def _repeat(kind: LayerKind, num_layers: int) -> tuple[LayerKind, ...]:
    return tuple(kind for _ in range(num_layers))


def _explain_alignment(
    model: Any,
    config: Any,
    names: dict[str, frozenset[str]],
    arguments: frozenset[str],
    kinds: tuple[LayerKind, ...],
) -> str | None:
    """Why a model needs left-padded rows and a 2-D mask, as its own generate() gives them; None if it does not."""
    attention = _name_attention(model)
    listed = set(getattr(config, "layer_types", None) or ())
    if attention not in ("eager", "sdpa"):
        return f"its attention ({attention}) takes no 4-D mask"
    if _has_alibi(config):
        return "its ALiBi is made from a 2-D mask"
    if "position_ids" not in arguments:
        return "it takes no position_ids"
    if not names["masking"]:
        return "it makes its masks in a way of its own"
    if _flattens_masks(model):
        return "it makes rows of any mask that it is given"
    if _DYNAMIC_MASKS in names["all"]:
        return "its attention makes a mask of the one it is given, and sees every key if there is none"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its local layers count keys from the last column"
    if listed - set(KIND_NAMES):
        return f"it has layers of another kind ({', '.join(sorted(listed - set(KIND_NAMES)))})"
    if len(set(kinds)) > 1 and "dict" not in names["masking"]:
        return "it has layers of two kinds and takes one mask"
    return None


def _name_attention(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", None) or "eager")


def _has_alibi(config: Any) -> bool:
    inner = getattr(config, "attn_config", None)  # MPT keeps it there
    has_alibi = getattr(config, "alibi", None)
    if has_alibi is None and inner is not None:
        has_alibi = inner.get("alibi") if isinstance(inner, dict) else getattr(inner, "alibi", None)
    return bool(has_alibi) or getattr(config, "model_type", "") == "bloom"  # whose config does not say so


_TABLES: Final = frozenset({"wpe", "embed_positions", "position_embedding", "position_embeddings", "pos_embed"})


def _find_context(config: Any) -> int | None:
    found = (getattr(config, name, None) for name in _CONTEXTS)
    return next((int(value) for value in found if value), None)


def _computes_positions(model: Any) -> bool:
    """Whether angles are computed for any position, and no table of positions ends."""
    named = (*model.named_parameters(), *model.named_buffers(), *model.named_modules())
    parts = {part for name, _ in named for part in name.split(".")}
    return not parts & _TABLES and any(part.endswith("inv_freq") for part in parts)


def _find_head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _read_id(config: Any, name: str) -> int | None:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else None


def _read_ids(config: Any, name: str) -> int | tuple[int, ...] | None:
    found = getattr(config, name, None)
    return tuple(found) if isinstance(found, list | tuple) else found
