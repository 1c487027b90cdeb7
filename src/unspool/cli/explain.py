"""`unspool explain`: a beam search as a tree, in the terminal and as files."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unspool.cli.console import BOLD, CYAN, DIM, GREEN, paint, say
from unspool.cli.model import add_model_options, load_text_model
from unspool.cli.parser import Parser
from unspool.cli.prompt import add_prompt_options, as_prompt, check_prompt, read_negative, read_prompt
from unspool.cli.settings import FRIENDLY, add_settings, collect_settings, imply_sampling, refuse_tensors
from unspool.cli.targets import find_targets, write_target
from unspool.errors import SettingError, UnsupportedError

if TYPE_CHECKING:
    from unspool.api import LanguageModel
    from unspool.explain import BeamTree
    from unspool.outputs import Generation

DEFAULTS: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 12}
FILES = ("html", "svg", "json")
WIDTH_OF_A_PIPE = 100
_STYLES = {"heading": (BOLD,), "best": (BOLD, GREEN), "returned": (CYAN,), "kept": (), "dropped": (DIM,)}


def build_parser() -> Parser:
    """The options of `unspool explain`."""
    parser = Parser(
        "explain",
        "[PROMPT] [options]",
        "Draw a beam search as a tree: which tokens were looked at, which went on, what was returned.\n"
        "As many sequences are returned as there are beams, unless --num-return-sequences is given.",
        (
            'unspool explain "The three primary colors are" --num-beams 4',
            'unspool explain --chat "What is 2+2?" --html beams.html --svg beams.svg',
            'unspool explain "Once upon a time" --num-beam-groups 2 --diversity-penalty 1.0',
        ),
    )
    add_prompt_options(parser)
    group = parser.add_argument_group("files")
    group.add_argument("--html", metavar="FILE", help="Write a page of it: one file, for any browser.")
    group.add_argument("--svg", metavar="FILE", help="Write a picture of it.")
    group.add_argument("--json", metavar="FILE", help="Write the trace: every step's candidates, as data.")
    group.add_argument("--force", action="store_true", help="Write over files that exist.")
    add_model_options(parser)
    add_settings(parser, {**FRIENDLY, **DEFAULTS, "num_return_sequences": "num_beams"})
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Search, draw, write."""
    settings = _complete(imply_sampling(collect_settings(arguments)))
    check_prompt(arguments, settings)
    targets = find_targets(arguments, FILES)
    text = read_prompt(arguments)
    lm = load_text_model(arguments, chats=arguments.chat)
    from unspool.explain import draw_page, draw_svg, draw_terminal  # torch is imported by now

    generation = lm.generate(as_prompt(text, arguments), return_beam_trace=True, **read_negative(arguments), **settings)
    tree = _grow(lm, generation, text)
    columns = shutil.get_terminal_size((WIDTH_OF_A_PIPE, 24)).columns
    sys.stdout.write(draw_terminal(tree, columns, _paint))
    sys.stdout.flush()
    drawn: dict[str, Callable[[], str]] = {
        "html": lambda: draw_page(tree, about={"model": lm.name, **_plain(settings)}),
        "svg": lambda: draw_svg(tree),
        "json": lambda: _describe(lm, generation, text, settings),
    }
    for kind, path in targets.items():
        write_target(path, drawn[kind](), is_forced=arguments.force)
        say(f"wrote {path}", DIM)
    missing = [kind for kind in FILES if kind not in targets]
    if len(missing) == len(FILES):
        say(
            f"a picture to keep: add {', '.join(f'--{kind} beams.{kind}' for kind in missing[:-1])} or "
            f"--{missing[-1]} beams.{missing[-1]}",
            DIM,
        )
    return 0


def _paint(text: str, role: str) -> str:
    return paint(text, *_STYLES[role], stream=sys.stdout)


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with this command's own defaults; raises for what it can't show."""
    if settings.pop("return_beam_trace", True) is False:
        raise SettingError("`return_beam_trace` is what this command draws; leave it out")
    refuse_tensors(settings)
    for name in ("logprobs", "prompt_logprobs"):
        if settings.get(name) is not None:
            raise UnsupportedError(f"`{name}`: the tree shows its own probabilities; use unspool run --json for these")
    complete = {**DEFAULTS, **settings}
    if settings.get("max_length") is not None and "max_new_tokens" not in settings:
        del complete["max_new_tokens"]
    num_beams = complete["num_beams"]
    if num_beams is None or num_beams < 2:
        raise SettingError("a tree has at least two beams: --num-beams 2 or more; unspool run decodes with one")
    if "num_return_sequences" not in settings:
        complete["num_return_sequences"] = num_beams
        if complete.get("force_words_ids"):
            complete.setdefault("strict_constraints", False)  # all beams are shown, those without a word too
    return complete


def _grow(lm: LanguageModel, generation: Generation, text: str) -> BeamTree:
    from unspool.explain import build_tree

    tokenizer = lm.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(list(ids))

    return build_tree(generation.beam_trace, decode, prompt_text=text, prompt_ids=generation.prompt_token_ids[0])


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in (*DEFAULTS, "num_return_sequences")}


def _describe(lm: LanguageModel, generation: Generation, text: str, settings: Mapping[str, Any]) -> str:
    """The trace, with what is needed to read it: the prompt, the settings and the text of every token in it."""
    tokens = {one.token for step in generation.beam_trace.steps for one in step.candidates}
    texts = {} if lm.tokenizer is None else {str(token): lm.tokenizer.decode([token]) for token in sorted(tokens)}
    report = {
        "model": lm.name,
        "prompt": text,
        "prompt_token_ids": generation.prompt_token_ids[0],
        "settings": dict(settings),
        "texts": generation.texts,
        "tokens": texts,
        "trace": generation.beam_trace.to_dict(),
    }
    return json.dumps(report, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
