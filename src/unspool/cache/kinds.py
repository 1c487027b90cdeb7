"""The kinds of cache by the names that `cache_implementation` takes: which model they serve, and how they are made.

A new kind is one entry of `KINDS`. Plans ask here what a kind needs, models ask here for the cache itself.
"""

from __future__ import annotations

from typing import Any, Final

from unspool.cache import making
from unspool.cache.base import Cache
from unspool.cache.config import CacheConfig
from unspool.cache.dynamic import DynamicCache
from unspool.cache.encoder_decoder import EncoderDecoderCache
from unspool.cache.entry import CacheKindEntry, KeyShape
from unspool.cache.making import BLOCKS, OFFLOADING, SIZES
from unspool.cache.mamba import MambaCache, refuse_without_states
from unspool.cache.offload.offloaded import OffloadedCache, OffloadedStaticCache
from unspool.cache.paged.cache import PagedCache
from unspool.cache.quantized import QUANTIZED_CACHES, QuantizedHybridCache, QuantizedStaticCache
from unspool.cache.sink import SinkCache, check_sink
from unspool.cache.sliding import HybridCache, SlidingWindowCache, refuse_encoder_decoder, refuse_without_window
from unspool.cache.static import StaticCache
from unspool.cache.stores.quantization import OPTIONS
from unspool.errors import SettingError, UnsupportedError
from unspool.registry import Table, check_maker
from unspool.wording import suggest


def find_kind(name: str) -> CacheKindEntry:
    """The kind of that name, or the error that says which there are."""
    kind = KINDS.get(name)
    if kind is None:
        hint = suggest(name, KINDS) or f"; use one of {', '.join(map(repr, KINDS))}"
        raise UnsupportedError(f"this version has no cache of kind {name!r}{hint}")
    return kind


def make_cache(name: str, shape: KeyShape, rows: int, capacity: int | None = None, options: Any = None) -> Cache:
    """An empty cache of a kind for `rows` rows, with room for `capacity` positions if the kind asks for room."""
    return find_kind(name).make(shape, rows, capacity, read_options(name, options))


def read_options(name: str, config: Any) -> dict[str, Any]:
    """What `cache_config` (a dict or a config) says for a kind; what the kind does not know is refused."""
    if config is None:
        return {}
    kind = find_kind(name)
    given = config.to_dict() if isinstance(config, CacheConfig) or hasattr(config, "to_dict") else dict(config)
    named = given.pop("cache_implementation", None)
    if named is not None and named != name:
        raise SettingError(
            f"`cache_config` is for a {named!r} cache and `cache_implementation` is {name!r}; make them agree"
        )
    for key in given:
        if key not in kind.options:
            known = ", ".join(kind.options) or "nothing"
            hint = suggest(str(key), kind.options)
            raise SettingError(f"`cache_config` has {key!r}, and a {name!r} cache takes {known}{hint}")
    if kind.check is not None:
        kind.check(given)
    return given


def _refuse_apart(info: Any) -> str | None:
    """Why a model's keys can't lie in blocks; None if they can."""
    return f"{info.why_apart}; use 'dynamic' or 'static'" if info.why_apart else None


def _refuse_blocks(info: Any) -> str | None:
    return refuse_encoder_decoder(info) or _refuse_apart(info)


_BUILT_IN: Final[tuple[CacheKindEntry, ...]] = (
    CacheKindEntry(
        "dynamic",
        making.make_dynamic,
        types=(DynamicCache, EncoderDecoderCache),
        forks=True,
        divides=True,
        is_plain=True,
    ),
    CacheKindEntry(
        "static",
        making.make_static,
        types=(StaticCache,),
        options=(*SIZES, "device"),
        is_sized=True,
        forks=True,
        divides=True,
        is_plain=True,
        check=making.check_sizes,
    ),
    CacheKindEntry(
        "paged",
        making.make_paged,
        types=(PagedCache,),
        options=(*BLOCKS, *SIZES),
        may_be_sized=True,
        forks=True,
        divides=True,
        check=making.check_paged,
        count_room=making.count_pages,
        refuse=_refuse_apart,
    ),
    CacheKindEntry(
        "paged_hybrid",
        making.make_paged_hybrid,
        types=(PagedCache,),
        options=BLOCKS,
        holds_every_key=False,
        check=making.check_paged,
        refuse=_refuse_blocks,
    ),
    CacheKindEntry(
        "paged_quantized",
        making.make_paged_quantized,
        types=(PagedCache,),
        options=(*OPTIONS, *BLOCKS),
        check=making.check_paged_quantized,
        count_room=making.count_pages,
        refuse=_refuse_blocks,
    ),
    CacheKindEntry(
        "mamba",
        making.make_mamba,
        types=(MambaCache,),
        is_endless=True,
        holds_every_key=False,
        refuse=refuse_without_states,
    ),
    CacheKindEntry(
        "sliding_window",
        making.make_sliding,
        types=(SlidingWindowCache,),
        is_sized=True,
        holds_every_key=False,
        refuse=refuse_without_window,
    ),
    CacheKindEntry(
        "offloaded", making.make_offloaded, types=(OffloadedCache,), options=OFFLOADING, check=making.check_offloading
    ),
    CacheKindEntry(
        "offloaded_static",
        making.make_offloaded_static,
        types=(OffloadedStaticCache,),
        options=(*SIZES, *OFFLOADING),
        is_sized=True,
        check=making.check_offloading,
    ),
    CacheKindEntry(
        "offloaded_hybrid",
        making.make_offloaded_hybrid,
        types=(HybridCache,),
        options=("folder",),
        is_sized=True,
        holds_every_key=False,
        check=making.check_offloading,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "sink",
        making.make_sink,
        types=(SinkCache,),
        options=("window_length", "num_sink_tokens"),
        is_endless=True,
        holds_every_key=False,
        check=lambda options: check_sink(making.fill_sink(options)),
        refuse=making.refuse_sink,
    ),
    CacheKindEntry(
        "hybrid",
        making.make_hybrid,
        types=(HybridCache,),
        is_sized=True,
        holds_every_key=False,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "quantized",
        making.make_quantized,
        types=tuple(QUANTIZED_CACHES.values()),
        options=OPTIONS,
        check=making.check_quantized,
    ),
    CacheKindEntry(
        "quantized_static",
        making.make_quantized_static,
        types=(QuantizedStaticCache,),
        options=(*OPTIONS, *SIZES),
        is_sized=True,
        check=making.check_quantized,
    ),
    CacheKindEntry(
        "quantized_hybrid",
        making.make_quantized_hybrid,
        types=(QuantizedHybridCache,),
        options=(*OPTIONS, *SIZES),
        is_sized=True,
        holds_every_key=False,
        check=making.check_quantized,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "offloaded_quantized_hybrid",
        making.make_offloaded_quantized_hybrid,
        types=(QuantizedHybridCache,),
        options=(*OPTIONS, *SIZES, "folder"),
        is_sized=True,
        holds_every_key=False,
        check=making.check_quantized,
        refuse=refuse_encoder_decoder,
    ),
)


def _check_entry(entry: CacheKindEntry) -> None:
    check_maker(f"kind of cache {entry.name!r}", entry.make)


KINDS: Final = Table[CacheKindEntry]("kind of cache", _BUILT_IN, lambda entry: entry.name, _check_entry)
"""Every kind of cache, by the name that `cache_implementation` takes."""
