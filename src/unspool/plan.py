"""From settings to a plan: who set what, every conflict, before the first forward pass.

Defaults < the model's generation_config.json < the caller's config < the call's arguments.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unspool.beams.rules import check_beams, check_constraints
from unspool.cache.kinds import KINDS, find_kind, read_options
from unspool.composition import Call, check_composition
from unspool.config import PARAMETERS, GenerationConfig, find_unused
from unspool.config.compiling import Compiling, read_compiling
from unspool.config.contrastive import check_contrastive, find_num_candidates
from unspool.config.drafting import Drafting, Relation, read_drafting
from unspool.config.layers import find_candidate_layers
from unspool.config.rules import check_settings
from unspool.config.values import MOST_ROWS
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.protocols import ModelInfo

Origin = Literal["default", "model", "config", "call"]
StrategyName = Literal["tokens", "contrastive", "beams", "beam_groups", "constrained"]

_SPOKEN: dict[str, str] = {
    "default": "by default",
    "model": "by the model's generation_config.json",
    "config": "in the generation_config given",
    "call": "in the call",
}


@dataclass(frozen=True)
class PromptShape:
    """What the plan must know of the prompts."""

    num_rows: int
    width: int  # columns of ids, padding included
    longest: int  # positions of the longest row
    has_embeds: bool = False
    has_cache: bool = False  # the caller gave past_key_values
    is_endless: bool = False  # and they hold what they hold, however long a text gets
    cache_is_filled: bool = False  # and they hold a part of the prompt
    cache_is_plain: bool = True  # and their keys lie in one buffer a layer
    is_ragged: bool = False  # rows of different lengths, the encoder's among them
    has_negative: bool = False  # a negative prompt was given
    longest_negative: int = 0  # positions it takes in the decoder

    @property
    def longest_read(self) -> int:
        """Positions of the longest row that is read, guidance's other rows among them."""
        return max(self.longest, self.longest_negative)


