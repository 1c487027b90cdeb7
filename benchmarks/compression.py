"""What shorter prompts and smaller caches keep, and what they cost: the tables of docs/compression.md.

`python benchmarks/compression.py prompts|keys|time [--texts N] [--tokens N] [--model NAME]` prints an object a line.
Texts are made by rule: sentences without a point, with one fact among them ("fact"), or a list of names and numbers
("lookup"). An answer is right if the number is.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from functools import partial

import unspool
from unspool.compression.losses import measure_texts

RATE = 0.5
NAMES = [
    "Ada",
    "Boris",
    "Clara",
    "Dmitri",
    "Elena",
    "Felix",
    "Greta",
    "Henrik",
    "Ines",
    "Jonas",
    "Keiko",
    "Lars",
    "Miriam",
    "Nadia",
    "Oskar",
    "Petra",
    "Quentin",
]
THINGS = [
    "lamp",
    "ferry",
    "garden",
    "ledger",
    "kettle",
    "bridge",
    "compass",
    "quilt",
    "engine",
    "meadow",
    "teacher",
    "harbour",
    "window",
    "basket",
]
WORDS = [
    "old",
    "wide",
    "quiet",
    "silver",
    "broken",
    "polite",
    "heavy",
    "bright",
    "narrow",
    "wooden",
    "famous",
    "distant",
]
DEEDS = [
    "repaired",
    "painted",
    "followed",
    "measured",
    "noticed",
    "carried",
    "returned",
    "weighed",
    "crossed",
    "admired",
]


def make_text(task: str, chance: random.Random, size: int) -> tuple[str, str, str]:
    """A text of about so many tokens, what is asked of it, and the answer."""
    name, number = chance.choice(NAMES), str(chance.randrange(10_000, 99_999))
    if task == "lookup":
        names = chance.sample([f"{first} {last.title()}" for first in NAMES for last in THINGS], size // 11)
        numbers = [str(chance.randrange(10_000, 99_999)) for _ in names]
        place = chance.randrange(len(names))
        text = "\n".join(f"{one}: {value}" for one, value in zip(names, numbers, strict=True))
        return text, f"\n\nQuestion: Which number has {names[place]}?\nAnswer: {names[place]}:", numbers[place]
    sentences: list[str] = []
    while len(sentences) * 13 < size:
        one, other = chance.sample(THINGS, 2)
        sentences.append(
            f"The {chance.choice(WORDS)} {one} was {chance.choice(DEEDS)} by {chance.choice(NAMES)} "
            f"near the {chance.choice(WORDS)} {other}."
        )
    sentences.insert(chance.randrange(len(sentences)), f"The secret number of {name} is {number}.")
    asked = f"\n\nQuestion: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
    return " ".join(sentences), asked, number


def drop_at_random(lm: unspool.LanguageModel, text: str, chance: random.Random) -> str:
    ids = lm.tokenizer.encode(text, add_special_tokens=False)
    kept = sorted(chance.sample(range(len(ids)), round(RATE * len(ids))))
    return lm.tokenizer.decode([ids[place] for place in kept])


def cut(lm: unspool.LanguageModel, text: str, *, is_end: bool) -> str:
    ids = lm.tokenizer.encode(text, add_special_tokens=False)
    count = round(RATE * len(ids))
    return lm.tokenizer.decode(ids[-count:] if is_end else ids[:count])


def list_methods(lm: unspool.LanguageModel, chance: random.Random) -> dict[str, Callable[[str, str], str]]:
    package = unspool.PromptCompressor(lm)

    def ask(asked: str) -> str:
        return asked.split("Question: ")[1].split("\n")[0]

    return {
        "whole": lambda text, _: text,
        "compress_prompt, question": lambda text, asked: unspool.compress_prompt(
            lm, text, question=ask(asked), rate=RATE
        ).contexts[0],
        "the same, keep_digits": lambda text, asked: unspool.compress_prompt(
            lm, text, question=ask(asked), rate=RATE, keep_digits=True
        ).contexts[0],
        "compress_prompt": lambda text, _: unspool.compress_prompt(lm, text, rate=RATE).contexts[0],
        "PromptCompressor": lambda text, _: package.compress_prompt(text, rate=RATE)["compressed_prompt"],
        "PromptCompressor, longllmlingua": lambda text, asked: package.compress_prompt(
            text,
            question=ask(asked),
            rate=RATE,
            rank_method="longllmlingua",
            condition_compare=True,
            concate_question=False,
        )["compressed_prompt"],
        "random tokens": lambda text, _: drop_at_random(lm, text, chance),
        "the first half": lambda text, _: cut(lm, text, is_end=False),
        "the last half": lambda text, _: cut(lm, text, is_end=True),
    }


def is_right(written: str, answer: str) -> bool:
    found = re.search(r"\d+", written)
    return found is not None and found[0] == answer


def measure_prompts(lm: unspool.LanguageModel, task: str, texts: int, tokens: int) -> None:
    chance = random.Random(7)
    made = [make_text(task, chance, tokens) for _ in range(texts)]
    for name, shorten in list_methods(lm, chance).items():
        right, losses, shares, seconds = 0, [], [], 0.0
        for text, asked, answer in made:
            started = time.perf_counter()
            short = shorten(text, asked)
            seconds += time.perf_counter() - started
            written = lm.generate(short + asked, max_new_tokens=8, do_sample=False).text
            right += is_right(written, answer)
            prompt, tail = lm.encode(short + asked)[0], lm.tokenizer.encode(f" {answer}", add_special_tokens=False)
            losses.append(float(measure_texts(lm.model, [[*prompt, *tail]])[0][-len(tail) :].mean()))
            shares.append(len(lm.encode(short)[0]) / len(lm.encode(text)[0]))
        line = {
            "part": "prompts",
            "task": task,
            "method": name,
            "right": right,
            "of": texts,
            "answer_loss": sum(losses) / texts,
            "share": sum(shares) / texts,
            "seconds": seconds / texts,
        }
        print(json.dumps(line), flush=True)


def measure_keys(lm: unspool.LanguageModel, task: str, texts: int, tokens: int) -> None:
    from unspool.api.pruning import RULES

    chance = random.Random(7)
    made = [make_text(task, chance, tokens) for _ in range(texts)]
    prefixes = [lm.prefix(text) for text, _, _ in made]
    for rule in ("all", "snapkv, question", *RULES):
        right, seconds, share = 0, 0.0, 0.0
        for prefix, (_, asked, answer) in zip(prefixes, made, strict=True):
            started = time.perf_counter()
            short = prefix
            if rule == "snapkv, question":
                short = prefix.compress(RATE, question=asked)
            elif rule != "all":
                short = prefix.compress(RATE, rule)
            seconds += time.perf_counter() - started
            share += short.nbytes / prefix.nbytes
            right += is_right(short.generate(asked, max_new_tokens=8, do_sample=False).text, answer)
        line = {
            "part": "keys",
            "task": task,
            "rule": rule,
            "right": right,
            "of": texts,
            "seconds": seconds / texts,
            "bytes": share / texts,
        }
        print(json.dumps(line), flush=True)


def measure_time(lm: unspool.LanguageModel, tokens: int) -> None:
    chance = random.Random(7)
    for size in (500, 1000, 2000, 4000, 8000):
        if size > tokens:
            return
        text, _, _ = make_text("fact", chance, size)
        ids = lm.encode(text)[0]
        half = ids[: len(ids) // 2]
        took = {
            "read": _time(partial(lm.prefix, ids)),
            "read_half": _time(partial(lm.prefix, half)),
            "compress": _time(partial(unspool.compress_prompt, lm, text, rate=RATE)),
        }
        prefix = lm.prefix(ids)
        short = prefix.compress(RATE, "keydiff")
        for name, one in (("step", prefix), ("step_short", short)):
            stats = [one.generate(" And", max_new_tokens=n, min_new_tokens=n, do_sample=False) for n in (2, 34)]
            took[name] = 1 / stats[1].stats.tokens_per_second
        print(
            json.dumps({"part": "time", "tokens": len(ids), "bytes": short.nbytes / prefix.nbytes, **took}), flush=True
        )


def _time(work: Callable[[], object]) -> float:
    """Seconds of the faster of two runs."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("prompts", "keys", "time"))
    parser.add_argument("--task", default="fact", choices=("fact", "lookup"))
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    lm = unspool.load(given.model)
    if given.part == "prompts":
        measure_prompts(lm, given.task, given.texts, given.tokens)
    elif given.part == "keys":
        measure_keys(lm, given.task, given.texts, given.tokens)
    else:
        measure_time(lm, given.tokens)


if __name__ == "__main__":
    main()
