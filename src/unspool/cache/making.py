"""How each kind of cache is made for a model's keys, and what its options may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from unspool.cache.base import Cache
from unspool.cache.dynamic import DynamicCache
from unspool.cache.entry import KeyShape, Options
from unspool.cache.mamba import MambaCache
from unspool.cache.offload.memory import take_linked, take_mapped
from unspool.cache.offload.offloaded import OffloadedCache, OffloadedStaticCache
from unspool.cache.paged.cache import PagedCache
from unspool.cache.paged.pool import BLOCK_SIZE, check_pool
from unspool.cache.quantized import QUANTIZED_CACHES, QuantizedHybridCache, QuantizedStaticCache
from unspool.cache.sink import SinkCache
from unspool.cache.sizes import DeviceMap
from unspool.cache.sliding import HybridCache, SlidingWindowCache
from unspool.cache.static import StaticCache
from unspool.cache.stores.memory import Allocate
from unspool.cache.stores.quantization import OPTIONS, QuantizedCacheConfig, read_quantized_config
from unspool.errors import SettingError, UnsupportedError

SIZES: Final = ("batch_size", "max_cache_len")  # the options of kinds that take their memory at once
BLOCKS: Final = ("block_size", "num_blocks")  # the options of kinds in blocks
OFFLOADING: Final = ("folder", "resident_layers")
SINK_WINDOW: Final = 1024  # positions that a sink cache keeps by default
NUM_SINKS: Final = 4  # first tokens among them: what the paper found enough


def _find_size(rows: int, capacity: int | None, options: Options) -> tuple[int, int | None]:
    """The rows and positions to take memory for: what the call needs, or more if the options say so."""
    positions = max(capacity or 0, options.get("max_cache_len") or 0)
    return max(rows, options.get("batch_size") or 0), positions or None


def _pick(options: Options, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def check_sizes(options: Options) -> None:
    """Raise for numbers of rows or positions that can't be."""
    for name in SIZES:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24):
            raise SettingError(f"`{name}` of a static cache must be a whole number above 0, not {value!r}")


def make_dynamic(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """A cache that grows."""
    return DynamicCache(capacity=capacity)


def make_static(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """A cache whose memory is taken once."""
    device = options.get("device")
    if device is not None and torch.device(device).type != shape.device.type:
        raise SettingError(f"`cache_config` puts the keys on {device}, the model is on {shape.device}; leave it out")
    places: DeviceMap = dict(enumerate(shape.layer_devices))
    return StaticCache(shape.as_config(), *_find_size(rows, capacity, options), shape.device, shape.dtype, places)


def make_mamba(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """The states of a Mamba model."""
    return MambaCache(shape.config, rows, shape.dtype, shape.device)


# --- layers with windows -------------------------------------------------------------------------------------


def make_sliding(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """Rings of a window, for models all of whose layers slide."""
    # What a text of that length can fill is all that a ring takes.
    return SlidingWindowCache(shape.as_config(), rows, capacity, shape.device, shape.dtype)


def make_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """Rings beside buffers of every key."""
    return HybridCache(shape.as_config(), rows, capacity, shape.device, shape.dtype)


def make_offloaded_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """The same, in memory outside of the device."""
    take = _choose_memory(shape, options)
    return HybridCache(shape.as_config(), rows, capacity, shape.device, shape.dtype, allocate=take)


def make_sink(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """The first tokens and a window."""
    return SinkCache(**fill_sink(options))


def fill_sink(options: Options) -> dict[str, Any]:
    """The options of a sink cache, with the defaults of those that are missing."""
    return {"window_length": SINK_WINDOW, "num_sink_tokens": NUM_SINKS, **options}


def refuse_sink(info: Any) -> str | None:
    """Why a model can't decode with sinks, or None if it can."""
    if "shifted_keys" in info.can:
        return None
    return (
        f"sinks move keys to other positions, and those of this {info.family} model are learned one by one, or it is "
        "not known how they enter its keys; use a model with rotary positions, or 'dynamic'"
    )


# --- blocks --------------------------------------------------------------------------------------------------


def make_paged(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """Rows in blocks of a pool."""
    size, room = options.get("block_size") or BLOCK_SIZE, options.get("max_cache_len")
    num_blocks = options.get("num_blocks")
    if num_blocks is None and room is not None:  # what its rows can need, and so all there is
        num_blocks = max(rows, options.get("batch_size") or 0) * -(-room // size)
    return PagedCache(block_size=size, num_blocks=num_blocks, max_cache_len=room)


def check_paged(options: Options) -> None:
    """Raise for sizes of blocks, or of what they hold, that can't be."""
    check_sizes(options)
    check_pool(options.get("block_size") or BLOCK_SIZE, options.get("num_blocks"))


def make_paged_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """Blocks, of which sliding layers let go."""
    return PagedCache(**_pick(options, BLOCKS), kinds=shape.layer_kinds, window=shape.window)


def make_paged_quantized(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """Blocks that are packed once they are full."""
    return PagedCache(**_pick(options, BLOCKS), cache_config=_read_packing(options, shape))


def check_paged_quantized(options: Options) -> None:
    """Raise for blocks that packed groups don't fill."""
    check_paged(options)
    config, size = _read_packing(options), options.get("block_size")
    if size is not None and size % config.q_group_size:
        raise SettingError(f"`block_size`={size} must be a multiple of `q_group_size`={config.q_group_size}")


def count_pages(options: Options) -> int | None:
    """Positions that all blocks together hold; None if there is no limit."""
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


def make_offloaded(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """A cache that grows outside of the device."""
    return OffloadedCache(capacity=capacity, num_layers=shape.num_layers, **options)


def make_offloaded_static(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """A cache whose memory is taken once, outside of the device."""
    most, room = _find_size(rows, capacity, options)
    rest = _pick(options, OFFLOADING)
    return OffloadedStaticCache(shape.as_config(), most, room, shape.device, shape.dtype, **rest)


def check_offloading(options: Options) -> None:
    """Raise for a folder or a number of layers that can't be."""
    check_sizes(options)
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


def check_quantized(options: Options) -> None:
    """Raise for options of packing that can't be."""
    check_offloading(options)
    _read_packing(options)


def make_quantized(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """A cache in few bits that grows."""
    config = _read_packing(options, shape)
    return QUANTIZED_CACHES[config.backend](config, capacity=capacity)


def make_quantized_static(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """A cache in few bits whose memory is taken once."""
    most, room = _find_size(rows, capacity, options)
    return QuantizedStaticCache(_read_packing(options), shape.as_config(), most, room or 0, shape.device, shape.dtype)


def make_quantized_hybrid(
    shape: KeyShape, rows: int, capacity: int | None, options: Options, allocate: Allocate | None = None
) -> Cache:
    """The same for models some of whose layers slide."""
    most, room = _find_size(rows, capacity, options)
    return QuantizedHybridCache(
        _read_packing(options), shape.as_config(), most, room or 0, shape.device, shape.dtype, allocate=allocate
    )


def make_offloaded_quantized_hybrid(shape: KeyShape, rows: int, capacity: int | None, options: Options) -> Cache:
    """The same, in memory outside of the device."""
    return make_quantized_hybrid(shape, rows, capacity, options, _choose_memory(shape, options))
