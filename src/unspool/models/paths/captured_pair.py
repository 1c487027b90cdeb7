"""An encoder-decoder's captured steps: its decoder's, and the keys of the sources."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from unspool.cache import Cache
from unspool.cache.rows import RowCache
from unspool.cache.stores.memory import KeyFormat
from unspool.models.encoder_decoder.caches import check_pair
from unspool.models.encoder_decoder.layers import EncoderDecoderWeights, take_decoder
from unspool.models.encoder_decoder.positions import DistanceBiases, PositionTable
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec
from unspool.models.paths.captured import CapturedSteps
from unspool.models.paths.captured_pair_parts import PairParts
from unspool.models.paths.captured_shape import PassShape
from unspool.models.paths.captured_sketch import make_sketch
from unspool.models.paths.captured_step import CapturedStep, Sources
from unspool.models.paths.path import Pass
from unspool.models.weights import iterate_tensors
from unspool.protocols import LAST, Forward

if TYPE_CHECKING:
    from unspool.models.paths.captured_body import Body

MOST_FIRST: Final = 4  # tokens that a text begins with: markers of a language and a task
MOST_QUERIES: Final = 64  # of one source: its beams, and their new tokens


class CapturedPairSteps(CapturedSteps):
    """The captured steps of an encoder-decoder: one for each bucket of rows and number of rows that share a source."""

    def __init__(
        self,
        spec: EncoderDecoderSpec,
        weights: EncoderDecoderWeights,
        positions: PositionTable,
        biases: DistanceBiases | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(spec.describe_decoder(), take_decoder(weights), device, dtype)
        self._pair, self._crosses = spec, weights.decoder.crosses
        self._position_table, self._distances = positions, biases
        self._table: torch.Tensor | None = None  # of positions, as it is in the graphs
        self._fused: dict[PassShape, bool] = {}  # whether a step's kernels are
        self._follow(iterate_tensors(self._crosses))

    @property
    def _limits(self) -> tuple[int, ...]:
        return ()  # their attention is in parts whatever the number of keys

    def _explain_refusal(self, new: Pass) -> str | None:
        pair, tokens = check_pair(new.cache), new.tokens
        cross = pair.cross_attention_cache.places()
        if cross is None or not cross.is_plain or len(cross.buffers) != self._spec.num_layers:
            return f"sources in a {type(pair.cross_attention_cache).__name__} are not read by address"
        first = cross.buffers[0]
        if first.device != self._numbered or first.dtype != self._dtype or not first.is_contiguous():
            return f"the sources' keys are kept in {first.dtype} on {first.device}"
        if tokens is None or tokens.shape[0] * tokens.shape[1] > MOST_QUERIES * len(pair.source_lengths):
            return f"more than {MOST_QUERIES} tokens of one source are read"
        if self._distances is not None and (max(tokens.shape[1], pair.num_forks) > 1 or not self._has_plain_keys(pair)):
            return "biases by distance are captured for one token a row over keys that are not packed"
        return super()._explain_refusal(new)

    def run(self, new: Pass) -> Forward | str:
        """As of a decoder. The few tokens that a text begins with are read one after the other, by the steps that
        follow them anyway: reading them at once would need a graph and kernels of its own."""
        tokens, cache = new.tokens, new.cache
        if tokens is None or cache.lengths or not self._opens(new):
            return super().run(new)
        self._check_longest(tokens.shape[1])
        answer: Forward | str = ""
        for place in range(tokens.shape[1]):
            one = Pass(tokens[:, place : place + 1], cache, None, new.want, None, new.open_span)
            answer = super().run(one)
            if isinstance(answer, str):
                assert place == 0, answer
                return answer
        return answer

    def _opens(self, new: Pass) -> bool:
        """Whether a pass begins texts with a few tokens each, for the logits of what follows alone; if so, the cache's
        memory is taken."""
        (rows, num_new), counts, spec = new.given.shape[:2], new.counts, self._spec
        pair = check_pair(new.cache)
        own, is_whole = pair.self_attention_cache, rows == pair.num_source_rows  # else the plain pass says so
        is_short = num_new <= MOST_FIRST and (counts is None or min(counts) == num_new)
        is_plain = replace(new.want, is_brief=False) == LAST and new.cache.num_forks == 1
        if not (is_whole and is_short and is_plain) or not isinstance(own, RowCache):
            return False
        if not own.holds_buffers(spec.num_layers):
            keys = KeyFormat(spec.num_kv_heads, spec.head_dim, self._dtype, self._numbered)
            own.open_layers(spec.num_layers, rows, keys)
        return True

    def _has_plain_keys(self, cache: Cache) -> bool:
        places = cache.places()
        return places is None or places.packed is None

    def _check_longest(self, longest: int) -> None:
        self._pair.check_length(longest)
        table = self._position_table.reserve(longest)
        if table is not self._table:  # it has grown, and graphs have the old one's address
            with self._lock:
                self._waiting.clear()
                self._table = table

    def _find_sources(self, cache: Cache) -> Sources | None:
        pair = check_pair(cache)
        places = pair.cross_attention_cache.places()
        assert places is not None
        return Sources(places, pair.source_lengths)

    def launch(self) -> None:
        """Launch the kernels of a step of one row over a plain cache."""
        shape = PassShape(rows=1, rows_each=1)
        self._check_longest(1)
        can_read = self._may_sketch and self._can_give_head_input(shape)
        for sketch in (None, *([make_sketch(self._weights.head)] if can_read else [])):
            CapturedStep(self._spec, self._make_body(shape), self._device, self._dtype, shape, sketch).launch()

    def _can_give_head_input(self, shape: PassShape) -> bool:
        from unspool.models.paths.captured_pair_choice import is_fused

        if shape not in self._fused:
            self._fused[shape] = is_fused(self._find_parts(), self._dtype, shape)
        return self._fused[shape]

    def _make_body(self, shape: PassShape) -> Body:
        from unspool.models.paths.captured_pair_choice import make_pair_body  # Triton is imported only if a GPU is used

        return make_pair_body(self._find_parts(), self._device, self._dtype, shape)

    def _find_parts(self) -> PairParts:
        biases = [] if self._distances is None else self._distances.tabulate()
        return PairParts(self._pair, self._weights, self._crosses, self._table, biases)
