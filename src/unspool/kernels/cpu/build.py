"""Building the library: `python -m unspool.kernels.cpu.build`. Needs nothing but Python and a C compiler.

The compiler is $CC, cc, gcc or clang; where there is none, the one in the `ziglang` wheel. Every instruction set is a
compilation of the same file, and the library chooses at run time.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
OUTPUT = HERE / ("libunspool_cpu.dylib" if sys.platform == "darwin" else "libunspool_cpu.so")
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]
SETS = {
    "aarch64": {
        "neon_dot": ["-march=armv8.2-a+dotprod+fp16", "-DUS_NEON_DOT"],
        "neon_i8mm": ["-march=armv8.2-a+dotprod+fp16+i8mm", "-DUS_NEON_DOT", "-DUS_NEON_I8MM"],
    },
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-DUS_AVX2"],
        "avx512": [
            *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")),
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-DUS_AVX512",
        ],
    },
}
NAMES = {"arm64": "aarch64", "amd64": "x86_64"}


def find_compiler() -> list[str] | None:
    """The command of a C compiler; None where there is none."""
    asked = os.environ.get("CC")
    if asked and shutil.which(shlex.split(asked)[0]):
        return shlex.split(asked)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def build(compiler: list[str], output: Path = OUTPUT, machine: str | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile every set for a machine and link them; the result appears whole or not at all."""
    name = machine or platform.machine().lower()
    sets = {"plain": [], **SETS.get(NAMES.get(name, name), {})}
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{part}.o") for part in ("library", "threads", *sets)]
        for part, target in zip(("library", "threads"), objects, strict=False):
            _call([*compiler, *FLAGS, *extra, "-c", str(SOURCES / f"{part}.c"), "-o", target])
        for (part, flags), target in zip(sets.items(), objects[2:], strict=True):
            source = str(SOURCES / "kernels.c")
            _call([*compiler, *FLAGS, *extra, *flags, f"-DUS_NAME={part}", "-c", source, "-o", target])
        made = Path(folder) / output.name
        _call([*compiler, *extra, "-shared", "-o", str(made), *objects, "-lm", "-lpthread"])
        output.parent.mkdir(parents=True, exist_ok=True)
        whole = output.with_suffix(".new")
        shutil.copyfile(made, whole)
        whole.replace(output)
    return output


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def main() -> int:
    """Build for this machine, and say what was done."""
    compiler = find_compiler()
    if compiler is None:
        print("no C compiler was found: install one (apt install gcc), or `pip install ziglang`", file=sys.stderr)
        return 1
    if os.name != "posix":
        print("the library is built for Linux and macOS; elsewhere unspool runs on torch's operators", file=sys.stderr)
        return 1
    try:
        print(f"built {build(compiler)} with {' '.join(compiler)}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
