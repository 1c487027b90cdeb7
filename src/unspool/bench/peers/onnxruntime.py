"""onnxruntime on an exported decoder with past keys and values: the names and shapes that optimum exports have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unspool.bench.benchmark import Benchmark
from unspool.bench.engine import Prompts, Timing
from unspool.bench.peers.packages import import_package, refuse_device, require_path
from unspool.errors import LoadError

_PAST, _PRESENT = "past_key_values.", "present."


class OnnxruntimePeer:
    """An ONNX file (`--peer onnxruntime=FILE.onnx`), on a CPU. Its loop is greedy; it has no beam search here."""

    name = "onnxruntime"
    can = frozenset({"decode", "prefill", "batch"})
    reads_sources = False

    def __init__(self, benchmark: Benchmark, path: Path | None) -> None:
        self._library = import_package("onnxruntime", self.name, "pip install onnxruntime")
        refuse_device(benchmark, self.name)
        example = "optimum-cli export onnx --task text-generation-with-past"
        self._path = _find_file(require_path(path, benchmark, self.name, "an ONNX file with past keys", example))
        self._threads = benchmark.threads
        self._session: Any = None

    def load(self) -> None:
        """Open the file, and check that it is a decoder with past keys."""
        options = self._library.SessionOptions()
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        self._session = self._library.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])
        inputs = {given.name: given for given in self._session.get_inputs()}
        self._outputs = [made.name for made in self._session.get_outputs()]
        self._past = [name for name in inputs if name.startswith(_PAST)]
        unknown = [name for name in inputs if name not in ("input_ids", "attention_mask", "position_ids", *self._past)]
        if "input_ids" not in inputs or not self._past or "logits" not in self._outputs or unknown:
            raise LoadError(
                f"{self._path.name} is no decoder with past keys: it takes {', '.join(inputs)[:200]}; export the "
                "model with --task text-generation-with-past"
            )
        self._names = set(inputs)
        # (rows, kv heads, positions, width): the second and the last are fixed
        self._shapes = {name: (inputs[name].shape[1], inputs[name].shape[3]) for name in self._past}
        self._types = {name: np.float16 if "float16" in inputs[name].type else np.float32 for name in self._past}

    def describe(self) -> str:
        """Its version and the file."""
        return f"onnxruntime {self._library.__version__}, {self._path.name}"

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Decode greedily."""
        assert num_beams == 1, "this loop has no beam search"
        ids = np.array([list(row) for row in prompts], dtype=np.int64)  # (rows, new)
        held = {
            name: np.zeros((len(ids), heads, 0, width), dtype=self._types[name])
            for name, (heads, width) in self._shapes.items()
        }
        timing = Timing.begin()
        timing.tokens, start = [[] for _ in prompts], 0
        while True:
            chosen = self._read(ids, start, held)
            timing.note_step()
            for row, token in zip(timing.tokens, chosen, strict=True):
                row.append(int(token))
            if len(timing.tokens[0]) == num_new:
                return timing
            start += ids.shape[1]
            ids = chosen[:, None]

    def _read(self, ids: np.ndarray[Any, Any], start: int, held: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Read new tokens (rows, new), keep their keys, and return the most likely next ones (rows,)."""
        rows, num_new = ids.shape
        feeds: dict[str, Any] = {"input_ids": ids, **held}
        if "attention_mask" in self._names:
            feeds["attention_mask"] = np.ones((rows, start + num_new), dtype=np.int64)
        if "position_ids" in self._names:
            feeds["position_ids"] = np.tile(np.arange(start, start + num_new, dtype=np.int64), (rows, 1))
        made = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
        for name in self._past:
            held[name] = made[_PRESENT + name.removeprefix(_PAST)]
        return np.asarray(made["logits"][:, -1].argmax(-1))


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("*.onnx"))
    if len(found) != 1:
        raise LoadError(f"{path} holds {len(found)} ONNX files; name the one to run: --peer onnxruntime=FILE.onnx")
    return found[0]
