"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

from unspool.decoding.reader import Reader
from unspool.decoding.record import read_logprobs
from unspool.decoding.rows import Rows
from unspool.outputs import TokenLogprob
from unspool.protocols import Want

CHUNK = 64  # positions whose full logits are held at a time


def read_prompt_logprobs(reader: Reader, rows: Rows, num_top: int) -> list[list[TokenLogprob | None]]:
    """Read the prompts but for their last tokens, a chunk at a time, and return what each token's probability was."""
    found: list[list[TokenLogprob | None]] = [[None] for _ in range(len(rows))]
    want = Want(logits="all", last_states=reader.want.last_states)
    tokens, counts = rows.unread([0] * len(rows))
    size = min(reader.chunk or CHUNK, reader.cache.longest_pass or CHUNK, CHUNK)
    for first in range(0, max(counts) - 1, size):
        real = [min(max(count - 1 - first, 0), size) for count in counts]
        starts = list(reader.cache.lengths) or [0] * len(rows)
        forward = reader.ask(tokens[:, first : first + max(real)], real, want)
        if reader.watch is not None:
            reader.watch(forward, starts, real)
        for row, count in enumerate(real):
            following = tokens[row, first + 1 : first + 1 + count]
            found[row] += read_logprobs(forward.logits[row, :count], following, num_top)
    return found
