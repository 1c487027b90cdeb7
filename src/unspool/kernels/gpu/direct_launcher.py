"""Launching our kernels through CUDA's own driver, without the C code that Triton has compiled for each of them.

Triton writes a function in C for every list of argument types, and its helper that loads kernels is in C too: a C
compiler takes a third of a second for each of them. Both are calls of CUDA's driver with a few packed numbers.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from unspool.kernels.gpu.compiling import is_ours

# How CUDA takes an argument of a kernel, by Triton's name for its type.
_FORMATS: Final = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_CONFIG: Final = "7I4xQQI4x"  # CUlaunchConfig: grid, block, shared memory, stream, attributes and their number
_ATTRIBUTE: Final = "I4x64s"  # CUlaunchAttribute
_NO_CONTEXT: Final = 201
_COOPERATIVE, _CLUSTER, _SPREADING, _OVERLAP = 2, 4, 5, 6  # CUlaunchAttributeID
_SPREAD: Final = 1  # programs of a cluster, over multiprocessors
_LARGEST_CLUSTER: Final = 8  # that every GPU with clusters has
_SHARED_ALWAYS: Final = 49_152  # bytes of shared memory that a kernel need not ask for
# CUfunction_attribute and CUdevice_attribute.
_MOST_THREADS, _STATIC_BYTES, _LOCAL_BYTES, _REGISTERS, _MOST_DYNAMIC_BYTES, _ANY_CLUSTER = 0, 1, 3, 4, 8, 14
_SHARED_OPTIN: Final = 97
_PREFER_SHARED: Final = 1  # CUfunc_cache
_PROPERTIES: Final = {
    "max_shared_mem": _SHARED_OPTIN, "max_num_regs": 12, "multiprocessor_count": 16, "warpSize": 10,
    "sm_clock_rate": 13, "mem_clock_rate": 36, "mem_bus_width": 37,
}  # fmt: skip


@cache
def _open_cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _open_cuda().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"Triton Error [CUDA]: {(text.value or b'an unknown error').decode()}")


def _enter_context(device: int) -> None:
    """Give this thread the device's context, if it has none."""
    cuda, context = _open_cuda(), ctypes.c_void_p()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(cuda.cuCtxSetCurrent(context))


class DirectUtils:
    """What Triton's helper does to load a kernel; everything else is asked of that helper, made when it is needed."""

    def __init__(self, make_helper: Callable[[], Any]) -> None:
        self._make_helper = make_helper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make_helper(), name)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Sizes of a GPU, under Triton's names for them."""
        return {name: _find_property(number, device) for name, number in _PROPERTIES.items()}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """A kernel's module and function, its registers, spilled registers, and the most threads that run it."""
        cuda, module, function = _open_cuda(), ctypes.c_void_p(), ctypes.c_void_p()
        _enter_context(device)
        _check(cuda.cuModuleLoadData(ctypes.byref(module), binary))
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        largest = _find_property(_SHARED_OPTIN, device)
        if shared > _SHARED_ALWAYS and largest > _SHARED_ALWAYS:
            _check(cuda.cuFuncSetCacheConfig(function, _PREFER_SHARED))
            rest = largest - _find_attribute(_STATIC_BYTES, function)
            _check(cuda.cuFuncSetAttribute(function, _MOST_DYNAMIC_BYTES, rest))
        registers, spilled = _find_attribute(_REGISTERS, function), _find_attribute(_LOCAL_BYTES, function) // 4
        assert module.value is not None and function.value is not None
        return module.value, function.value, registers, spilled, _find_attribute(_MOST_THREADS, function)


def _find_property(number: int, device: int) -> int:
    found = ctypes.c_int()
    _check(_open_cuda().cuDeviceGetAttribute(ctypes.byref(found), number, device))
    return found.value


def _find_attribute(number: int, function: ctypes.c_void_p) -> int:
    found = ctypes.c_int()
    _check(_open_cuda().cuFuncGetAttribute(ctypes.byref(found), number, function))
    return found.value


def can_launch(source: Any, metadata: Any) -> bool:
    """Whether a kernel's arguments are plain numbers and addresses, and it is one of ours.

    Others keep Triton's launcher, which also asks the driver whether a tensor is on the GPU.
    """
    kinds = source.signature.values()
    is_plain = all(isinstance(kind, str) and (kind == "constexpr" or _find_format(kind)) for kind in kinds)
    asks_for_memory = metadata.global_scratch_size or metadata.profile_scratch_size
    return is_plain and not asks_for_memory and is_ours(source)


def _find_format(kind: str) -> str | None:
    return "Q" if kind.startswith("*") else _FORMATS.get(kind)


