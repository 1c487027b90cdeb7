"""A decoder's pass in one call of the CPU library: all layers, all phases, no operators in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from unspool.cache import Cache, Span
from unspool.kernels.cpu import find_library
from unspool.kernels.cpu.library import CHUNK
from unspool.models.decoder.head import check_positions
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.decoder.views import AttentionViews
from unspool.models.paths.library_calls import LibraryCalls
from unspool.models.paths.library_keys import find_keys
from unspool.models.paths.library_model import DescribedModel
from unspool.models.paths.path import ALL_LAYERS, EMBEDDINGS, Pass
from unspool.models.weights import PackedLinear
from unspool.protocols import Forward, Stretch

# Tokens of a pass; for many more of them torch's products of plain floats are as fast. Measured on Arm alone.
_MOST_FLOAT: Final = {"neon_dot": CHUNK, "neon_i8mm": CHUNK}
_MOST_FLOAT_ELSEWHERE: Final = 16


class LibraryPath:
    """Passes in one call of the CPU library."""

    name = "library"
    most_tokens: int | None  # of a pass that is faster here; None: all are

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, views: AttentionViews) -> None:
        library = find_library()
        assert library is not None, "explain_no_library() says so"
        self._spec, self._weights = spec, weights
        self._calls = LibraryCalls(spec, DescribedModel(spec, weights, views), library)
        self.most_tokens = None
        if not isinstance(weights.layers[0].up, PackedLinear):
            self.most_tokens = _MOST_FLOAT.get(library.instructions, _MOST_FLOAT_ELSEWHERE)

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
        if self.most_tokens is not None and sum(span.counts) > self.most_tokens:
            return f"torch's products of plain numbers are as fast for more than {self.most_tokens} tokens"
        longest = max(start + count for start, count in zip(span.starts, span.counts, strict=True))
        check_positions(self._spec, self._weights, longest)
        with cache.steady():
            keys = find_keys(cache, span, self._spec)
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
    ) -> Stretch | None:
        """Several greedy steps in one call, whose keys lie past the rows' lengths; None if they can't be."""
        rows = len(tokens)
        if rows > (self.most_tokens or CHUNK) or cache.places(in_order=True) is None:
            return None
        if (longest := cache.longest_stretch) is not None:
            num_steps = min(num_steps, longest)
        if not num_steps:
            return None
        cache.make_room(rows, num_steps)
        span = open_span(cache, rows, num_steps, [0] * rows)  # room for all of them; no length changes
        try:
            check_positions(self._spec, self._weights, span.stop)
            with cache.steady():
                keys = find_keys(cache, span, self._spec)
                if keys is None:
                    return None
                return Stretch(self._calls.take_steps(tokens, span, keys, ends), path=self.name)
        finally:
            cache.end()
