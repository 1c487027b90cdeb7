"""Having a kernel compiled in another process: a compilation as plain numbers and names."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import cache as once
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import triton
from triton import knobs
from triton.compiler import compiler
from triton.compiler.compiler import make_backend
from triton.runtime import cache, jit

from unspool.kernels.compiler_process import COMPILERS

_PLAIN: Final = (int, float, bool, str, type(None))  # what JSON gives back as it was


@once
def find_triton_key() -> str:
    """What distinguishes this Triton from others: the sizes of its files, and when they were written.

    Triton's own key is a hash of all that they hold, 400 MB: a quarter of a second, and seconds where no other process
    has read them before.
    """
    home = Path(triton.__file__).parent
    files = [path for name in ("compiler", "backends", "language", "runtime") for path in (home / name).rglob("*.py")]
    files += (home / "_C").glob("libtriton.*")
    stamps = sorted((str(path.relative_to(home)), path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return f"{triton.__version__}-{hashlib.sha256(repr(stamps).encode()).hexdigest()}"


def name_by_files() -> bool:
    """Let Triton name our kernels in its cache by `find_triton_key`, and all others by its own key, if it can be."""
    own = getattr(cache, "get_cache_key", None)
    if own is None or {getattr(user, "get_cache_key", None) for user in (compiler, jit)} != {own}:  # another Triton
        return False
    ours = FunctionType(own.__code__, {**vars(cache), "triton_key": find_triton_key})

    def get_cache_key(source: Any, *args: Any, **kwargs: Any) -> str:
        return str((ours if is_ours(source) else own)(source, *args, **kwargs))

    compiler.get_cache_key = jit.get_cache_key = get_cache_key
    return True


def is_ours(source: Any) -> bool:
    """Whether what is compiled or launched is a kernel of this package."""
    module = getattr(getattr(source, "fn", None), "__module__", None)
    return module is not None and module.startswith("unspool.")


def compile_elsewhere(compiling: Callable[..., Any]) -> None:
    """Fill Triton's cache with the kernel that a function of `AsyncCompileMode` compiles, if another process can.

    Otherwise, and after any error, the function compiles it here.
    """
    with suppress(Exception):
        parts = inspect.getclosurevars(compiling).nonlocals
        job = describe_job(parts["src"], parts["target"], parts["options"], parts["env_vars"])
        if job is not None and not _is_cached(parts["src"], parts["target"], parts["options"], parts["env_vars"]):
            COMPILERS.compile(job, _find_key())


def describe_job(source: Any, target: Any, options: Any, environment: dict[str, str]) -> dict[str, Any] | None:
    """A compilation as JSON; None if it is not to be described so."""
    kernel = source.fn
    is_usual = knobs.cache.manager_class is None and not (
        knobs.compilation.always_compile or knobs.compilation.override or knobs.compilation.dump_ir
    )
    is_plain = all(type(value) in _PLAIN for value in source.constants.values())
    is_flat = all(isinstance(kind, str) for kind in source.signature.values())
    if not (is_usual and is_plain and is_flat and is_ours(source)):
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
    key = compiler.get_cache_key(source, make_backend(target), options, environment)
    held = cache.get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return held.get_group(f"{source.name[:150]}.json") is not None


_find_key = find_triton_key if name_by_files() else cache.triton_key
