"""A cache's keys for the CPU library: their addresses (`Places`), and which row's keys each row of a pass reads."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from unspool.cache import Cache, EncoderDecoderCache, Span
from unspool.cache.places import PackedPlaces, Places
from unspool.cache.stores.memory import KeyFormat
from unspool.errors import SettingError
from unspool.kernels.cpu.structures import CPackedLayer, CPacking, CStore, describe_packed, describe_scheme
from unspool.kernels.packing import Packed
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.weights import find_addresses

_LONGEST_ROW = 2**30  # positions: what the library counts in 32 bits
NUMBERS_OF_SOURCES = (torch.float32, torch.float16)  # own keys are float32
_PART = 64  # US_PART: keys that it reads at once, which must not cross a packed block


@dataclass(frozen=True, slots=True)
class Addresses:
    """The C structs of a cache's memory."""

    own: CStore  # a row's own keys
    shared: CStore  # those before them that it shares with others
    packing: CPacking  # how those are packed
    packed: Any  # and where, if they are: the address of an array of `CPackedLayer`, one per layer
    kept: Any  # what must outlive the call
    held: list[torch.Tensor]  # all buffers,
    at: list[int]  # and their addresses when they were described


@dataclass(frozen=True, slots=True)
class LibrarySources:
    """The keys of an encoder's states that a pass reads."""

    addresses: Addresses
    rows: Sequence[int]  # the source of each row of the pass
    lengths: Sequence[int]  # and how many positions that has
    longest: int


@dataclass(slots=True)
class LibraryKeys:
    """The keys that one pass reads and writes."""

    addresses: Addresses
    shared_rows: Sequence[int]  # whose keys come first, one per row
    shared_counts: Sequence[int]  # and how many of them; 0: none
    own_rows: Sequence[int]  # which row of the own buffers each row of the pass is
    bases: Sequence[int] | None = None  # the position that place 0 of packed layers that slide stands for
    sources: LibrarySources | None = None  # of models with an encoder


_KNOWN: WeakKeyDictionary[Places, Addresses | None] = WeakKeyDictionary()


