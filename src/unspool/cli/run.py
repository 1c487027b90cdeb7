"""`unspool run`: a prompt in, its continuation out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unspool.cli.console import DIM, AnswerWriter, end_line, say, write
from unspool.cli.detect import add_watermark_options, read_watermark
from unspool.cli.languages import add_language_options, check_languages, mark_prompts
from unspool.cli.model import add_assistant_option, add_model_options, load_assistant, load_text_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.prompt import add_prompt_options, as_prompt, check_prompt, read_negative, read_prompt
from unspool.cli.reading import check_text, read_prompts
from unspool.cli.report import describe_generation, format_stats
from unspool.cli.settings import add_settings, collect_settings, imply_sampling, refuse_tensors
from unspool.errors import SettingError

if TYPE_CHECKING:
    from unspool.api import Answer, LanguageModel


def build_parser() -> Parser:
    """The options of `unspool run`."""
    parser = Parser(
        "run",
        "[PROMPT] [options]",
        "Continue a prompt: the text is printed as it is written.\n"
        "Without a prompt, or with -, the prompt is read from standard input.",
        (
            'unspool run "The capital of France is" --max-new-tokens 8',
            'unspool run --chat --stats "Write a haiku about a lighthouse."',
            'unspool run --do-sample --temperature 0.7 --top-p 0.9 --seed 1 "Once upon a time"',
            "cat notes.txt | unspool run --json --logprobs 2",
            'unspool run --do-sample --watermark mark.json --key-file mark.key "Once upon a time"',
        ),
    )
    prompt = add_prompt_options(parser)
    add_language_options(prompt)
    prompt.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="A picture for the model to look at, before the prompt; several times for several.",
    )
    prompt.add_argument(
        "--prompts-file",
        "--prompts_file",
        metavar="FILE",
        help="Run every line of a file as a prompt; texts are printed as `[1] …` when done.",
    )
    shown = parser.add_argument_group("what is printed")
    shown.add_argument("--json", action="store_true", help="Print one JSON object when done, and nothing else.")
    shown.add_argument("--stats", action="store_true", help="Print the speed on standard error.")
    model = add_model_options(parser)
    add_assistant_option(model)
    model.add_argument(
        "--preset",
        metavar="NAME",
        help="Settings saved under a name in the model's folder (NAME.json), or a path; options given here win.",
    )
    add_watermark_options(parser, is_required=False)
    add_settings(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Load, generate, print."""
    settings = imply_sampling(collect_settings(arguments))
    _check(arguments, settings)
    mark = read_watermark(arguments)
    texts = _read_texts(arguments)
    lm = load_text_model(arguments, chats=arguments.chat)
    prompts = [as_prompt(text, arguments) for text in mark_prompts(lm, texts, arguments, settings)]
    others: dict[str, Any] = _place_pictures(prompts, arguments.image)
    is_batch = arguments.prompts_file is not None
    assistant = load_assistant(arguments)
    others |= {} if assistant is None else {"assistant_model": assistant}
    others |= _read_preset(arguments, lm)
    answer = lm.start(prompts if is_batch else prompts[0], **read_negative(arguments), **settings, **mark, **others)
    if arguments.json:
        for _ in answer.pieces():
            pass
        hidden = {name: config.without_key() for name, config in mark.items()}
        _print_json(answer, lm, texts, arguments, {**settings, **hidden})
    elif answer.num_rows > 1 or is_batch:
        _print_rows(answer, answer.num_rows // len(texts))
    else:
        _print_stream(answer)
    if arguments.stats:
        say(format_stats(answer.stats, answer.result().finish_reasons), DIM)
    return 0


def _check(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Raise for what can be refused before a model is loaded."""
    refuse_tensors(settings)
    check_prompt(arguments, settings)
    check_languages(arguments)
    if arguments.prompts_file is not None and arguments.prompt is not None:
        raise UsageError("a prompt and --prompts-file were both given; give one of them")
    if arguments.image and arguments.prompts_file is not None:
        raise UsageError("--image stands beside one prompt; leave out --prompts-file")
    for name in ("logprobs", "prompt_logprobs"):
        if settings.get(name) is not None and not arguments.json:
            raise SettingError(f"`{name}` are numbers beside the text and are printed with --json; add it")


def _place_pictures(prompts: list[Any], pictures: list[str]) -> dict[str, Any]:
    """Put pictures before the text of a chat's last message; beside a text they are an argument of the call."""
    if not pictures or isinstance(prompts[0], str):
        return {"images": pictures} if pictures else {}
    last = prompts[0][-1]
    parts = [{"type": "image", "path": picture} for picture in pictures]
    prompts[0][-1] = {**last, "content": [*parts, {"type": "text", "text": last["content"]}]}
    return {}


def _read_preset(arguments: argparse.Namespace, lm: LanguageModel) -> dict[str, Any]:
    """The preset as the call's `generation_config`, if one is named."""
    if arguments.preset is None:
        return {}
    from unspool.config.presets import read_preset

    preset = read_preset(arguments.preset, lm.source if lm.source.is_dir() else lm.source.parent)
    refuse_tensors({name: getattr(preset, name) for name in preset.explicit})
    return {"generation_config": preset}


def _read_texts(arguments: argparse.Namespace) -> list[str]:
    if arguments.system is not None:
        check_text(arguments.system, "--system")
    if arguments.prompts_file is not None:
        return read_prompts(arguments.prompts_file)
    return [read_prompt(arguments)]


def _print_stream(answer: Answer) -> None:
    last, writer = "", AnswerWriter()
    try:
        for piece in answer.pieces():
            writer.write(piece, is_thought=piece.kind == "thought")
            last = piece if piece and piece.kind == "text" else last
    except KeyboardInterrupt:
        end_line(last or "\n")  # the shell's prompt begins a line
        raise
    end_line(last)


def _print_rows(answer: Answer, num_copies: int) -> None:
    """Rows end in any order; each is printed as a whole when it ends."""
    texts = [""] * answer.num_rows
    for piece in answer.pieces():
        texts[piece.row] += piece if piece.kind == "text" else ""
        if piece.finish_reason is not None:
            prompt, copy = divmod(piece.row, num_copies)
            label = f"{prompt + 1}.{copy + 1}" if 1 < num_copies < answer.num_rows else f"{piece.row + 1}"
            write(f"[{label}] {texts[piece.row]}".removesuffix("\n") + "\n")


def _print_json(
    answer: Answer, lm: LanguageModel, texts: list[str], arguments: argparse.Namespace, settings: Mapping[str, Any]
) -> None:
    head: dict[str, Any] = {"model": arguments.model}
    if arguments.prompts_file is None:
        head["prompt"] = texts[0]
    else:
        head["prompts"] = texts
    if arguments.chat:
        head |= {"chat": True, "system": arguments.system}
    if arguments.negative_prompt is not None:
        head["negative_prompt"] = arguments.negative_prompt
    if arguments.preset is not None:
        head["preset"] = arguments.preset
    head["settings"] = dict(settings)
    tokenizer = lm.tokenizer
    report = describe_generation(
        answer.result(), head, lambda token: "" if tokenizer is None else tokenizer.decode([token])
    )
    write(json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n")
