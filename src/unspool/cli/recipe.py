"""`unspool recipe`: make, check, list and run decoding methods that are shared as folders."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from unspool.cli.console import say, write
from unspool.cli.model import add_model_options, load_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.settings import add_settings, collect_settings, refuse_tensors
from unspool.errors import SettingError, UnspoolError
from unspool.recipes.finding import FILE, find_recipe, list_code, list_shipped
from unspool.recipes.requirements import check_requirements
from unspool.recipes.running import check_source, load_recipe
from unspool.small_files import make_folder, write_text
from unspool.wording import suggest

_ACTIONS = {
    "new": "Write the folder of a new recipe.",
    "check": "Say whether a folder is a recipe whose requirements are met; nothing of it is run.",
    "run": "Run a recipe on a prompt.",
    "list": "List the recipes that come with unspool.",
}
_SCRIPT = '''"""What this recipe does, in one sentence."""

import unspool


class MyProcessor(unspool.LogitsProcessor):
    """Changes the scores of the next token."""

    def __call__(self, input_ids, scores):
        return scores


def generate(model, input_ids, generation_config, logits_processor=None, **kwargs):
    """Generate with the processor above; rows are batched and streamed as usual."""
    processors = [*(logits_processor or []), MyProcessor()]
    return unspool.generate(
        model, input_ids, generation_config=generation_config, logits_processor=processors, **kwargs
    )
'''
_README = """# {name}

What it does, and which arguments it takes beside those of generate().
"""


def build_parser() -> Parser:
    """The options of `unspool recipe`."""
    parser = Parser(
        "recipe",
        "new|check|run|list [NAME] [PROMPT] [options]",
        "\n".join(f"{name:<6} {text}" for name, text in _ACTIONS.items()),
        (
            "unspool recipe new my-recipe",
            "unspool recipe check my-recipe",
            'unspool recipe run best_of_n "The capital of France is" --arg n=4',
            'unspool recipe run ./my-recipe "Once upon a time" --trust-remote-code',
        ),
    )
    parser.general.add_argument("action", metavar="ACTION", help=", ".join(_ACTIONS))
    parser.general.add_argument("name", metavar="NAME", nargs="?", help="A folder, a hub id, or a shipped recipe.")
    parser.general.add_argument("prompt", metavar="PROMPT", nargs="?", help="The text to continue.")
    parser.general.add_argument("--chat", action="store_true", help="Use the model's chat template.")
    parser.general.add_argument(
        "--trust-remote-code", "--trust_remote_code", action="store_true", help="Run the recipe's code."
    )
    parser.general.add_argument("--recipe-revision", metavar="COMMIT", help="The commit of a recipe from the hub.")
    parser.general.add_argument(
        "--arg", metavar="NAME=VALUE", action="append", default=[], help="An argument of the recipe, as JSON or text."
    )
    add_model_options(parser)
    add_settings(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Do what the action says."""
    if arguments.action not in _ACTIONS:
        hint = suggest(arguments.action, _ACTIONS, str)
        raise UsageError(f"there is no action {arguments.action[:80]!r}{hint} The actions are: {', '.join(_ACTIONS)}")
    if arguments.action == "list":
        for name in list_shipped():
            write(f"{name}\n")
        return 0
    if arguments.name is None:
        raise UsageError(f"unspool recipe {arguments.action} needs a recipe's name or folder")
    if arguments.action != "run" and arguments.prompt is not None:
        raise UsageError(f"unspool recipe {arguments.action} takes a name and nothing else")
    return {"new": _make, "check": _check, "run": _run}[arguments.action](arguments)


def _make(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.name)
    script = folder / "custom_generate" / FILE
    if script.exists():
        raise SettingError(f"{script} exists already; give another folder")
    make_folder(script.parent)
    write_text(script, _SCRIPT)
    for path, text in ((folder / "README.md", _README.format(name=folder.name)), (folder / "requirements.txt", "")):
        if not path.exists():
            write_text(path, text)
    say(f"wrote {script}; try it: unspool recipe run {folder} --trust-remote-code “The sea is”")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    files = find_recipe(arguments.name, arguments.recipe_revision)
    check_source(files)
    check_requirements(files.requirements, files.name)
    write(f"{arguments.name} is a recipe. It runs {list_code(files)}\n")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if arguments.prompt is None:
        raise UsageError("unspool recipe run needs a prompt")
    settings = collect_settings(arguments)
    refuse_tensors(settings)
    own = dict(_read_argument(text) for text in arguments.arg)
    # What can be refused is refused before a model is loaded.
    files = find_recipe(arguments.name, arguments.recipe_revision)
    load_recipe(files, trusts=arguments.trust_remote_code)
    lm = load_model(arguments)
    from unspool.api import generate
    from unspool.api.prompt import as_ids

    ids = as_ids(lm.encode(arguments.prompt, chat=arguments.chat)).to(lm.device)
    given: dict[str, Any] = {"max_new_tokens": 256} if settings.get("max_length") is None else {}
    try:
        sequences: Any = generate(
            lm,
            ids,
            custom_generate=files,  # as they were read: the folder may have changed while the model was loaded
            trust_remote_code=arguments.trust_remote_code,
            tokenizer=lm.tokenizer,
            **{**given, **settings, **own},
        )
    except (UnspoolError, OSError):
        raise
    except Exception as error:
        raise SettingError(
            f"the recipe {arguments.name} has failed: {type(error).__name__}: {error} (--debug shows where)"
        ) from error
    rows = getattr(sequences, "sequences", sequences)
    if not hasattr(rows, "tolist"):
        raise SettingError(
            f"the recipe {arguments.name} has returned a {type(rows).__name__}, and this program prints token ids; "
            "call it from Python: unspool.generate(…, custom_generate=…)"
        )
    for row in rows.tolist():
        kept = row if lm.model.info.is_encoder_decoder else row[ids.shape[1] :]
        write((lm.tokenizer.decode(kept, skip_special_tokens=True) if lm.tokenizer else str(kept)) + "\n")
    return 0


def _read_argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise UsageError(f"--arg takes NAME=VALUE, not {text[:80]!r}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
