"""Whisper tiny.en on a sound, beside faster-whisper (int8) and transformers: seconds and real-time factor.

    python benchmarks/speech.py talk.wav --threads 2 --rounds 5 [--ctranslate2 FOLDER] [--transformers]

FOLDER holds the model in CTranslate2's format (model.bin). Engines take turns; the least of the rounds counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import unspool


def make_ours(path: str, threads: int) -> Callable[[], str]:
    """unspool in float32."""
    lm = unspool.load("whisper-tiny.en", threads=threads)
    return lambda: str(lm.transcribe(path, return_timestamps=True).text)


def make_ctranslate2(path: str, threads: int, folder: str) -> Callable[[], str]:
    """faster-whisper in int8, greedy, with its own fall-back."""
    from faster_whisper import WhisperModel

    model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=threads)

    def run() -> str:
        segments, _ = model.transcribe(path, beam_size=1, condition_on_previous_text=False, language="en")
        return "".join(segment.text for segment in segments)

    return run


def make_transformers(path: str, threads: int) -> Callable[[], str]:
    """transformers' own generate() over the same features."""
    import numpy as np
    import transformers

    from unspool.loading.catalogue import find_model
    from unspool.speech.features import extract_features
    from unspool.speech.sound import open_sound

    torch.set_num_threads(threads)
    folder = find_model("whisper-tiny.en")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    settings = {"temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "compression_ratio_threshold": 1.35}
    settings |= {"logprob_threshold": -1.0, "no_speech_threshold": 0.6}

    def run() -> str:
        features = extract_features(np.concatenate(list(open_sound(path).blocks())))[None]
        return str(model.generate(input_features=features, return_timestamps=True, **settings).shape)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sound")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ctranslate2", metavar="FOLDER")
    parser.add_argument("--transformers", action="store_true")
    arguments = parser.parse_args()
    engines = {"unspool": make_ours(arguments.sound, arguments.threads)}
    if arguments.ctranslate2:
        engines["faster-whisper int8"] = make_ctranslate2(arguments.sound, arguments.threads, arguments.ctranslate2)
    if arguments.transformers:
        engines["transformers"] = make_transformers(arguments.sound, arguments.threads)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(arguments.rounds):
        for name, run in engines.items():
            wall, used = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - used
            old = best.get(name, spent)
            best[name] = min(old[0], spent[0]), min(old[1], spent[1])
    seconds = unspool.load("whisper-tiny.en").transcribe(arguments.sound).duration
    for name, (wall, used) in best.items():
        print(f"{name:<20} {wall:7.2f} s  {used:7.2f} processor s  real-time factor {wall / seconds:.3f}")


if __name__ == "__main__":
    main()
