"""Structured output: documents that an independent validator reads, and what keeping a grammar costs.

python benchmarks/structured.py --documents 1000     a hundred schemas, every strategy; needs jsonschema
python benchmarks/structured.py --cost               a step with a grammar beside one without, and first calls
python benchmarks/structured.py --forced             a document full of fixed keys, with drafts and without
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import unspool

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 1},
    "hot sampling": {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 2},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True, "seed": 3},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "guidance": {"guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "forced text": {"drafter": "grammar"},
}
COST_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 60},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 150},
            "minItems": 10,
            "maxItems": 10,
        },
        "kind": {"enum": ["first", "second", "third"]},
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 30, "maxLength": 40}, "size": {"type": "number"}},
            "required": ["city", "size"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "ages", "kind", "place"],
    "additionalProperties": False,
}
FIXED = {
    "type": "object",
    "properties": {
        f"the_{name}_of_the_customer": {"type": "integer", "minimum": 0, "maximum": 9}
        for name in ("shipping_region", "billing_region", "loyalty_level", "credit_rating", "contact_preference")
    },
    "additionalProperties": False,
}
FIXED["required"] = list(FIXED["properties"])


def write_documents(lm: Any, count: int, most: int) -> None:
    """Documents for every schema and strategy; every finished one is validated."""
    import jsonschema
    from tests.grammar.schemas import SCHEMAS

    names, told, finished, written = list(SCHEMAS), Counter[str](), Counter[str](), 0
    started = time.perf_counter()
    strategies = list(STRATEGIES.items())
    for turn in range(-(-count // len(names))):
        strategy, settings = strategies[turn % len(strategies)]
        for first in range(0, len(names), 20):
            some = names[first : first + 20]
            prompts = [[{"role": "user", "content": f"Write a {name} as JSON ({turn})."}] for name in some]
            schemas = [SCHEMAS[name] if isinstance(SCHEMAS[name], dict) else {} for name in some]
            answer = lm.generate(prompts, json_schema=schemas, max_new_tokens=most, **settings)
            for row, name in enumerate(some):
                written += 1
                told[strategy] += 1
                if answer.finish_reasons[row] != "eos":
                    continue
                finished[strategy] += 1
                value = answer.parse(row)
                try:
                    jsonschema.validate(value, SCHEMAS[name])
                except jsonschema.ValidationError as error:
                    print(f"WRONG {strategy} {name}: {answer.texts[row]!r}: {error.message}")
            print(f"\r{written} documents, {sum(finished.values())} finished", end="", file=sys.stderr, flush=True)
    print(f"\n{written} documents of {len(names)} schemas in {time.perf_counter() - started:.0f} s")
    for strategy in told:
        print(f"{strategy:>16}  {told[strategy]:5} written  {finished[strategy]:5} finished and valid")


def time_steps(lm: Any, rows: int, rounds: int, **settings: Any) -> float:
    """Milliseconds a step, the least of some rounds."""
    prompts = [f"Number {row}: tell me about the town." for row in range(rows)]
    best = []
    for _ in range(rounds):
        answer = lm.generate(prompts, chat=False, max_new_tokens=64, min_new_tokens=None, **settings)
        stats = answer.stats
        best.append((stats.total_seconds - stats.first_token_seconds) / max(1, max(map(len, answer.token_ids)) - 1))
    return 1e3 * min(best)


def measure_cost(lm: Any, batches: list[int], rounds: int) -> None:
    """What a grammar costs a step, and a new schema its first call."""
    for rows in batches:
        schemas = [{**COST_SCHEMA, "title": f"row {row}"} for row in range(rows)]
        plain, kept = [], []
        lm.generate("a", json_schema=COST_SCHEMA, drafter=False, max_new_tokens=2)
        for _ in range(rounds):
            plain.append(time_steps(lm, rows, 1, eos_token_id=None))
            kept.append(time_steps(lm, rows, 1, json_schema=schemas, drafter=False, eos_token_id=2))
        cost = min(kept) / min(plain) - 1
        print(
            f"{rows:3} rows: {min(plain):7.2f} ms a step, {min(kept):7.2f} with a schema per row: {100 * cost:+.1f} %"
        )
    first = []
    for number in range(20):
        schema = {**COST_SCHEMA, "description": f"schema {number}"}
        started = time.perf_counter()
        lm.generate("a", json_schema=schema, drafter=False, max_new_tokens=1)
        first.append(time.perf_counter() - started)
        again = time.perf_counter()
        lm.generate("a", json_schema=schema, drafter=False, max_new_tokens=1)
        first[-1] -= time.perf_counter() - again
    print(f"a new schema: {1e3 * statistics.median(first):.1f} ms more than a known one (median of {len(first)})")


def measure_forced(lm: Any, rounds: int) -> None:
    """A document full of fixed keys: tokens a second with drafts, without, and unconstrained."""
    found: dict[str, list[float]] = {"unconstrained": [], "kept": [], "kept, forced text drafted": []}
    for _ in range(rounds):
        for name, settings in zip(found, ({}, {"drafter": False}, {}), strict=True):
            asked = {"json_schema": FIXED} if name != "unconstrained" else {"suppress_tokens": [2]}
            answer = lm.generate("Customers:", max_new_tokens=96, **asked, **settings)
            stats = answer.stats
            seconds = stats.total_seconds - stats.first_token_seconds
            found[name].append(1e3 * seconds / max(1, len(answer.token_ids[0]) - 1))
            if name.endswith("drafted"):
                told = answer.speculation
    for name, values in found.items():
        print(f"{name:>28}: {min(values):6.2f} ms a token, {min(found['unconstrained']) / min(values):.2f}x")
    print(f"drafted {told.drafted[0]}, accepted {told.accepted[0]}" if told else "")


def load_shape(shape: str, tokenizer: Path) -> Any:
    """A Llama of random weights in bfloat16, with a tokenizer that has fewer tokens."""
    from gpu_step import make_model  # benchmarks/gpu_step.py

    from unspool.api import LanguageModel
    from unspool.loading.model import LoadedParts
    from unspool.text import Tokenizer

    model = make_model(shape)
    defaults = unspool.GenerationConfig(eos_token_id=2, pad_token_id=0)
    return LanguageModel(LoadedParts(shape, Path(), model, Tokenizer.from_folder(tokenizer), defaults))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=["1B", "8B"], help="random weights on a GPU instead of a model")
    parser.add_argument("--tokenizer", type=Path, help="a folder with the tokenizer of --shape")
    parser.add_argument("--documents", type=int, metavar="N")
    parser.add_argument("--most", type=int, default=160, help="new tokens of a document")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--forced", action="store_true")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    lm = load_shape(given.shape, given.tokenizer) if given.shape else unspool.load(given.model)
    print(
        f"{platform.machine()}, {lm.device}, {torch.get_num_threads()} threads, {lm!r}",
        json.dumps(vars(given), default=str),
    )
    if given.documents:
        write_documents(lm, given.documents, given.most)
    if given.cost:
        measure_cost(lm, given.batches, given.rounds)
    if given.forced:
        measure_forced(lm, given.rounds)


if __name__ == "__main__":
    main()
