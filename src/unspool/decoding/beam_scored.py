"""Diverse and constrained beam search: a beam scorer decides which continuations go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.decoding.beam import NEVER, BeamSettings
from unspool.decoding.beam_stream import Agreement, BeamTrace, Candidate
from unspool.decoding.finish import Finish
from unspool.decoding.loop import Emitted, LiveBeam
from unspool.decoding.rows import Rows
from unspool.decoding.step import Step


class ScoredBeams:
    """What both have in common: running scores, the scorer's verdict, and the sequences it settles on in the end."""

    def __init__(
        self,
        step: Step,
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
        self._step, self._rows, self._finish, self._settings, self._scorer = step, rows, finish, settings, scorer
        self._eos = list(eos_token_ids) or None
        self._max_length = max_length
        self._width = rows.history().shape[1]
        self._num_prompts = len(rows) // settings.num_beams
        self._agreement = Agreement(self._num_prompts, settings.num_returned, shows_table=shows_table)
        self.trace = trace
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
        self._step.reorder_rows(parents)
        reasons = self._finish.explain(self._rows.history(), self._step.record.scores)
        self._is_done = bool(self._scorer.is_done) or all(reason is not None for reason in reasons)
        return self._end() if self._is_done else self._tell()

    def _choose(self) -> tuple[list[int], torch.Tensor]:
        """The row that every row goes on from, and its next token (rows,)."""
        raise NotImplementedError

    def _take_best(self, totals: torch.Tensor, num_beams: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The best continuations of each prompt's beams (prompts, candidates): log-probability, token, beam."""
        vocab = totals.shape[-1]
        flat = totals.view(self._num_prompts, num_beams * vocab)
        count = max(2, 1 + len(self._eos or ())) * num_beams
        best, index = flat.topk(min(count, flat.shape[1]), dim=1, largest=True, sorted=True)
        return best, index % vocab, torch.div(index, vocab, rounding_mode="floor")

    def _note(self, best: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, kept: torch.Tensor) -> None:
        """Write the candidates (prompts, n) into the trace; `kept` (prompts, beams) are the tokens that went on."""
        if self.trace is None:
            return
        ends = set(self._eos or ())
        for prompt, (scores, ids, beams, going) in enumerate(
            zip(best.tolist(), tokens.tolist(), parents.tolist(), kept.tolist(), strict=True)
        ):
            candidates = [
                Candidate(token, beam, score, "eos" if token in ends else None)
                for score, token, beam in zip(scores, ids, beams, strict=True)
            ]
            places = [place for place, token in enumerate(ids) if token in going and token not in ends]
            self.trace.note(prompt, self._num_tokens + 1, candidates, places[: len(going)])

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

    def _end(self) -> Emitted:
        assert self._last is not None
        tokens, parents = self._last
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
        sequences, origins = final["sequences"], final["beam_indices"]
        reasons = self._finish.explain(sequences, None)
        emitted = Emitted({}, {})
        counts = (origins >= 0).sum(dim=1).tolist()
        ended = []
        for row, count in enumerate(counts):
            new = sequences[row, self._width : self._width + count].tolist()
            is_ended = bool(new) and new[-1] in (self._eos or ())
            ended.append((new, "eos" if is_ended else reasons[row] or "length"))
        returned = self._settings.num_returned
        for prompt in range(self._num_prompts):
            self._agreement.tell(emitted, prompt, [], ended[prompt * returned : (prompt + 1) * returned])
        return emitted

    def _all_origins(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._origins)

    def result(self, *, wants_scores: bool) -> dict[str, torch.Tensor | None]:
        """The scores and origins of the sequences returned; the reference tells neither without scores."""
        if self.final is None or not wants_scores:
            return {"sequences_scores": None, "beam_indices": None}
        return {"sequences_scores": self.final["sequence_scores"], "beam_indices": self.final["beam_indices"]}


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
        for number, scores in enumerate(self._step.next_groups(rows, self._groups, current)):
            places = torch.tensor(self._groups[number], device=rows.device)
            best, tokens, beams = self._take_best(scores + self._scores[places, None], size)
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
                parents[place] = self._groups[number][source]
                self._origins[place] = (*before[parents[place]], source)
            self._note(best, tokens, beams, verdict["next_beam_tokens"].view(self._num_prompts, size))
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
        scores = self._step.next_logits(rows, normalise=True).scores
        totals = scores + self._scores[:, None]
        best, tokens, beams = self._take_best(totals, self._settings.num_beams)
        verdict = self._scorer.process(
            rows.history(),
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
        parents = verdict["next_beam_indices"].tolist()
        self._note(best, tokens, beams, verdict["next_beam_tokens"].view(self._num_prompts, -1))
        self._origins = [(*self._origins[source], source) for source in parents]
        return parents, verdict["next_beam_tokens"]
