"""Beam search beside transformers: time, floor and memory, in one interleaved run.

    python benchmarks/beams.py [--beams 4] [--batches 1 8] [--prompt 512] [--new 128] [--rounds 3]
                               [--memory-prompt 2048] [--memory-new 16]

The default model in float32, the same prompt ids for both. The floor is the time of the forward passes alone, over
the same cache: a search can't be faster than its model. Memory is that of the keys and values held at the end, when
they are the most: transformers keeps a copy of the prompt's for every beam (and makes another when beams are
reordered, which is not counted), unspool one for every prompt.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from floor import run_forwards  # benchmarks/floor.py

import unspool
from unspool.api.starting import start
from unspool.loading.catalogue import find_model

TEXT = (
    "The following is a short story about a lighthouse keeper who lived alone on a rocky island far from land. "
    "Every evening he climbed the spiral stairs to light the great lamp, and every morning he wrote down in his "
    "log the ships that had passed during the night. One winter evening, however, something unusual happened that "
    "he could not explain to anyone. "
)


def load_transformers(path: Path) -> Any:
    """The same file through transformers' own reader, float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def held_bytes(cache: Any) -> int:
    """Bytes of keys and values in a transformers cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


class Pair:
    """One search by both, with the bytes that each held."""

    def __init__(self, model: Any, reference: Any, prompt: torch.Tensor, num_beams: int, num_new: int) -> None:
        self._model, self._reference, self._prompt = model, reference, prompt
        self._num_beams, self._num_new = num_beams, num_new
        self._common = {
            "num_beams": num_beams,
            "max_new_tokens": num_new,
            "eos_token_id": None,
            "return_dict_in_generate": True,
        }
        self.bytes_held = {"ours": 0, "theirs": 0}

    def search(self) -> None:
        """Ours."""
        run = start(self._model, self._prompt, **self._common)
        for _ in run:
            pass
        self.bytes_held["ours"] = run.cache.nbytes

    def search_with_transformers(self) -> None:
        """Theirs."""
        mask = torch.ones_like(self._prompt)
        output = self._reference.generate(self._prompt, attention_mask=mask, do_sample=False, **self._common)
        self.bytes_held["theirs"] = held_bytes(output.past_key_values)

    def step_only(self) -> None:
        """The floor."""
        run_forwards(self._model, self._prompt, self._num_beams, self._num_new)

    def measure(self, rounds: int) -> dict[str, float]:
        """Median seconds of each, taken in turns."""
        runs: dict[str, Callable[[], None]] = {
            "ours": self.search,
            "theirs": self.search_with_transformers,
            "floor": self.step_only,
        }
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - started)
        return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-prompt", type=int, default=2048, help="0 leaves the second table out")
    parser.add_argument("--memory-new", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = find_model("smollm2-135m")
    assert path is not None, "run: unspool pull smollm2-135m"
    lm, reference = unspool.load("smollm2-135m", quantize=None), load_transformers(path)
    text = torch.tensor([lm.tokenizer(TEXT * 150)["input_ids"]])
    assert text.shape[1] >= max(options.prompt, options.memory_prompt), "the text is too short for such a prompt"

    def pair(batch: int, width: int, num_new: int) -> Pair:
        return Pair(lm.model, reference, text[:, :width].repeat(batch, 1), options.beams, num_new)

    print(
        f"{date.today()} · {platform.machine()}, {options.threads} threads · torch {torch.__version__} · "
        f"SmolLM2-135M float32 · {options.beams} beams, prompt {options.prompt}, {options.new} new tokens, "
        f"{options.rounds} interleaved rounds, medians"
    )
    print(f"{'batch':>6}{'unspool s':>12}{'transformers s':>16}{'ratio':>8}{'floor s':>10}{'of the floor':>14}")
    pair(1, min(options.prompt, 16), 2).measure(1)  # both warm
    for batch in options.batches:
        taken = pair(batch, options.prompt, options.new).measure(options.rounds)
        ours, theirs, floor = taken["ours"], taken["theirs"], taken["floor"]
        print(f"{batch:>6}{ours:>12.2f}{theirs:>16.2f}{theirs / ours:>7.2f}x{floor:>10.2f}{ours / floor:>13.2f}x")
    if not options.memory_prompt:
        return
    print(f"\nkeys and values at prompt {options.memory_prompt}, {options.memory_new} new tokens")
    print(f"{'batch':>6}{'unspool MB':>12}{'transformers MB':>17}{'share':>8}")
    for batch in options.batches[:1]:
        long = pair(batch, options.memory_prompt, options.memory_new)
        long.search()
        long.search_with_transformers()
        ours, theirs = (long.bytes_held[name] / 1e6 for name in ("ours", "theirs"))
        print(f"{batch:>6}{ours:>12.0f}{theirs:>17.0f}{ours / theirs:>8.0%}")


if __name__ == "__main__":
    main()
