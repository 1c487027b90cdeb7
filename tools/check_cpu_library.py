"""Random shapes through the CPU library, each instruction set against plain C.

    python tools/check_cpu_library.py --sanitize     here, under AddressSanitizer and UndefinedBehaviorSanitizer
    python tools/check_cpu_library.py --emulate      for x86-64 (AVX2) and Arm with i8mm, under qemu

The second needs `pip install ziglang` (it compiles for other processors) and qemu (apt install qemu-user-static).
qemu does not know AVX-512: copy the program it builds to such a machine (it ran on the H200's host, 2026-11-15).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# GCC joins products and sums by the last: without it kernels that agree to the bit in the library would not here.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
SANITIZERS += ["-g", "-O1", "-fexpensive-optimizations", "-DUS_CHECKS"]
# qemu flushes a small float16 too where small floats are flushed; processors do not.
EMULATED = ("-static", "-DUS_KEEPS_SMALL", "-DUS_CHECKS")
TARGETS = {"x86_64": "x86_64-linux-musl", "aarch64": "aarch64-linux-musl"}


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_build", ROOT / "src/unspool/kernels/cpu/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(program: list[str], rounds: int, seed: int) -> bool:
    done = subprocess.run([*program, str(rounds), str(seed)], check=False)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    builder = load_builder()
    went_well = True
    with tempfile.TemporaryDirectory() as folder:
        if arguments.sanitize:
            compiler = builder.find_compiler()
            if compiler is None:
                print("no C compiler was found: nothing was checked", file=sys.stderr)
                return 1
            made = builder.build(compiler, Path(folder) / "check", extra=tuple(SANITIZERS), program="check")
            went_well &= check([str(made)], arguments.rounds, arguments.seed)
        for machine, target in TARGETS.items() if arguments.emulate else ():
            qemu = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
            if qemu is None or importlib.util.find_spec("ziglang") is None:
                print(f"{machine}: needs qemu-{machine} and the ziglang package", file=sys.stderr)
                return 1
            zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
            made = builder.build(zig, Path(folder) / machine, machine=machine, extra=EMULATED, program="check")
            print(f"{machine}: ", end="", flush=True)
            went_well &= check([qemu, "-cpu", "max", str(made)], arguments.rounds, arguments.seed)
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
