"""One step of a beam search on the scores: the candidates of every prompt, and on a device also which of them go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unspool.decoding.beams.settings import NEVER, BeamSettings
from unspool.decoding.randomness import draw_gumbel
from unspool.kernels.beam_choice import ChosenBeams
from unspool.kernels.presence import runs_kernels
from unspool.kernels.ranks import log_probabilities, rank_allowed
from unspool.kernels.sending import Fetched, fetch, fetch_once, send
from unspool.logits.highest import take_highest


@dataclass(frozen=True, slots=True)
class Drawing:
    """What beam sampling draws with: a seed and a position for each prompt, (prompts,) each."""

    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """The candidates of a step, and the beams that go on."""

    # (prompts, 3, candidates) int32: tokens, beams they continue, bits of their log-probabilities; with groups of beams
    # (prompts, groups, 3, candidates), beams counted from a group's first.
    packed: torch.Tensor
    parents: torch.Tensor  # (rows,) int64: the row that each row goes on from
    tokens: torch.Tensor  # (rows,) int64: its next token
    running: torch.Tensor  # (rows,) float32: its log-probability

    @property
    def column(self) -> torch.Tensor:
        """The tokens as a column (rows, 1)."""
        return self.tokens[:, None]


Listed = tuple[list[list[int]], list[list[int]], list[list[float]]]
"""Tokens, the beams that they continue and log-probabilities, one list per prompt each."""


def _normalise(scores: torch.Tensor, forbidden: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of logits (rows, vocab), those of forbidden tokens -inf."""
    inside = [token for token in forbidden if 0 <= token < scores.shape[-1]]
    made = log_probabilities(scores)
    return made.index_fill(1, send(inside, scores.device), -torch.inf) if inside else made


