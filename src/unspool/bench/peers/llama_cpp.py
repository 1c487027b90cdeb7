"""llama.cpp through llama-cpp-python's bindings: batches of sequences, greedy, no sampler chain."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from unspool.bench.benchmark import Benchmark
from unspool.bench.engine import Prompts, Timing
from unspool.bench.peers.packages import import_package
from unspool.errors import LoadError, SettingError

_ALL_LAYERS = 999


class LlamaCppPeer:
    """llama.cpp on the benchmark's GGUF file, or on another one (`--peer llama-cpp=FILE`). It has no beam search."""

    name = "llama-cpp"
    can = frozenset({"decode", "prefill", "batch"})
    reads_sources = False

    def __init__(self, benchmark: Benchmark, path: Path | None) -> None:
        self._llama = import_package("llama_cpp", self.name, "pip install llama-cpp-python")
        path = path or benchmark.location
        if not path.is_file() or path.suffix.lower() != ".gguf":
            raise SettingError(
                f"the peer {self.name} reads a GGUF file, and {path.name} is none; convert the model (llama.cpp's "
                f"convert_hf_to_gguf.py) and name it: --peer {self.name}=FILE.gguf"
            )
        self._benchmark, self._path = benchmark, path
        self._threads = benchmark.threads or _count_cores()
        self._model: Any = None
        self._context: Any = None
        self._num_tokens = 0  # of the vocabulary

    def load(self) -> None:
        """Read the file, and make a context that holds every row of the largest batch."""
        llama, benchmark = self._llama, self._benchmark
        self._quiet = llama.llama_log_callback(lambda *_: None)  # kept: C calls it for the process's life
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        how = llama.llama_model_default_params()
        how.n_gpu_layers = 0 if (benchmark.device or "").startswith("cpu") else _ALL_LAYERS
        self._model = llama.llama_model_load_from_file(str(self._path).encode(), how)
        if not self._model:
            raise LoadError(f"llama.cpp can't read {self._path}")
        self._num_tokens = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model)))
        sizes = llama.llama_context_default_params()
        sizes.n_seq_max = benchmark.most_rows
        sizes.n_ctx = benchmark.most_rows * benchmark.longest
        sizes.n_batch = max(benchmark.prefill, benchmark.most_rows * benchmark.prompt)
        sizes.n_threads = sizes.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, sizes)
        if not self._context:
            raise LoadError(f"llama.cpp makes no context of {sizes.n_ctx} positions for {self._path.name}")

    def describe(self) -> str:
        """Its version and the file's quantisation."""
        described = ctypes.create_string_buffer(128)
        self._llama.llama_model_desc(self._model, described, len(described))
        kind = described.value.decode(errors="replace")
        return f"llama-cpp-python {self._llama.__version__}, {kind}, {self._threads} threads"

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Decode greedily: all rows in one batch, one sequence per row."""
        assert num_beams == 1, "llama.cpp has no beam search"
        llama = self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        timing = Timing.begin()
        timing.tokens = [[] for _ in prompts]
        rows, start = [list(row) for row in prompts], 0
        while True:
            chosen = self._read(rows, start)
            timing.note_step()
            for row, token in zip(timing.tokens, chosen, strict=True):
                row.append(token)
            if len(timing.tokens[0]) == num_new:
                return timing
            start += len(rows[0])
            rows = [[token] for token in chosen]

    def _read(self, rows: list[list[int]], start: int) -> list[int]:
        """Read every row's tokens from position `start` on; returns the most likely token after each row."""
        llama, width = self._llama, len(rows[0])
        batch = llama.llama_batch_init(len(rows) * width, 0, 1)
        try:
            batch.n_tokens = len(rows) * width
            for number, tokens in enumerate(rows):
                for offset, token in enumerate(tokens):
                    place = number * width + offset
                    batch.token[place] = token
                    batch.pos[place] = start + offset
                    batch.n_seq_id[place] = 1
                    batch.seq_id[place][0] = number
                    batch.logits[place] = offset == width - 1
            status = llama.llama_decode(self._context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode gave {status} for {len(rows)} rows of {width} tokens")
        finally:
            llama.llama_batch_free(batch)
        return [self._find_likeliest((number + 1) * width - 1) for number in range(len(rows))]

    def _find_likeliest(self, place: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, shape=(self._num_tokens,)).argmax())


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
