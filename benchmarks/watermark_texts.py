"""Marked and unmarked texts of the default model, written and detected: part of benchmarks/watermark.py."""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unspool
from unspool.watermark.bayesian import read_g_values
from unspool.watermark.scoring import SynthIDScorer, make_scorer
from unspool.watermark.training import Examples, measure, train_detector

VOCAB = 49_152
LENGTHS = (25, 50, 100, 150, 200, 300, 400)
BATCH = 32
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


def sample_texts(lm: Any, prompts: list[str], length: int, seeds: list[int], marking: Any, **settings: Any) -> Any:
    """Texts of just this length, drawn from the model's own probabilities."""
    return lm.generate(
        prompts,
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        seed=seeds,
        watermarking_config=marking,
        **settings,
    )


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
            seeds = [1000 + length + first + place for place in range(len(batch))]
            made = sample_texts(lm, batch, length, seeds, SCHEMES[scheme], logprobs=0)
            assert made.logprobs is not None
            surprise = [[round(-one.logprob, 4) for one in row] for row in made.logprobs]
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"tokens": made.token_ids, "surprise": surprise}))
            part.replace(path)
            took = time.perf_counter() - begin
            print(f"{scheme} {length} {first}: {len(batch) * length / took:.0f} tokens/s", flush=True)


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
    is_counted = evidence.is_independent
    return float(scorer.standardise(evidence.values[is_counted].sum()[None], np.array([is_counted.sum()]))[0])


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
                counts = np.array([float(one.is_independent.sum()) for one in evidence])
                totals = np.array([float(one.values[one.is_independent].sum()) for one in evidence])
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
