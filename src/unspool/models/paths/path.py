"""The interface of a fast path: a way to run a decoder's pass, which explains in words why it can't take one.

A decoder has a list of them and takes the first that doesn't refuse. The reasons of those before it reach
`Forward.path_reason` unchanged. If all refuse, the pass is run operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from unspool.cache import Cache, Span
from unspool.protocols import Forward, Want

# Refusals that several paths share.
EMBEDDINGS: Final = "embeddings are read"
ALL_LAYERS: Final = "hidden states or attention weights of all layers are wanted"


class Pass:
    """One pass over new tokens. Its span is opened on first access, so paths that need none open none."""

    __slots__ = ("_open", "_span", "cache", "counts", "embeds", "tokens", "want")

    def __init__(
        self,
        tokens: torch.Tensor | None,
        cache: Cache,
        counts: Sequence[int] | None,
        want: Want,
        embeds: torch.Tensor | None,
        open_span: Callable[[Cache, int, int, Sequence[int] | None], Span],
    ) -> None:
        self.tokens, self.cache, self.counts, self.want, self.embeds = tokens, cache, counts, want, embeds
        self._open = open_span
        self._span: Span | None = None

    @property
    def given(self) -> torch.Tensor:
        """The tokens (rows, new), or the embeddings (rows, new, hidden)."""
        given = self.tokens if self.tokens is not None else self.embeds
        assert given is not None
        return given

    @property
    def span(self) -> Span:
        """The positions that the pass writes; its cache is open from now on, until `cache.end()`."""
        if self._span is None:
            rows, num_new = self.given.shape[:2]
            self._span = self._open(self.cache, rows, num_new, self.counts)
        return self._span


class Path(Protocol):
    """One way to run passes."""

    @property
    def name(self) -> str:
        """The value of `Forward.path`."""
        ...

    def run(self, new: Pass) -> Forward | str:
        """Run a pass, and advance its cache; or return why this path can't take it, having written nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedPath:
    """A path that can't take any pass of a model."""

    name: str
    reason: str

    def run(self, new: Pass) -> Forward | str:  # noqa: ARG002 - the same for every pass
        """The reason."""
        return self.reason


def run_first(paths: Sequence[Path], new: Pass) -> tuple[Forward | None, str]:
    """The result of the first path that takes the pass, or None; and the refusals of those before it."""
    refusals: list[str] = []
    for path in paths:
        made = path.run(new)
        if not isinstance(made, str):
            return made, "; ".join(refusals)
        if made not in refusals:
            refusals.append(made)
    return None, "; ".join(refusals)
