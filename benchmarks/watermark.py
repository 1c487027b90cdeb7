"""How well watermarks are found, what they cost, and marked text from a GPU.

    python benchmarks/watermark.py --write [--schemes none,green,gumbel,synthid] [--texts 500]
    python benchmarks/watermark.py --score
    python benchmarks/watermark.py --cost [--device cuda --shape 8b --rows 32]
    python benchmarks/watermark.py --choosing [--rows 32] [--shape 8b --layers 2]
    python benchmarks/watermark.py --speculation --texts 24 --length 100
    python benchmarks/watermark.py --sample-on cuda --out FILE

`--write` generates texts with the default model (temperature 1, fixed seeds) into a folder, batch by batch, and goes on
where it was stopped. `--score` detects them: the table and the curve of docs/watermarking.md. `--cost` times a decoding
step's processors beside transformers'. `--choosing` times what marks add to choosing tokens inside the steps of a CPU,
which differs less from run to run than whole steps do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from watermark_texts import (  # benchmarks/watermark_texts.py
    KEYS,
    SCHEMES,
    VOCAB,
    draw_curve,
    list_prompts,
    sample_texts,
    score_texts,
    write_texts,
)

import unspool
from unspool.decoding.strategies.choosing import LogitsChoice
from unspool.watermark.scoring import make_scorer

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "watermark.json"
CURVE = HERE.parent / "docs" / "images" / "watermark_curve.svg"
TINY = HERE.parent / "tests" / "conformance" / "goldens" / "models" / "llama"
FOLDER = Path.home() / ".cache" / "unspool" / "watermark_texts"
NUM_TEXTS = 500
MORE_SCHEMES: dict[str, Any] = {  # whose cost is measured
    "selfhash": unspool.WatermarkingConfig(bias=2.0, greenlist_ratio=0.25, seeding_scheme="selfhash", context_width=4),
}


# --- costs --------------------------------------------------------------------------------------------------


def time_call(call: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of a call's milliseconds."""
    times = []
    for number in range(repeats + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def make_peer(name: str, config: Any, vocab: int, device: str) -> Any:
    """transformers' processor of a scheme; it has no Gumbel one, and its selfhash takes a second for a few rows."""
    import transformers

    if name in ("gumbel", "selfhash"):
        return None
    settings = config.to_dict()
    if name == "synthid":
        return transformers.SynthIDTextWatermarkLogitsProcessor(**settings, device=device)
    return transformers.WatermarkLogitsProcessor(vocab, device, **settings)


def measure_costs(device: str, shape: str, rows: int, repeats: int) -> None:
    """Print what marking adds to a step of sampling, and what the processors take alone, beside transformers'."""
    vocab = 128_256 if shape == "8b" else VOCAB
    steps = measure_steps(device, shape, rows, repeats)
    print(f"{shape} on {device}, {rows} rows: a step takes {steps['none']:.3f} ms")
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, vocab + 1, dtype=torch.float32)
    histories = [
        torch.multinomial(1 / ranks, rows * 64, replacement=True, generator=generator).view(rows, 64).to(device)
        for _ in range(repeats + 3)
    ]  # new contexts in every call, of Zipf's frequencies
    scores = (3 * torch.randn(rows, vocab, generator=generator)).to(device)
    for name, config in {**SCHEMES, **MORE_SCHEMES}.items():
        if config is None:
            continue
        told = []
        for mark in (config.construct_processor(vocab, device), make_peer(name, config, vocab, device)):
            if mark is None:
                told.append("-")
                continue
            supply = iter(histories)
            took = time_call(lambda mark=mark, supply=supply: mark(next(supply), scores), device, repeats)
            told.append(f"{took:.3f} ms ({100 * took / steps['none']:.1f} %)")
        added = steps[name] - steps["none"]
        whole = f"{added:+.3f} ms ({100 * added / steps['none']:+.1f} %)"
        print(f"{name:9} adds {whole:>20}; alone {told[0]:>20}   transformers: {told[1]}")
    if device == "cpu":
        tokens = torch.multinomial(1 / ranks, 1000, replacement=True, generator=generator).tolist()
        for name in ("green", "selfhash", "gumbel", "synthid"):
            scorer = make_scorer({**SCHEMES, **MORE_SCHEMES}[name], vocab)
            took = time_call(lambda scorer=scorer: scorer.read(tokens), device, 5)
            print(f"detecting {name} in 1,000 tokens: {took:.1f} ms")


