"""The cache of one call: made for its rows, freed of padding at the end, returned as it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from unspool.cache import LEGACY, ROLL_BACK, Cache, find_kind
from unspool.decoding.prompts import join_encoded
from unspool.decoding.reader import Reader, encode_at_once
from unspool.decoding.returns import append_rows
from unspool.decoding.run_parts import RunParts
from unspool.protocols import LAST, Encoded, SourceAnswer, SourceAsk

CAPACITY_AHEAD: Final = 256  # new positions a dynamic cache makes room for at once
CAPACITY_AHEAD_ON_GPU: Final = 2048  # there growing costs more, for a step ahead waits for it


class CallCache:
    """The cache that a call's rows are read into, and the encoder's states that go with it."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.held: Cache | None = parts.hooks.cache
        self.encoded: Encoded | None = None  # the sources, once they are read

    @property
    def nbytes(self) -> int:
        """Bytes that the keys and values take; 0 before the run has begun, or where the cache does not say."""
        return int(getattr(self.held, "nbytes", 0))

    # --- before the first pass ---------------------------------------------------------------------------
    def open(self, make: Callable[[], Cache] | None, answer: SourceAnswer | None) -> Cache:
        """The cache that was given, or a new one: by `make` if somebody else makes it. `answer` runs the encoder."""
        if self.held is None:
            self.held = self.make(answer) if make is None else make()
        return self.held

    def make(self, answer: SourceAnswer | None = None) -> Cache:
        """A new cache of the model's, large enough for the call, with what its encoder reads."""
        parts = self._parts
        plan, prompts, settings, model, readout = parts.plan, parts.prompts, parts.settings, parts.model, parts.readout
        encoded = self._encode(answer or encode_at_once)
        longest = readout.longest_prompt(prompts.lengths)
        last = longest + plan.max_new_tokens
        kind = find_kind(plan.cache_kind)
        options = dict(plan.cache_config or {})
        room = settings.max_cache_len or options.get("max_cache_len") or 0
        if kind.is_sized or (kind.may_be_sized and room):
            capacity = max(room, last + plan.num_candidates)  # they lie past the row's end
            if kind.may_be_sized:
                options["max_cache_len"] = capacity
            rows = parts.num_decoded_rows * readout.num_sets
            if not settings.low_memory and not (kind.forks and "forks" in model.info.can):
                rows *= max(1, plan.num_candidates)  # they are read in copies of their row
        else:
            # Beams grow beside the prompt, in a cache of their own.
            ahead = CAPACITY_AHEAD_ON_GPU if model.device.type == "cuda" else CAPACITY_AHEAD
            capacity = longest if plan.num_beams > 1 else min(last, longest + ahead)
            rows = prompts.num_rows * readout.num_sets
        given = {"config": options} if options else {}
        return model.new_cache(plan.cache_kind, rows, capacity, encoded=encoded, **given)

    def _encode(self, answer: SourceAnswer) -> Encoded | None:
        """What the decoder's rows read: the sources and, beside them, the negative prompts of guidance."""
        parts = self._parts
        source, negative = parts.prompts.source, parts.prompts.negative
        if source is None:
            return None
        ask = SourceAsk(parts.model, source.tokens, source.lengths, parts.want, source.embeds)
        self.encoded = source.encoded or answer(ask)
        if negative is None:
            return self.encoded
        return join_encoded(self.encoded, answer(SourceAsk(parts.model, negative.tokens, negative.lengths)))

    # --- between and after the passes --------------------------------------------------------------------
    def put_aside(self, rows: Sequence[int]) -> None:
        """Remember where rows are that have ended, if the caller gets them and they go on as padding."""
        if self._parts.keeps_places:
            assert self.held is not None
            self.held.put_aside(rows)

    @torch.no_grad()
    def read_padding(self, reader: Reader, emitted: Sequence[Sequence[int]], *, reads_choice: bool) -> None:
        """Let rows that ended before the others read the padding behind their text, if the caller gets it and they
        have not: those of drafts read nothing once they have ended, and where a strategy reads what it chooses they
        have gone on with tokens that nobody gets."""
        parts, fill = self._parts, self._parts.plan.fill_token_id
        if not self._holds_padding or not parts.keeps_places or not reader.keeps_cache:
            return
        cache, prompts = reader.cache, self._list_prompts()
        if reads_choice and ROLL_BACK in cache.can:
            ends = [prompt + len(text) for prompt, text in zip(prompts, emitted, strict=True)]
            cache.truncate([min(held, end) for held, end in zip(cache.lengths, ends, strict=True)])
        last = max(map(len, emitted)) - 1  # the last token is the next call's
        read = [held - prompt for held, prompt in zip(cache.lengths, prompts, strict=True)]
        unread = [[*text, *[fill] * last][first:last] for text, first in zip(emitted, read, strict=True)]
        if any(unread):
            nothing = torch.zeros(len(unread), 0, dtype=torch.int64, device=parts.model.device)
            reader.read(append_rows(nothing, unread, fill), list(map(len, unread)), LAST)

    @property
    def _holds_padding(self) -> bool:
        return self._parts.hooks.keeps_padding and self.held is not None and self.held.takes_padding

    def _list_prompts(self) -> list[int]:
        """The length of each row's prompt."""
        return [length for length in self._parts.prompts.lengths for _ in range(self._parts.plan.num_return_sequences)]

    def forget_padding(self, emitted: Sequence[Sequence[int]], num_unread: int) -> None:
        """Roll the rows that ended early back to their own tokens, so that they can be continued; of all but the last
        `num_unread`, which the next call expects unread."""
        parts, cache = self._parts, self.held
        assert cache is not None
        if parts.plan.num_beams > 1 or not parts.wants_every_row:
            return  # rows have left and nobody gets the cache
        cache.take_back()
        if ROLL_BACK not in cache.can:
            return
        if parts.settings.return_legacy_cache:  # tuples must keep one length
            cache.truncate([max(0, held - num_unread) for held in cache.lengths])
            return
        prompts, written = self._list_prompts(), [len(tokens) for tokens in emitted]
        if self._holds_padding:
            written = [max(written)] * len(written)
        real = [length + count - num_unread for length, count in zip(prompts, written, strict=True)]
        cache.truncate([min(held, length) for held, length in zip(cache.lengths, real, strict=True)])
        if parts.prompts.source is None and parts.prompts.width and not self._holds_padding:
            copies = parts.plan.num_return_sequences
            begun = [text for text in parts.prompts.list_tokens() for _ in range(copies)]
            rows = zip(begun, emitted, cache.lengths, strict=True)
            cache.texts_held = [[*text, *new][:length] for text, new, length in rows]

    def find_held(self, emitted: Sequence[Sequence[int]]) -> tuple[list[int], Cache] | None:
        """The tokens that a call of one row has read, and the cache that holds them; None if it was let go."""
        parts, cache = self._parts, self.held
        if parts.num_rows != 1 or parts.plan.num_beams > 1 or not parts.wants_every_row or cache is None:
            return None
        tokens = [*parts.prompts.list_tokens()[0], *emitted[0]]
        return tokens[: cache.lengths[0]], cache

    def give_out(self, reasons: Sequence[str | None]) -> Any:
        """What an output object returns: rows with all their keys, or the reference's tuples; None if none are kept.

        `reasons` say why what is returned ended: a search that was cut at its length leaves the sequences' own keys.
        """
        settings = self._parts.settings
        if settings.use_cache is False or self.held is None:  # the latter: stopped before it began
            return None
        cache: Any = self.held.merge()
        cache.texts_held = self.held.texts_held
        plan = self._parts.plan
        is_in_order = plan.strategy == "beams" and not plan.do_sample  # groups and draws are sorted at the end
        if plan.num_beams > 1 and not (is_in_order and all(reason == "length" for reason in reasons)):
            cache.beams_left = tuple(cache.lengths)
        if settings.return_legacy_cache and LEGACY in cache.can:
            return cache.to_legacy_cache()
        return cache
