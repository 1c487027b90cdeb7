"""Translation models on a CPU beside CTranslate2 and transformers: greedy and four beams, one sentence and eight.

    python benchmarks/encoder_decoders.py FOLDER --ctranslate2 CONVERTED --threads 2 --rounds 5 [--transformers]
        [--packages SITE_PACKAGES] [--beams 1 4] [--sentences 1 8]

FOLDER is a model in the hub's layout (an OPUS-MT zh-en, or a T5), CONVERTED the same in CTranslate2's format, of which
both compute types are measured. SITE_PACKAGES is where ctranslate2 is installed, if not beside unspool. Engines take
turns; the least of the rounds counts. A row's text ends where the model ends it, after 64 tokens at most; a beam search
ends with `early_stopping=True`, when as many beams have ended as there are, which is what CTranslate2 does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import unspool

CHINESE = (
    "这本书讲述了一个年轻人在战争年代寻找父亲的故事，出版后受到了读者的广泛欢迎。",
    "今天天气很好，我们去公园散步吧。",
    "他在北京的一家大公司工作了十年，去年才回到家乡。",
    "请问，火车站怎么走？",
    "我昨天买的手机坏了。",
    "科学家们发现，这种鸟每年都会飞越数千公里到南方过冬。",
    "由于大雨，今天晚上的音乐会改到下周六举行，门票继续有效。",
    "你能帮我一个忙吗？",
)
ENGLISH = (
    "Translate to French: My father has worked for the same company for more than ten years.",
    "Translate to German: The house is wonderful.",
    "Write a title: add retry logic to the download client and log every failure with its reason",
    "Translate to German: Please open the window, it is very warm in here.",
    "Answer the question: What is the capital of France?",
    "Summarize: The committee met on Monday to discuss the new budget. After four hours, members agreed to spend more "
    "on schools and less on roads. The mayor said the decision would be final by the end of the week.",
    "Translate to Spanish: We will meet again tomorrow morning at the station.",
    "Write a title: fix the crash when the settings file is empty",
)
MOST_TOKENS = 64
Run = Callable[[int, int], list[list[int]]]  # (sentences, beams) to the new tokens of each


def read_sources(lm: unspool.LanguageModel, family: str) -> list[list[int]]:
    """The sentences' tokens."""
    texts = CHINESE if family == "marian" else ENGLISH
    return [list(lm.tokenizer.encode(text)) for text in texts]


def pad(rows: Sequence[list[int]], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the right, and their mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [filler] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def trim(row: Sequence[int], config: dict[str, int]) -> list[int]:
    """New tokens up to the first end, which is left out."""
    found = [int(token) for token in row][1:]
    end = config["eos_token_id"]
    return found[: found.index(end)] if end in found else [token for token in found if token != config["pad_token_id"]]


def stop_early(beams: int) -> dict[str, bool]:
    """The setting of a beam search that ends when as many beams have ended as there are."""
    return {"early_stopping": True} if beams > 1 else {}


def make_ours(folder: str, threads: int, kind: str | None, sources: list[list[int]], config: dict[str, int]) -> Run:
    """unspool: float32, or quantised weights."""
    lm = unspool.load(folder, threads=threads, quantize=kind)

    def run(count: int, beams: int) -> list[list[int]]:
        ids, mask = pad(sources[:count], config["pad_token_id"])
        told = {"num_beams": beams, "do_sample": False, "max_new_tokens": MOST_TOKENS, **stop_early(beams)}
        made = unspool.generate(lm.model, ids, attention_mask=mask, **told)
        return [trim(row, config) for row in made.tolist()]

    return run


def make_transformers(folder: str, sources: list[list[int]], config: dict[str, int]) -> Run:
    """transformers' own generate()."""
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(count: int, beams: int) -> list[list[int]]:
        ids, mask = pad(sources[:count], config["pad_token_id"])
        told = {"num_beams": beams, "do_sample": False, "max_new_tokens": MOST_TOKENS, **stop_early(beams)}
        made = model.generate(ids, attention_mask=mask, max_length=None, **told)
        return [trim(row, config) for row in made.tolist()]

    return run


def make_ctranslate2(folder: str, threads: int, kind: str, sources: list[list[int]], config: dict[str, int]) -> Run:
    """CTranslate2's translator."""
    import ctranslate2

    words = json.loads((Path(folder) / "shared_vocabulary.json").read_text(encoding="utf-8"))
    numbers = {word: number for number, word in enumerate(words)}
    told = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    translator = ctranslate2.Translator(folder, device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads)
    adds_end = bool(told.get("add_source_eos"))
    texts = [[words[token] for token in (row[:-1] if adds_end else row)] for row in sources]
    assert all(row[-1] == config["eos_token_id"] for row in sources)

    def run(count: int, beams: int) -> list[list[int]]:
        made = translator.translate_batch(
            texts[:count], beam_size=beams, max_decoding_length=MOST_TOKENS, max_batch_size=0
        )
        return [[numbers[word] for word in result.hypotheses[0]] for result in made]

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--ctranslate2", metavar="CONVERTED")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--packages", metavar="SITE_PACKAGES")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sentences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ours", nargs="+", default=["float32", "int8", "int4"])
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(arguments.packages)
    torch.set_num_threads(arguments.threads)
    config = json.loads((Path(arguments.folder) / "config.json").read_text(encoding="utf-8"))
    sources = read_sources(unspool.load(arguments.folder), config["model_type"])
    engines: dict[str, Run] = {}
    for kind in arguments.ours:
        quantize = None if kind == "float32" else kind
        engines[f"unspool {kind}"] = make_ours(arguments.folder, arguments.threads, quantize, sources, config)
    if arguments.ctranslate2:
        for kind in ("float32", "int8"):
            made = make_ctranslate2(arguments.ctranslate2, arguments.threads, kind, sources, config)
            engines[f"ctranslate2 {kind}"] = made
    if arguments.transformers:
        engines["transformers float32"] = make_transformers(arguments.folder, sources, config)
    for beams in arguments.beams:
        for count in arguments.sentences:
            best: dict[str, tuple[float, float]] = {}
            texts: dict[str, list[list[int]]] = {}
            for turn in range(arguments.rounds + 1):
                for name, run in engines.items():
                    if turn > 2 and name.startswith("transformers"):
                        continue  # the slowest by far
                    wall, used = time.perf_counter(), time.process_time()
                    texts[name] = run(count, beams)
                    spent = time.perf_counter() - wall, time.process_time() - used
                    if turn:  # the first is a rehearsal
                        old = best.get(name, spent)
                        best[name] = min(old[0], spent[0]), min(old[1], spent[1])
            print(f"\n{beams} beams, {count} sentences")
            plain = texts[next(iter(engines))]
            for name, (wall, used) in best.items():
                same = sum(mine == other for mine, other in zip(texts[name], plain, strict=True))
                tokens = sum(map(len, texts[name]))
                print(
                    f"  {name:<22} {1e3 * wall:8.1f} ms  {1e3 * used:8.1f} processor ms  {tokens:4d} tokens  "
                    f"{same} of {count} the same as the first"
                )


if __name__ == "__main__":
    main()
