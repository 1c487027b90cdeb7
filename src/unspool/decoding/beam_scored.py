"""Diverse and constrained beam search: a beam scorer decides which continuations go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.beams.hypotheses import Hypothesis
from unspool.beams.result import pick_best
from unspool.decoding.beam import NEVER, BeamSettings
from unspool.decoding.beam_notes import VerdictNotes
from unspool.decoding.beam_stream import Agreement
from unspool.decoding.beam_trace import BeamTrace
from unspool.decoding.finish import Finish
from unspool.decoding.loop import Emitted, LiveBeam, Result
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer


class ScoredBeams:
    """What both have in common: running scores, the scorer's verdict, and the sequences it settles on in the end."""

    reads_choice = False

    def __init__(
        self,
        logits: Scorer,
        rows: Rows,
        finish: Finish,
        settings: BeamSettings,
        scorer: Any,
        *,
        eos_token_ids: Sequence[int],
        max_length: int,
        shows_table: bool = False,
        trace: BeamTrace | None = None,
    ) -> None:
        self._logits, self._rows, self._finish, self._settings, self._scorer = logits, rows, finish, settings, scorer
        self._eos = list(eos_token_ids) or None
        self._max_length = max_length
        self._width = rows.history().shape[1]
        self._num_prompts = len(rows) // settings.num_beams
        self._agreement = Agreement(self._num_prompts, settings.num_returned, shows_table=shows_table)
        self.trace = trace
        self._notes = None if trace is None else VerdictNotes(trace, scorer, eos_token_ids)
        self._num_tokens = 0
        self._scores = torch.full((len(rows),), NEVER, device=rows.device)  # (rows,): log-probability so far
        self._origins: list[tuple[int, ...]] = [() for _ in range(len(rows))]  # the rows each token came from
        self._is_done = False
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens and parents looked at last
        self.final: dict[str, Any] | None = None

    def is_done(self) -> bool:
        """Whether the scorer, or every row's stop, has ended the search."""
        return self._is_done

    def turn(self) -> Emitted:
        """Choose every beam's next token, let the rows follow, and see whether that was the end."""
        parents, tokens = self._choose()
        self._num_tokens += 1
        self._rows.reorder(parents)
        self._rows.append(tokens[:, None])
        self._logits.reader.reorder_rows(parents)
        reasons = self._finish.explain(self._rows.history(), self._logits.record.scores)
        self._is_done = bool(self._scorer.is_done) or all(reason is not None for reason in reasons)
        return self._end(reasons) if self._is_done else self._tell()

    def _choose(self) -> tuple[list[int], torch.Tensor]:
        """The row that every row goes on from, and its next token (rows,)."""
        raise NotImplementedError

    def _stay_home(self, place: int, source: int) -> int:
        """The row to go on from: the scorer sends rows of prompts that are done to row 0, where they have no place."""
        num_beams = self._settings.num_beams
        return source if source // num_beams == place // num_beams else place

    def _take_best(self, totals: torch.Tensor, num_beams: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best continuations of each prompt's beams (prompts, candidates): log-probability, token, beam."""
        vocab = totals.shape[-1]
        flat = totals.view(self._num_prompts, num_beams * vocab)
        count = max(2, 1 + len(self._eos or ())) * num_beams
        best, index = flat.topk(min(count, flat.shape[1]), dim=1, largest=True, sorted=True)
        return best, index % vocab, torch.div(index, vocab, rounding_mode="floor")

    # --- what is told ----------------------------------------------------------------------------------
    def _live(self, prompt: int) -> list[LiveBeam]:
        settings = self._settings
        first = prompt * settings.num_beams
        new = self._rows.history()[first : first + settings.num_beams, self._width :].tolist()
        scores = self._scores[first : first + settings.num_beams].tolist()
        beams = [LiveBeam(tokens, score, None) for tokens, score in zip(new, scores, strict=True)]
        groups = range(prompt * settings.num_groups, (prompt + 1) * settings.num_groups)
        for group in groups:
            for score, tokens, *_ in self._scorer._beam_hyps[group].beams:
                beams.append(LiveBeam(tokens[self._width :].tolist(), score, "eos"))
        return beams

    def _tell(self) -> Emitted:
        emitted = Emitted({}, {})
        table = [self._live(prompt) for prompt in range(self._num_prompts)]
        for prompt, beams in enumerate(table):
            self._agreement.tell(emitted, prompt, [beam.tokens for beam in beams], None)
        if self._agreement.shows_table:
            emitted.beams = table
        return emitted

    def _end(self, reasons: Sequence[str | None]) -> Emitted:
        """Let the scorer settle; `reasons` say why each row must end, where it does."""
        assert self._last is not None
        tokens, parents = self._last
        finished = [list(pool.beams) for pool in self._scorer._beam_hyps]
        self.final = final = self._scorer.finalize(
            self._rows.history(),
            self._scores,
            tokens,
            parents,
            max_length=self._max_length,
            pad_token_id=self._rows.pad_token_id,
            eos_token_id=self._eos,
            beam_indices=self._all_origins(),
            decoder_prompt_len=self._width,
        )
        emitted = Emitted({}, {})
        row = 0
        for prompt in range(self._num_prompts):
            ended = []
            for group, hypothesis in self._pick_returned(prompt):
                beam = self._find_running(prompt, group, hypothesis, finished)
                reason = "eos" if beam is None else reasons[self._first_row(prompt, group) + beam] or "length"
                length = len(hypothesis.tokens) + (beam is None)  # its end token is not among its tokens
                ended.append((final["sequences"][row, self._width : length].tolist(), reason))
                row += 1
                if self._notes is not None:
                    self._notes.note_returned(prompt, group, hypothesis, beam, reason)
            self._agreement.tell(emitted, prompt, [], ended)
        return emitted

    def _pick_returned(self, prompt: int) -> list[tuple[int, Hypothesis]]:
        """The hypotheses of a prompt that are returned, best first, each with its group."""
        num_groups, pools = self._settings.num_groups, self._scorer._beam_hyps
        found = [(group, one) for group in range(num_groups) for one in pools[prompt * num_groups + group].beams]
        best = pick_best([one for _, one in found], self._settings.num_returned)
        return [next(pair for pair in found if pair[1] is one) for one in best]

    def _find_running(
        self, prompt: int, group: int, hypothesis: Hypothesis, finished: list[list[Hypothesis]]
    ) -> int | None:
        """The beam of its group that a hypothesis was to the last; None if it had ended before."""
        if any(hypothesis is one for one in finished[prompt * self._settings.num_groups + group]):
            return None
        first, size = self._first_row(prompt, group), self._settings.num_beams // self._settings.num_groups
        history, scores = self._rows.history()[first : first + size], self._scores[first : first + size].tolist()
        rate = self._scorer._beam_hyps[prompt * self._settings.num_groups + group]._score
        return next(
            beam
            for beam in range(size)
            # A beam that does not exist (yet) may be written like one that does: the score tells them apart.
            if rate(scores[beam], self._num_tokens) == hypothesis.score
            and torch.equal(history[beam], hypothesis.tokens)
        )

    def _first_row(self, prompt: int, group: int) -> int:
        settings = self._settings
        return prompt * settings.num_beams + group * (settings.num_beams // settings.num_groups)

    def _all_origins(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._origins)

    def result(self) -> Result:
        """The scores and origins of the sequences returned; the reference returns neither without scores."""
        final = self.final
        has_scores = final is not None and self._settings.tells_scores
        return Result(
            {
                "sequences_scores": final["sequence_scores"] if final is not None and has_scores else None,
                "beam_indices": final["beam_indices"] if final is not None and has_scores else None,
                "beam_trace": self.trace,
            },
            sequences=None if final is None else final["sequences"],
        )

    def close(self) -> None:
        """Nothing is left undone."""


class GroupBeams(ScoredBeams):
    """Diverse beam search: groups choose one after the other, and avoid what those before them chose.

    Vijayakumar et al., 2016: https://arxiv.org/abs/1610.02424
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self._settings
        size = settings.num_beams // settings.num_groups
        self._size = size
        self._groups = [
            [
                prompt * settings.num_beams + beam
                for prompt in range(self._num_prompts)
                for beam in range(first, first + size)
            ]
            for first in range(0, settings.num_beams, size)
        ]
        self._scores[::size] = 0.0  # one beam of each group begins

    def _choose(self) -> tuple[list[int], torch.Tensor]:
        rows, size = self._rows, self._size
        current = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        parents = list(range(len(rows)))
        history = rows.history()
        before = list(self._origins)
        for number, scores in enumerate(self._logits.next_groups(rows, self._groups, current)):
            places = torch.tensor(self._groups[number], device=rows.device)
            best, tokens, beams = self._take_best(scores + self._scores[places, None], size)
            if self._notes is not None:
                self._notes.look()
            verdict = self._scorer.process(
                history[places],
                best,
                tokens,
                beams,
                pad_token_id=rows.pad_token_id,
                eos_token_id=self._eos,
                beam_indices=self._all_origins(),  # with what earlier groups chose, as in the reference
                group_index=number,
                decoder_prompt_len=self._width,
            )
            self._scores[places] = verdict["next_beam_scores"].to(self._scores.dtype)
            current[places] = verdict["next_beam_tokens"]
            for place, source in zip(self._groups[number], verdict["next_beam_indices"].tolist(), strict=True):
                parents[place] = self._stay_home(place, self._groups[number][source])
                self._origins[place] = (*before[self._groups[number][source]], source)
            if self._notes is not None:
                self._notes.note(self._num_tokens + 1, number, history[places], (best, tokens, beams), verdict)
            self._last = (tokens, beams)
        return parents, current

    def _all_origins(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._origins[row] for group in self._groups for row in group)


class ConstrainedBeams(ScoredBeams):
    """Constrained beam search: beams are kept in banks by how much of the constraints they have fulfilled.

    Post and Vilar, 2018 (https://arxiv.org/abs/1804.06609), Hu et al., 2019.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores[:: self._settings.num_beams] = 0.0

    def _choose(self) -> tuple[list[int], torch.Tensor]:
        rows = self._rows
        scores = self._logits.next_logits(rows, normalise=True).scores
        totals = scores + self._scores[:, None]
        best, tokens, beams = self._take_best(totals, self._settings.num_beams)
        history = rows.history()
        if self._notes is not None:
            self._notes.look()
        verdict = self._scorer.process(
            history,
            best,
            tokens,
            beams,
            totals.clone(),
            pad_token_id=rows.pad_token_id,
            eos_token_id=self._eos,
            beam_indices=self._all_origins(),
            decoder_prompt_len=self._width,
        )
        self._scores = verdict["next_beam_scores"].to(self._scores.dtype)
        self._last = (tokens, beams)
        sources = verdict["next_beam_indices"].tolist()
        parents = [self._stay_home(place, source) for place, source in enumerate(sources)]
        if self._notes is not None:
            self._notes.note(self._num_tokens + 1, 0, history, (best, tokens, beams), verdict)
        self._origins = [(*self._origins[source], source) for source in sources]
        return parents, verdict["next_beam_tokens"]
