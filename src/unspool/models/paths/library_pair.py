"""An encoder-decoder's passes in one call of the CPU library: its decoder, and the keys of the sources."""

from __future__ import annotations

from collections.abc import Iterator

from unspool.cache import Cache, Span
from unspool.models.decoder.views import AttentionViews
from unspool.models.encoder_decoder.caches import check_pair
from unspool.models.encoder_decoder.layers import EncoderDecoderWeights, take_decoder
from unspool.models.encoder_decoder.positions import DistanceBiases, PositionTable
from unspool.models.encoder_decoder.spec import EncoderDecoderSpec
from unspool.models.paths.library import LibraryPath
from unspool.models.paths.library_keys import LibraryKeys, find_keys, find_sources
from unspool.models.paths.library_model import DescribedModel, describe_norm
from unspool.models.paths.library_narrow import Product
from unspool.models.weights import find_addresses

_ENDLESS = 1 << 30  # positions of a model without a table of them


class DescribedPair(DescribedModel):
    """The structs of an encoder-decoder's decoder."""

    def __init__(
        self,
        spec: EncoderDecoderSpec,
        weights: EncoderDecoderWeights,
        views: AttentionViews,
        positions: PositionTable,
        biases: DistanceBiases | None,
        *,
        narrows: bool = False,
    ) -> None:
        self._pair, self._crosses = spec, weights.decoder.crosses
        self._position_table, self._biases = positions, biases
        self.own = take_decoder(weights)  # `_extend_tables` does the positions
        super().__init__(spec.describe_decoder(), self.own, views, beside=self._crosses, narrows=narrows)

    def _describe(self) -> None:
        super()._describe()
        self._model.is_post = not self._pair.is_norm_first
        self._model.has_cross = True
        self._model.head_scale = self._pair.head_scale
        for layer, cross in zip(self._layers, self._crosses, strict=True):
            layer.cross_norm = describe_norm(cross.norm)
            layer.cross_q, layer.cross_out = self._describe_product(cross.q), self._describe_product(cross.out)

    def _list_products(self) -> Iterator[Product]:
        for cross in self._crosses:
            yield from ((cross.q, 1), (cross.out, 1))
        yield from super()._list_products()

    def _extend_tables(self, stop: int) -> None:
        self._room, self._tables = _ENDLESS, []
        spec, table = self._pair.decoder.positions, self._position_table.reserve(stop)
        if spec is not None and table is not None:
            self._tables.append(table)
            self._model.positions = table[spec.offset :].data_ptr()
            self._room = table.shape[0] - spec.offset
        if self._biases is not None:
            found = self._biases.reserve(stop)
            self._tables += found
            self._model.num_distances = found[0].shape[1]
            self._room = min(self._room, found[0].shape[1])
            for index, layer in enumerate(self._layers):
                layer.biases = found[min(index, len(found) - 1)].data_ptr()
        self._tables_at = find_addresses(self._tables)


class PairLibraryPath(LibraryPath):
    """Passes of an encoder-decoder in one call of the CPU library."""

    def __init__(self, spec: EncoderDecoderSpec, described: DescribedPair) -> None:
        super().__init__(spec.describe_decoder(), described.own, described)
        self._pair = spec

    def _own(self, cache: Cache) -> Cache:
        return check_pair(cache).self_attention_cache

    def _find_keys(self, cache: Cache, span: Span) -> LibraryKeys | None:
        pair = check_pair(cache)
        keys, sources = find_keys(pair.self_attention_cache, span, self._spec), find_sources(pair, self._spec)
        if keys is not None:
            keys.sources = sources
        return None if sources is None else keys

    def _check_longest(self, longest: int) -> None:
        self._pair.check_length(longest)
