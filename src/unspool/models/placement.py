"""Laying a decoder's layers over several devices: which part lies where, by a caller's map or by what fits.

A pass goes through the layers in order, and its states move where the next layer lies. So several devices are for
models that are too large for one, not for speed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from unspool.errors import ResourceError, SettingError, UnsupportedError, excerpt

STRATEGIES: Final = ("auto", "sequential", "balanced", "balanced_low_0")
_UNITS: Final = {"": 1, "B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}}
_UNITS_OF_TWO: Final = {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_MEMORY = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?I?B?)", re.IGNORECASE)
_SHARE_OF_FREE: Final = 0.9  # that weights may take of a device; keys and states need the rest
_MOST_PARTS: Final = 100_000  # of a map


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a decoder's parts lie."""

    embedding: torch.device  # where ids come in, and logits go out
    layers: tuple[torch.device, ...]
    head: torch.device  # and the last norm

    @property
    def devices(self) -> list[torch.device]:
        """Every device, once."""
        return list(dict.fromkeys((self.embedding, *self.layers, self.head)))

    def name_parts(self) -> dict[str, str]:
        """The device of each part, runs of layers as one."""
        parts: dict[str, str] = {"embedding": str(self.embedding)}
        for index, device in enumerate(self.layers):
            parts[f"layers.{index}"] = str(device)
        return {**parts, "head": str(self.head)}


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The bytes that a decoder's parts will take, and the names that a map may give them."""

    names: tuple[str, ...]  # of the embedding, each layer and the head
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What a caller asks of the layout: a strategy or a map, and the bytes that devices may take."""

    layout: str | tuple[tuple[str, torch.device], ...]
    memory: tuple[tuple[torch.device, int], ...] | None = None

    @property
    def lead(self) -> torch.device:
        """The first device that is named, or there: what dtype and form of weights are chosen for."""
        named = [device for _, device in (() if isinstance(self.layout, str) else self.layout)]
        named += [device for device, _ in self.memory or ()]
        cards = [device for device in named if device.type == "cuda"]
        if not named:
            return torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")
        return (cards or named)[0]

    def place(self, parts: PartSizes) -> Placement:
        """The device of each part; raises if they don't fit, or one has none."""
        if isinstance(self.layout, str):
            return _fill(self.layout, parts, self.memory or _measure_free())
        return self._follow_map(parts)

    def _follow_map(self, parts: PartSizes) -> Placement:
        assert not isinstance(self.layout, str)
        found = [_find_device(name, dict(self.layout)) for name in parts.names]
        placement = Placement(found[0], tuple(found[1:-1]), found[-1])
        for device, most in self.memory or ():
            taken = sum(size for size, place in zip(parts.sizes, found, strict=True) if place == device)
            if taken > most:
                raise ResourceError(
                    f"device_map puts {taken / 1e9:.2f} GB on {device}, and max_memory allows {most / 1e9:.2f} GB there"
                )
        return placement


def read_device_request(device_map: Any, max_memory: Any) -> DeviceRequest | torch.device | None:
    """A device map, and the memory of devices, as a request; one device if all lies there; None for load()'s choice."""
    memory = _read_memory(max_memory)
    if device_map is None or (isinstance(device_map, str) and device_map in STRATEGIES):
        if device_map is None and memory is None:
            return None
        if memory is None and torch.cuda.device_count() == 0:
            return None  # the CPU is all there is
        return DeviceRequest(device_map or "auto", memory)
    if isinstance(device_map, Mapping):
        if not 1 <= len(device_map) <= _MOST_PARTS:
            raise SettingError(f"device_map has {len(device_map)} parts; name at least one")
        layout = tuple((_read_name(name), read_device(device)) for name, device in device_map.items())
        devices = {device for _, device in layout}
        if len(devices) == 1 and memory is None:
            return devices.pop()
        return DeviceRequest(layout, memory)
    device = read_device(device_map)
    return device if memory is None else DeviceRequest((("", device),), memory)


def _read_name(name: Any) -> str:
    if not isinstance(name, str):
        raise SettingError(f"device_map names a part {excerpt(name)}; parts are texts: 'model.layers.0'")
    return name.strip(".")