class DirectLauncher:
    """Launches one kernel; called as Triton calls its own launchers."""

    def __init__(self, source: Any, metadata: Any) -> None:
        kinds = list(source.signature.values())
        places = [place for place, kind in enumerate(kinds) if kind != "constexpr"]
        self._places, self._pick = places, _pick(places)
        self._pointers = [number for number, place in enumerate(places) if kinds[place].startswith("*")]
        formats = [_find_format(kinds[place]) or "" for place in places]
        formats += ["Q", "Q"]  # addresses of memory that kernels may ask for
        begins = ["".join([_CONFIG, *formats[:number], f"0{kind}"]) for number, kind in enumerate(formats)]
        self._offsets = [struct.calcsize(begin) for begin in begins]
        self._format = struct.Struct("".join([_CONFIG, *formats]))
        self._is_cooperative, self._overlaps = metadata.launch_cooperative_grid, metadata.launch_pdl
        self._calls: dict[int, list[_Call]] = {}  # by the size of a cluster: those that no thread uses now
        self._launch = _find_launch()

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int,
        packed: Sequence[int], metadata: Any, enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        """Launch a grid of (x, y, z) programs, or clusters of them along the first axis."""
        warps, cluster, shared = packed[:3]
        if enter is not None:
            enter(metadata)
        values = list(self._pick(args))
        for number in self._pointers:
            value = values[number]
            if type(value) is not int:
                values[number] = 0 if value is None else value.data_ptr()
        if x * y * z > 0:
            free = self._calls.setdefault(cluster, [])
            try:
                call = free.pop()
            except IndexError:  # each is in use, by other threads
                call = self._make_call(cluster, function)
            size = (x * cluster, y, z, 32 * warps, 1, 1, shared)
            self._format.pack_into(call.memory, 0, *size, stream, *call.attributes, *values, 0, 0)
            code = self._launch(call.address, function, call.parameters, None)
            if code == _NO_CONTEXT:
                import torch

                _enter_context(torch.cuda.current_device())
                code = self._launch(call.address, function, call.parameters, None)
            free.append(call)
            _check(code)
        if leave is not None:
            leave(metadata)

    def bind(self, function: int, packed: Sequence[int], num_given: int) -> Callable[..., None]:
        """What launches a kernel again by `again(x, y, z, stream, values)`: a grid that is not empty, and the first
        `num_given` arguments as numbers and addresses; the others stay as they were. With `overlaps=False` it starts
        once all before it has ended."""
        warps, cluster, shared = packed[:3]
        pick, pack, launch = _pick([place for place in self._places if place < num_given]), self._format, self._launch
        threads, free = 32 * warps, self._calls.setdefault(cluster, [])

        def again(x: int, y: int, z: int, stream: int, values: Sequence[Any], *, overlaps: bool = True) -> None:
            try:
                call = free.pop()
            except IndexError:  # each is in use, by other threads
                call = self._make_call(cluster, function)
            picked, attributes = pick(values), call.attributes if overlaps else call.other_attributes
            pack.pack_into(
                call.memory, 0, x * cluster, y, z, threads, 1, 1, shared, stream, *attributes, *picked, 0, 0
            )  # fmt: skip
            code = launch(call.address, function, call.parameters, None)
            if code == _NO_CONTEXT:
                import torch

                _enter_context(torch.cuda.current_device())
                code = launch(call.address, function, call.parameters, None)
            free.append(call)
            if code:
                _check(code)

        return again

    def _make_call(self, cluster: int, function: int) -> _Call:
        if cluster > _LARGEST_CLUSTER:
            _check(_open_cuda().cuFuncSetAttribute(ctypes.c_void_p(function), _ANY_CLUSTER, 1))
        attributes: list[tuple[int, tuple[int, ...]]] = []
        if self._overlaps:  # the first: see `other_attributes`
            attributes.append((_OVERLAP, (1,)))
        if self._is_cooperative:
            attributes.append((_COOPERATIVE, (1,)))
        if cluster != 1:
            attributes += [(_CLUSTER, (cluster, 1, 1)), (_SPREADING, (_SPREAD,))]
        return _Call(attributes, self._offsets, self._format.size)


class _Call:
    """The memory of one launch: its configuration and arguments, the arguments' addresses, and attributes."""

    def __init__(self, attributes: Sequence[tuple[int, tuple[int, ...]]], offsets: Sequence[int], size: int) -> None:
        first = size + 8 * len(offsets)
        each = struct.calcsize(_ATTRIBUTE)
        self.memory = ctypes.create_string_buffer(first + each * len(attributes))
        self.address = ctypes.addressof(self.memory)
        self.parameters = self.address + size
        self.attributes = (self.address + first, len(attributes))
        skipped = 1 if attributes and attributes[0][0] == _OVERLAP else 0
        self.other_attributes = (self.address + first + each * skipped, len(attributes) - skipped)  # without overlap
        struct.pack_into(f"{len(offsets)}Q", self.memory, size, *(self.address + offset for offset in offsets))
        for number, (kind, values) in enumerate(attributes):
            packed = struct.pack(f"{len(values)}I", *values)
            struct.pack_into(_ATTRIBUTE, self.memory, first + each * number, kind, packed)


def _pick(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the values at some places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: [values[place] for place in places]


@cache
def _find_launch() -> Any:
    launch = _open_cuda().cuLaunchKernelEx
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return launch