@dataclass(frozen=True)
class Plan:
    """One call, settled: every value decided, every conflict ruled out."""

    settings: GenerationConfig
    origins: Mapping[str, Origin]
    do_sample: bool
    max_length: int  # columns, as the reference counts: prompt, padding and new tokens
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    num_beams: int
    num_return_sequences: int
    seeds: tuple[int, ...] | None  # one for all or one a prompt; None: drawn for this call
    cache_kind: str
    prompt_width: int
    dola_layers: tuple[int, ...] = ()  # the layers that DoLa chooses among; none without it
    cache_config: Mapping[str, Any] = field(default_factory=dict)  # what the kind is told, checked
    drafting: Drafting | None = None
    compiling: Compiling | None = None

    @property
    def guidance_scale(self) -> float | None:
        """The weight of guidance; None where there is none, as at 1."""
        scale = self.settings.guidance_scale
        return None if scale is None or scale == 1 else float(scale)

    @property
    def max_new_tokens(self) -> int:
        """The most tokens a row can get."""
        return self.max_length - self.prompt_width

    @property
    def strategy(self) -> StrategyName:
        """Which way of decoding the settings ask for."""
        settings = self.settings
        if self.num_beams == 1:
            return "contrastive" if self.num_candidates else "tokens"
        if settings.constraints is not None or settings.force_words_ids is not None:
            return "constrained"
        return "beam_groups" if (settings.num_beam_groups or 1) > 1 else "beams"

    @property
    def num_candidates(self) -> int:
        """The most tokens that are read ahead for a row, to choose one of them; 0 where none is."""
        return find_num_candidates(self.settings)

    @property
    def copies(self) -> int:
        """Rows that one prompt is continued in."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences

    @property
    def fill_token_id(self) -> int:
        """What follows a sequence that ended before others; beam search takes an end token where padding is id 0,
        as the reference does."""
        is_plain = self.strategy == "beams" and self.eos_token_ids and not self.pad_token_id
        return self.eos_token_ids[0] if is_plain else self.pad_token_id

    @property
    def asked(self) -> frozenset[str]:
        """The settings that the caller set, in the call or in a config given to it."""
        return _find_asked(self.origins)


def settle(
    settings: GenerationConfig,
    origins: Mapping[str, Origin],
    info: ModelInfo,
    shape: PromptShape,
    assistant: ModelInfo | None = None,
    relation: Relation = "same",
) -> Plan:
    """Decide a call's merged settings for a model, its drafter and prompts, or raise the error that names what can't
    be."""
    _refuse_unbuilt(settings, origins)
    _refuse_unused(settings, origins)
    _check_low_memory(settings, origins)
    _refuse_by_model(settings, origins, info, shape)
    check_composition(
        Call(
            settings,
            info,
            has_ids=shape.width > 0,
            has_embeds=shape.has_embeds,
            has_cache=shape.has_cache,
            has_negative=shape.has_negative,
            asked=_find_asked(origins),
        )
    )
    check_beams(settings, _find_asked(origins))
    check_contrastive(
        settings,
        _find_asked(origins),
        {name: _SPOKEN[origin] for name, origin in origins.items()},
        vocab_size=info.vocab_size,
        num_rows=shape.num_rows,
        cache_is_filled=shape.cache_is_filled,
    )
    _check_rows(settings, shape)
    eos = as_token_ids(settings.eos_token_id, "eos_token_id", info)
    cache_kind = _name_cache(settings, origins, info, shape)
    is_endless = shape.is_endless if shape.has_cache else KINDS[cache_kind].is_endless
    max_length = _decide_length(settings, origins, info, shape, is_endless)
    _check_reachable(settings, origins, shape.width, max_length)
    check_constraints(settings, vocab_size=info.vocab_size, end_ids=eos, max_new_tokens=max_length - shape.width)
    drafting = _decide_drafting(settings, origins, info, shape, assistant, relation)
    return Plan(
        settings=settings,
        origins=origins,
        do_sample=bool(settings.do_sample),
        max_length=max_length,
        eos_token_ids=eos,
        pad_token_id=_decide_padding(settings, eos, info),
        num_beams=settings.num_beams or 1,
        num_return_sequences=settings.num_return_sequences or 1,
        seeds=_decide_seeds(settings),
        cache_kind=cache_kind,
        cache_config=_check_cache(cache_kind, settings, origins, shape, max_length - shape.width),
        prompt_width=shape.width,
        dola_layers=_decide_layers(settings, info),
        drafting=drafting,
        compiling=_decide_compiling(settings, origins, info, shape, cache_kind),
    )


def _decide_layers(settings: GenerationConfig, info: ModelInfo) -> tuple[int, ...]:
    if settings.dola_layers is None:
        return ()
    return find_candidate_layers(settings.dola_layers, info.num_layers, is_tied=info.has_tied_embeddings)


def _find_asked(origins: Mapping[str, Origin]) -> frozenset[str]:
    return frozenset(name for name, origin in origins.items() if origin in ("config", "call"))


def merge(
    model_config: GenerationConfig | None,
    config: GenerationConfig | None,
    call: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[GenerationConfig, dict[str, Origin]]:
    """One config out of all layers, and who set each value.

    `defaults` replace the table's, and a length among them replaces the model file's `max_length`.
    """
    _refuse_unknown(call)
    merged = GenerationConfig()
    origins: dict[str, Origin] = dict.fromkeys(PARAMETERS, "default")
    of_model = _explicit(model_config)
    if defaults and "max_new_tokens" in defaults:
        of_model.pop("max_length", None)
    layers: list[tuple[Origin, Mapping[str, Any]]] = [
        ("default", defaults or {}),
        ("model", of_model),
        ("config", _explicit(config)),
        ("call", call),
    ]
    for origin, values in layers:
        for name, value in values.items():
            setattr(merged, name, value)
            origins[name] = origin
    check_settings(merged)
    return merged, origins


def _explicit(config: GenerationConfig | None) -> dict[str, Any]:
    return {} if config is None else {name: getattr(config, name) for name in config.explicit}


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingError(f"generate() has no setting {name!r}{hint}")


def _refuse_unused(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    for name, reason in find_unused(settings).items():
        if origins[name] in (
            "config",
            "call",
        ):  # what a model's file suggests for another strategy is no request
            raise SettingError(f"{reason} (`{name}` was set {_SPOKEN[origins[name]]}.)")
    for name in ("force_words_ids", "return_beam_trace"):
        if (settings.num_beams or 1) == 1 and getattr(settings, name) and origins[name] in ("config", "call"):
            raise SettingError(
                f"`{name}`, set {_SPOKEN[origins[name]]}, is read by beam search alone; set `num_beams` above 1, or "
                f"leave it out"
            )


def _check_low_memory(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    """Refuse `low_memory` where there is nothing to evaluate in parts; a model's file may say it for its beams."""
    has_parts = (settings.num_beams or 1) > 1 or find_num_candidates(settings)
    if settings.low_memory and not has_parts and origins["low_memory"] in ("config", "call"):
        raise SettingError(
            f"`low_memory`, set {_SPOKEN[origins['low_memory']]}, reads the beams of a search in parts, or candidates "
            "of contrastive search one by one, and this is neither; set `num_beams` above 1, or `penalty_alpha` and "
            "`top_k`, or leave it out"
        )


