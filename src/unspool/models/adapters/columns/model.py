"""A transformers model run as its own generate() runs it, behind unspool's model protocol.

For everything that the adapters over our own caches do not take: images and sound, inputs of a model's own, states,
models that keep nothing, transformers' own caches, compiled steps. Rows stay in the caller's columns with a 2-D mask,
the cache is transformers', and each pass goes through the model's `prepare_inputs_for_generation`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unspool.cache import Cache
from unspool.config import CompileConfig
from unspool.errors import UnsupportedError
from unspool.models.adapters.adapted import AdaptedModel, name_failures
from unspool.models.adapters.columns.answers import choose_logits, join_passes, lighten, read_states
from unspool.models.adapters.columns.held import find_inner, mark_held
from unspool.models.adapters.columns.inner import find_places, keeps_rows, put_states, take_states
from unspool.models.adapters.columns.inputs import PassInputs
from unspool.models.adapters.columns.state import ColumnCache, Columns
from unspool.models.adapters.description import Description, has_leading_streams, keeps_states
from unspool.models.adapters.hooks import find_preparing_hook
from unspool.protocols import LAST, Encoded, Forward, PreparedRows, Want
from unspool.shortage import explain_shortage

_KINDS = {  # ours to what transformers' GenerationConfig calls it
    "dynamic": None,
    "mamba": None,
    "static": "static",
    "hybrid": "static",
    "offloaded": "offloaded",
    "offloaded_hybrid": "offloaded_static",
    "offloaded_static": "offloaded_static",
    "quantized": "quantized",
}
# On a CPU keys are where offloading would bring them, and transformers' own fails there.
_ON_CPU: dict[str | None, str | None] = {"offloaded": None, "offloaded_static": "static"}
IN_COLUMNS = "a transformers model runs its own forward over its own cache"


@dataclass
class CallInputs:
    """One call's inputs, as transformers prepares them."""

    prompt: Columns
    inputs: dict[str, Any]  # further arguments of the model's forward
    rows: PreparedRows
    config: Any  # a GenerationConfig of transformers
    main: tuple[Any, str]  # the input that the others go with, and its name
    source: tuple[Any, str] | None = None  # the encoder's main input and its name; None: there is nothing to encode
    has_fixed_room: bool = False  # the cache is one of transformers' static ones
    compiling: CompileConfig | None = None
    is_encoded: bool = False  # images and videos among the inputs are encoded
    why: str = ""  # this route is taken
    is_changed: bool = False  # the object is not as its class says, and may have lost what writes its cache
    given: dict[str, Any] = field(default_factory=dict)
    prepare_text: Callable[[torch.Tensor, torch.Tensor], CallInputs] | None = None  # another text's inputs: ids, mask


