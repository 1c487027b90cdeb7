"""CTranslate2 on a converted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unspool.bench.benchmark import WORKS, Benchmark
from unspool.bench.engine import Prompts, Timing
from unspool.bench.peers.packages import import_package, require_path
from unspool.errors import LoadError

_MOST_BYTES = 64 * 2**20


class CTranslate2Peer:
    """A folder that its converter wrote (`--peer ctranslate2=FOLDER`)."""

    name = "ctranslate2"
    can = frozenset(WORKS)
    reads_sources = False

    def __init__(self, benchmark: Benchmark, path: Path | None) -> None:
        self._library = import_package("ctranslate2", self.name, "pip install ctranslate2")
        self._folder = require_path(
            path,
            benchmark,
            self.name,
            "a converted model",
            "ct2-transformers-converter --model FOLDER --output_dir OUT",
        )
        if not (self._folder / "model.bin").is_file():
            raise LoadError(f"{self._folder} holds no model.bin: it was not made by CTranslate2's converter")
        self._vocabulary = _read_vocabulary(self._folder)
        self._numbers = {token: number for number, token in enumerate(self._vocabulary)}
        self._benchmark = benchmark
        self._generator: Any = None

    def load(self) -> None:
        """Open the folder."""
        device = "cuda" if (self._benchmark.device or "cpu").startswith("cuda") else "cpu"
        self._generator = self._library.Generator(
            str(self._folder), device=device, inter_threads=1, intra_threads=self._benchmark.threads or 0
        )

    def describe(self) -> str:
        """Its version and dtype."""
        return f"CTranslate2 {self._library.__version__}, {self._generator.compute_type}"

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Decode greedily, or by beams."""
        words = [[self._vocabulary[token] for token in row] for row in prompts]
        timing = Timing.begin()
        steps_seen = 0

        def note(result: Any) -> bool:
            nonlocal steps_seen
            if result.step >= steps_seen:  # called once per row: the first call of a step counts
                steps_seen = result.step + 1
                timing.note_step()
            return False

        results = self._generator.generate_batch(
            words,
            beam_size=num_beams,
            max_length=num_new,
            min_length=num_new,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note if num_beams == 1 else None,
        )
        if not timing.ends:
            timing.note_step()
        timing.tokens = [[self._numbers[word] for word in result.sequences[0]] for result in results]
        return timing


def _read_vocabulary(folder: Path) -> list[str]:
    path = next((folder / name for name in ("vocabulary.json", "vocabulary.txt") if (folder / name).is_file()), None)
    if path is None or path.stat().st_size > _MOST_BYTES:
        raise LoadError(f"{folder} holds no vocabulary.json or vocabulary.txt of a usual size")
    text = path.read_text(encoding="utf-8")
    words = json.loads(text) if path.suffix == ".json" else text.splitlines()
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise LoadError(f"{path} is no list of tokens")
    return words