def load_model(device: str, shape: str, layers: int | None = None) -> Any:
    """The default model, or one of random weights in the 8B shape, in 4 bits on a CPU."""
    if shape != "8b":
        return unspool.load("smollm2-135m", device=device).model
    from gpu_step import build_native, make_config, make_weights  # benchmarks/gpu_step.py

    config = make_config("8B")
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    weights = make_weights(config, device)
    if device == "cpu":
        return build_native(config, weights, device, torch.float32, "int4")
    return build_native(config, weights, device)


def measure_steps(device: str, shape: str, rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a sampled step with each mark and without: longer calls less shorter ones, in turn."""
    model = load_model(device, shape)
    prompt = torch.randint(0, 1000, (rows, 32), generator=torch.Generator().manual_seed(0)).to(device)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "eos_token_id": None}
    schemes = {**SCHEMES, **MORE_SCHEMES}
    seeds = itertools.count(1)  # every call writes another text: lists that the one before has left would cost nothing

    def call(name: str, length: int) -> float:
        begin = time.perf_counter()
        mark, seed = schemes[name], next(seeds)
        unspool.generate(
            model, input_ids=prompt, max_new_tokens=length, watermarking_config=mark, seed=seed, **settings
        )
        if device == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begin)

    times: dict[str, list[float]] = {name: [] for name in schemes}
    for number in range(repeats // 4 + 1):
        for name in schemes:
            short, long = call(name, 8), call(name, 72)
            if number:
                times[name].append((long - short) / 64)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_choosing(shape: str, layers: int | None, rows: int, repeats: int) -> None:
    """Print what choosing a step's tokens takes on a CPU with each mark and without, over texts that all differ."""
    model = load_model("cpu", shape, layers)
    schemes = {**SCHEMES, **MORE_SCHEMES}
    begun: list[float] = []
    took: list[float] = []
    choose = LogitsChoice.__call__

    def time_choice(self: LogitsChoice, likeliest: list[int], logits: torch.Tensor) -> list[int]:
        begun.append(time.perf_counter())
        chosen = choose(self, likeliest, logits)
        took.append(time.perf_counter() - begun[-1])
        return chosen

    generator = torch.Generator().manual_seed(0)
    choices: dict[str, list[float]] = {name: [] for name in schemes}
    steps: list[float] = []
    LogitsChoice.__call__ = time_choice
    for number in range(repeats + 1):
        for name, mark in schemes.items():
            begun.clear(), took.clear()
            prompt = torch.randint(0, 1000, (rows, 32), generator=generator)
            unspool.generate(
                model,
                input_ids=prompt,
                max_new_tokens=72,
                watermarking_config=mark,
                seed=number,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
            )
            if number:  # the first texts fill caches of code
                choices[name] += took[4:]
                steps += [b - a for a, b in itertools.pairwise(begun[4:])] if mark is None else []
    LogitsChoice.__call__ = choose
    step, plain = 1000 * statistics.fmean(steps), 1000 * statistics.fmean(choices["none"])
    print(f"{shape}, {model.info.num_layers} layers, {rows} rows: a step {step:.2f} ms, choosing {plain:.3f} of it")
    for name, found in choices.items():
        added = 1000 * statistics.fmean(found) - plain
        print(f"{name:9} adds {added:+.3f} ms ({100 * added / step:+.2f} %)")


# --- speculation --------------------------------------------------------------------------------------------


def measure_speculation(num_texts: int, length: int) -> None:
    """Print how well marks are found in texts written with and without speculation: true positives at a p value of
    1 %, the mean z score, and how many drafted tokens were accepted."""
    lm = unspool.load("smollm2-135m")
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 4},
        "draft model": {"assistant_model": lm.model, "num_assistant_tokens": 3},
    }
    prompts = list_prompts()[:num_texts]
    print("| scheme | way | found at p = 1 % | mean z | drafts accepted |\n|---|---|---|---|---|")
    for scheme, config in SCHEMES.items():
        if config is None:
            continue
        detector = unspool.WatermarkDetector(lm.model.info, "cpu", config, ignore_repeated_ngrams=True)
        for way, settings in ways.items():
            made = sample_texts(lm, prompts, length, list(range(num_texts)), config, **settings)
            told = [detector(torch.tensor([row]), return_dict=True) for row in made.token_ids]
            found = statistics.fmean(float(one.p_value[0] <= 0.01) for one in told)
            z_score = statistics.fmean(float(one.z_score[0]) for one in told)
            drafts = made.stats.speculation
            share = "-" if drafts is None else f"{sum(drafts.accepted)} of {sum(drafts.drafted)}"
            print(f"| {scheme} | {way} | {found:.3f} | {z_score:.1f} | {share} |", flush=True)


