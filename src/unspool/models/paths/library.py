"""A decoder's pass in one call of the CPU library: all layers, all phases, no operators in between."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import torch

from unspool.cache import Cache, Span
from unspool.kernels.cpu import find_library
from unspool.kernels.cpu.library import CHUNK
from unspool.kernels.cpu.structures import FloatKind
from unspool.kernels.token_choice import TokenChoice
from unspool.models.decoder.head import check_positions
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured import CapturedSteps
from unspool.models.paths.library_calls import LibraryCalls
from unspool.models.paths.library_keys import LibraryKeys, find_keys
from unspool.models.paths.library_model import DescribedModel
from unspool.models.paths.path import ALL_LAYERS, EMBEDDINGS, Pass, WithPaths
from unspool.models.weights import PackedLinear
from unspool.protocols import LAST, Choose, Forward, Stretch
from unspool.shortage import explain_shortage

# Tokens of a pass; for many more of them torch's products of plain floats are as fast. Measured on Arm and AVX-512.
_MOST_FLOAT: Final = {"neon_dot": CHUNK, "neon_i8mm": CHUNK, "avx512": 2 * CHUNK, "amx": CHUNK}
_MOST_FLOAT_ELSEWHERE: Final = 16
# Of one text: products with copies in 16 bits are faster than torch's; attention over many keys is not.
_MOST_NARROW: Final[dict[tuple[str, FloatKind], int]] = {
    ("amx", "bfloat16"): sys.maxsize,
    ("amx", "float16"): 256,
    ("avx512", "bfloat16"): 256,
    ("avx512", "float16"): 256,
    **{(name, kind): sys.maxsize for name in ("neon_dot", "neon_i8mm") for kind in ("bfloat16", "float16")},
}
PACKING_LIMIT: Final = 1 << 30  # bytes of weights up to which a second copy is kept


class LibraryPath:
    """Passes in one call of the CPU library."""

    name = "library"

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, described: DescribedModel) -> None:
        library = find_library()
        assert library is not None, "explain_no_library() says so"
        self._spec, self._weights = spec, weights
        self._described = described
        self._calls = LibraryCalls(spec, described, library)
        self.most_float: int | None = None  # tokens of a pass over plain floats; None: weights are quantised
        if not isinstance(weights.layers[0].up, PackedLinear):
            self.most_float = _MOST_FLOAT.get(library.instructions, _MOST_FLOAT_ELSEWHERE)
        self._instructions = library.instructions

    def run(self, new: Pass) -> Forward | str:
        """Read the tokens in one call, and advance the cache; or why it can't be one call."""
        want, cache, tokens = new.want, new.cache, new.tokens
        if tokens is None:
            return EMBEDDINGS
        if want.hidden_states or want.attentions:
            return ALL_LAYERS
        if want.early and want.logits == "all":
            return "early logits are read one token at a time"
        span = new.span
        if (reason := self._explain_slow(span.counts)) is not None:
            return reason
        self._check_longest(max(start + count for start, count in zip(span.starts, span.counts, strict=True)))
        with self._own(cache).steady():
            keys = self._find_keys(cache, span)
            if keys is None:
                return f"the CPU library does not read the keys of a {type(cache).__name__}"
            forward = self._calls.forward(tokens, span, keys, want)
        cache.end()
        return forward

    def take_steps(
        self,
        tokens: Sequence[int],
        cache: Cache,
        num_steps: int,
        ends: tuple[int, ...],
        open_span: Callable[[Cache, int, int, Sequence[int] | None], Span],
        choose: Choose | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> Stretch | None:
        """Several steps without operators between them, whose keys lie past the rows' ends; None if that can't be."""
        rows, own = len(tokens), self._own(cache)
        if rows > min(self.most_float or CHUNK, CHUNK) or own.places(in_order=True) is None:
            return None
        if (longest := own.longest_stretch) is not None:
            num_steps = min(num_steps, longest)
        if not num_steps:
            return None
        own.make_room(rows, num_steps)
        span = open_span(cache, rows, num_steps, [0] * rows)  # room for all of them; no length changes
        try:
            self._check_longest(span.stop)
            with own.steady():
                keys = self._find_keys(cache, span)
                if keys is None:
                    return None
                return Stretch(self._calls.take_steps(tokens, span, keys, ends, choose, forbidden), path=self.name)
        finally:
            cache.end()

    def find_copy(self, weight: torch.Tensor) -> torch.Tensor | None:
        """What steps read in the place of a matrix, if it is not the matrix itself."""
        return self._described.find_copy(weight)

    def _explain_slow(self, counts: Sequence[int]) -> str | None:
        """Why torch's operators are as fast for so many tokens of each row; None if the library is faster."""
        if self.most_float is None or sum(counts) <= self.most_float:
            return None
        kind = self._described.narrow_kind
        most = _MOST_NARROW.get((self._instructions, kind), 0) if kind is not None else 0
        if not most:
            return f"torch's products of plain numbers are as fast for more than {self.most_float} tokens"
        if max(counts) > most:
            return f"torch's products and attention are as fast for more than {most} tokens of a text"
        return None

    # --- what differs in models with an encoder ---------------------------------------------------------
    def _own(self, cache: Cache) -> Cache:
        """The cache that holds the texts' keys."""
        return cache

    def _find_keys(self, cache: Cache, span: Span) -> LibraryKeys | None:
        return find_keys(cache, span, self._spec)

    def _check_longest(self, longest: int) -> None:
        """Raise if a row would get more positions than the model has."""
        check_positions(self._spec, self._weights, longest)


class WithLibrary(WithPaths):
    """What models share whose passes the CPU library may run."""

    _packs: bool  # set before the paths are listed

    @property
    def packs_for_batches(self) -> bool:
        """Whether steps on a CPU may keep a second copy of the weights: in half of the bytes where that is exact, laid
        out for several rows, and of the head a sketch that greedy steps read."""
        return self._packs

    @packs_for_batches.setter
    def packs_for_batches(self, is_on: bool) -> None:
        self._packs = is_on
        self._refresh()

    @abstractmethod
    def _refresh(self) -> None:
        """Make again what follows from the weights and settings."""

    @abstractmethod
    def _begin(self, cache: Cache, rows: int, num_new: int, counts: Sequence[int] | None) -> Span:
        """Open a pass over a cache."""

    def take_steps(
        self,
        tokens: Sequence[int],
        cache: Cache,
        num_steps: int,
        ends: tuple[int, ...],
        choose: Choose | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> Stretch | None:
        """Several greedy steps in one call of the CPU library, which writes keys past the rows' lengths."""
        library = self.find_path("library")
        if not isinstance(library, LibraryPath):
            return None
        return library.take_steps(tokens, cache, num_steps, ends, self._begin, choose, forbidden)

    @explain_shortage("a model read tokens")
    @torch.no_grad()
    def launch_steps(
        self, tokens: torch.Tensor, cache: Cache, num_steps: int, choice: TokenChoice | None = None
    ) -> torch.Tensor | None:
        """Several steps of a captured graph, launched without waiting for any of them."""
        captured = self.find_path("captured")
        if not isinstance(captured, CapturedSteps):
            return None
        return captured.launch_steps(Pass(tokens, cache, None, LAST, None, self._begin), num_steps, choice)
