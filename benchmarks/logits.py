"""What processors cost beside transformers': each alone, and a usual chain with the draw.

    python benchmarks/logits.py [--device cuda] [--rows 1 16 64] [--vocab 128256] [--history 4096] [--chain-only]

Times are medians of interleaved runs, in milliseconds; a ratio above 1 is how many times faster unspool's is.
Prints a Markdown table for docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

import unspool
from unspool.decoding.randomness import Uniforms
from unspool.decoding.tails import draw_from_tail
from unspool.logits.fused import split_tail

CHAIN = "repetition 1.1 → temperature 0.7 → top-k 50 → top-p 0.9 → draw"


@dataclass(frozen=True)
class Sheet:
    """What is measured on: scores as a model gives them, and a history."""

    ids: torch.Tensor  # (rows, history)
    scores: torch.Tensor  # (rows, vocab)

    @classmethod
    def make(cls, rows: int, vocab: int, history: int, device: str) -> Sheet:
        """Zipf-like probabilities with noise; a history that repeats itself."""
        generator = torch.Generator().manual_seed(0)
        rank = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
        scores = -1.1 * torch.log(rank + 1.0) + torch.randn(rows, vocab, generator=generator) * 0.5
        ids = torch.randint(0, min(vocab, 2000), (rows, history), generator=generator)
        return cls(ids.to(device), scores.to(device))


def make_pairs(sheet: Sheet) -> dict[str, tuple[Any, Any]]:
    """Each processor and the reference's, by the setting that switches it on; None where it has none."""
    ids, device = sheet.ids, sheet.ids.device
    history = ids.shape[1]
    prompt = ids[:, : history // 2]
    bias = {(int(a), int(b)): -1.0 for a, b in zip(range(64), range(1, 65), strict=True)} | {(7,): 2.0}
    words = [[a, a + 1] for a in range(64)] + [[500]]

    def both(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return getattr(unspool, name)(*args), getattr(transformers, name)(*args, **kwargs)

    top_h = transformers.generation.logits_process.TopHLogitsWarper
    return {
        "sequence_bias (65 sequences)": both("SequenceBiasLogitsProcessor", bias),
        "encoder_repetition_penalty": both("EncoderRepetitionPenaltyLogitsProcessor", 1.2, prompt),
        "repetition_penalty": both("RepetitionPenaltyLogitsProcessor", 1.1),
        "presence_penalty": (unspool.PresencePenaltyLogitsProcessor(0.5), None),
        "frequency_penalty": (unspool.FrequencyPenaltyLogitsProcessor(0.5), None),
        "dry": (unspool.DRYLogitsProcessor(0.8, 1.75, 2, [13]), None),
        "no_repeat_ngram_size=3": both("NoRepeatNGramLogitsProcessor", 3),
        "encoder_no_repeat_ngram_size=3": both("EncoderNoRepeatNGramLogitsProcessor", 3, prompt),
        "bad_words_ids (65 words)": both("NoBadWordsLogitsProcessor", words, 2),
        "min_new_tokens": both("MinNewTokensLengthLogitsProcessor", 0, history + 9, [2, 3], device=device),
        "suppress_tokens (64)": both("SuppressTokensLogitsProcessor", list(range(64)), device=device),
        "forced_eos_token_id": both("ForcedEOSTokenLogitsProcessor", history + 1, 2, device=device),
        "remove_invalid_values": both("InfNanRemoveLogitsProcessor"),
        "temperature": both("TemperatureLogitsWarper", 0.7),
        "dynatemp_range": (unspool.DynamicTemperatureLogitsWarper(1.0, 0.5), None),
        "top_n_sigma": (unspool.TopNSigmaLogitsWarper(1.0), None),
        "top_h": (unspool.TopHLogitsWarper(0.4), top_h(0.4)),
        "top_k=50": both("TopKLogitsWarper", 50),
        "top_p=0.9": both("TopPLogitsWarper", 0.9),
        "min_p": both("MinPLogitsWarper", 0.05),
        "top_a": (unspool.TopALogitsWarper(0.2), None),
        "typical_p": both("TypicalLogitsWarper", 0.9),
        "epsilon_cutoff": both("EpsilonLogitsWarper", 1e-4),
        "eta_cutoff": both("EtaLogitsWarper", 1e-4, device=device),
        "mirostat_tau": (unspool.MirostatLogitsWarper(5.0), None),
        "renormalize_logits": both("LogitNormalization"),
    }


def make_chain(sheet: Sheet) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The usual chain, as decoding runs it here, and as the reference's `_sample` does."""
    kinds = (("RepetitionPenaltyLogitsProcessor", 1.1), ("TemperatureLogitsWarper", 0.7), ("TopKLogitsWarper", 50))
    kinds += (("TopPLogitsWarper", 0.9),)
    head, tail = split_tail(unspool.LogitsProcessorList(getattr(unspool, name)(value) for name, value in kinds))
    theirs = transformers.LogitsProcessorList([getattr(transformers, name)(value) for name, value in kinds])
    rows = sheet.scores.shape[0]
    seeds = torch.arange(rows, device=sheet.ids.device)
    uniforms, positions = Uniforms(), iter(range(10**9))
    assert tail is not None

    def mine() -> torch.Tensor:
        return draw_from_tail(tail, head(sheet.ids, sheet.scores), uniforms.take(seeds, [next(positions)] * rows))

    def other() -> torch.Tensor:
        scores = theirs(sheet.ids, sheet.scores)
        return torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)

    return mine, other


def measure(calls: list[Callable[[], Any]], device: str, seconds: float) -> list[float]:
    """Median milliseconds of each call, taken in turns so that what else the machine does hits all alike."""

    def once(call: Callable[[], Any]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    for _ in range(10 if device == "cuda" else 1):  # until all is captured that will be
        for call in calls:
            call()
    times: list[list[float]] = [[] for _ in calls]
    ends = time.perf_counter() + seconds
    while len(times[0]) < 3 or (time.perf_counter() < ends and len(times[0]) < 200):
        for call, taken in zip(calls, times, strict=True):
            taken.append(once(call))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--history", type=int, default=4_096)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line and batch")
    parser.add_argument("--chain-only", action="store_true")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"vocabulary {options.vocab}, history {options.history}, float32, {where}, torch {torch.__version__}, ")
    print(f"transformers {transformers.__version__}; ms a step: unspool / transformers (ratio)\n")
    lines: dict[str, list[str]] = {}
    with torch.inference_mode():
        for rows in options.rows:
            sheet = Sheet.make(rows, options.vocab, options.history, options.device)
            measured: dict[str, tuple[Callable[[], Any], ...]] = {CHAIN: make_chain(sheet)}
            if not options.chain_only:
                for name, pair in make_pairs(sheet).items():
                    measured[name] = tuple(partial(one, sheet.ids, sheet.scores) for one in pair if one is not None)
            for name, calls in measured.items():
                times = measure(list(calls), options.device, options.seconds)
                cell = f"{times[0]:.2f}" + (f" / {times[1]:.2f} ({times[1] / times[0]:.1f}×)" if times[1:] else "")
                lines.setdefault(name, []).append(cell)
    print("| |" + "".join(f" batch {rows} |" for rows in options.rows))
    print("|---|" + "---|" * len(options.rows))
    for name, cells in lines.items():
        print(f"| {name} |" + "".join(f" {cell} |" for cell in cells))


if __name__ == "__main__":
    main()
