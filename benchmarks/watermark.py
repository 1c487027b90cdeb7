"""How well watermarks are found, what they cost, and marked text from a GPU.

    python benchmarks/watermark.py --write [--schemes none,green,gumbel,synthid] [--texts 500]
    python benchmarks/watermark.py --score
    python benchmarks/watermark.py --cost [--device cuda --shape 8b --rows 32]
    python benchmarks/watermark.py --speculation --texts 24 --length 100
    python benchmarks/watermark.py --sample-on cuda --out FILE

`--write` generates texts with the default model (temperature 1, fixed seeds) into a folder, batch by batch, and goes on
where it was stopped. `--score` detects them: the table and the curve of docs/watermarking.md. `--cost` times a decoding
step's processors beside transformers'.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unspool
from unspool.watermark.bayesian import read_g_values
from unspool.watermark.scoring import SynthIDScorer, make_scorer
from unspool.watermark.training import Examples, measure, train_detector

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "watermark.json"
CURVE = HERE.parent / "docs" / "images" / "watermark_curve.svg"
TINY = HERE.parent / "tests" / "conformance" / "goldens" / "models" / "llama"
VOCAB = 49_152
LENGTHS = (25, 50, 100, 150, 200, 300, 400)
FOLDER = Path.home() / ".cache" / "unspool" / "watermark_texts"
BATCH = 32
NUM_TEXTS = 500
NUM_LONG = 96  # texts that have 400 tokens too, for the curve
KEYS = [
    *(654, 400, 836, 123, 340, 443, 597, 160, 57, 29, 590, 639, 13, 715, 468),
    *(990, 966, 226, 324, 585, 118, 504, 421, 521, 129, 669, 732, 225, 90, 960),
]
SCHEMES: dict[str, Any] = {
    "none": None,
    "green": unspool.WatermarkingConfig(bias=2.0, greenlist_ratio=0.25),
    "gumbel": unspool.GumbelWatermarkingConfig(),
    "synthid": unspool.SynthIDTextWatermarkingConfig(ngram_len=5, keys=KEYS),
}
MORE_SCHEMES: dict[str, Any] = {  # whose cost is measured
    "selfhash": unspool.WatermarkingConfig(bias=2.0, greenlist_ratio=0.25, seeding_scheme="selfhash", context_width=4),
}
OPENINGS = (
    *("The history of", "A short story about", "Why people like", "An introduction to", "The trouble with"),
    *("What nobody tells you about", "A letter about", "The future of", "How to teach children", "My first day with"),
    *("The science of", "A recipe inspired by", "Five questions on", "The economics of", "A day without"),
    *("An interview on", "The art of", "A guide for beginners to", "The oldest book on", "A debate about"),
)
TOPICS = (
    *("bread", "rivers", "chess", "bridges", "the night sky", "bees", "paper", "winter", "trains", "music"),
    *("maps", "gardens", "glass", "horses", "lighthouses", "salt", "clocks", "forests", "cities", "languages"),
    *("mathematics", "the sea", "memory", "football", "silence"),
)


def list_prompts() -> list[str]:
    """As many prompts as there are pairs of an opening and a topic."""
    return [f"{opening} {topic}" for topic in TOPICS for opening in OPENINGS]


def write_texts(schemes: list[str], num_texts: int, folder: Path) -> None:
    """Generate every scheme's texts, a file for each batch: tokens, and how likely the model found them."""
    lm = unspool.load("smollm2-135m")
    folder.mkdir(parents=True, exist_ok=True)
    works = [(first, 200) for first in range(0, num_texts, BATCH)]
    works += [(first, 400) for first in range(0, min(num_texts, NUM_LONG), BATCH)]
    for first, length in works:
        batch = list_prompts()[:num_texts][first : first + BATCH]
        for scheme in schemes:
            path = folder / f"{scheme}_{length}_{first:04}.json"
            if path.is_file():
                continue
            begin = time.perf_counter()
            made = lm.generate(
                batch,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                seed=[1000 + length + first + place for place in range(len(batch))],
                logprobs=0,
                watermarking_config=SCHEMES[scheme],
            )
            assert made.logprobs is not None
            surprise = [[round(-one.logprob, 4) for one in row] for row in made.logprobs]
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"tokens": made.token_ids, "surprise": surprise}))
            part.replace(path)
            took = time.perf_counter() - begin
            print(f"{scheme} {length} {first}: {len(batch) * length / took:.0f} tokens/s", flush=True)


# --- detecting ----------------------------------------------------------------------------------------------


def read_texts(folder: Path) -> dict[str, dict[int, list[tuple[list[int], list[float]]]]]:
    """What was written: by scheme and length, tokens and how surprising the model found them."""
    found: dict[str, dict[int, list[Any]]] = {scheme: {200: [], 400: []} for scheme in SCHEMES}
    for path in sorted(folder.glob("*_*_*.json")):
        scheme, length, _ = path.stem.split("_")
        content = json.loads(path.read_text())
        found[scheme][int(length)] += list(zip(content["tokens"], content["surprise"], strict=True))
    return found


def score_means(scorer: Any, tokens: list[int]) -> float:
    """The mean value of what counts: the statistic that p values come from."""
    evidence = scorer.read(tokens)
    return float(scorer.standardise(evidence.values[evidence.is_new].sum()[None], np.array([evidence.is_new.sum()]))[0])