class ColumnModel(AdaptedModel):
    """A transformers model with the inputs of one call."""

    def __init__(self, model: Any, description: Description, call: CallInputs) -> None:
        super().__init__(model, description)
        self.call = call
        self._inputs = PassInputs(model, description, is_pair=self.is_pair)
        self._inner = find_places(model)
        self._keeps_states = keeps_states(model, description.config)
        self._hook = find_preparing_hook(model)  # what it gives to a pass may lie in other columns than the tokens
        placed = f"{type(model).__name__} keeps what it makes of each row itself" if keeps_rows(model) else ""
        self.info = replace(
            self.info,
            why_single=placed or self.info.why_single,
            why_even=self._explain_even(),
            why_placed=placed,
            can=self.info.can | {"whole_prompts"},
        )

    @property
    def is_pair(self) -> bool:
        """Whether inputs of the decoder are named apart from those of an encoder."""
        return self.info.is_encoder_decoder

    @property
    def prepared(self) -> PreparedRows:
        """The decoder's prompt, which transformers' code made of the caller's inputs."""
        return self.call.rows

    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """What generate() returns for finished rows: their tokens, if a model makes nothing else of them."""
        return sequences

    # --- the encoder ---------------------------------------------------------------------------------
    @explain_shortage("an encoder read its source")
    @torch.no_grad()
    def encode(
        self,
        tokens: torch.Tensor | None,  # the call's inputs are known
        counts: Sequence[int] | None = None,
        *,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Encoded:
        """Run the encoder over what the caller gave."""
        call = self.call
        if "encoder_outputs" not in call.inputs:
            assert call.source is not None
            value, name = call.source
            config = copy.copy(call.config)
            config.output_hidden_states, config.output_attentions = want.hidden_states, want.attentions
            with self._switch(want), name_failures(self.inner):
                call.inputs = _find_encoding(self.inner)(value, call.inputs, name, config)
        made = call.inputs["encoder_outputs"]
        states = made[0] if not isinstance(made, Mapping) else made.get("last_hidden_state", next(iter(made.values())))
        hidden, weights = (getattr(made, name, None) for name in ("hidden_states", "attentions"))
        return Encoded(
            states,
            [states.shape[1]] * states.shape[0],
            tuple(hidden) if want.hidden_states and hidden is not None else None,
            tuple(weights) if want.attentions and weights is not None else None,
        )

    @torch.no_grad()
    def _encode_media(self) -> None:
        """Encode a decoder's images and videos, in releases of transformers that do so before rows are repeated: their
        rule for repeated rows knows what was encoded, and not which of the pixels belong to a row."""
        takes_encoded = getattr(self.inner, "_supports_mm_encoder_outputs", lambda: False)()
        if self.is_pair or self.call.is_encoded or not takes_encoded:
            return
        inputs = dict(self.call.inputs)
        if inputs.get("mm_encoder_outputs") is not None:
            inputs["mm_encoder_outputs"] = dict(inputs["mm_encoder_outputs"])
        with name_failures(self.inner):
            made = _find_encoding(self.inner)(None, inputs, None, self.call.config)
        self.call.inputs = {
            name: value for name, value in made.items() if not (name == "mm_encoder_outputs" and not value)
        }
        self.call.is_encoded = True

    def _explain_even(self) -> str:
        """Why a batch's rows must grow alike; empty if they need not."""
        kind, columns = type(self.inner).__name__, self.call.prompt
        if self._keeps_states:
            return f"{kind} keeps states"
        if self._hook is not None:
            return f"the {self._hook}() of this {kind} prepares passes by a rule of its own"
        if self.call.inputs.get(self._name_past()) is None and "past_key_values" not in self.description.arguments:
            cache = ColumnCache(self.inner, columns, dict(self.call.inputs), keeps_past=False, name="past_key_values")
            cache.columns = columns
            asked = self._inputs.make(cache, columns.width, is_first=True).get("input_ids")
            if asked is not None and asked.shape[1] > columns.width:
                return f"{kind} predicts at a column that it adds itself, once a pass"
        if self.description.counts_columns:
            return f"{kind} has layers that see the last few columns, masked ones too"
        if self.call.has_fixed_room:  # a token that one row refuses is a masked column of that row
            return "a static cache of transformers has room for the answer's columns alone"
        return f"{kind} takes no positions" if columns.positions is None else ""

    # --- caches --------------------------------------------------------------------------------------
    def new_cache(
        self,
        kind: str = "dynamic",
        rows: int = 1,
        capacity: int | None = None,
        encoded: Encoded | None = None,  # it is among the call's inputs
        config: Mapping[str, Any] | None = None,
    ) -> ColumnCache:
        """A cache of transformers' own kind for this call."""
        call, name = self.call, self._name_past()
        self._encode_media()
        keeps_past = call.config.use_cache is not False
        if keeps_past and call.inputs.get(name) is None and kind not in _KINDS:
            raise UnsupportedError(
                f"`cache_implementation`={kind!r} is a cache of unspool's, and {call.why}; leave it out, or use "
                "'dynamic' or 'static'"
            )
        room = max(call.prompt.width, 1) if capacity is None else capacity
        room = call.prompt.width + max(room - max(call.rows.lengths), 1) - 1
        room = max(room, call.config.max_cache_len or 0, (config or {}).get("max_cache_len") or 0)
        options = {key: value for key, value in (config or {}).items() if key != "max_cache_len"}

        def begin(inputs: dict[str, Any], num_rows: int) -> dict[str, Any]:
            made = {**inputs, "use_cache": keeps_past}
            if keeps_past and made.get(name) is None:
                theirs = copy.copy(call.config)
                known = _KINDS[kind]
                theirs.cache_implementation = _ON_CPU.get(known, known) if self.device.type == "cpu" else known
                theirs.cache_config = options or None
                with name_failures(self.inner):
                    self._prepare_past(theirs, made, num_rows, room)
            return made

        inputs = begin(call.inputs, rows)
        has_past = keeps_past and inputs.get(name) is not None
        cache = ColumnCache(self.inner, call.prompt, inputs, keeps_past=has_past, name=name)
        cache.has_inner, cache.has_hook = bool(self._inner), self._hook is not None
        if call.inputs.get(name) is None:
            cache.begin_inputs = begin
        return cache

    def _name_past(self) -> str:
        return "cache_params" if "cache_params" in self.description.arguments else "past_key_values"

    def _prepare_past(self, config: Any, inputs: dict[str, Any], rows: int, room: int) -> None:
        prepare = self.inner._prepare_cache_for_generation
        arguments = {
            "generation_config": config,
            "model_kwargs": inputs,
            "generation_mode": None,
            "assistant_model": None,
            "batch_size": rows,
            "max_cache_length": room,
            "device": self.device,
        }
        prepare(**{name: arguments[name] for name in inspect.signature(prepare).parameters if name in arguments})

    @property
    def given_cache(self) -> ColumnCache | None:
        """The transformers cache that the caller gave, with what it holds; None if there is none."""
        call = self.call
        past = call.inputs.get(self._name_past())
        if past is None:
            return None
        if self.is_pair:
            self.encode(None)  # a run with a cache encodes nothing itself
        cache = self.new_cache()
        held = call.prompt.num_read
        if held:
            cache.columns = call.prompt.copy()
            cache.lengths = call.prompt.mask[:, :held].sum(dim=-1).tolist()
            cache.columns.cut(held)
            inner = find_inner(past)
            cache.inner = take_states(self._inner) if inner is None else inner
        return cache

    # --- a forward pass ------------------------------------------------------------------------------
    @explain_shortage("a model read tokens")
    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        *,
        counts: Sequence[int] | None = None,
        want: Want = LAST,
        embeds: torch.Tensor | None = None,
    ) -> Forward:
        """Read new tokens after what the cache holds, in the columns of the call."""
        assert isinstance(cache, ColumnCache)
        new = self._take_input(tokens, embeds)
        rows, num_new = new.shape[:2]
        real = list(counts) if counts is not None else [num_new] * rows
        held = list(cache.lengths) or [0] * rows
        if self._is_first(cache, held):
            forward = self._read_prompt(cache, tokens, held, real, want)
        else:
            assert tokens is not None
            forward = self._read_on(cache, tokens, held, real, want)
        return forward

    def _is_first(self, cache: ColumnCache, held: list[int]) -> bool:
        """Whether a pass reads the call's prompt, or what is missing of it."""
        if cache.columns is None:
            return True
        if cache.keeps_past:
            return cache.columns.num_read < cache.prompt.width
        return any(start < length for start, length in zip(held, self._find_lengths(cache), strict=True))

    def _read_on(
        self, cache: ColumnCache, tokens: torch.Tensor, held: list[int], real: list[int], want: Want
    ) -> Forward:
        """Read tokens behind the prompt.

        Models that keep something of a prompt elsewhere than in the cache have it for as many rows as the prompt had.
        They read the prompts of rows that were repeated once more.
        """
        was_repeated, cache.was_repeated = cache.was_repeated, False
        num_new, columns = tokens.shape[1], cache.columns
        assert columns is not None
        # Tokens that were tried before and accepted are read again where states went back to what they were.
        num_asked = num_new + (columns.width - columns.num_read if cache.keeps_past else 0)
        is_joint = num_asked == 1 or not (cache.keeps_states or cache.answers_once or self.description.lacks_order)
        run = self._run if is_joint else self._run_singly
        try:
            self._append(cache, tokens, real)
            return run(cache, num_new, want, is_first=not cache.keeps_past)
        except UnsupportedError:
            if not was_repeated or not cache.begin_again(held):
                raise
        return self._read_prompt(cache, tokens, held, real, want)

    def _read_prompt(
        self, cache: ColumnCache, tokens: torch.Tensor | None, held: list[int], real: list[int], want: Want
    ) -> Forward:
        """Read the call's prompt as it was given; chunks of it wait for the last one."""
        rows = len(real)
        if rows != cache.prompt.mask.shape[0]:
            self._add_others(cache, tokens, real, want)
        prompt, lengths = cache.prompt, self._find_lengths(cache)
        stops = [start + count for start, count in zip(held, real, strict=True)]
        if any(stop < length for stop, length in zip(stops, lengths, strict=True)):
            cache.lengths = stops
            return Forward(torch.zeros(rows, self.info.vocab_size, device=self.device))
        columns = cache.columns = prompt.copy()
        columns.num_read = self.call.prompt.num_read if cache.past is not None else 0
        cache.lengths = list(lengths)
        extra = [stop - length for stop, length in zip(stops, lengths, strict=True)]
        if any(extra):  # texts that are read anew at every step, and what a drafting model has not read yet
            assert tokens is not None
            width = max(extra)
            starts = torch.tensor([length - start for length, start in zip(lengths, held, strict=True)])
            index = (starts[:, None] + torch.arange(width)).clamp(0, tokens.shape[1] - 1).to(tokens.device)
            if cache.output is None:  # how inputs follow new columns is known once the prompt was read
                self._run(cache, columns.width - columns.num_read, LAST, is_first=True)
            self._append(cache, tokens.gather(1, index), extra)
            if cache.keeps_past and columns.num_read:
                return self._run(cache, width, want, is_first=False)
        num_unread = columns.width - columns.num_read
        is_behind = columns.num_read > 0 and cache.keeps_states  # what a given cache holds
        if is_behind or self.description.lacks_order:
            has_embeds = not self.is_pair and cache.inputs.get("inputs_embeds") is not None
            return self._run_singly(cache, num_unread, want, is_first=has_embeds)
        return self._run(cache, num_unread, want, is_first=True)

    def _add_others(self, cache: ColumnCache, tokens: torch.Tensor | None, real: Sequence[int], want: Want) -> None:
        """Make the rows that follow the prompts' own a part of what is read: guidance has one for each, of tokens.

        Pieces of a prompt that is read in chunks come whole here: such calls wait for the last one.
        """
        own = cache.prompt
        num_own, rows = own.mask.shape[0], len(real)
        managed = (*self._inputs.managed, cache.name, "use_cache")
        extra = sorted(name for name in cache.inputs if name not in managed and cache.inputs[name] is not None)
        # Models without a cache of keys or states read padding as tokens, and those that keep states themselves too.
        takes = self.description.arguments
        heeds_masks = self._name_past() in takes and "attention_mask" in takes and not self._inner and not self._hook
        if tokens is None or rows != 2 * num_own or extra or own.num_read or self.is_pair or not heeds_masks:
            raise UnsupportedError(
                f"{rows} rows are to be read for {num_own} prompts, as guidance does, and "
                f"{self.call.why}, so its inputs belong to the prompts alone; leave guidance out"
            )
        others = Columns.right_aligned(tokens[num_own:], real[num_own:], counts_positions=own.positions is not None)
        if max(real[num_own:]) > own.width and (want.hidden_states or want.attentions):
            raise UnsupportedError(
                f"a negative prompt of {max(real[num_own:])} tokens would shift the columns of the prompts, which have "
                f"{own.width}, in the states that are returned, and {self.call.why}; shorten it, or leave "
                "output_hidden_states and output_attentions out"
            )
        cache.prompt = own.join(others)
        cache.num_ahead = cache.prompt.width - own.width

    def _find_lengths(self, cache: ColumnCache) -> list[int]:
        return cache.prompt.lengths

    def _append(self, cache: ColumnCache, tokens: torch.Tensor, real: Sequence[int]) -> None:
        assert cache.columns is not None
        num_new = tokens.shape[1]
        cache.close_gaps()
        cache.may_gap |= min(real) < num_new
        columns = cache.columns
        place = torch.arange(num_new, device=columns.mask.device)
        columns.append(tokens, place < torch.tensor(list(real), device=place.device)[:, None])
        if not cache.has_followed:
            cache.inputs = self._inputs.follow(cache, num_new)
        cache.has_followed = False
        cache.lengths = [length + count for length, count in zip(cache.lengths, real, strict=True)]

    def _run(self, cache: ColumnCache, num_new: int, want: Want, *, is_first: bool) -> Forward:
        columns = cache.columns
        assert columns is not None
        num_read = columns.num_read if cache.keeps_past else 0
        last = columns.find_last()
        num_asked = columns.width - num_read
        with self._switch(want):  # a mask over a static cache is made here, in the form that the attention takes
            inputs = self._inputs.make(cache, num_asked, is_first=is_first)
        asked = inputs.get("input_ids")
        if is_first and asked is not None and asked.shape[1] > num_asked:
            cache.answers_once = True
        is_end = want.logits == "last" and bool((last == columns.width - 1).all())
        if "logits_to_keep" in self.description.arguments:
            inputs["logits_to_keep"] = 1 if is_end else num_new if not is_first else 0
        wants_states = want.hidden_states or want.last_states or bool(want.early)
        if wants_states:
            inputs["output_hidden_states"] = True
        if want.attentions:
            inputs["output_attentions"] = True
        call = self._find_call(cache, is_first)
        put_states(self._inner, cache.inner)
        with self._switch(want), name_failures(self.inner):
            made = call(**inputs, return_dict=True)
        cache.inner = take_states(self._inner)
        columns.num_read = columns.width if cache.keeps_past else 0
        forward = self._read(made, columns, last, num_new, want)
        if is_first and self.call.is_changed and cache.keeps_past and not _holds_any(cache.past):
            raise UnsupportedError(
                f"{type(self.inner).__name__} wrote nothing to the past_key_values it was given, so it can't be "
                "decoded step by step; use its own generate()"
            )
        cache.output = lighten(made)
        if cache.keeps_past or is_first:
            self._take_past(cache, made)
        if self.info.why_placed:  # what the model keeps of the last pass may be read after it
            cache.inputs, cache.has_followed = self._inputs.follow(cache, 1), True
        if self._keeps_states:
            mark_held(cache.past, columns.num_read, cache.inner)
        return forward

    def _run_singly(self, cache: ColumnCache, num_new: int, want: Want, *, is_first: bool) -> Forward:
        """Read columns one after the other.

        Models that keep states begin anew with several at once; others predict at a column that they add themselves.
        """
        columns = cache.columns
        assert columns is not None
        if not cache.keeps_past and self.description.lacks_order:
            return self._run_in_order(cache, num_new, want)
        first = columns.num_read if cache.keeps_past else columns.width - num_new
        made = []
        for stop in range(first + 1, columns.width + 1):
            part = cache.columns = columns.copy()
            part.cut(stop)
            part.num_read = stop - 1 if cache.keeps_past else 0
            made.append(self._run(cache, 1, replace(want, logits="all"), is_first=is_first))
        cache.columns = columns
        columns.num_read = columns.width if cache.keeps_past else 0
        return join_passes(made[-num_new:], want)

    def _run_in_order(self, cache: ColumnCache, num_new: int, want: Want) -> Forward:
        """Read all columns one after the other where nothing is kept: over a cache that is let go."""
        assert cache.columns is not None
        config, spare = copy.copy(self.call.config), copy.copy(cache)
        config.use_cache, spare.keeps_past = True, True
        spare.columns, spare.inputs = cache.columns.copy(), {**cache.inputs, "use_cache": True}
        with name_failures(self.inner):
            self._prepare_past(config, spare.inputs, len(cache.columns.mask), cache.columns.width)
        forward = self._run_singly(spare, cache.columns.width, want, is_first=False)
        if want.logits == "all":
            forward.logits = forward.logits[:, -num_new:]
        kept = {name: made for name, made in spare.output.items() if name != spare.name}
        cache.output = type(spare.output)(**kept)
        return forward

    def _find_call(self, cache: ColumnCache, is_first: bool) -> Any:
        """The model's forward: compiled for steps, if that was asked for."""
        config = self.call.compiling
        if config is None or not getattr(cache.past, "is_compileable", False):
            return self.inner
        from transformers import CompileConfig as TheirConfig

        compiled = self.inner.get_compiled_call(TheirConfig(**config.to_dict()))  # nothing is compiled before it runs
        return self.inner if is_first else compiled

    def _take_past(self, cache: ColumnCache, made: Any) -> None:
        """Keep the cache that a model made itself."""
        for name in ("past_key_values", "cache_params", "state", "mems", "past_buckets_states"):
            past = made.get(name) if isinstance(made, Mapping) else None
            if past is None or cache.inputs["use_cache"] is False:
                continue
            if name in ("mems", "past_buckets_states"):
                name = "past_key_values"
            if not cache.keeps_past:
                cache.name, cache.keeps_past = name, True
                assert cache.columns is not None
                cache.columns.num_read = cache.columns.width
            cache.inputs[name] = past
            return

    # --- what a pass returned ------------------------------------------------------------------------
    def _read(self, made: Any, columns: Columns, last: torch.Tensor, num_new: int, want: Want) -> Forward:
        forward = Forward(
            choose_logits(made.logits, columns, last, num_new, want).to(self.device),
            state_rows=int(has_leading_streams(self.description.config)),
            is_laid_out=True,
            path_reason=f"{IN_COLUMNS}: {self.call.why}",
        )
        prefix = "decoder_" if self.is_pair else ""
        states = getattr(made, f"{prefix}hidden_states", None)
        if states is not None:
            read_states(forward, states, columns, last, num_new, want, self)
        if want.attentions:
            forward.attentions = self._read_weights(getattr(made, f"{prefix}attentions", None))
            if self.is_pair:
                forward.cross_attentions = self._read_weights(made.cross_attentions)
        return forward

    def _read_weights(self, weights: Any) -> tuple[Any, ...]:
        """Attention weights as the model returned them: some layers have none, and some models return lists."""
        made: tuple[Any, ...] = weights if weights is not None else ()
        return made


def _holds_any(past: Any) -> bool:
    """Whether a layer of transformers' cache has keys; of a cache that does not say, it is taken for granted."""
    layers = getattr(past, "layers", None)
    if layers is None:
        layers = getattr(getattr(past, "self_attention_cache", None), "layers", None)
    return layers is None or any(getattr(layer, "is_initialized", True) for layer in layers)


def _find_encoding(model: Any) -> Any:
    """transformers' method that runs the encoder and puts its output among a model's inputs; it was renamed."""
    for name in (
        "_prepare_encoder_decoder_kwargs_for_generation",
        "_maybe_prepare_encoder_kwargs_for_generation",
    ):
        if hasattr(model, name):
            return getattr(model, name)
    raise UnsupportedError("this release of transformers has no method to run an encoder with; use 5.0 or later")
