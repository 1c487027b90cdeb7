"""Checkpoints that exist only as pickles (pytorch_model.bin): rewritten as safetensors by a confined process.

A pickle can call whatever it names. Here torch's weights-only reader, which knows a short list of names, opens it in a
process of its own that has the two files open and nothing else: no other file, no network, no child, bounded memory and
time (`pickled_program`). What comes back is read as any safetensors file of unknown origin is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Final

from unspool.errors import LoadError, ResourceError, UnspoolError, UnsupportedError
from unspool.loading.catalogue import store_folder
from unspool.loading.safetensors_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    SafetensorsFiles,
    read_weight_map,
)
from unspool.small_files import open_regular, write_text

PICKLED_NAME: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
PICKLED_PATTERN: Final = "pytorch_model*.bin"
Report = Callable[[int, int], None]
"""Called with the bytes written so far and those in all."""

_PROGRAM = Path(__file__).with_name("pickled_program.py")
_SECONDS: Final = 60  # of CPU time, and one for every `_BYTES_A_SECOND` of the file
_BYTES_A_SECOND: Final = 20 << 20
_START_SECONDS: Final = 120  # of wall time, until the process has its libraries; the machine may be busy
_WALL_FACTOR: Final = 5
_MEMORY: Final = 1 << 30  # and twice the file's bytes
_SHARD = re.compile(r"pytorch_model[-_.\w]*\.bin")


def find_pickles(folder: Path) -> dict[Path, set[str] | None]:
    """The pickles that hold a folder's weights, and the tensors that its index says are in each; none if there are
    safetensors, or other files than transformers wrote."""
    if (folder / WEIGHTS_NAME).exists() or (folder / INDEX_NAME).exists():
        return {}
    if (folder / PICKLED_NAME).is_file():
        return {folder / PICKLED_NAME: None}
    if not (folder / PICKLED_INDEX).is_file():
        return dict.fromkeys(sorted(path for path in folder.glob(PICKLED_PATTERN) if path.is_file()))
    found: dict[Path, set[str] | None] = {}
    for name, shard in read_weight_map(folder / PICKLED_INDEX, ".bin").items():
        if not _SHARD.fullmatch(shard):
            raise LoadError(f"{PICKLED_INDEX} names {shard!r:.200} as a shard; they are called {PICKLED_PATTERN}")
        names = found.setdefault(folder / shard, set())
        assert names is not None
        names.add(name)
    missing = [path.name for path in found if not path.is_file()]
    if missing:
        raise LoadError(
            f"{folder} lacks {missing[0]}, one of the {len(found)} shards that {PICKLED_INDEX} lists: the download is "
            "incomplete, fetch the model again"
        )
    return found


def rewrite_pickles(folder: Path, target: Path, report: Report | None = None) -> None:
    """Write the weights of a folder's pickles to another folder, as safetensors."""
    pickles = find_pickles(folder)
    if not pickles:
        raise LoadError(f"{folder} has no {PICKLED_PATTERN}: there is nothing to rewrite")
    sizes = [path.stat().st_size for path in pickles]
    places: dict[str, str] = {}
    for number, (path, expected) in enumerate(pickles.items(), start=1):
        before, total = sum(sizes[: number - 1]), sum(sizes)
        shard = WEIGHTS_NAME if len(pickles) == 1 else f"model-{number:05}-of-{len(pickles):05}.safetensors"

        def tell(
            done: int, whole: int, size: int = sizes[number - 1], before: int = before, total: int = total
        ) -> None:
            if report is not None:
                report(before + size * done // max(1, whole), total)

        _rewrite(path, target / shard, tell)
        names = set(_list_names(target / shard))
        lacking = (expected or set()) - names
        if lacking:
            raise LoadError(f"{PICKLED_INDEX} says that tensor {min(lacking)!r:.200} lies in {path.name}; it does not")
        for name in names if expected is None else expected:
            if name in places:
                raise LoadError(f"tensor {name!r:.200} lies in {places[name]} and in {path.name}: which one counts?")
            places[name] = shard
    if len(pickles) > 1:
        write_text(target / INDEX_NAME, json.dumps({"metadata": {}, "weight_map": places}))


def _list_names(path: Path) -> list[str]:
    return SafetensorsFiles.open_file(path).names()


def _rewrite(path: Path, target: Path, report: Report) -> None:
    """Rewrite one pickle, in a process of its own."""
    if os.name != "posix":
        raise UnsupportedError(
            f"{path} is a pickle, which is opened in a confined process, and this system has none; convert the model "
            "with `unspool convert` on Linux or macOS"
        )
    what = f"{path} is a pickle and can't be read as weights:"
    with open_regular(path) as source, target.open("wb") as made:
        size = os.fstat(source.fileno()).st_size
        seconds = _SECONDS + size // _BYTES_A_SECOND
        request = {
            "path": sys.path,
            "source": source.fileno(),
            "target": made.fileno(),
            "seconds": seconds,
            "memory": _MEMORY + 2 * size,
        }
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "HOME", "LANG") if name in os.environ}
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(source.fileno(), made.fileno()),
                env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        except (OSError, MemoryError) as error:
            raise ResourceError(f"the process that reads {path} could not be started: {error}") from error
        late = Timer(_START_SECONDS + _WALL_FACTOR * seconds, process.kill)
        late.start()
        with process:
            try:
                answer = _follow(process, request, report)
            finally:
                late.cancel()
                process.kill()
    if "refused" in answer:
        raise LoadError(f"{what} {answer['refused']}. Use safetensors or a GGUF file of the model")
    if "written" not in answer:
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise LoadError(f"{what} the process that read it took more than {seconds} s or was ended from outside")
        raise LoadError(
            f"{what} the process that read it ended with the code {process.returncode}; it may have run out of memory "
            "(twice the file and 1 GB)"
        )


def _follow(process: subprocess.Popen[bytes], request: dict[str, object], report: Report) -> dict[str, object]:
    """Hand the request over, report what the process says, and return the last of it."""
    assert process.stdin is not None and process.stdout is not None
    answer: dict[str, object] = {}
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    for _ in range(1 << 20):
        line = process.stdout.readline(1 << 16)
        if not line:
            break
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if not isinstance(said, dict):
            continue
        if type(said.get("done")) is int and type(said.get("total")) is int:
            report(said["done"], said["total"])
        elif "written" in said:
            answer = {"written": True}
        elif "refused" in said:
            answer = {"refused": " ".join(str(said["refused"])[:600].split())}
    process.wait()
    return answer if process.returncode == 0 else {}


def open_pickles(folder: Path, report: Report | None = None) -> SafetensorsFiles:
    """The weights of a folder that has only pickles. What they are rewritten to is removed when it is no longer mapped:
    on disk it has no name even now."""
    place = store_folder() / "rewritten"
    try:
        place.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=place))
    except OSError:
        made = Path(tempfile.mkdtemp(prefix="unspool-"))
    try:
        rewrite_pickles(folder, made, report)
        tensors = SafetensorsFiles(made)
    except UnspoolError:
        raise
    except OSError as error:
        raise LoadError(f"{folder} can't be rewritten as safetensors in {made}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    tensors.location = folder
    return tensors
