"""The interface of a fast path: a way to run a decoder's pass, which explains in words why it can't take one.

A decoder has a list of them and takes the first that doesn't refuse. The reasons of those before it reach
`Forward.path_reason` unchanged. If all refuse, the pass is run operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    def open_span(self) -> Callable[[Cache, int, int, Sequence[int] | None], Span]:
        """What opens a span over the cache."""
        return self._open

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


class WithPaths:
    """What models with fast paths share."""

    paths: list[Path]  # of a pass, in the order in which they are tried

    def find_path(self, name: str) -> Path | None:
        """The path of that name, if it takes passes of this model."""
        return next((path for path in self.paths if path.name == name and not isinstance(path, ClosedPath)), None)

    @contextmanager
    def without_paths(self, *names: str) -> Iterator[None]:
        """Disable these paths inside the context: for tests and comparisons."""
        held, self.paths = self.paths, [path for path in self.paths if path.name not in names]
        try:
            yield
        finally:
            self.paths = held

    @property
    def fast_path(self) -> str | None:
        """How steps run by default: "captured", "library", or None for operator by operator."""
        return next((name for name in ("captured", "library") if self.find_path(name) is not None), None)


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
