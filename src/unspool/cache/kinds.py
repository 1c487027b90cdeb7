"""The kinds of cache by the names that `cache_implementation` takes: which model they serve, and how they are made.

A new kind is one entry of `KINDS`. Plans ask here what a kind needs, models ask here for the cache itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import torch

from unspool.cache.base import Cache
from unspool.cache.config import CacheConfig
from unspool.cache.dynamic import DynamicCache
from unspool.cache.encoder_decoder import EncoderDecoderCache
from unspool.cache.mamba import MambaCache, refuse_without_states
from unspool.cache.offload.memory import take_linked, take_mapped
from unspool.cache.offload.offloaded import OffloadedCache, OffloadedStaticCache
from unspool.cache.paged.cache import PagedCache
from unspool.cache.paged.pool import BLOCK_SIZE, check_pool
from unspool.cache.quantized import QUANTIZED_CACHES, QuantizedHybridCache, QuantizedStaticCache
from unspool.cache.sink import SinkCache, check_sink
from unspool.cache.sliding import HybridCache, SlidingWindowCache, refuse_encoder_decoder, refuse_without_window
from unspool.cache.static import StaticCache
from unspool.cache.stores.memory import Allocate
from unspool.cache.stores.quantization import OPTIONS, QuantizedCacheConfig, read_quantized_config
from unspool.errors import SettingError, UnsupportedError
from unspool.registry import Table, check_maker

Options = Mapping[str, Any]
"""What `cache_config` says, without the name of the kind."""

SIZES: Final = ("batch_size", "max_cache_len")  # the options of kinds that take their memory at once
BLOCKS: Final = ("block_size", "num_blocks")  # the options of kinds in blocks
OFFLOADING: Final = ("folder", "resident_layers")
SINK_WINDOW: Final = 1024  # positions that a sink cache keeps by default
NUM_SINKS: Final = 4  # first tokens among them: what the paper found enough


@dataclass(frozen=True, slots=True)
class KeyShape:
    """What a cache must know of the model whose keys and values it holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layer_kinds: tuple[str, ...] = ()  # "full" or "sliding", one per layer; empty: all "full"
    window: int | None = None  # keys that a "sliding" layer sees
    config: Any = None  # the model's own, for kinds that hold something else than keys

    def as_config(self) -> SimpleNamespace:
        """The same under the names that model configs use."""
        sizes = {
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_kv_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.num_kv_heads * self.head_dim,
            "sliding_window": self.window,
            "layer_types": [f"{kind}_attention" for kind in self.layer_kinds],
        }
        return SimpleNamespace(**{**(vars(self.config) if self.config is not None else {}), **sizes})


@dataclass(frozen=True)
class CacheKindEntry:
    """One kind of cache: what it needs, and how it is made."""

    table: ClassVar[str] = "unspool.cache.kinds:KINDS"

    name: str  # what `cache_implementation` takes
    make: Callable[[KeyShape, int, int | None, Options], Cache]  # shape, rows, capacity, options
    types: tuple[type[Cache], ...] = ()  # what it makes, if files may hold it: these have `_pack` and `_unpack`
    options: tuple[str, ...] = ()  # the keys of `cache_config` that it reads
    is_sized: bool = False  # takes all its memory at once, for every row and position that a call may need
    may_be_sized: bool = False  # does so if it is given `max_cache_len`, and grows otherwise
    is_endless: bool = False  # holds what it holds however long a text gets, so that no context ends it
    holds_every_key: bool = True  # each position's own keys are held, so attention weights can be returned by position
    forks: bool = False  # candidates for a row's next token can be read over the row's own keys
    divides: bool = False  # a pass can run over some of the rows at a time
    is_plain: bool = False  # keys lie in one buffer per layer, which a compiled step can read
    check: Callable[[Options], None] | None = None  # raises for values of options that can't be
    count_room: Callable[[Options], int | None] | None = None  # positions that all rows together have room for
    refuse: Callable[[Any], str | None] | None = None  # why a model (its `info`) can't be served, or None


