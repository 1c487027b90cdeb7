"""Launching a kernel again: what Triton works out at every launch is looked up by what it depends on.

Triton binds arguments to names, asks the driver about every pointer, writes the options out as a text and calls hooks:
15 to 25 µs, longer than most kernels of a decoding step run. Which compiled kernel it takes depends on an argument's
type, whether an address or a number is a multiple of 16, and whether a number is 1; that is read off here, and
addresses are passed as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

from unspool.kernels.gpu.direct_launcher import DirectLauncher

_SMALL: Final = 1 << 31  # numbers beyond have 64 bits
_LARGE: Final = 1 << 63
_MOST: Final = 4096  # variants that are remembered

Variant = Callable[..., None]
"""Launches what was compiled: `again(x, y, z, stream, values)`, where values are the arguments given by place."""


class OverlapError(Exception):
    """A kernel can't be launched without overlap."""


_known: Final[dict[tuple[Any, ...], Variant]] = {}
_kernels: Final[dict[int, Any]] = {}  # keeps them, and so their numbers


def relaunch(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    cluster: int,
    options: dict[str, Any],
    *,
    overlaps: bool = True,  # whether it may start before what it reads has been written, and waits itself
) -> Any:
    """Launch a kernel that was launched with such arguments before, and return None; otherwise the key to `remember`
    it by once it has been launched, or `()` if it can't be."""
    read = _read(args) if isinstance(kernel, JITFunction) else None
    if read is None:
        return ()
    kinds, values = read
    device = torch._C._cuda_getDevice()
    key = (id(kernel), device, cluster, *kinds, *options, *options.values())
    again = _known.get(key)
    if again is None:
        return key
    width, height, depth = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    if width and height and depth:
        stream = torch._C._cuda_getCurrentRawStream(device)
        if overlaps:
            again(width, height, depth, stream, values)
        else:
            again(width, height, depth, stream, values, overlaps=False)
    return None


def remember(key: tuple[Any, ...], kernel: Any, made: Any, num_given: int, options: dict[str, Any]) -> None:
    """Keep what was launched, if all that was given by place is an argument and all that was given by name is compiled
    in."""
    if not key or kernel.pre_run_hooks:
        return
    given, named = kernel.params[:num_given], kernel.params[num_given:]
    if any(param.is_constexpr for param in given) or not all(param.is_constexpr for param in named):
        return
    if len(_known) >= _MOST:
        _known.clear()
    _kernels[id(kernel)] = kernel
    _known[key] = _bind(made, num_given, tuple(options.get(param.name) for param in named))


def _bind(made: Any, num_given: int, named: tuple[Any, ...]) -> Variant:
    """What launches a compiled kernel again; directly, if it is launched so."""
    run, function, sizes = made.run, made.function, made.packed_metadata
    if isinstance(run, DirectLauncher):
        return run.bind(function, sizes, num_given)

    def again(x: int, y: int, z: int, stream: int, values: list[Any], *, overlaps: bool = True) -> None:
        if not overlaps:
            raise OverlapError("Triton's own launchers launch a kernel in one way")
        run(x, y, z, stream, function, sizes, None, None, None, *values, *named)

    return again


def _read(args: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """What a compiled kernel depends on of its arguments, and what it is given; None if one is of another kind."""
    kinds: list[Any] = []
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor or kind is Parameter:
            if not arg.is_cuda:
                return None  # the driver knows whether it can be read there
            at = arg.data_ptr()
            kinds.append(arg.dtype if not at & 15 else (arg.dtype,))
            values.append(at)
        elif kind is int:
            size = 0 if -_SMALL <= arg < _SMALL else 2 if arg < _LARGE else 4
            kinds.append(1 if arg == 1 else 16 + size + (arg & 15 == 0))
            values.append(arg)
        elif kind is float or arg is None:
            kinds.append(kind)
            values.append(arg)
        elif kind is bool:
            kinds.append((arg,))
            values.append(arg)
        else:
            return None
    return kinds, values
