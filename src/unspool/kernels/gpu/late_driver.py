"""Triton's driver without what it compiles for itself at first: that is needed when a kernel is loaded, not before.

With an empty cache Triton runs a C compiler for a third of a second before it compiles a first kernel.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import triton
from triton.backends.driver import GPUDriver
from triton.runtime import driver

_KNOWN: Final = ("3.6.",)  # releases whose driver consists of what is set below
_lock = threading.Lock()


def use_late_driver() -> None:
    """Let Triton have such a driver for NVIDIA's GPUs, unless it has one already."""
    with _lock:
        if not triton.__version__.startswith(_KNOWN) or driver._active is not None or driver._default is not None:
            return
        from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

        if not CudaDriver.is_active():
            return

        class LateDriver(CudaDriver):  # type: ignore[misc]
            """As its base, whose `utils` are made at once."""

            def __init__(self) -> None:
                GPUDriver.__init__(self)
                self.launcher_cls = CudaLauncher
                self._making = threading.Lock()
                self._utils: Any = None

            @property
            def utils(self) -> Any:
                """Functions that load kernels."""
                if self._utils is None:
                    with self._making:
                        if self._utils is None:
                            self._utils = CudaUtils()
                return self._utils

        driver.set_active(LateDriver())
