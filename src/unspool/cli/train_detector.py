"""`unspool train-detector`: SynthID-Text's Bayesian detector, trained on text that a model writes for it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.console import DIM, ProgressLine, say
from unspool.cli.detect import add_watermark_options
from unspool.cli.model import add_model_options, load_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.reading import read_prompts
from unspool.errors import InputError, LoadError
from unspool.numeric import is_token_id
from unspool.small_files import read_json_object, write_text

if TYPE_CHECKING:
    import torch

    from unspool.api import LanguageModel
    from unspool.config import BaseWatermarkingConfig

NUM_TEXTS, NUM_TOKENS, BATCH = 200, 200, 16
MOST_TEXTS, MOST_TOKENS = 100_000, 4096
OPENINGS = ("The story of", "An essay on", "A letter about", "How to think about", "A short history of")
SUBJECTS = ("bread", "rivers", "the night sky", "bridges", "music", "winter", "maps", "gardens", "trains", "memory")
STATE = "texts.json"


def build_parser() -> Parser:
    """The options of `unspool train-detector`."""
    parser = Parser(
        "train-detector",
        "FOLDER --watermark FILE [options]",
        "Write marked and unmarked text with a model, train SynthID-Text's Bayesian detector on it, and save it into\n"
        "FOLDER with its rates of true and false alarms on held-out text. Stopped, it goes on where it was.",
        ("unspool train-detector detector --watermark mark.json --key-file mark.key --texts 500",),
    )
    parser.general.add_argument("folder", metavar="FOLDER", help=argparse.SUPPRESS)
    add_watermark_options(parser)
    group = parser.add_argument_group("training")
    group.add_argument("--texts", metavar="N", type=int, default=NUM_TEXTS, help=f"Texts of each kind. [{NUM_TEXTS}]")
    group.add_argument("--tokens", metavar="N", type=int, default=NUM_TOKENS, help=f"Tokens a text. [{NUM_TOKENS}]")
    group.add_argument("--prompts", metavar="FILE", help="What texts begin with, one prompt a line. [a few of our own]")
    group.add_argument("--temperature", metavar="X", type=float, default=1.0, help="Of sampling. [1]")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="Of sampling and training. [0]")
    add_model_options(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Write, train, measure, save."""
    from unspool.config import SynthIDTextWatermarkingConfig
    from unspool.watermark.keys import load_watermark

    if not 24 <= arguments.texts <= MOST_TEXTS:
        raise UsageError(f"--texts {arguments.texts}: from 24 to {MOST_TEXTS}")
    if not 10 <= arguments.tokens <= MOST_TOKENS:
        raise UsageError(f"--tokens {arguments.tokens}: from 10 to {MOST_TOKENS}")
    config = load_watermark(arguments.watermark, arguments.key_file)
    if not isinstance(config, SynthIDTextWatermarkingConfig):
        raise UsageError("--watermark: only SynthID-Text has a detector to train; the others are detected as they are")
    if arguments.tokens < config.ngram_len:
        raise UsageError(f"--tokens {arguments.tokens}: the watermark's n-grams alone have {config.ngram_len}")
    folder = Path(arguments.folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is a file; a detector is saved into a folder")
    folder.mkdir(parents=True, exist_ok=True)
    prompts = _list_prompts(arguments.prompts)
    texts = _write_texts(arguments, config, prompts, folder)
    report = _train(arguments, config, texts, folder)
    write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    say(f"saved the detector into {folder}; its keys are known again and not written there", DIM)
    return 0


def _list_prompts(path: str | None) -> list[str]:
    if path is not None:
        return read_prompts(path)
    return [f"{opening} {subject}" for subject in SUBJECTS for opening in OPENINGS]


def _write_texts(
    arguments: argparse.Namespace, config: BaseWatermarkingConfig, prompts: list[str], folder: Path
) -> dict[str, list[list[int]]]:
    """The tokens of marked and unmarked texts; what is done is kept in the folder, for the same settings alone."""
    from unspool.watermark.bayesian import take_fingerprint

    settings = config.to_dict()
    about: dict[str, Any] = {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "prompts": prompts,
        "watermark": {**config.without_key(), "keys": take_fingerprint(settings["keys"])},
    }
    path = folder / STATE
    texts: dict[str, list[list[int]]] = {"marked": [], "unmarked": []}
    if path.is_file():
        kept = read_json_object(path, 1 << 30)
        if kept.get("about") != about:
            raise InputError(f"{path} holds texts of other settings; give another folder, or remove it")
        texts = _check_texts(kept.get("texts"), path)
    if min(map(len, texts.values())) >= arguments.texts:
        return {name: rows[: arguments.texts] for name, rows in texts.items()}
    lm = load_model(arguments)
    begin, total = time.monotonic(), 2 * arguments.texts
    with ProgressLine() as line:
        for name, mark in (("marked", config), ("unmarked", None)):
            while len(texts[name]) < arguments.texts:
                first = len(texts[name])
                count = min(BATCH, arguments.texts - first)
                batch = [prompts[(first + place) % len(prompts)] for place in range(count)]
                texts[name] += _sample(lm, arguments, batch, first, mark)
                write_text(path, json.dumps({"about": about, "texts": texts}))
                done = len(texts["marked"]) + len(texts["unmarked"])
                line.show_bar("writing texts", done, total)
                if not line.is_live:
                    say(f"{done} of {total} texts, {time.monotonic() - begin:.0f} s", DIM)
    return texts


def _sample(
    lm: LanguageModel,
    arguments: argparse.Namespace,
    prompts: list[str],
    first: int,
    mark: BaseWatermarkingConfig | None,
) -> list[list[int]]:
    made = lm.generate(
        prompts,
        max_new_tokens=arguments.tokens,
        min_new_tokens=arguments.tokens,
        do_sample=True,
        temperature=arguments.temperature,
        top_k=0,
        seed=[arguments.seed + 2 * (first + place) + (mark is None) for place in range(len(prompts))],
        watermarking_config=mark,
    )
    return made.token_ids


def _check_texts(texts: Any, path: Path) -> dict[str, list[list[int]]]:
    is_sound = isinstance(texts, dict) and set(texts) == {"marked", "unmarked"}
    for rows in texts.values() if is_sound else ():
        is_sound = is_sound and isinstance(rows, list) and len(rows) <= MOST_TEXTS
        is_sound = is_sound and all(isinstance(row, list) and len(row) <= MOST_TOKENS for row in rows)
        is_sound = is_sound and all(is_token_id(token) for row in rows for token in row)
    if not is_sound:
        raise LoadError(f"{path} does not hold texts; remove it to begin anew")
    kept: dict[str, list[list[int]]] = texts
    return kept


def _train(
    arguments: argparse.Namespace, config: Any, texts: dict[str, list[list[int]]], folder: Path
) -> dict[str, Any]:
    import torch

    from unspool.watermark.bayesian import read_g_values
    from unspool.watermark.scoring import SynthIDScorer
    from unspool.watermark.training import Examples, measure, train_detector

    mark = config.construct_processor(1, "cpu")
    read = {name: read_g_values(mark, torch.tensor(rows), None) for name, rows in texts.items()}
    held = arguments.texts // 3  # never trained on

    def cut(name: str, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return read[name][0][part], read[name][1][part]

    examples = Examples.join(cut("marked", slice(held, None)), cut("unmarked", slice(held, None)))
    with ProgressLine() as line:
        model = train_detector(
            examples, seed=arguments.seed, report=lambda done, total: line.show_bar("training", done, total)
        )
    with torch.no_grad():
        odds = {name: model.score(*cut(name, slice(0, held))).tolist() for name in texts}
    report: dict[str, Any] = {"texts": arguments.texts, "held_out": held, "tokens": arguments.tokens, "rates": {}}
    simple = {
        "mean": SynthIDScorer(mark, is_weighted=False),
        "weighted mean": SynthIDScorer(mark),
    }
    scores = {"bayesian": odds}
    for name, scorer in simple.items():
        scores[name] = {kind: [_average(scorer, row) for row in rows[:held]] for kind, rows in texts.items()}
    for name, found in scores.items():
        rates = measure(found["marked"], found["unmarked"], 0.01)
        report["rates"][name] = {"true_positive_rate_at_1%": rates.true_positive_rate, "threshold": rates.threshold}
    for kind, name in (("marked", "true_positive_rate_at_even_odds"), ("unmarked", "false_positive_rate_at_even_odds")):
        report[name] = sum(value > 0 for value in odds[kind]) / held
    model.config.set_detector_information(arguments.model, config)
    model.config.hide_keys()
    model.save_pretrained(folder)
    return report


def _average(scorer: Any, tokens: list[int]) -> float:
    evidence = scorer.read(tokens)
    return float(evidence.values[evidence.is_new].mean())
