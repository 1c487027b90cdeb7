"""Beam search beside transformers: time and memory, in one interleaved run.

    python benchmarks/beams.py [--beams 4] [--batches 1 8] [--prompt 512] [--new 128] [--rounds 2]

The default model in float32, the same prompt ids for both. Memory is that of the keys and values held at the end:
transformers keeps a copy of the prompt's for every beam, unspool one for every prompt.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from typing import Any

import torch
from decode import TEXT, load_transformers  # benchmarks/decode.py

import unspool
from unspool.loading.catalogue import find_model


def held_bytes(cache: Any) -> int:
    """Bytes of keys and values in a transformers cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = find_model("smollm2-135m")
    assert path is not None, "run: unspool pull smollm2-135m"
    lm, reference = unspool.load("smollm2-135m"), load_transformers(path)
    ids = torch.tensor([lm.tokenizer(TEXT * 40)["input_ids"]])[:, : options.prompt]
    common = {
        "num_beams": options.beams,
        "max_new_tokens": options.new,
        "eos_token_id": None,
        "return_dict_in_generate": True,
    }
    print(
        f"{date.today()} · {platform.machine()}, {options.threads} threads · torch {torch.__version__} · "
        f"SmolLM2-135M float32 · {options.beams} beams, prompt {options.prompt}, {options.new} new tokens, "
        f"{options.rounds} interleaved rounds, medians"
    )
    print(
        f"{'batch':>6}{'unspool s':>12}{'transformers s':>16}{'ratio':>8}{'keys MB':>10}{'theirs MB':>11}{'share':>8}"
    )
    for batch in options.batches:
        prompt = ids.repeat(batch, 1)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(options.rounds):
            started = time.perf_counter()
            run = unspool.api.calls.start(lm.model, prompt, **common)
            for _ in run:
                pass
            times["ours"].append(time.perf_counter() - started)
            mine = run.cache_bytes
            started = time.perf_counter()
            theirs = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **common)
            times["theirs"].append(time.perf_counter() - started)
        ours, other = statistics.median(times["ours"]), statistics.median(times["theirs"])
        other_bytes = held_bytes(theirs.past_key_values)
        print(
            f"{batch:>6}{ours:>12.2f}{other:>16.2f}{other / ours:>7.2f}x"
            f"{mine / 1e6:>10.0f}{other_bytes / 1e6:>11.0f}{mine / other_bytes:>8.0%}"
        )


if __name__ == "__main__":
    main()
