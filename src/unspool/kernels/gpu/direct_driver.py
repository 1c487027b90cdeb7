"""Triton's driver without a C compiler: what loads and launches our kernels calls CUDA's driver itself."""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import triton
from triton.backends.driver import GPUDriver
from triton.runtime import driver

from unspool.forks import make_lock
from unspool.kernels.gpu.direct_launcher import DirectLauncher, DirectUtils, can_launch

_KNOWN: Final = ("3.6.",)  # releases whose driver and launchers are what is set below
_lock = make_lock(sys.modules[__name__], "_lock")


def use_direct_driver() -> None:
    """Let Triton have such a driver for NVIDIA's GPUs; one that it has already gets our launchers."""
    with _lock:
        if not triton.__version__.startswith(_KNOWN):
            return
        from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

        if not CudaDriver.is_active():
            return
        making, made = threading.Lock(), list[Any]()

        def make_helper() -> Any:
            with making:
                if not made:
                    made.append(CudaUtils())
                return made[0]

        def make_launcher(source: Any, metadata: Any) -> Any:
            if can_launch(source, metadata):
                return DirectLauncher(source, metadata)
            make_helper()  # Triton's launchers look for a class in it
            return CudaLauncher(source, metadata)

        class DirectDriver(CudaDriver):  # type: ignore[misc]  # Triton has no types
            """As its base, whose helper is compiled at once."""

            def __init__(self) -> None:
                GPUDriver.__init__(self)
                self.launcher_cls = make_launcher
                self.utils = DirectUtils(make_helper)

        known = driver._active or driver._default
        if known is None:
            driver.set_active(DirectDriver())
        elif type(known) is CudaDriver:  # somebody has used Triton before
            known.launcher_cls = make_launcher