def read_device(given: Any) -> torch.device:
    """A device that is there; raises for any other."""
    if isinstance(given, str) and given == "disk":
        raise UnsupportedError("device_map puts parts on 'disk': weights are held in memory; use 'cpu'")
    if type(given) is bool or not isinstance(given, int | str | torch.device):
        raise SettingError(f"device_map={excerpt(given)} is not a device; use 'auto', 'cpu', 'cuda' or {{'': device}}")
    try:
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except RuntimeError as error:
        raise SettingError(
            f"{excerpt(given)} is not a device that torch knows; use 'cpu', 'cuda' or 'cuda:N'"
        ) from error
    check_present(device)
    if device == torch.device("cuda"):  # without a number
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_present(device: torch.device) -> None:
    """Raise for a CUDA device, or a second CPU, that this machine has not."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type not in ("cpu", "cuda") or (device.index or 0) < count:
        return
    found = f"{count} CUDA devices" if device.type == "cuda" else "one CPU"
    raise SettingError(f"there is no device {str(device)!r}: torch finds {found} here")


def _read_memory(given: Any) -> tuple[tuple[torch.device, int], ...] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not given:
        raise SettingError(
            f"max_memory={excerpt(given)} is no mapping of devices to bytes: {{0: '10GiB', 'cpu': '30GiB'}}"
        )
    return tuple((read_device(device), _read_bytes(most)) for device, most in given.items())


def _read_bytes(given: Any) -> int:
    """A number of bytes, or a text with a unit: "10GiB", "500MB"."""
    match = _MEMORY.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is not None:
        unit = match[2].upper()
        factor = {**_UNITS, **_UNITS_OF_TWO}.get(unit)
        if factor is not None:
            return int(float(match[1]) * factor)
    if type(given) is int and 0 <= given < 1 << 60:
        return given
    raise SettingError(f"max_memory has {excerpt(given)}, which is no number of bytes and no text like '10GiB'")


def _measure_free() -> tuple[tuple[torch.device, int], ...]:
    """What weights may take of each GPU; the CPU takes what is left over."""
    found = []
    for index in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(index)
        found.append((torch.device("cuda", index), int(_SHARE_OF_FREE * free)))
    return (*found, (torch.device("cpu"), 1 << 60))


def _fill(strategy: str, parts: PartSizes, memory: Sequence[tuple[torch.device, int]]) -> Placement:
    """The embedding and the head on the first device, and layers in order where there is room."""
    embedding, *layers, head = parts.sizes
    first = memory[0][0]
    room = dict(memory)
    room[first] -= embedding + head
    shares = _share(strategy, sum(parts.sizes), memory)
    used = dict.fromkeys(room, 0)
    used[first] = embedding + head
    placed: list[torch.device] = []
    devices = list(room)
    at = 0
    for size in layers:
        while at < len(devices) and (
            room[devices[at]] < size or used[devices[at]] + size / 2 > shares.get(devices[at], float("inf"))
        ):
            at += 1
        if at == len(devices) or room[first] < 0:
            said = ", ".join(f"{device}: {most / 1e9:.2f} GB" for device, most in memory)
            raise ResourceError(
                f"the weights take {sum(parts.sizes) / 1e9:.2f} GB and don't fit the devices ({said}): the first one "
                "holds the embedding and the head too. Allow more in max_memory, or use quantize= or dtype="
            )
        room[devices[at]] -= size
        used[devices[at]] += size
        placed.append(devices[at])
    return Placement(first, tuple(placed), first)


def _share(strategy: str, total: int, memory: Sequence[tuple[torch.device, int]]) -> dict[torch.device, float]:
    """How much each GPU but the last should take, where weights are spread evenly."""
    cards = [device for device, _ in memory if device.type == "cuda"] or [device for device, _ in memory]
    if not strategy.startswith("balanced") or len(cards) < 2:
        return {}
    if strategy == "balanced":
        return dict.fromkeys(cards[:-1], total / len(cards))
    return {cards[0]: 0.0, **dict.fromkeys(cards[1:-1], total / (len(cards) - 1))}


def _find_device(name: str, layout: Mapping[str, torch.device]) -> torch.device:
    """The device of a part, by the longest name in a map that is it or stands above it."""
    within = {place for part, place in layout.items() if part.startswith(f"{name}.")}
    above = [part for part in layout if not part or name == part or name.startswith(f"{part}.")]
    if not above and len(within) == 1:
        return within.pop()
    if not above:
        raise SettingError(f"device_map says nothing of {name!r}; name it, or what stands above it ('' is everything)")
    device = layout[max(above, key=len)]
    if within - {device}:
        raise UnsupportedError(f"device_map puts parts of {name!r} on several devices; a layer lies on one")
    return device
