"""What a call of an encoder-decoder begins with on a GPU: the encoder, the sources' keys, the first token.

    python benchmarks/gpu_sources.py [--shapes bart-large …] [--runs 1x512 8x512] [--ragged] [--profile] [--peer]
    python benchmarks/gpu_sources.py --transcribe 60 [--new 100]

Random weights in bfloat16. Times are from a call to the end of its work on the device, the median of the rounds. The
floor has the operations of the encoder and of the sources' keys at the rate of a large product, or the weights at the
bandwidth of a copy, whichever takes longer; `busy` is how long the encoder's kernels run. With `--ragged` each source
is shorter than the one before. `--transcribe` reads so many seconds of noise as Whisper-large-v3, and says where the
time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_pairs import SHAPES, draw_source, make  # benchmarks/gpu_pairs.py
from gpu_prompts import measure_peak, profile_pass  # benchmarks/gpu_prompts.py
from gpu_step import measure_bandwidth  # benchmarks/gpu_step.py

import unspool
from unspool.models.weights import iterate_tensors

THRESHOLDS = ("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold")
END, START, FIRST_LANGUAGE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = (
    50257, 50258, 50259, 50359, 50360, 50362, 50363, 50364
)  # fmt: skip


def time_wall(run: Callable[[], object], rounds: int) -> float:
    """The median of a call's milliseconds, to the end of its work on the device."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def time_busy(run: Callable[[], object]) -> tuple[float, int]:
    """The milliseconds that a call's kernels run, and how many there are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(one.device_time_total for one in events) / 1e3, sum(one.count for one in events)


def find_floors(model: Any, rows: int, length: int, peak: float, bandwidth: float) -> tuple[float, float]:
    """Milliseconds of the encoder, and of the sources' keys."""
    spec, weights = model.spec, model.weights
    if spec.features is not None:
        length = spec.features.positions
    matrices = [one for one in iterate_tensors(weights.encoder.layers) if one.dim() == 2]
    attention = 4 * length * spec.encoder.num_heads * spec.encoder.head_dim * spec.encoder.num_layers
    encoder = rows * length * (2 * sum(one.numel() for one in matrices) + attention)
    if spec.features is not None:
        first, second = (one.weight.numel() for one in weights.encoder.convolutions)
        encoder += rows * length * (4 * first + 2 * second)
    crosses = [cross.kv.weight for cross in weights.decoder.crosses]
    keys = rows * length * 2 * sum(one.numel() for one in crosses)
    made = rows * length * sum(one.shape[0] for one in crosses) * 2
    floors = (
        (encoder, sum(one.nbytes for one in matrices)),
        (keys, made + sum(one.nbytes for one in crosses)),
    )
    return tuple(1e3 * max(work / peak, read / bandwidth) for work, read in floors)  # type: ignore[return-value]


