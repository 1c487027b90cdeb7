"""Builds the CPU library with the package. A machine without a compiler gets the one in the ziglang wheel; where that
does not work either, the package is installed without the library and runs on torch's operators."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src", "unspool", "kernels", "cpu")


def _load_builder(root: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("unspool_cpu_build", Path(root) / FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LibraryBuildHook(BuildHookInterface):
    """Compiles the library before files are gathered, for wheels and for editable installs."""

    def dependencies(self) -> list[str]:
        """A compiler, where the machine has none."""
        return [] if os.name != "posix" or _load_builder(self.root).find_compiler() else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the interface's argument
        if self.target_name != "wheel" or os.environ.get("UNSPOOL_BUILD_CPU") == "off" or os.name != "posix":
            return
        builder = _load_builder(self.root)
        compiler = builder.find_compiler()
        if compiler is None:
            self.app.display_warning("no C compiler: installed without the CPU library (unspool doctor says more)")
            return
        try:
            made = builder.build(compiler)
        except RuntimeError as error:
            self.app.display_warning(f"the CPU library was not built, torch's operators will be used:\n{error}")
            return
        build_data["pure_python"] = False
        platform = os.environ.get("UNSPOOL_WHEEL_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(
            ".", "_"
        )
        build_data["tag"] = f"py3-none-{platform}"
        build_data["artifacts"].append(str(FOLDER / made.name))
        print(f"built {made.name} with {' '.join(compiler)}", file=sys.stderr)
