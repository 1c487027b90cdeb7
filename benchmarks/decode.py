"""Decoding speed of the default model beside transformers, in one interleaved run on this machine.

    python benchmarks/decode.py [--rounds 3] [--new 128] [--batches 1 8] [--json FILE]

All engines use the same file, the same prompt ids, greedy decoding and the same number of threads: unspool with the
file's own 4-bit blocks, with int8 and with plain float32, transformers in float32. Rounds alternate between them, so
that a slow minute of the machine hits all. Reported is the median time of a decode step over all rounds, and the
time of reading a prompt.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import unspool
from unspool.loading.catalogue import find_model

TEXT = (
    "The following is a short story about a lighthouse keeper who lived alone on a rocky island far from land. "
    "Every evening he climbed the spiral stairs to light the great lamp, and every morning he wrote down in his "
    "log the ships that had passed during the night. One winter evening, however, something unusual happened that "
    "he could not explain to anyone. "
)

KINDS = {"unspool": "auto", "unspool int8": "int8", "unspool float32": None}  # as the file has them, and asked for


class Clock:
    """A streamer that only notes when tokens arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def steps_of(run: Callable[[Clock], None]) -> list[float]:
    """Milliseconds between tokens, the first (the prompt's) left out."""
    clock = Clock()
    run(clock)
    return [(b - a) * 1e3 for a, b in zip(clock.times[1:], clock.times[2:], strict=False)]


def load_transformers(path: Path) -> Any:
    """The same file through transformers' own reader, float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    path = find_model("smollm2-135m")
    assert path is not None, "run: unspool pull smollm2-135m"
    lms = {name: unspool.load("smollm2-135m", quantize=kind) for name, kind in KINDS.items()}
    lm = lms["unspool"]
    reference = load_transformers(path)
    ids = torch.tensor([lm.tokenizer(TEXT * 12)["input_ids"]])[:, : max(options.prompt, options.prefill)]

    def make_ours(model: Any) -> Callable[[Clock, torch.Tensor, int], None]:
        def ours(clock: Clock, prompt: torch.Tensor, new: int) -> None:
            unspool.generate(model, prompt, max_new_tokens=new, eos_token_id=None, streamer=clock)

        return ours

    def theirs(clock: Clock, prompt: torch.Tensor, new: int) -> None:
        reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, streamer=clock
        )

    engines = {name: make_ours(each.model) for name, each in lms.items()} | {"transformers": theirs}
    for engine in engines.values():  # warm them
        engine(Clock(), ids[:, : options.prompt], 4)

    results: dict[str, dict[str, float]] = {name: {} for name in engines}
    for batch in options.batches:
        prompt = ids[:, : options.prompt].repeat(batch, 1)
        gathered: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.rounds):
            for name, engine in engines.items():
                gathered[name] += steps_of(lambda clock, e=engine, p=prompt: e(clock, p, options.new))  # type: ignore[misc]
        for name, steps in gathered.items():
            results[name][f"batch {batch}, ms a step"] = statistics.median(steps)
    prompt = ids[:, : options.prefill]
    gathered = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            started = time.perf_counter()
            engine(Clock(), prompt, 1)
            gathered[name].append((time.perf_counter() - started) * 1e3)
    for name, times in gathered.items():
        results[name][f"prefill {options.prefill}, ms"] = statistics.median(times)

    import transformers

    print(
        f"{date.today()} · {platform.machine()}, {options.threads} threads · torch {torch.__version__} · "
        f"unspool {unspool.__version__} · transformers {transformers.__version__} · SmolLM2-135M · "
        f"prompt {options.prompt}, {options.new} new tokens, {options.rounds} interleaved rounds, medians"
    )
    print(f"{'':28}" + "".join(f"{name:>18}" for name in engines))
    for label, other in results["transformers"].items():
        cells = (f"{results[name][label]:>9.1f} {other / results[name][label]:>6.2f}x " for name in engines)
        print(f"{label:28}" + "".join(cells))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
