"""Models that exist only as pickles: rewritten by a confined process, or refused with what they hold instead.

No test opens a pickle in this process; one process reads many for `test_what_is_refused`, as the real one reads one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.conformance.cases import GOLDENS

import unspool
from unspool.cli.main import main
from unspool.errors import LoadError
from unspool.loading import pickled, pickled_program
from unspool.loading.digests import digest_model, sample_weights
from unspool.loading.pickled import find_pickles

pytestmark = pytest.mark.skipif(os.name != "posix", reason="confined processes are of POSIX systems")
LLAMA = GOLDENS / "models" / "llama"
PROGRAM = Path(pickled_program.__file__)


class Call:
    """A pickle of it calls os.system."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._trace}",)


def write_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The golden llama without its weights, which are returned."""
    shutil.copytree(LLAMA, folder)
    (folder / "model.safetensors").unlink()
    return load_file(LLAMA / "model.safetensors")


def test_a_model_of_shards_that_share_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One shard is of torch's old layout; two names share a tensor, and one is a view of a larger one."""
    tensors = write_folder(folder := tmp_path / "model")
    first = {name: tensors[name] for name in sorted(tensors)[:5]}
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    name = min(rest)
    rest[name] = torch.cat([rest[name], rest[name]])[: len(rest[name])]
    torch.save(first, folder / "pytorch_model-00001-of-00002.bin", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": rest}, folder / "pytorch_model-00002-of-00002.bin")
    weight_map = {name: f"pytorch_model-0000{1 if name in first else 2}-of-00002.bin" for name in tensors}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    digests = digest_model(folder), sample_weights(folder)

    assert main(["convert", str(folder), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    made = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert {**made[0], **made[1]}.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for part in made for name, tensor in part.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((LLAMA / "config.json").read_text())
    model, same = (unspool.load(place, device="cpu").model for place in (tmp_path / "out", LLAMA))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(*(unspool.generate(one, ids, max_new_tokens=6) for one in (model, same)))
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2  # it is there already
    assert main(["convert", str(LLAMA), str(tmp_path / "more")]) == 2  # which has safetensors

    with (folder / "pytorch_model-00002-of-00002.bin").open("ab") as file:
        file.write(b"x")
    assert all(one != other for one, other in zip((digest_model(folder), sample_weights(folder)), digests, strict=True))


def test_loading_rewrites_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself is left out."""
    monkeypatch.setenv("UNSPOOL_HOME", str(tmp_path / "home"))
    write_folder(folder := tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(bytes(100))

    def copy(path: Path, target: Path, report: Callable[[int, int], None]) -> None:
        shutil.copyfile(LLAMA / "model.safetensors", target)
        report(5, 10)

    monkeypatch.setattr(pickled, "_rewrite", copy)
    told: list[tuple[str, int, int]] = []
    model = unspool.load(folder, device="cpu", progress=lambda *one: told.append(one)).model
    ids = torch.tensor([[5, 6, 7]])
    same = unspool.load(LLAMA, device="cpu").model
    assert torch.equal(*(unspool.generate(one, ids, max_new_tokens=6) for one in (model, same)))
    assert told[0] == ("safetensors", 50, 100) and any(one[0] == "weights" for one in told)
    assert not any((tmp_path / "home" / "rewritten").iterdir())
    index = {"weight_map": {"model.norm.weight": "pytorch_model-1.bin", "lm_tail": "pytorch_model-1.bin"}}
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-1.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadError, match=r"'lm_tail' lies in pytorch_model-1\.bin; it does not"):
        unspool.load(folder, device="cpu")
    (folder / "pytorch_model.bin.index.json").unlink()
    (folder / "pytorch_model-2.bin").write_bytes(bytes(100))
    with pytest.raises(LoadError, match="which one counts"):
        unspool.load(folder, device="cpu")


def test_a_file_that_calls_something(tmp_path: Path) -> None:
    write_folder(folder := tmp_path / "model")
    trace = tmp_path / "trace"
    torch.save({"a": torch.zeros(2), "b": Call(trace)}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"names posix.system, which is no part of weights"):
        unspool.load(folder, device="cpu")
    assert not trace.exists()


def test_folders_without_such_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder)
    with pytest.raises(LoadError, match="no weights"):
        unspool.load(folder, device="cpu")
    (folder / "weights.pt").write_bytes(b"x")
    with pytest.raises(LoadError, match="is a pickle"):
        unspool.load(folder, device="cpu")
    index = folder / "pytorch_model.bin.index.json"
    for shard, words in (("../a.bin", "shard"), ("pytorch_model-1.bin", "lacks"), ("a.bin", "called")):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(LoadError, match=words):
            find_pickles(folder)
    assert find_pickles(LLAMA) == {}


def list_refused(folder: Path) -> dict[str, tuple[str, Any]]:
    """Checkpoints, and what their refusal names."""
    zeros = torch.zeros(3)
    return {
        "call": ("posix.system", {"a": Call(folder / "trace")}),
        "global": ("fractions.Fraction", {"a": __import__("fractions").Fraction(1, 2)}),
        "number": ("int under 'epoch'", {"epoch": 1, "a": zeros}),
        "list": ("a list", [zeros]),
        "name": ("int in the place", {1: zeros}),
        "empty": ("no tensors", {}),
        "sparse": ("sparse", {"a": zeros.to_sparse()}),
        "complex": ("complex64", {"a": zeros.to(torch.complex64)}),
        "expanded": ("stand for more", {"a": torch.zeros(1).expand(1 << 40)}),
    }


READ_ALL = """
import importlib.util, json, sys
sys.path[:] = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("program", sys.argv[2])
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
import torch
said = []
for path in sys.argv[3:]:
    try:
        program._find_tensors(torch, torch.load(path, map_location="cpu", weights_only=True), 1000)
        said.append("read")
    except program.RefusedError as refusal:
        said.append(str(refusal))
    except Exception as error:
        said.append(program._explain(error))
print(json.dumps(said))
"""


def test_what_is_refused(tmp_path: Path) -> None:
    words, paths = [], []
    for name, (word, held) in list_refused(tmp_path).items():
        torch.save(held, tmp_path / name)
        words.append(word)
    (tmp_path / "damaged").write_bytes(b"PK\x03\x04" + bytes(100))
    (tmp_path / "other").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    words += ["damaged", "os.system"]
    paths = [str(tmp_path / name) for name in (*list_refused(tmp_path), "damaged", "other")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", READ_ALL, json.dumps(sys.path), str(PROGRAM), *paths],
        capture_output=True,
        check=True,
        text=True,
    )
    for word, said in zip(words, json.loads(done.stdout), strict=True):
        assert word in said or ("magic" in said and word == "os.system"), said
        assert "torch.load" not in said  # torch's advice is to read the file without care
    assert not (tmp_path / "trace").exists()


CONFINED = """
import importlib.util, os, resource, socket, sys
spec = importlib.util.spec_from_file_location("program", sys.argv[1])
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
program.confine(5, 1 << 28, 1000)
for name, act in {
    "open": lambda: open(sys.argv[1]),
    "write": lambda: open(sys.argv[1] + ".new", "w"),
    "connect": lambda: socket.socket(),
    "fork": os.fork,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "remove": lambda: os.remove(sys.argv[2]),
    "kill": lambda: os.kill(os.getppid(), 0),
    "memory": lambda: bytearray(1 << 30),
}.items():
    try:
        act()
        print(name, "was done", flush=True)
    except (OSError, MemoryError):
        print(name, "was refused", flush=True)
print(sum(range(1000)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="system calls are refused on Linux")
def test_what_the_confined_process_can_t_do(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    done = subprocess.run(
        [sys.executable, "-I", "-c", CONFINED, str(PROGRAM), str(kept)], capture_output=True, check=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "499500" and len(lines) == 9
    has_filter = importlib.util.find_spec("resource") is not None and os.uname().machine in pickled_program._CALLS
    for line in lines[:-1]:
        assert line.endswith("refused") or not has_filter, line
    assert kept.exists()
