"""The observer of a traced call: what it is shown of a turn becomes events, and nothing large is kept after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from unspool.decoding.beams.trace import Returned, TraceStep
from unspool.decoding.loop import Emitted
from unspool.decoding.observer import CandidatesCompared, DraftChecked, Guided, LayersContrasted, Scored, TokenChosen
from unspool.decoding.run import Run
from unspool.text.token_texts import TokenTexts
from unspool.trace.beams import BeamSteps
from unspool.trace.marks import RunningMark
from unspool.trace.methods import (
    describe_candidates,
    describe_draft,
    describe_guidance,
    describe_layers,
    judge_draft,
)
from unspool.trace.positions import Position

LONGEST_TEXT = 256  # characters of a token that are shown


class Tracer:
    """Sees one call, and makes the events of each turn; `Trace` adds the text that became final."""

    def __init__(self) -> None:
        self._position: Position | None = None  # the one whose token is not known yet
        self._extra: dict[str, Any] = {}  # what methods reported of it
        self._described: list[dict[str, Any]] = []  # this turn's positions whose tokens are known
        self._draft: DraftChecked | None = None
        self._index = 0  # of the next token after the prompt
        self._drafted = self._accepted = 0
        self.sum_logprobs = 0.0
        self.beams: BeamSteps | None = None

    def begin(self, run: Run) -> None:
        """Called before the first pass."""
        parts = run.parts
        plan, info = parts.plan, parts.model.info
        self._texts = TokenTexts(parts.hooks.tokenizer)
        self._settings = plan.settings
        self._readout = (
            ("DoLa", "dola_layers")
            if plan.dola_layers
            else ("ClassifierFreeGuidance", "guidance_scale")
            if plan.guidance_scale is not None
            else None
        )
        self._mark = RunningMark.of(plan.settings.watermarking_config, info) if plan.num_beams == 1 else None
        if plan.num_beams > 1:
            self.beams = BeamSteps(plan, info.vocab_size, parts.prompt_ids[0].tolist(), self.show)
        written = parts.prompts.ids[0, parts.prompts.width - parts.prompts.num_written :].tolist()
        self._index = len(written)
        if self._mark is not None:
            for token in written:
                self._mark.add(token)
        self._last = time.perf_counter()

    def show(self, token: int) -> str:
        """The text that is shown for a token."""
        return self._texts.show(token)[:LONGEST_TEXT]

    # --- in a turn -------------------------------------------------------------------------------------------
    def see(self, report: Any) -> None:
        """Take a report in."""
        if self.beams is not None:
            if isinstance(report, TraceStep | Returned | Scored):
                self.beams.see(report)
            return
        if isinstance(report, Scored):
            self._position = Position.read(report, self._settings, self._readout)
        elif isinstance(report, TokenChosen):
            self._describe_position(report.token)
        elif isinstance(report, LayersContrasted):
            self._extra["dola"] = describe_layers(report, self.show)
        elif isinstance(report, Guided):
            self._extra["guidance"] = describe_guidance(report, self.show)
        elif isinstance(report, CandidatesCompared):
            self._extra["contrastive"] = describe_candidates(report, self.show)
        elif isinstance(report, DraftChecked):
            self._draft = report

    def _describe_position(self, token: int) -> None:
        """Take down what is known of the position whose token this is; its distributions are let go."""
        position, extra = self._position, self._extra
        self._position, self._extra = None, {}
        if position is None or not 0 <= token < len(position.raw):  # it may be that none could be chosen
            return
        if position.grammar is not None:
            extra["grammar"] = position.grammar
        self._described.append(position.describe(token, self.show) | extra)

    # --- after it --------------------------------------------------------------------------------------------
    def sum_up(self, emitted: Emitted) -> list[dict[str, Any]]:
        """The events of a turn."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self.beams is not None:
            events = self.beams.sum_up()
            for step in events:
                step |= {"step": self._index, "ms": round(1000 * seconds, 3)}
                self._index += 1
            return events
        tokens = emitted.tokens.get(0, [])
        events, kinds = self._describe_turn_draft(tokens)
        for place, token in enumerate(tokens):
            event = self._describe_token(place, token)
            events.append(event | {"draft": kinds[place], "ms": round(1000 * seconds / len(tokens), 3)})
        self._position, self._extra, self._described, self._draft = None, {}, [], None
        return events

    def _describe_turn_draft(self, tokens: Sequence[int]) -> tuple[list[dict[str, Any]], Sequence[str | None]]:
        """The event of the turn's draft, if there was one, and each token's verdict."""
        draft = self._draft
        if draft is None:
            return [], [None] * len(tokens)
        verdicts, kinds = judge_draft(draft, len(tokens))
        self._drafted += len(draft.tokens)
        self._accepted += draft.num_accepted
        event = {
            "type": "draft",
            "index": self._index,
            "tokens": describe_draft(draft.tokens, verdicts, self.show),
            "accepted": draft.num_accepted,
            "drafted": len(draft.tokens),
            "total_accepted": self._accepted,
            "total_drafted": self._drafted,
        }
        return [event], kinds

    def _describe_token(self, place: int, token: int) -> dict[str, Any]:
        """The event of one of the turn's tokens."""
        event: dict[str, Any] = {"type": "token", "index": self._index, "id": token, "text": self.show(token)}
        self._index += 1
        if place == len(self._described):
            self._describe_position(token)
        if place < len(self._described):  # a strategy of somebody's own may choose without scores
            event |= self._described[place]
            self.sum_logprobs += event["logprob"] or 0.0
        if self._mark is not None:
            event["watermark"] = self._mark.add(token)
        return event