def find_kind(name: str) -> CacheKindEntry:
    """The kind of that name, or the error that says which there are."""
    kind = KINDS.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; use one of {', '.join(map(repr, KINDS))}"
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
            near = difflib.get_close_matches(str(key), kind.options, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingError(f"`cache_config` has {key!r}, and a {name!r} cache takes {known}{hint}")
    if kind.check is not None:
        kind.check(given)
    return given


# --- how the kinds are made ----------------------------------------------------------------------------------


def _find_size(rows: int, capacity: int | None, options: Options) -> tuple[int, int | None]:
    """The rows and positions to take memory for: what the call needs, or more if the options say so."""
    positions = max(capacity or 0, options.get("max_cache_len") or 0)
    return max(rows, options.get("batch_size") or 0), positions or None


def _pick(options: Options, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _check_sizes(options: Options) -> None:
    for name in SIZES:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24):
            raise SettingError(f"`{name}` of a static cache must be a whole number above 0, not {value!r}")


def _make_dynamic(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return DynamicCache(capacity=capacity)


def _make_static(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    device = options.get("device")
    if device is not None and torch.device(device).type != shape.device.type:
        raise SettingError(f"`cache_config` puts the keys on {device}, the model is on {shape.device}; leave it out")
    return StaticCache(shape.as_config(), *_find_size(rows, capacity, options), shape.device, shape.dtype)


def _make_mamba(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return MambaCache(shape.config, rows, shape.dtype, shape.device)


# --- layers with windows -------------------------------------------------------------------------------------


def _make_sliding(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    # What a text of that length can fill is all that a ring takes.
    return SlidingWindowCache(shape.as_config(), rows, capacity, shape.device, shape.dtype)


def _make_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return HybridCache(shape.as_config(), rows, capacity, shape.device, shape.dtype)


def _make_offloaded_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    take = _choose_memory(shape, options)
    return HybridCache(shape.as_config(), rows, capacity, shape.device, shape.dtype, allocate=take)


def _make_sink(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return SinkCache(**_fill_sink(options))


def _fill_sink(options: Options) -> dict[str, Any]:
    return {"window_length": SINK_WINDOW, "num_sink_tokens": NUM_SINKS, **options}


def _refuse_sink(info: Any) -> str | None:
    if "shifted_keys" in info.can:
        return None
    return (
        f"sinks move keys to other positions, and those of this {info.family} model are learned one by one, or it is "
        "not known how they enter its keys; use a model with rotary positions, or 'dynamic'"
    )


# --- blocks --------------------------------------------------------------------------------------------------


def _make_paged(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    size, room = options.get("block_size") or BLOCK_SIZE, options.get("max_cache_len")
    num_blocks = options.get("num_blocks")
    if num_blocks is None and room is not None:  # what its rows can need, and so all there is
        num_blocks = max(rows, options.get("batch_size") or 0) * -(-room // size)
    return PagedCache(block_size=size, num_blocks=num_blocks, max_cache_len=room)


def _check_paged(options: Options) -> None:
    _check_sizes(options)
    check_pool(options.get("block_size") or BLOCK_SIZE, options.get("num_blocks"))


def _make_paged_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return PagedCache(**_pick(options, BLOCKS), kinds=shape.layer_kinds, window=shape.window)


def _make_paged_quantized(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return PagedCache(**_pick(options, BLOCKS), cache_config=_read_packing(options, shape))


def _check_paged_quantized(options: Options) -> None:
    _check_paged(options)
    config, size = _read_packing(options), options.get("block_size")
    if size is not None and size % config.q_group_size:
        raise SettingError(f"`block_size`={size} must be a multiple of `q_group_size`={config.q_group_size}")


def _count_pages(options: Options) -> int | None:
    num_blocks = options.get("num_blocks")
    return None if num_blocks is None else num_blocks * (options.get("block_size") or BLOCK_SIZE)


# --- memory elsewhere ----------------------------------------------------------------------------------------


def _choose_memory(shape: KeyShape, options: Options) -> Allocate:
    """Where caches of several kinds of layers put keys: beside a GPU in pinned memory, on a CPU in files."""
    if shape.device.type == "cuda":
        return take_linked
    if shape.device.type != "cpu":
        raise UnsupportedError(f"keys on {shape.device} can't be offloaded; use a CPU or a CUDA device, or 'hybrid'")

    def take(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return take_mapped(size, dtype, options.get("folder"))

    return take


def _make_offloaded(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return OffloadedCache(capacity=capacity, num_layers=shape.num_layers, **options)


def _make_offloaded_static(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    most, room = _find_size(rows, capacity, options)
    rest = _pick(options, OFFLOADING)
    return OffloadedStaticCache(shape.as_config(), most, room, shape.device, shape.dtype, **rest)


def _check_offloading(options: Options) -> None:
    _check_sizes(options)
    layers, folder = options.get("resident_layers", 0), options.get("folder")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
        raise SettingError(f"`resident_layers` counts layers that stay on the device; it can't be {layers!r}")
    if folder is not None and not Path(folder).is_dir():
        raise SettingError(f"`folder` is where keys are offloaded to, and {str(folder)!r} is no folder")


# --- few bits ------------------------------------------------------------------------------------------------


def _read_packing(options: Options, shape: KeyShape | None = None) -> QuantizedCacheConfig:
    """What the options say about packing; heads that can't be cut into its groups are refused."""
    config = read_quantized_config(_pick(options, OPTIONS))
    if shape is not None:
        config.make_schemes(shape.head_dim)
    return config


def _check_quantized(options: Options) -> None:
    _check_offloading(options)
    _read_packing(options)


def _make_quantized(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    config = _read_packing(options, shape)
    return QUANTIZED_CACHES[config.backend](config, capacity=capacity)


def _make_quantized_static(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    most, room = _find_size(rows, capacity, options)
    return QuantizedStaticCache(_read_packing(options), shape.as_config(), most, room or 0, shape.device, shape.dtype)


def _make_quantized_hybrid(
    shape: KeyShape, rows: int, capacity: int | None, options: Options, allocate: Allocate | None = None
) -> Cache:
    most, room = _find_size(rows, capacity, options)
    return QuantizedHybridCache(
        _read_packing(options), shape.as_config(), most, room or 0, shape.device, shape.dtype, allocate=allocate
    )


def _make_offloaded_quantized_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    return _make_quantized_hybrid(shape, rows, capacity, options, _choose_memory(shape, options))


_BUILT_IN: Final[tuple[CacheKindEntry, ...]] = (
    CacheKindEntry(
        "dynamic", _make_dynamic, types=(DynamicCache, EncoderDecoderCache), forks=True, divides=True, is_plain=True
    ),
    CacheKindEntry(
        "static",
        _make_static,
        types=(StaticCache,),
        options=(*SIZES, "device"),
        is_sized=True,
        forks=True,
        divides=True,
        is_plain=True,
        check=_check_sizes,
    ),
    CacheKindEntry(
        "paged",
        _make_paged,
        types=(PagedCache,),
        options=(*BLOCKS, *SIZES),
        may_be_sized=True,
        forks=True,
        divides=True,
        check=_check_paged,
        count_room=_count_pages,
    ),
    CacheKindEntry(
        "paged_hybrid",
        _make_paged_hybrid,
        types=(PagedCache,),
        options=BLOCKS,
        holds_every_key=False,
        check=_check_paged,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "paged_quantized",
        _make_paged_quantized,
        types=(PagedCache,),
        options=(*OPTIONS, *BLOCKS),
        check=_check_paged_quantized,
        count_room=_count_pages,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "mamba", _make_mamba, types=(MambaCache,), is_endless=True, holds_every_key=False, refuse=refuse_without_states
    ),
    CacheKindEntry(
        "sliding_window",
        _make_sliding,
        types=(SlidingWindowCache,),
        is_sized=True,
        holds_every_key=False,
        refuse=refuse_without_window,
    ),
    CacheKindEntry("offloaded", _make_offloaded, types=(OffloadedCache,), options=OFFLOADING, check=_check_offloading),
    CacheKindEntry(
        "offloaded_static",
        _make_offloaded_static,
        types=(OffloadedStaticCache,),
        options=(*SIZES, *OFFLOADING),
        is_sized=True,
        check=_check_offloading,
    ),
    CacheKindEntry(
        "offloaded_hybrid",
        _make_offloaded_hybrid,
        types=(HybridCache,),
        options=("folder",),
        is_sized=True,
        holds_every_key=False,
        check=_check_offloading,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "sink",
        _make_sink,
        types=(SinkCache,),
        options=("window_length", "num_sink_tokens"),
        is_endless=True,
        holds_every_key=False,
        check=lambda options: check_sink(_fill_sink(options)),
        refuse=_refuse_sink,
    ),
    CacheKindEntry(
        "hybrid",
        _make_hybrid,
        types=(HybridCache,),
        is_sized=True,
        holds_every_key=False,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "quantized", _make_quantized, types=tuple(QUANTIZED_CACHES.values()), options=OPTIONS, check=_check_quantized
    ),
    CacheKindEntry(
        "quantized_static",
        _make_quantized_static,
        types=(QuantizedStaticCache,),
        options=(*OPTIONS, *SIZES),
        is_sized=True,
        check=_check_quantized,
    ),
    CacheKindEntry(
        "quantized_hybrid",
        _make_quantized_hybrid,
        types=(QuantizedHybridCache,),
        options=(*OPTIONS, *SIZES),
        is_sized=True,
        holds_every_key=False,
        check=_check_quantized,
        refuse=refuse_encoder_decoder,
    ),
    CacheKindEntry(
        "offloaded_quantized_hybrid",
        _make_offloaded_quantized_hybrid,
        types=(QuantizedHybridCache,),
        options=(*OPTIONS, *SIZES, "folder"),
        is_sized=True,
        holds_every_key=False,
        check=_check_quantized,
        refuse=refuse_encoder_decoder,
    ),
)


def _check_entry(entry: CacheKindEntry) -> None:
    check_maker(f"kind of cache {entry.name!r}", entry.make)


KINDS: Final = Table[CacheKindEntry]("kind of cache", _BUILT_IN, lambda entry: entry.name, _check_entry)
"""Every kind of cache, by the name that `cache_implementation` takes."""