# --- a text from another device -----------------------------------------------------------------------------


def sample(device: str, path: Path) -> None:
    """Write marked text of a tiny model, which the repository has, with what a detector says of it here."""
    lm = unspool.load(TINY, device=device, native=True)
    prompt = torch.tensor([[5, 6, 7, 8]], device=lm.model.device)
    listed = []
    marks = (
        unspool.WatermarkingConfig(bias=4.0, greenlist_ratio=0.25),
        unspool.WatermarkingConfig(bias=4.0, greenlist_ratio=0.25, seeding_scheme="selfhash", context_width=3),
        unspool.GumbelWatermarkingConfig(context_width=2),
        unspool.SynthIDTextWatermarkingConfig(ngram_len=3, keys=KEYS[:12]),
    )
    for mark in marks:
        made = unspool.generate(
            lm.model,
            input_ids=prompt,
            max_new_tokens=100,
            do_sample=True,
            top_k=0,
            seed=3,
            eos_token_id=None,
            watermarking_config=mark,
        )
        assert isinstance(made, torch.Tensor)
        tokens = made[:, 4:]
        detector = unspool.WatermarkDetector(lm.model.info, device, mark, ignore_repeated_ngrams=True)
        told = detector(tokens, return_dict=True)
        listed.append(
            {
                "watermark": mark.to_dict(),
                "tokens": tokens[0].tolist(),
                "z_score": float(told.z_score[0]),
                "p_value": float(told.p_value[0]),
            }
        )
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    path.write_text(json.dumps({"device": name, "texts": listed}, indent=1) + "\n")
    print(f"wrote {path}: z scores {[round(one['z_score'], 2) for one in listed]}")


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--choosing", action="store_true")
    parser.add_argument("--layers", type=int, help="of the 8B shape, for --choosing")
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("--length", type=int, default=200, help="tokens of a text of --speculation")
    parser.add_argument("--sample-on", metavar="DEVICE")
    parser.add_argument("--out", type=Path, default=Path("watermark_text.json"))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--texts", type=int, default=NUM_TEXTS)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=["135m", "8b"], default="135m")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.write:
        write_texts(arguments.schemes.split(","), arguments.texts, arguments.folder)
    if arguments.score:
        results = score_texts(arguments.folder)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        CURVE.write_text(draw_curve(results["rates"]) + "\n")
        print(json.dumps(results, indent=1))
    if arguments.cost:
        measure_costs(arguments.device, arguments.shape, arguments.rows, arguments.repeats)
    if arguments.choosing:
        measure_choosing(arguments.shape, arguments.layers, arguments.rows, arguments.repeats)
    if arguments.speculation:
        measure_speculation(arguments.texts, arguments.length)
    if arguments.sample_on:
        sample(arguments.sample_on, arguments.out)


if __name__ == "__main__":
    main()
