"""Generation settings typed by a person: flags made from the table of parameters, and their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unspool.cli.parser import FLAG, Parser
from unspool.config.parameters import PARAMETERS, Kind, Parameter
from unspool.config.sampling import asks_for_draws
from unspool.config.values import LONGEST_TEXT, check_value
from unspool.errors import LoadError, SettingError, UnsupportedError
from unspool.small_files import read_bytes
from unspool.wording import suggest

LONGEST_VALUE = 1 << 20  # characters of one typed value
LONGEST_SHOWN = 80  # of those, in an error
# These return tensors and caches, which a program that prints text can't show.
TENSORS_ONLY = (
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "return_legacy_cache",
)
# The short way's own defaults (a test compares them: that module imports torch).
FRIENDLY: dict[str, Any] = {"max_new_tokens": 256, "max_length": None, "strict_constraints": True}
_TITLES = {
    "length": "length",
    "strategy": "strategy",
    "sampling": "sampling (turned on by what it alone reads)",
    "control": "control",
    "output": "output",
    "special tokens": "special tokens",
    "assistance": "assistance (drafts that the model checks)",
    "cache": "cache",
    "performance": "performance",
}
_REPEATED = ("texts", "choices")  # kinds whose option may be given several times
_PREFIX = "setting:"  # keeps the settings apart from the program's own options in what argparse returns
_METAVARS: dict[Kind, str] = {
    "flag": FLAG,
    "integer": "N",
    "number": "X",
    "text": "TEXT",
    "texts": "TEXT",
    "choice": "CHOICE",
    "ids": "ID",
    "id list": "[ID, …]",
    "id lists": "[[ID, …], …]",
    "layers": "LAYERS",
    "bias": "[[[ID, …], X], …]",
    "token bias": '{"ID": X, …}',
    "decay": "[START, FACTOR]",
    "forced ids": "[[POSITION, ID], …]",
    "schema": "FILE",
    "long text": "TEXT",
    "choices": "TEXT",
    "tags": "FILE",
}


def add_settings(parser: Parser, defaults: Mapping[str, Any] = FRIENDLY, left_out: Sequence[str] = ()) -> None:
    """Every setting that can be typed as an option, in both spellings, grouped as the table is.

    `defaults` are the command's own, which replace the table's in the help; it has options of its own for `left_out`.
    """
    for group in dict.fromkeys((*_TITLES, *(parameter.group for parameter in PARAMETERS.values()))):
        members = [one for one in PARAMETERS.values() if one.group == group and one.name not in left_out]
        shown = [parameter for parameter in members if is_typed(parameter) and parameter.name not in TENSORS_ONLY]
        if not shown:
            continue
        section = parser.add_argument_group(_TITLES.get(group, group))
        for parameter in shown:
            _add_setting(parser, section, parameter, defaults)
    for name in TENSORS_ONLY:  # accepted here, so that the error can explain why not
        _add_setting(parser, parser.general, PARAMETERS[name], defaults, is_hidden=True)


def is_typed(parameter: Parameter) -> bool:
    """Whether a value can be typed: objects can't."""
    return parameter.kind != "object"


def _add_setting(
    parser: Parser,
    section: argparse._ArgumentGroup,
    parameter: Parameter,
    defaults: Mapping[str, Any],
    *,
    is_hidden: bool = False,
) -> None:
    dashed = parameter.name.replace("_", "-")
    for name in dict.fromkeys((dashed, parameter.name)):
        is_shown = name == dashed and not is_hidden
        options: dict[str, Any] = {"dest": f"{_PREFIX}{parameter.name}", "default": argparse.SUPPRESS}
        reading: dict[str, Any] = {
            "type": _reader(parameter),
            "metavar": _METAVARS.get(parameter.kind, "JSON"),
            "action": "append" if parameter.kind in _REPEATED else "store",
            "help": _describe(parameter, defaults) if is_shown else argparse.SUPPRESS,
        }
        section.add_argument(f"--{name}", **options, **reading)
        if parameter.kind == "flag":
            parser.flags.add(f"--{name}")
            negation = f"--no-{name}" if name == dashed else f"--no_{name}"
            section.add_argument(negation, action="store_const", const=False, help=argparse.SUPPRESS, **options)