def score_bayesian(marked: list[list[int]], plain: list[list[int]], length: int) -> tuple[list[float], list[float]]:
    """Log-odds of texts by detectors trained on the other half of them."""
    mark = SCHEMES["synthid"].construct_processor(VOCAB, "cpu")
    read = [read_g_values(mark, torch.tensor([row[:length] for row in rows]), None) for rows in (marked, plain)]
    odds: list[list[float]] = [[0.0] * len(marked), [0.0] * len(plain)]
    for half in (0, 1):
        train = [(values[1 - half :: 2], mask[1 - half :: 2]) for values, mask in read]
        detector = train_detector(Examples.join(*train))
        for kind, (values, mask) in enumerate(read):
            with torch.no_grad():
                odds[kind][half::2] = detector.score(values[half::2], mask[half::2]).tolist()
    return odds[0], odds[1]


def score_texts(folder: Path) -> dict[str, Any]:
    """True positive rates at 1 % false positives, by length; p values of unmarked text; perplexities."""
    texts = read_texts(folder)
    synthid = SCHEMES["synthid"].construct_processor(VOCAB, "cpu")
    scorers = {
        "green": make_scorer(SCHEMES["green"], VOCAB, 1 << 20),
        "gumbel": make_scorer(SCHEMES["gumbel"], VOCAB),
        "synthid mean": SynthIDScorer(synthid, is_weighted=False),
        "synthid weighted mean": SynthIDScorer(synthid),
    }
    results: dict[str, Any] = {"rates": {}, "perplexity": {}, "texts": {}}
    for scheme, held in texts.items():
        surprise = [value for rows in held.values() for _, row in rows for value in row]
        results["texts"][scheme] = {length: len(rows) for length, rows in held.items()}
        if surprise:
            results["perplexity"][scheme] = math.exp(statistics.fmean(surprise))
    for length in LENGTHS:
        size = 200 if length <= 200 else 400
        plain = [tokens for tokens, _ in texts["none"][size]]
        for name, scorer in scorers.items():
            marked = [tokens for tokens, _ in texts[name.split()[0]][size]]
            if not marked or not plain:
                continue
            scores = [[score_means(scorer, row[:length]) for row in rows] for rows in (marked, plain)]
            results["rates"].setdefault(name, {})[length] = measure(*scores, 0.01).true_positive_rate
            if length == 200:
                evidence = [scorer.read(row) for row in plain]
                counts = np.array([float(one.is_new.sum()) for one in evidence])
                totals = np.array([float(one.values[one.is_new].sum()) for one in evidence])
                p_values = scorer.tail(totals, counts)
                told = {str(level): float((p_values <= level).mean()) for level in (0.01, 0.001)}
                results.setdefault("false_positives", {})[name] = told
        marked = [tokens for tokens, _ in texts["synthid"][size]]
        if min(len(marked), len(plain)) >= 32:
            odds = score_bayesian(marked, plain, length)
            results["rates"].setdefault("synthid Bayesian", {})[length] = measure(*odds, 0.01).true_positive_rate
    return results


def draw_curve(rates: dict[str, dict[Any, float]]) -> str:
    """True positive rates against length, as SVG."""
    colours = ("#4338ca", "#0f8a5f", "#c2660c", "#b3261e", "#6b7280")
    width, height, left, base = 640.0, 320.0, 50.0, 280.0

    def place(length: float, rate: float) -> str:
        return f"{left + (width - left - 20) * math.log(length / 25) / math.log(16):.1f},{base - 240 * rate:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height + 40:g}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for rate in (0, 0.25, 0.5, 0.75, 1):
        y = base - 240 * rate
        parts.append(f'<path d="M{left} {y}H{width - 20}" stroke="#ddd"/><text x="12" y="{y + 4}">{rate:g}</text>')
    for length in LENGTHS:
        x = place(length, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{base + 18}" text-anchor="middle">{length}</text>')
    for number, (name, found) in enumerate(rates.items()):
        points = " ".join(place(float(length), rate) for length, rate in found.items())
        x, y = left + 200 * (number % 3), base + 42 + 18 * (number // 3)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[number % 5]}" stroke-width="2"/>')
        parts.append(f'<text x="{x}" y="{y}" fill="{colours[number % 5]}">{name}</text>')
    parts.append(f'<text x="{left}" y="20">true positive rate at 1 % false positives, by tokens</text></svg>')
    return "".join(parts)


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


def measure_steps(device: str, shape: str, rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a sampled step with each mark and without: longer calls less shorter ones, in turn."""
    if shape == "8b":
        from gpu_step import make_config, make_weights  # benchmarks/gpu_step.py

        from unspool.models.registry import build_model
        from unspool.models.weights import MemorySource

        config = make_config("8B")
        weights = MemorySource(make_weights(config, device))
        model = build_model(config, weights, is_gguf=False, device=torch.device(device), dtype=torch.bfloat16)
    else:
        model = unspool.load("smollm2-135m", device=device).model
    prompt = torch.randint(0, 1000, (rows, 32), generator=torch.Generator().manual_seed(0)).to(device)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 1, "eos_token_id": None}
    schemes = {**SCHEMES, **MORE_SCHEMES}

    def call(name: str, length: int) -> float:
        begin = time.perf_counter()
        unspool.generate(model, input_ids=prompt, max_new_tokens=length, watermarking_config=schemes[name], **settings)
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
            made = lm.generate(
                prompts,
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                seed=list(range(num_texts)),
                watermarking_config=config,
                **settings,
            )
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
    if arguments.speculation:
        measure_speculation(arguments.texts, arguments.length)
    if arguments.sample_on:
        sample(arguments.sample_on, arguments.out)


if __name__ == "__main__":
    main()
