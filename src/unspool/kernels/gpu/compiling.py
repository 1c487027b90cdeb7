"""Having a kernel compiled in another process: a compilation as plain numbers and names."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from triton import knobs
from triton.compiler.compiler import make_backend
from triton.runtime import cache

from unspool.kernels.compiler_process import COMPILERS

_PLAIN: Final = (int, float, bool, str, type(None))  # what JSON gives back as it was


def compile_elsewhere(compiling: Callable[..., Any]) -> None:
    """Fill Triton's cache with the kernel that a function of `AsyncCompileMode` compiles, if another process can.

    Otherwise, and after any error, the function compiles it here.
    """
    with suppress(Exception):
        parts = inspect.getclosurevars(compiling).nonlocals
        job = describe_job(parts["src"], parts["target"], parts["options"], parts["env_vars"])
        if job is not None and not _is_cached(parts["src"], parts["target"], parts["options"], parts["env_vars"]):
            COMPILERS.compile(job, cache.triton_key())


def describe_job(source: Any, target: Any, options: Any, environment: dict[str, str]) -> dict[str, Any] | None:
    """A compilation as JSON; None if it is not to be described so."""
    kernel = source.fn
    is_usual = knobs.cache.manager_class is None and not (
        knobs.compilation.always_compile or knobs.compilation.override or knobs.compilation.dump_ir
    )
    is_plain = all(type(value) in _PLAIN for value in source.constants.values())
    is_flat = all(isinstance(kind, str) for kind in source.signature.values())
    if not (is_usual and is_plain and is_flat and kernel.__module__.startswith("unspool.")):
        return None
    return {
        "module": kernel.__module__,
        "name": kernel.__name__,
        "is_gluon": kernel.is_gluon(),
        "signature": source.signature,
        "constants": [[list(place), value] for place, value in source.constants.items()],
        "attributes": [[list(place), value] for place, value in source.attrs.items()],
        "options": dict(options.__dict__),
        "target": [target.backend, target.arch, target.warp_size],
        "environment": environment,
        "cache": knobs.cache.dir,
    }


def _is_cached(source: Any, target: Any, options: Any, environment: dict[str, str]) -> bool:
    key = cache.get_cache_key(source, make_backend(target), options, environment)
    held = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return held.get_group(f"{source.name[:150]}.json") is not None