def measure_first(
    name: str, model: Any, reference: Any, run: str, options: argparse.Namespace, peak: float, bandwidth: float
) -> None:
    """One line."""
    rows, length = map(int, run.split("x"))
    source = draw_source(model, rows, length)
    ids, features = source.get("input_ids"), source.get("input_features")
    counts = None
    if options.ragged and ids is not None:
        counts = [length - row * length // (2 * rows) for row in range(rows)]
        source["attention_mask"] = (torch.arange(length) < torch.tensor(counts)[:, None]).long().cuda()

    def encode() -> Any:
        return model.encode(ids, counts, embeds=features)

    def first() -> None:
        unspool.generate(model, **source, max_new_tokens=1, eos_token_id=None, do_sample=False)

    encoded = encode()

    def project() -> Any:
        return model.new_cache("dynamic", rows, 64, encoded)

    for work in (encode, project, first, encode, project, first):
        work()
    took, made, whole = (time_wall(work, options.rounds) for work in (encode, project, first))
    (busy, kernels), (made_busy, made_kernels) = time_busy(encode), time_busy(project)
    floors = find_floors(model, rows, length, peak, bandwidth)
    told = f"{name:17} {run:>7}: encoder {took:7.3f} ms (busy {busy:.3f} in {kernels}; floor {floors[0]:.3f}), "
    told += f"keys {made:.3f} (busy {made_busy:.3f} in {made_kernels}; floor {floors[1]:.3f}), first token {whole:.2f}"
    if reference is not None:
        encoder = reference.get_encoder()
        given = {"input_features": features} if ids is None else {"input_ids": ids}
        given |= {"attention_mask": source["attention_mask"]} if "attention_mask" in source else {}
        from transformers.generation import GenerationMixin

        def theirs() -> None:
            GenerationMixin.generate(reference, **source, max_new_tokens=1, do_sample=False)

        encoder(**given)
        theirs()
        there, there_whole = time_wall(lambda: encoder(**given), options.rounds), time_wall(theirs, options.rounds)
        told += f"; transformers {there:.2f}, {there_whole:.1f}"
    print(told, flush=True)
    if options.profile:
        profile_pass(encode, 14)


class Wordless:
    """A tokenizer whose tokens are no text."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        """A word for each."""
        return " ".join(map(str, tokens))


def make_listener(model: Any) -> Any:
    """A language model of large-v3's markers."""
    from unspool.api.language_model import LanguageModel
    from unspool.config import GenerationConfig
    from unspool.loading.model import LoadedParts

    config = GenerationConfig(
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=END,
        decoder_start_token_id=START,
        max_length=448,
        suppress_tokens=[*range(1, 90), START, PREVIOUS, NO_SPEECH],
        begin_suppress_tokens=[220, END],
    )
    extra = {
        "lang_to_id": {f"<|{code}|>": FIRST_LANGUAGE + place for place, code in enumerate(("en", "zh", "de", "es"))},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
        "is_multilingual": True,
        "no_timestamps_token_id": NO_TIMES,
        "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
    }
    for name, value in extra.items():
        setattr(config, name, value)
    return LanguageModel(LoadedParts("whisper-large-v3", Path(), model, Wordless(), config))  # type: ignore[arg-type]


def measure_transcription(model: Any, seconds: float, new: int, rounds: int) -> None:
    """Print what a sound takes, and where."""
    lm = make_listener(model)
    sound = np.random.default_rng(0).normal(size=int(16_000 * seconds)).astype(np.float32) * 0.1
    for name, settings in {
        "plain": dict.fromkeys(THRESHOLDS),
        "thresholds": {},
        "a language": {"language": "en"},
    }.items():
        told = {"temperature": 0.0, "max_new_tokens": new, **settings}

        def run(told: dict[str, Any] = told) -> Any:
            return lm.transcribe(sound, **told)

        found = run()
        took = time_wall(run, rounds)
        tokens = sum(len(one.tokens) for one in found.segments)
        told_ = f"transcribe {seconds:.0f} s, {name}: {took:.1f} ms, {tokens} tokens, {len(found.segments)} segments"
        print(told_, flush=True)
    profile = cProfile.Profile()
    torch.cuda.synchronize()
    profile.enable()
    lm.transcribe(sound, temperature=0.0, max_new_tokens=new)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(40)
    print("\n".join(line[:150] for line in text.getvalue().splitlines()), flush=True)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--runs", nargs="+", default=["1x512", "8x512"], help="rows x length; Whisper's is its own")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--transcribe", type=float, metavar="SECONDS")
    parser.add_argument("--new", type=int, default=100, help="tokens of a window")
    options = parser.parse_args()
    peak, bandwidth = measure_peak(), measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peak / 1e12:.0f} TFLOP/s", flush=True)
    for name in ["whisper-large-v3"] if options.transcribe else options.shapes:
        model, reference = make(name)
        if options.transcribe:
            measure_transcription(model, options.transcribe, options.new, options.rounds)
            return
        for run in options.runs:
            measure_first(name, model, reference if options.peer else None, run, options, peak, bandwidth)
        del model, reference
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