# --- what is not built yet: each with the value that switches it off ------------------------------------
_OFF: dict[str, tuple[Any, str]] = {
    "forced_decoder_ids": (None, "Whisper's way to force a language and a task"),
    "watermarking_config": (None, "watermarking"),
    "generation_kwargs": ({}, "further arguments"),
}


def _refuse_unbuilt(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    for name, (off, feature) in _OFF.items():
        value = getattr(settings, name)
        if value is None or value == off:
            continue
        raise UnsupportedError(
            f"`{name}`={value!r}, set {_SPOKEN[origins[name]]}, needs {feature}, which this version of unspool "
            f"does not have yet; pass {name}={off!r} to decode without it"
        )


def _refuse_by_model(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape
) -> None:
    asks_start = settings.decoder_start_token_id is not None and "decoder_start_token_id" in _find_asked(origins)
    if asks_start and not info.is_encoder_decoder:
        raise SettingError(f"`decoder_start_token_id` begins the text of an encoder-decoder; {info.family} is none")
    for name, capability in (("output_hidden_states", "hidden_states"), ("output_attentions", "attentions")):
        if getattr(settings, name) and capability not in info.can:
            raise UnsupportedError(f"`{name}` was asked for, and a {info.family} model can't return them")
    if find_num_candidates(settings) and "last_states" not in info.can:
        raise UnsupportedError(
            f"`penalty_alpha`, set {_SPOKEN[origins['penalty_alpha']]}, asks for contrastive search, which compares "
            f"hidden states, and a {info.family} model returns none; leave it out"
        )
    states = [name for name in ("output_hidden_states", "output_attentions") if getattr(settings, name)]
    for name in ("prefill_chunk_size", "prompt_logprobs"):
        if states and getattr(settings, name) is not None:
            raise SettingError(
                f"`{name}` reads the prompt in pieces and `{states[0]}` returns the prompt's states whole; "
                "ask for one of them"
            )
    if settings.prompt_logprobs is None:
        return
    for is_so, what in (
        (info.is_encoder_decoder, "an encoder-decoder model's prompt is not predicted token by token"),
        (shape.has_embeds, "inputs_embeds have no tokens"),
        (shape.has_cache, "past_key_values hide the prompt's first part from the model"),
    ):
        if is_so:
            raise SettingError(f"`prompt_logprobs` can't be told: {what}")


def _check_rows(settings: GenerationConfig, shape: PromptShape) -> None:
    name = max(("num_return_sequences", "num_beams"), key=lambda name: getattr(settings, name) or 1)
    copies = int(getattr(settings, name) or 1)
    if shape.num_rows * copies > MOST_ROWS:
        raise SettingError(
            f"`{name}`={copies} for {shape.num_rows} prompts makes {shape.num_rows * copies} rows; "
            f"at most {MOST_ROWS} are decoded in one call"
        )
    for name, parameter in PARAMETERS.items():
        value = getattr(settings, name)
        if parameter.may_be_per_row and isinstance(value, (list, tuple)) and len(value) != shape.num_rows:
            raise SettingError(
                f"`{name}` has {len(value)} values for {shape.num_rows} prompts; "
                "give one number, or a list with one for each prompt"
            )


def as_token_ids(value: Any, name: str, info: ModelInfo) -> tuple[int, ...]:
    """One token id, a list or a tensor of them, as a tuple; checked against the vocabulary."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    for token in ids:
        # Negative ids are a known way to say "none"; they match nothing.
        if token >= info.vocab_size:
            raise SettingError(f"`{name}`={token} is outside the model's vocabulary of {info.vocab_size} tokens")
    return ids


def _decide_padding(settings: GenerationConfig, eos: tuple[int, ...], info: ModelInfo) -> int:
    pad = settings.pad_token_id
    if pad is not None and pad >= 0:
        return as_token_ids(pad, "pad_token_id", info)[0]
    return next((token for token in eos if token >= 0), 0)


def _decide_length(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape, is_endless: bool
) -> int:
    order = ("default", "model", "config", "call")
    rank = {name: order.index(origins[name]) for name in ("max_length", "max_new_tokens")}
    counts_new = settings.max_new_tokens is not None and (
        rank["max_new_tokens"] >= rank["max_length"] or settings.max_length is None
    )
    hidden = shape.longest if shape.has_embeds and shape.width == 0 else 0  # positions that no column stands for
    limits = []
    if counts_new:
        limits.append(shape.width + int(settings.max_new_tokens))
    if settings.max_length is not None and (
        not counts_new or (rank["max_length"] == rank["max_new_tokens"] and rank["max_length"] > 0)
    ):
        limits.append(int(settings.max_length) - hidden)
    if not limits:
        raise SettingError("neither `max_length` nor `max_new_tokens` is set; a generation needs an end")
    longest = min(limits)
    if longest <= shape.width:
        prompt = shape.width or shape.longest
        how = _SPOKEN[origins["max_length"]]
        raise SettingError(
            f"the prompt has {prompt} tokens and `max_length` is {settings.max_length} ({how}), prompt included; "
            "set `max_new_tokens` to say how many tokens to add"
        )
    return longest if is_endless else _fit_context(longest, settings, origins, info, shape)


def _fit_context(
    longest: int, settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape
) -> int:
    """Cut a default at the model's context; refuse what was asked for and can't be."""
    if info.max_context is None:
        return longest
    which = "prompt" if shape.longest_read == shape.longest else "negative prompt"
    if shape.longest_read >= info.max_context:
        raise InputError(
            f"the {which} has {shape.longest_read} tokens and the model's context ends at {info.max_context}; "
            "shorten the prompt, or use a model with a longer context"
        )
    room = info.max_context - shape.longest_read
    if longest - shape.width <= room:
        return longest
    asked = [
        name
        for name in ("max_new_tokens", "max_length")
        if origins[name] in ("config", "call") and getattr(settings, name) is not None
    ]
    if asked:
        raise SettingError(
            f"`{asked[0]}` asks for {longest - shape.width} new tokens after a {which} of {shape.longest_read}, and "
            f"the model's context ends at {info.max_context}; at most max_new_tokens={room} fit"
        )
    return shape.width + room


def _check_reachable(settings: GenerationConfig, origins: Mapping[str, Origin], width: int, max_length: int) -> None:
    """Refuse a place that the caller names and no row gets to; what a model's file says of longer texts may stay."""
    for name, most, counted in (
        ("min_new_tokens", max_length - width, "new tokens"),
        ("min_length", max_length, "tokens, prompt included"),
    ):
        value = getattr(settings, name)
        fewest = max(value) if isinstance(value, (list, tuple)) else value or 0
        if fewest > most and origins[name] in ("config", "call"):
            raise SettingError(
                f"`{name}`={value!r} asks for more than a row can get: this call ends at {most} {counted}; "
                f"lower it, or raise `max_new_tokens`"
            )
    decays = settings.exponential_decay_length_penalty is not None
    if decays and settings.eos_token_id is None and origins["exponential_decay_length_penalty"] in ("config", "call"):
        raise SettingError(
            "`exponential_decay_length_penalty` makes the end token likelier, and there is none; set `eos_token_id`"
        )
    forced = settings.forced_bos_token_id
    if forced is not None and forced >= 0 and width != 1 and origins["forced_bos_token_id"] in ("config", "call"):
        raise SettingError(
            f"`forced_bos_token_id`={forced} forces the second token of a text, and the prompt has {width} already; "
            "leave it out, or begin with one token"
        )


def _decide_seeds(settings: GenerationConfig) -> tuple[int, ...] | None:
    seed = settings.seed
    if seed is None:
        return None
    return tuple(seed) if isinstance(seed, (list, tuple)) else (int(seed),)


def _name_cache(settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape) -> str:
    """Which kind of cache a call is to make, once the model is known to be served by it."""
    keeps_states = "state" in info.layer_kinds
    usual = "mamba" if keeps_states else "dynamic"
    name, origin = str(settings.cache_implementation or usual), origins["cache_implementation"]
    if origin == "model" and name in ("hybrid", "sliding_window"):
        return "dynamic"  # a model's file says how to save memory, not what to answer: the windows are kept
    kind = KINDS.get(name)
    if kind is None:
        raise UnsupportedError(
            f"`cache_implementation`={name!r}, set {_SPOKEN[origin]}, is a kind of cache that this version of unspool "
            f"does not have; use one of {', '.join(map(repr, KINDS))}"
        )
    if keeps_states and name == "dynamic":
        return usual  # what a model takes where nobody chooses
    if keeps_states and name != usual:
        raise UnsupportedError(
            f"`cache_implementation`={name!r}, set {_SPOKEN[origin]}: it holds keys, and a {info.family} model keeps "
            f"states; leave it out, or use {usual!r}"
        )
    reason = kind.refuse(info) if kind.refuse is not None and not shape.has_cache else None
    if reason is not None:
        raise UnsupportedError(f"`cache_implementation`={name!r}, set {_SPOKEN[origin]}: {reason}")
    return name


def _check_cache(
    name: str, settings: GenerationConfig, origins: Mapping[str, Origin], shape: PromptShape, num_new: int
) -> dict[str, Any]:
    """What the cache is told, once it is known to suffice for the call."""
    kind, options = find_kind(name), read_options(name, settings.cache_config)
    for told, room in (
        ("max_cache_len", settings.max_cache_len),
        ("cache_config['max_cache_len']", options.get("max_cache_len")),
    ):
        if room is not None and not kind.is_sized:
            raise SettingError(
                f"`{told}` is the room of a static cache and the cache is {name}; add cache_implementation='static'"
            )
        needed = shape.longest_read + num_new
        if room is not None and room < needed:
            raise SettingError(
                f"`{told}`={room} is too little for a prompt of {shape.longest_read} tokens and {num_new} new ones; "
                f"at least {needed} are needed, {needed - room} more, or fewer new tokens"
            )
    if settings.output_attentions and not kind.holds_every_key and not shape.has_cache:
        raise SettingError(
            f"`output_attentions` tells weights by position, and a {name!r} cache lets positions go; "
            "use cache_implementation='dynamic'"
        )
    if settings.return_legacy_cache and (name != "dynamic" or shape.is_ragged):
        what = f"a {name} cache" if name != "dynamic" else "rows of different lengths"
        raise SettingError(f"`return_legacy_cache` gives tuples, which can't hold {what}; leave it out")
    if shape.has_cache:
        _refuse_beside_cache(settings, origins)
    return options


def _decide_drafting(
    settings: GenerationConfig,
    origins: Mapping[str, Origin],
    info: ModelInfo,
    shape: PromptShape,
    assistant: ModelInfo | None,
    relation: Relation,
) -> Drafting | None:
    drafting = read_drafting(
        settings,
        _find_asked(origins),
        has_assistant=assistant is not None,
        num_layers=info.num_layers,
        can=info.can,
        relation=relation,
    )
    if drafting is None:
        return None
    if settings.return_legacy_cache and shape.num_rows * (settings.num_return_sequences or 1) > 1:
        raise SettingError(
            "`return_legacy_cache` gives tuples, which can't hold rows of different lengths, and rows accept different "
            "numbers of drafted tokens; leave it out"
        )
    if assistant is not None:
        _check_assistant(info, assistant, shape, relation)
    return drafting


def _decide_compiling(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape, cache_kind: str
) -> Compiling | None:
    """Whether steps are compiled; a `compile_config` that no step could follow is refused."""
    compiling = read_compiling(settings, _find_asked(origins))
    if compiling is None:
        return None
    name = "compile_config" if compiling.is_forced else "compile"
    told = f"`{name}`, set {_SPOKEN[origins[name]]}, asks for compiled steps"
    if "compile" not in info.can:
        raise UnsupportedError(f"{told}, and those of a {info.family} model can't be compiled yet; leave it out")
    is_plain = shape.cache_is_plain if shape.has_cache else KINDS[cache_kind].is_plain
    returned = [name for name in ("output_hidden_states", "output_attentions") if getattr(settings, name)]
    for is_so, reason in (
        (settings.use_cache is False, "`use_cache`=False reads every text anew at every step"),
        (bool(returned), f"`{', '.join(returned)}` returns what a compiled step does not keep"),
        (not is_plain, "this cache does not keep its keys in plain buffers; use a 'dynamic' or 'static' one"),
    ):
        if is_so and compiling.is_forced:
            raise SettingError(f"{told}, and {reason}; leave one of them out")
    return compiling


def _check_assistant(info: ModelInfo, assistant: ModelInfo, shape: PromptShape, relation: Relation) -> None:
    if relation == "same" and assistant.vocab_size != info.vocab_size:
        raise SettingError(
            f"`assistant_model` has a vocabulary of {assistant.vocab_size} tokens and the model one of "
            f"{info.vocab_size}: its drafts would mean other texts; pass `tokenizer` and `assistant_tokenizer` to "
            "draft across tokenizers, or use a draft model with the same one"
        )
    if assistant.is_encoder_decoder != info.is_encoder_decoder:
        kinds = ("an encoder-decoder", "decoder-only")
        own, other = kinds if info.is_encoder_decoder else kinds[::-1]
        raise SettingError(
            f"`assistant_model` is {other} and the model is {own}; use a draft model of the same kind, or "
            "prompt_lookup_num_tokens"
        )
    if shape.has_embeds:
        raise SettingError(
            "`assistant_model` reads tokens, and inputs_embeds are the model's own; pass input_ids, or use "
            "assistant_early_exit"
        )
    if relation != "same" and info.is_encoder_decoder:
        raise SettingError(
            "`assistant_model` has another tokenizer than the model, and an encoder-decoder's source is not put into "
            "other tokens; use a draft model with the same tokenizer, or prompt_lookup_num_tokens"
        )
    room, needed = assistant.max_context, shape.longest
    if relation != "other" and room is not None and needed >= room:  # in other tokens, the prompt has other lengths
        raise SettingError(
            f"the prompt has {needed} tokens and the assistant_model's context ends at {room}; "
            "use one with a longer context"
        )


def _refuse_beside_cache(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    if settings.use_cache is False:
        raise SettingError("past_key_values were given and `use_cache` is False; leave one of them out")
    for name in ("cache_implementation", "cache_config", "max_cache_len"):
        if origins[name] in ("config", "call") and getattr(settings, name) is not None:
            raise SettingError(
                f"`{name}` says what cache to make and past_key_values is one already; leave one of them out"
            )