def find_candidates(
    scores: torch.Tensor,
    running: torch.Tensor,
    settings: BeamSettings,
    drawing: Drawing | None,
    *,
    is_normalised: bool = True,
    forbidden: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each prompt's likeliest (or drawn) continuations: tokens, beams that they continue, log-probabilities.

    From scores (rows, vocab), log-probabilities if they are normalised, and the log-probabilities of the running beams
    (rows,); each result is (prompts, candidates). If they are not normalised, `forbidden` tokens are then -inf.
    """
    num_beams, vocab = settings.num_beams, scores.shape[-1]
    num_prompts = len(scores) // num_beams
    ranked = None
    if not is_normalised:
        if drawing is None:
            ranked = rank_allowed(scores, min(settings.num_candidates, vocab), forbidden)
        if ranked is None:
            scores = _normalise(scores, forbidden)
    if drawing is not None:
        total = (scores + running[:, None]).view(num_prompts, num_beams * vocab)
        noise = draw_gumbel(drawing.seeds, drawing.positions, total.shape[1])
        index = (total + noise).topk(min(settings.num_candidates, total.shape[1]), dim=1).indices
        return index % vocab, index // vocab, total.gather(1, index)
    # A beam's highest are among its own highest: only those are added up and compared.
    each, tokens = ranked or take_highest(scores, min(settings.num_candidates, vocab))  # (rows, few)
    total = (each + running[:, None]).view(num_prompts, -1)
    best, places = total.topk(min(settings.num_candidates, total.shape[1]))  # a tiny vocabulary has fewer
    return tokens.view(num_prompts, -1).gather(1, places), places // each.shape[1], best


def select_beams(
    scores: torch.Tensor,
    running: torch.Tensor,
    ends: torch.Tensor,
    settings: BeamSettings,
    *,
    is_normalised: bool,
    drawing: Drawing | None = None,
) -> Selection:
    """Decide a step where its scores are: from scores (rows, vocab), log-probabilities if they are normalised, those of
    the running beams (rows,), and the tokens that end a sequence. The host decides alike in `PlainBeams.advance`."""
    has_all = settings.num_candidates <= settings.num_beams * scores.shape[-1]  # a tiny vocabulary has fewer
    fits = has_all and _fits_kernels(scores, settings.num_beams, settings.num_candidates)
    if not fits:
        return select_by_operators(scores, running, ends, settings, drawing, is_normalised=is_normalised)
    if not is_normalised and drawing is not None:
        scores, is_normalised = torch.log_softmax(scores, dim=-1), True
    from unspool.kernels.gpu.sampling.beams import choose_beams  # Triton is imported where a GPU is used

    chosen = choose_beams(
        scores,
        running,
        ends,
        num_beams=settings.num_beams,
        num_candidates=settings.num_candidates,
        never=NEVER,
        is_normalised=is_normalised,
        drawing=None if drawing is None else (drawing.seeds, drawing.positions),
    )
    return Selection(*chosen)


def select_by_operators(
    scores: torch.Tensor,
    running: torch.Tensor,
    ends: torch.Tensor,
    settings: BeamSettings,
    drawing: Drawing | None = None,
    *,
    is_normalised: bool = True,
) -> Selection:
    """The same operator by operator: the reference of the kernels."""
    tokens, beams, best = find_candidates(scores, running, settings, drawing, is_normalised=is_normalised)
    is_end = (tokens[..., None] == ends).any(dim=-1)
    lowered = torch.where(is_end, best.double() + NEVER, best.double())  # as the host counts
    order = lowered.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(
        dim=-1, descending=True, stable=True
    )
    kept = order.indices[:, : settings.num_beams]
    first = torch.arange(0, len(scores), settings.num_beams, device=scores.device)[:, None]
    return Selection(
        torch.stack((tokens.int(), beams.int(), best.view(torch.int32)), dim=1),
        (beams.gather(1, kept) + first).flatten(),
        tokens.gather(1, kept).flatten(),
        lowered.gather(1, kept).flatten().float(),
    )


def select_groups(
    scores: torch.Tensor,
    running: torch.Tensor,
    ends: torch.Tensor,
    settings: BeamSettings,
    penalty: float,
    *,
    is_normalised: bool,
    forbidden: Sequence[int] = (),
) -> Selection:
    """Decide a step of diverse beam search for all groups that are not over: each goes on with the first of its
    candidates that do not end, and a candidate is lowered by the penalty for every beam of an earlier group that goes
    on with its token. From scores (rows, vocab) before that, and the rest as `select_beams`; what is `forbidden` as in
    `find_candidates`."""
    size, vocab = settings.num_beams // settings.num_groups, scores.shape[-1]
    num_candidates = min(settings.count_candidates(size), size * vocab)
    few = num_candidates + settings.num_beams - size  # earlier groups can lower as many tokens as they have beams
    if not _fits_kernels(scores, size, few):
        counts = num_candidates, min(few, vocab)
        return select_groups_on_host(
            scores, running, ends, settings, penalty, counts, is_normalised=is_normalised, forbidden=forbidden
        )
    assert not forbidden, "the kernels are given what processors have forbidden"
    from unspool.kernels.gpu.sampling.beams import choose_in_groups  # Triton is imported where a GPU is used

    chosen = choose_in_groups(
        scores,
        running,
        ends,
        num_beams=settings.num_beams,
        num_groups=settings.num_groups,
        num_candidates=num_candidates,
        num_ranked=few,
        penalty=penalty,
        never=NEVER,
        is_normalised=is_normalised,
    )
    return Selection(*chosen)


def select_groups_on_host(
    scores: torch.Tensor,
    running: torch.Tensor,
    ends: torch.Tensor,
    settings: BeamSettings,
    penalty: float,
    counts: tuple[int, int],
    *,
    is_normalised: bool,
    forbidden: Sequence[int] = (),
) -> Selection:
    """The same from each row's likeliest tokens, of which the host chooses; `counts` are the candidates of a group and
    the tokens of a row that can be among them."""
    num_candidates, few = counts
    num_beams, size = settings.num_beams, settings.num_beams // settings.num_groups
    num_prompts = len(scores) // num_beams
    ranked = None if is_normalised else rank_allowed(scores, few, forbidden)
    if ranked is None:
        ranked = take_highest(scores if is_normalised else _normalise(scores, forbidden), few)
    fetched = [fetch(part) for part in (*ranked, running, ends)]
    values, tokens, before, end_ids = (part.read().numpy() for part in fetched)
    values, tokens = values.reshape(num_prompts, num_beams, few), tokens.reshape(num_prompts, num_beams, few)
    before = before.reshape(num_prompts, num_beams, 1)
    packed = np.empty((num_prompts, settings.num_groups, 3, num_candidates), np.int32)
    parents = np.empty((num_prompts, num_beams), np.int64)
    chosen, after = np.empty_like(parents), np.empty((num_prompts, num_beams), np.float32)
    for group in range(settings.num_groups):
        first = group * size
        own = slice(first, first + size)
        times = (tokens[:, own, :, None] == chosen[:, None, None, :first]).sum(-1, dtype=np.float32)
        totals = ((values[:, own] - np.float32(penalty) * times) + before[:, own]).reshape(num_prompts, -1)
        compared = np.where(np.isnan(totals), np.inf, totals)  # what is no number comes first, as in torch
        order = np.argsort(-compared, axis=1, kind="stable")[:, :num_candidates]
        found = np.take_along_axis(tokens[:, own].reshape(num_prompts, -1), order, axis=1)
        best = np.take_along_axis(totals, order, axis=1)
        packed[:, group, 0], packed[:, group, 1], packed[:, group, 2] = found, order // few, best.view(np.int32)
        is_end = np.isin(found, end_ids)
        kept = np.argsort(is_end, axis=1, kind="stable")[:, :size]
        chosen[:, own] = np.take_along_axis(found, kept, axis=1)
        parents[:, own] = first + np.take_along_axis(order // few, kept, axis=1)
        lowered = np.where(is_end, best.astype(np.float64) + NEVER, best)
        after[:, own] = np.take_along_axis(lowered, kept, axis=1)
    parents += np.arange(0, len(scores), num_beams)[:, None]
    device = scores.device
    return Selection(
        torch.from_numpy(packed),
        send(parents.ravel().tolist(), device),
        send(chosen.ravel().tolist(), device),
        send(after.ravel().tolist(), device, torch.float32),
    )


@dataclass(frozen=True, slots=True)
class Best:
    """The best continuations of each prompt's beams on their way to the host, and the tokens of those that go on."""

    packed: Fetched
    tokens: torch.Tensor  # (rows,), on the device

    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities, tokens, and beams that they continue, (prompts, candidates) each, on the host."""
        tokens, beams, bits = self.packed.read().unbind(1)
        return bits.contiguous().view(torch.float32), tokens.long(), beams.long()


def find_best(
    scores: torch.Tensor, running: torch.Tensor, ends: torch.Tensor, num_beams: int, num_candidates: int
) -> Best | None:
    """What `read_best` reads, and what goes on of it as beam scorers choose: the first that do not end. None without a
    kernel for it."""
    num_candidates = min(num_candidates, num_beams * scores.shape[-1])
    if not _fits_kernels(scores, num_beams, num_candidates):
        return None
    from unspool.kernels.gpu.sampling.beams import choose_beams  # Triton is imported where a GPU is used

    packed, _, tokens, _ = choose_beams(
        scores,
        running,
        ends,
        num_beams=num_beams,
        num_candidates=num_candidates,
        never=NEVER,
        is_normalised=True,
        by_order=True,
    )
    return Best(fetch(packed), tokens)


def read_best(
    scores: torch.Tensor, running: torch.Tensor, num_beams: int, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best continuations of each prompt's beams, on the host: log-probabilities, tokens, and beams that they
    continue, (prompts, candidates) each. From log-probabilities (rows, vocab) and those of the beams (rows,)."""
    nothing_ends = torch.empty(0, dtype=torch.int64, device=scores.device)
    found = find_best(scores, running, nothing_ends, num_beams, num_candidates)
    if found is not None:
        return found.read()
    vocab = scores.shape[-1]
    num_candidates = min(num_candidates, num_beams * vocab)
    flat = (scores + running[:, None]).view(-1, num_beams * vocab)
    best, index = flat.topk(num_candidates, dim=1, largest=True, sorted=True)
    fetched = [fetch(part) for part in (best, index % vocab, torch.div(index, vocab, rounding_mode="floor"))]
    best, tokens, beams = (part.read() for part in fetched)
    return best, tokens, beams


def fetch_candidates(chosen: Selection | ChosenBeams) -> Callable[[], Listed]:
    """Begin to copy a step's candidates to the host; what is returned reads them, once."""
    if isinstance(chosen, Selection):
        fetched = fetch_once(chosen.packed)
        return lambda: fetched.read(read_candidates)
    return lambda: _list_candidates(chosen.read().packed)


def read_candidates(packed: torch.Tensor) -> Listed:
    """A step's candidates as lists."""
    return _list_candidates(packed.numpy())


def _list_candidates(numbers: np.ndarray[Any, np.dtype[np.int32]]) -> Listed:
    return numbers[:, 0].tolist(), numbers[:, 1].tolist(), numbers[:, 2].view(np.float32).tolist()


def read_groups(packed: torch.Tensor) -> list[Listed]:
    """The candidates of each group of beams as lists."""
    return [read_candidates(group) for group in packed.unbind(1)]


def _fits_kernels(scores: torch.Tensor, num_beams: int, num_candidates: int) -> bool:
    return scores.dtype == torch.float32 and fits_kernels(scores.device, num_beams, num_candidates)


def fits_kernels(device: torch.device, num_beams: int, num_candidates: int) -> bool:
    """Whether a device has kernels that choose so many of a prompt's candidates."""
    if not runs_kernels(device):
        return False
    from unspool.kernels.gpu.sampling.beams import MOST_CANDIDATES, MOST_RANKED

    return num_candidates <= MOST_CANDIDATES and num_candidates * num_beams <= MOST_RANKED
