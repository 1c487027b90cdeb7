"""Building the library: `python -m unspool.kernels.cpu.build`. Needs nothing but Python and a C compiler.

The compiler is $CC, cc, gcc or clang, or else the one in the `ziglang` wheel. The same file is compiled once for every
instruction set, and the library chooses at run time.
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
from concurrent.futures import ThreadPoolExecutor
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
    "-fno-schedule-insns",  # GCC would load everything first, and then lack registers
    "-Wno-ignored-optimization-argument",  # other compilers do not know it
    "-Wall",
    "-Wextra",
]
_AVX512 = [*(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")), "-mavx2", "-mfma", "-mf16c", "-DUS_AVX512"]
SETS = {
    "aarch64": {
        "neon_dot": ["-march=armv8.2-a+dotprod+fp16", "-DUS_NEON_DOT"],
        "neon_i8mm": ["-march=armv8.2-a+dotprod+fp16+i8mm", "-DUS_NEON_DOT", "-DUS_NEON_I8MM"],
    },
    "x86_64": {
        "avx2": ["-mavx2", "-mfma", "-mf16c", "-DUS_AVX2"],
        "avx512": _AVX512,
        "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16", "-DUS_AMX"],
    },
}
_ZIG_NAMES = {
    "-march=armv8.2-a+dotprod+fp16": "-mcpu=generic+v8_2a+dotprod+fullfp16",
    "-march=armv8.2-a+dotprod+fp16+i8mm": "-mcpu=generic+v8_2a+dotprod+fullfp16+i8mm",
}
NAMES = {"arm64": "aarch64", "amd64": "x86_64"}


def find_compiler() -> list[str] | None:
    """The command of a C compiler; None if there is none."""
    asked = os.environ.get("CC")
    if asked and shutil.which(shlex.split(asked)[0]):
        return shlex.split(asked)
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def build(
    compiler: list[str],
    output: Path = OUTPUT,
    *,
    machine: str | None = None,
    extra: tuple[str, ...] = (),
    program: str | None = None,
) -> Path:
    """Compile every set for a machine and link them; the result appears whole or not at all.

    With `program`, a file of csrc that has a main(), the result is that program instead of the library.
    """
    name = machine or platform.machine().lower()
    sets = {"plain": [], **SETS.get(NAMES.get(name, name), {})}
    if "amx" in sets and not _knows(compiler, [*extra, *sets["amx"]]):  # GCC before 11
        del sets["amx"]
        extra = (*extra, "-DUS_NO_AMX")
    parts = {part: ("kernels", [*flags, f"-DUS_NAME={part}"]) for part, flags in sets.items()}  # first: they take long
    parts |= {part: (part, []) for part in ("library", "layouts", "sketches", "threads", program) if part}
    with tempfile.TemporaryDirectory() as folder:
        objects, commands = [], []
        is_zig = "ziglang" in compiler  # it names Arm's extensions in its own way
        for part, (source, flags) in parts.items():
            flags = [_ZIG_NAMES.get(flag, flag) for flag in flags] if is_zig else flags
            objects.append(str(Path(folder) / f"{part}.o"))
            commands.append([*compiler, *FLAGS, *extra, *flags, "-c", str(SOURCES / f"{source}.c"), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_call, commands))
        made = Path(folder) / "made"
        shape = [] if program else ["-shared"]
        _call([*compiler, *extra, *shape, "-o", str(made), *objects, "-lm", "-lpthread"])
        output.parent.mkdir(parents=True, exist_ok=True)
        whole = output.with_name(output.name + ".new")
        shutil.copy(made, whole)
        whole.replace(output)
    return output


def _knows(compiler: list[str], flags: list[str]) -> bool:
    """Whether a compiler knows some flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.c"
        source.touch()
        command = [*compiler, *flags, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


def main() -> int:
    """Build for this machine, and print the result."""
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