def find_keys(cache: Cache, span: Span, spec: DecoderSpec) -> LibraryKeys | None:
    """The keys of an open pass; None for caches that the library can't read. The caller holds `cache.steady()`."""
    rows, forks = len(span.starts), cache.num_forks
    keys = KeyFormat(spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu"))
    cache.open_layers(spec.num_layers, rows // forks, keys)
    places = cache.places(in_order=True)
    if places is None or len(places.buffers) != spec.num_layers or span.stop > _LONGEST_ROW:
        return None
    addresses = _find_addresses(places, spec)
    if addresses is None:
        return None
    if cache.first_fork is not None:
        return _find_forks(places, addresses, cache, cache.first_fork)
    return _find_rows(places, addresses, span, spec)


def find_sources(pair: EncoderDecoderCache, spec: DecoderSpec) -> LibrarySources | None:
    """The keys of a pair's encoder; None if the library can't read them."""
    places, lengths = pair.cross_attention_cache.places(in_order=True), pair.source_lengths
    if places is None or not places.is_plain or len(places.buffers) != spec.num_layers or not lengths:
        return None
    addresses = _find_addresses(places, spec, NUMBERS_OF_SOURCES)
    if addresses is None or places.buffers[0].shape[0] < len(lengths):
        return None
    each = pair.num_branches * pair.num_forks  # rows of a pass that read one source
    rows = [source for source in range(len(lengths)) for _ in range(each)]
    return LibrarySources(addresses, rows, [lengths[source] for source in rows], max(lengths))


def _find_addresses(
    places: Places, spec: DecoderSpec, dtypes: Collection[torch.dtype] = (torch.float32,)
) -> Addresses | None:
    addresses = _KNOWN.get(places)
    if addresses is None and places in _KNOWN:
        return None
    if addresses is None or find_addresses(addresses.held) != addresses.at:  # tensors can be given other memory
        addresses = _KNOWN[places] = _describe(places, spec)
    if addresses is not None and places.buffers[0].dtype not in dtypes:
        return None
    return addresses


def _find_rows(places: Places, addresses: Addresses, span: Span, spec: DecoderSpec) -> LibraryKeys | None:
    rows, first = len(span.starts), places.buffers[0]
    none: Sequence[int] = [0] * rows
    table = _find_tables(places)
    if table is not None:
        counts = places.packed.num_packed if places.packed is not None else none
        if table[0].shape[0] < rows or len(counts) != rows:
            return None
        return LibraryKeys(addresses, range(rows), counts, range(rows))
    if first.shape[0] < rows:
        return None
    if places.rooms is not None:
        for layer, room in enumerate(places.rooms):
            window = spec.window if spec.kind_of(layer) == "sliding" else None
            if room < min(span.stop, window or span.stop):
                return None  # the cache keeps fewer keys than the model's layers see
        return LibraryKeys(addresses, none, none, range(rows))
    counts = none
    if places.packed is not None:
        counts = places.packed.num_packed
    elif places.prompt_lengths is not None:
        counts = places.prompt_lengths
    if len(counts) != rows:
        return None
    held = max(start - shared for start, shared in zip(span.starts, counts, strict=True)) + span.num_new
    if held > first.shape[1]:
        return None  # a long pass over packed keys is read as it came, and packed on its way
    if places.branches:
        return LibraryKeys(addresses, [row // places.branches for row in range(rows)], counts, range(rows))
    bases = places.packed.bases if places.packed is not None else None
    return LibraryKeys(addresses, range(rows), counts, range(rows), bases)


def _find_forks(places: Places, addresses: Addresses, cache: Cache, first: int) -> LibraryKeys | None:
    """A row's keys are what its forks share; each fork's own are one position, described as a row of its own."""
    if not (places.is_plain or places.block_table is not None) or not places.buffers[0].is_contiguous():
        return None
    forks = cache.num_forks
    lengths, room = cache.lengths[::forks], places.buffers[0].shape[1]
    slots: list[int] = []
    for row, length in enumerate(lengths):
        for place in range(length + first, length + first + forks):
            block = row if places.block_table is None else int(places.block_table[row, place // room])
            slots.append(block * room + (place if places.block_table is None else place % room))
    rows = addresses.own
    own = CStore(rows.layers, rows.position_stride, rows.position_stride)
    forked = Addresses(own, rows, addresses.packing, None, addresses.kept, addresses.held, addresses.at)
    shared_rows = [row for row in range(len(lengths)) for _ in range(forks)]
    return LibraryKeys(forked, shared_rows, cache.lengths, slots)


# --- memory ----------------------------------------------------------------------------------------------


def _describe(places: Places, spec: DecoderSpec) -> Addresses | None:
    """The addresses of a cache's buffers; None if the library can't read them."""
    if places.is_pinned or (places.branches and places.ancestry is not None):
        return None
    shape = (2, spec.num_kv_heads, spec.head_dim)
    own = _describe_buffers(places.buffers, shape, places.rooms)
    shared = own if places.shared is None else _describe_buffers(places.shared, shape, None)
    if own is None or shared is None or (places.shared is not None and len(places.shared) != spec.num_layers):
        return None
    held, packing, packed = [*places.buffers, *(places.shared or ())], CPacking(), None
    tables, addressed = _find_tables(places), None
    if tables is not None:
        if not all(map(_is_readable, tables)) or len({table.shape for table in tables}) > 1:
            return None
        addressed = (ctypes.c_void_p * spec.num_layers)(
            *(tables[layer % len(tables)].data_ptr() for layer in range(spec.num_layers))
        )
        own[0].tables, own[0].width, own[0].block = (
            ctypes.addressof(addressed),
            tables[0].shape[1],
            places.buffers[0].shape[1],
        )
        held += tables
    if places.packed is not None:
        tensors = [tensor for layer in places.packed.layers for tensor in layer]
        if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors):
            return None
        if places.packed.block_table is not None:
            if not _is_readable(places.packed.block_table) or places.packed.num_places % _PART:
                return None
            held.append(places.packed.block_table)
        packing, packed = _describe_packed(places.packed, spec)
        held += tensors
    address = ctypes.cast(packed, ctypes.c_void_p) if packed is not None else None
    return Addresses(own[0], shared[0], packing, address, (own, shared, packed, addressed), held, find_addresses(held))


def _find_tables(places: Places) -> list[torch.Tensor] | None:
    """The tables of blocks, one for all layers or one per layer; None if rows lie whole."""
    return [places.block_table] if places.block_table is not None else places.layer_tables


def _is_readable(table: torch.Tensor) -> bool:
    return table.dtype == torch.int32 and table.is_contiguous() and table.device.type == "cpu"


def _describe_buffers(
    buffers: Sequence[torch.Tensor], shape: tuple[int, ...], rooms: Sequence[int] | None
) -> tuple[CStore, Any] | None:
    first = buffers[0]
    strides = first.stride()
    for buffer in buffers:
        is_alike = buffer.shape == first.shape if rooms is None else buffer.is_contiguous()
        if not is_alike or buffer.shape[2:] != shape or buffer.stride()[1:] != strides[1:]:
            return None
        if buffer.dtype != first.dtype or buffer.device.type != "cpu" or (rooms is None and buffer.stride() != strides):
            return None
    if first.dtype not in NUMBERS_OF_SOURCES or strides[2:] != (shape[1] * shape[2], shape[2], 1):
        return None
    array = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
    sizes = (ctypes.c_int32 * len(rooms))(*rooms) if rooms is not None else None
    store = CStore(ctypes.cast(array, ctypes.c_void_p), strides[0], strides[1])
    store.is_half = first.dtype == torch.float16
    if sizes is not None:
        store.rooms = ctypes.addressof(sizes)
    return store, (array, sizes)


def _describe_packed(places: PackedPlaces, spec: DecoderSpec) -> tuple[CPacking, Any]:
    """How shared keys are packed, and an array of where, one entry per layer."""
    rows, (key_scheme, value_scheme) = len(places.num_packed), places.schemes
    if key_scheme.width != spec.head_dim or value_scheme.width != spec.head_dim:
        raise SettingError(
            f"keys were packed for heads of {key_scheme.width} numbers and the model's have {spec.head_dim}"
        )
    layers = []
    for layer, tensors in enumerate(places.layers):
        slides = places.sliding is not None and places.sliding[layer]
        keys, values = Packed(key_scheme, *tensors[:3]), Packed(value_scheme, *tensors[3:])
        firsts = places.bases if slides and places.bases is not None else [0] * rows
        held = max(count - first for count, first in zip(places.num_packed, firsts, strict=True))
        if places.block_table is not None:
            held = min(held, keys.num_positions)
        if keys.num_positions != values.num_positions or held > keys.num_positions or min(firsts) < 0:
            raise SettingError(f"{held} packed positions do not fit {keys.num_positions}")
        table = places.block_table
        described = (describe_packed(part, rows if table is None else 1, spec.num_kv_heads) for part in (keys, values))
        width, address = (0, None) if table is None else (table.shape[1], table.data_ptr())
        layers.append(CPackedLayer(*described, keys.num_positions, int(slides), width, address))
    packing = CPacking(describe_scheme(key_scheme), describe_scheme(value_scheme))
    return packing, (CPackedLayer * len(layers))(*layers)