def _describe(parameter: Parameter, defaults: Mapping[str, Any]) -> str:
    text = parameter.help.replace("%", "%%")
    if parameter.kind in _REPEATED:
        text += " May be given several times."
    if parameter.kind == "flag":
        return f"{text} [{'on' if parameter.default else 'off'}]"
    default = defaults.get(parameter.name, parameter.default)
    return text if default is None or default is False else f"{text} [{default}]"


def _reader(parameter: Parameter) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return read_value(parameter, text)
        except SettingError as error:  # argparse adds which option it was
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def read_value(parameter: Parameter, text: str) -> Any:
    """A typed value, checked by itself; the plan checks it against other settings."""
    if len(text) > LONGEST_VALUE:
        raise SettingError(f"`{parameter.name}` has {len(text)} characters; at most {LONGEST_VALUE} are read")
    try:
        value = parameter.parse(_read_file(parameter, text))
    except ValueError as error:  # also Python's own, for a number of more digits than it reads
        if isinstance(error, SettingError) and len(text) <= LONGEST_SHOWN:
            raise
        shown = text[:LONGEST_SHOWN]
        raise SettingError(f"`{parameter.name}` can't be read from {shown!r}…: {parameter.help}") from error
    check_value(parameter, value)
    return value


def _read_file(parameter: Parameter, text: str) -> str:
    """A schema or tags come from a file, unless they are typed as JSON."""
    if parameter.kind not in ("schema", "tags") or text.lstrip().startswith(("{", "none", "null")):
        return text
    try:
        return read_bytes(Path(text), 4 * LONGEST_TEXT).decode()
    except (LoadError, UnicodeError, ValueError) as error:
        raise SettingError(f"`{parameter.name}` is a file, or JSON in {{}}: {error}") from error


def find_setting(name: str) -> Parameter:
    """The setting of this name, in either spelling, that can be typed."""
    plain = name.removeprefix("--").replace("-", "_")
    parameter = PARAMETERS.get(plain)
    if parameter is None:
        known = [known for known, parameter in PARAMETERS.items() if is_typed(parameter)]
        raise SettingError(f"there is no setting {name[:80]!r}{suggest(plain, known, str)}")
    if not is_typed(parameter):
        raise UnsupportedError(f"`{plain}` is an object and can't be typed; use it from Python: lm.generate(…)")
    return parameter


def collect_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line gives, by name."""
    settings: dict[str, Any] = {}
    for key, value in vars(arguments).items():
        if key.startswith(_PREFIX):
            parameter = PARAMETERS[key.removeprefix(_PREFIX)]
            settings[parameter.name] = _flatten(value) if parameter.kind in _REPEATED else value
    return settings


def imply_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with sampling turned on if one is typed that it alone reads, and nothing says whether to."""
    return {**settings, "do_sample": True} if asks_for_draws(settings) else settings


def _flatten(given: list[Any]) -> Any:
    texts = [text for item in given if item is not None for text in (item if isinstance(item, list) else [item])]
    return texts or None


def refuse_tensors(settings: Mapping[str, Any]) -> None:
    """Raise for settings whose results can't be printed as text."""
    if settings.get("return_beam_trace"):
        raise UnsupportedError("`return_beam_trace` returns a tree, which unspool explain draws and writes: use that")
    for name in TENSORS_ONLY:
        if settings.get(name):
            raise UnsupportedError(
                f"`{name}` returns tensors, which this program can't print. Use --json with --logprobs N for "
                f"probabilities, or Python: unspool.load(…).generate(…, {name}=True)"
            )
