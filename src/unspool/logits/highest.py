"""The highest few scores of each row."""

from __future__ import annotations

import torch

from unspool.kernels.ranks import rank_rows

CHUNK = 96
WIDE = 16_384  # from where a search in two levels pays


def take_highest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest scores of each row, falling, and their tokens: (rows, k) each."""
    if scores.device.type == "cpu" and is_wide(scores, k):
        if (ranked := rank_rows(scores, k, normalises=False)) is not None:
            return ranked
        values, tokens = take_highest_by_chunks(scores, k)
        if not bool((values[:, -1] == -torch.inf).any()):
            return values, tokens
        # Chunks without a number tie: the places are as good as any.
    found = torch.topk(scores, k)
    return found.values, found.indices


def is_wide(scores: torch.Tensor, k: int) -> bool:
    """Whether a search in two levels pays."""
    return scores.shape[-1] >= WIDE and k <= scores.shape[-1] // CHUNK // 8


def take_highest_by_chunks(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in two levels: the k highest lie in the k chunks with the highest maxima, and in what no whole chunk
    holds. Of tokens with the same score it may choose others."""
    vocab = scores.shape[-1]
    num_chunks = vocab // CHUNK
    chunks = scores[:, : num_chunks * CHUNK].reshape(-1, num_chunks, CHUNK)  # (rows, chunks, chunk)
    best = chunks.amax(dim=-1).topk(k, sorted=False).indices  # (rows, k)
    few = chunks.gather(1, best[..., None].expand(-1, -1, CHUNK)).flatten(1)  # (rows, k * chunk)
    column = torch.arange(CHUNK, device=scores.device)
    tokens = (best[..., None] * CHUNK + column).flatten(1)
    if num_chunks * CHUNK < vocab:
        rest = torch.arange(num_chunks * CHUNK, vocab, device=scores.device)
        few = torch.cat((few, scores[:, rest]), dim=-1)
        tokens = torch.cat((tokens, rest.expand(scores.shape[0], -1)), dim=-1)
    values, places = few.topk(k)
    return values, tokens.gather(1, places)
