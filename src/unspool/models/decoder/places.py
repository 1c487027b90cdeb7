"""How much memory a decoder's parts will take, and where a request puts them."""

from __future__ import annotations

import math
from typing import Final

import torch

from unspool.errors import UnsupportedError
from unspool.models.assembly import Packing
from unspool.models.decoder.layers import WeightNames
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.placement import DeviceRequest, PartSizes, Placement
from unspool.models.weights import WeightSource

_PACKED_BYTES: Final = {"int8": 1.0625, "fp8": 1.0, "file": 1.0625}  # of a number; else 4 bits and their scales
_FOUR_BITS: Final = 0.625


def place_decoder(
    devices: DeviceRequest,
    spec: DecoderSpec,
    names: WeightNames,
    source: WeightSource,
    dtype: torch.dtype,
    packing: Packing | None,
) -> Placement:
    """The devices of a decoder's parts; raises where they can't lie so."""
    placement = devices.place(_measure(spec, names, source, dtype, packing))
    if placement.embedding != placement.head and (
        spec.is_head_tied or spec.embedding_size not in (None, spec.hidden_size)
    ):
        raise UnsupportedError(
            f"the head of {spec.family} shares weights with the embedding, so both lie on one device; device_map names "
            f"{placement.embedding} and {placement.head}"
        )
    if packing is not None and len({device.type for device in placement.devices}) > 1:
        raise UnsupportedError(
            "quantised weights lie on GPUs or on a CPU, not on both: their layouts differ; use quantize=None, or "
            "devices of one kind"
        )
    return placement


def _measure(
    spec: DecoderSpec, names: WeightNames, source: WeightSource, dtype: torch.dtype, packing: Packing | None
) -> PartSizes:
    starts = [names.layer.format(i=index) for index in range(spec.num_layers)]
    sizes = [0] * (spec.num_layers + 2)
    for name in source.names():
        whole = name if name.startswith((starts[0][:1], names.prefix)) else names.prefix + name
        shape = source.info(name).shape
        place = next(
            (i for i, start in enumerate(starts, 1) if name.startswith(start) or whole.startswith(start)), None
        )
        if place is None:
            is_last = bool(names.final_norm) and name.startswith(names.final_norm)
            place = -1 if name.startswith(f"{names.head}.") or is_last else 0
        each = float(dtype.itemsize)
        if packing is not None and len(shape) > 1:
            each = _PACKED_BYTES.get(packing, _FOUR_BITS)
        sizes[place] += int(each * math.prod(shape))
    parts = (names.embedding, *(start.strip(".") for start in starts), names.head)
    return PartSizes(parts, tuple(sizes))
