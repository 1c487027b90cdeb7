"""`unspool detect`: whether a text carries a watermark, and what that rests on."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.console import BOLD, DIM, GREEN, paint, say
from unspool.cli.model import add_model_options, load_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.reading import check_text, decode_text, read_stdin
from unspool.cli.targets import find_targets, write_target
from unspool.errors import InputError
from unspool.small_files import read_bytes

if TYPE_CHECKING:
    from unspool.api import LanguageModel
    from unspool.config import BaseWatermarkingConfig

FEWEST_TOKENS = 25  # with fewer, even marked text is hardly ever found at 1 %
LEVEL = 0.01
LARGEST_TEXT = 16 << 20


def add_watermark_options(parser: Parser, *, is_required: bool = True) -> argparse._ArgumentGroup:
    """Options that name a watermark and its key."""
    group = parser.add_argument_group("watermark")
    group.add_argument("--watermark", metavar="FILE", required=is_required, help="The watermark's settings, as JSON.")
    group.add_argument(
        "--key-file",
        metavar="FILE",
        help="The key: a number, or a list of them. [$UNSPOOL_WATERMARK_KEY, or what the settings say]",
    )
    return group


def read_watermark(arguments: argparse.Namespace) -> dict[str, BaseWatermarkingConfig]:
    """The setting that --watermark and --key-file ask for, by its name; nothing without --watermark."""
    if arguments.watermark is None:
        if arguments.key_file is not None:
            raise UsageError("--key-file holds the key of a watermark; say which one with --watermark FILE")
        return {}
    from unspool.watermark.keys import load_watermark  # torch comes with it

    return {"watermarking_config": load_watermark(arguments.watermark, arguments.key_file)}


def build_parser() -> Parser:
    """The options of `unspool detect`."""
    parser = Parser(
        "detect",
        "FILE|- --watermark FILE [options]",
        "Say whether a text carries a watermark, with the p value and how many tokens it rests on.\n"
        "Repeated n-grams are counted once. The key is read and never shown.",
        (
            "unspool detect essay.txt --watermark mark.json --key-file mark.key",
            "unspool detect - --watermark mark.json --html essay.html < essay.txt",
        ),
    )
    parser.general.add_argument("file", metavar="FILE", help=argparse.SUPPRESS)
    group = add_watermark_options(parser)
    group.add_argument("--detector", metavar="FOLDER", help="A detector that unspool train-detector made.")
    group.add_argument("--level", metavar="P", type=float, default=LEVEL, help=f"False alarms allowed. [{LEVEL}]")
    group.add_argument(
        "--min-tokens", metavar="N", type=int, default=FEWEST_TOKENS, help=f"Judge nothing shorter. [{FEWEST_TOKENS}]"
    )
    files = parser.add_argument_group("output")
    files.add_argument("--json", action="store_true", help="Print JSON.")
    files.add_argument("--html", metavar="FILE", help="Write a page: tokens coloured, the z score as it grows.")
    files.add_argument("--force", action="store_true", help="Write over a file that exists.")
    add_model_options(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Read the text, score it, and print what was found."""
    if not 0 < arguments.level < 1:
        raise UsageError(f"--level {arguments.level} must be a probability between 0 and 1")
    if arguments.min_tokens < 1:
        raise UsageError(f"--min-tokens {arguments.min_tokens}: at least 1")
    targets = find_targets(arguments, ("html",))
    if arguments.file == "-":
        text = read_stdin("the text to judge")
    else:
        path = Path(arguments.file).expanduser()
        text = check_text(decode_text(read_bytes(path, LARGEST_TEXT), str(path)), str(path))
    from unspool.watermark.keys import load_watermark  # torch comes with it

    config = load_watermark(arguments.watermark, arguments.key_file)
    report, page = judge(load_model(arguments), text, config, arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    for target in targets.values():
        write_target(target, page, is_forced=arguments.force)
        say(f"wrote {target}", DIM)
    return 0


def judge(
    lm: LanguageModel, text: str, config: BaseWatermarkingConfig, arguments: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """What is found, as data and as a page."""
    from unspool.watermark.detector import WatermarkDetector
    from unspool.watermark.page import draw_page, find_growth

    tokens = lm.encode(text)[0]
    info = lm.model.info
    detector = WatermarkDetector(info, "cpu", config, ignore_repeated_ngrams=True)
    if tokens and tokens[0] == detector.bos_token_id:
        tokens = tokens[1:]
    needed = max(arguments.min_tokens + detector.scorer.num_before, detector.scorer.num_before + 1)
    if len(tokens) < needed:
        raise InputError(
            f"the text has {len(tokens)} tokens; with less than {needed} (--min-tokens {arguments.min_tokens}, after a "
            f"context of {detector.scorer.num_before}) nothing can be said about a mark"
        )
    evidence = detector.scorer.read(tokens)
    num_counted = int(evidence.is_independent.sum())
    if num_counted < arguments.min_tokens:
        raise InputError(
            f"the text repeats itself: of {len(tokens)} tokens {num_counted} count, less than --min-tokens "
            f"{arguments.min_tokens}; nothing can be said about a mark"
        )
    p_value = float(detector.find_p_values([evidence])[0])
    is_marked = p_value <= arguments.level
    report: dict[str, Any] = {
        "is_marked": is_marked,
        "p_value": p_value,
        "z_score": find_growth(detector.scorer, evidence)[-1],
        "num_tokens": len(tokens),
        "num_tokens_scored": num_counted,
        "green_fraction": float((evidence.is_marked_side & evidence.is_independent).sum()) / num_counted,
        "level": arguments.level,
        "watermark": config.without_key(),
    }
    if arguments.detector is not None:
        report["probability"] = _ask_detector(arguments.detector, config, lm, tokens)
    facts = {"p value": f"{p_value:.3g}", "z score": f"{report['z_score']:.2f}", "tokens counted": num_counted}
    page = ""
    if arguments.html is not None:
        assert lm.tokenizer is not None
        pieces = cut_text(lm.tokenizer, tokens)
        page = draw_page(detector.scorer, evidence, pieces, _say_verdict(is_marked), {**facts, "tokens": len(tokens)})
    return report, page


def cut_text(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text: one decoded alone may lack the space before it, or be part of a character."""
    from unspool.text.detokenize import Detokenizer

    words = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [words.put([token]) for token in tokens]
    pieces[-1] += words.end()
    return pieces


def _ask_detector(folder: str, config: BaseWatermarkingConfig, lm: LanguageModel, tokens: list[int]) -> float:
    import torch

    from unspool.config import SynthIDTextWatermarkingConfig
    from unspool.watermark import BayesianDetectorModel, SynthIDTextWatermarkDetector

    if not isinstance(config, SynthIDTextWatermarkingConfig):
        raise UsageError("--detector: the Bayesian detector is for SynthID-Text; the other watermarks need none")
    mark = config.construct_processor(lm.model.info.vocab_size, "cpu")
    detector = SynthIDTextWatermarkDetector(BayesianDetectorModel.from_pretrained(folder), mark, lm.tokenizer)
    return float(detector(torch.tensor([tokens]))[0])


def _say_verdict(is_marked: bool) -> str:
    return "The text carries the mark." if is_marked else "No mark was found."


def _print(report: dict[str, Any]) -> None:
    styles = (BOLD, GREEN) if report["is_marked"] else (BOLD,)
    print(paint(_say_verdict(report["is_marked"]), *styles, stream=sys.stdout))
    print(f"p value {report['p_value']:.3g} (level {report['level']:g}), z score {report['z_score']:.2f}")
    print(f"{report['num_tokens_scored']} of {report['num_tokens']} tokens counted")
    if "probability" in report:
        print(f"the trained detector finds it marked with probability {report['probability']:.4f}")
