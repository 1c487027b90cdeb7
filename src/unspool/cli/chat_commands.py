"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.cli.console import BOLD, DIM, paint, say, say_parts
from unspool.cli.conversation import Conversation, SavedChat, describe_chat, read_chat
from unspool.cli.reading import check_text
from unspool.cli.report import count, format_stats
from unspool.cli.session import Session
from unspool.cli.settings import find_setting, imply_sampling, read_value
from unspool.config.parameters import PARAMETERS
from unspool.errors import InputError, SettingError, UnspoolError
from unspool.small_files import write_text
from unspool.wording import Setting, suggest


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """One slash command: what follows its name, what it does, and the function that does it."""

    argument: str
    summary: str
    execute: Callable[[Session, str], None]


_SAMPLING = Setting("do_sample", "True", is_advice=True)


class Quit(Exception):  # noqa: N818 - no error: the way out
    """The user leaves the chat."""


def execute_line(session: Session, line: str) -> None:
    """Execute a line that begins with a slash."""
    word, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(_ALIASES.get(word, word))
    if command is None:
        hint = suggest(word, COMMANDS, str) or "."
        raise InputError(
            f"there is no command {word[:80]}{hint} /help lists them; //… sends a line that begins with a slash"
        )
    argument = argument.strip()
    if argument and not command.argument:
        raise InputError(f"{word} takes nothing after it")
    command.execute(session, argument)


def _help(_session: Session, _argument: str) -> None:
    width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        say(f"  {f'{name} {command.argument}':<{width}}  {command.summary}")
    say("  Ctrl-c stops an answer; ctrl-d leaves. //… sends a line that begins with a slash.", DIM)


def _set(session: Session, argument: str) -> None:
    if not argument:
        _list_settings(session)
        return
    name, value = _split_setting(argument)
    parameter = find_setting(name)
    changed = imply_sampling({**session.settings, parameter.name: read_value(parameter, value)})
    _change_settings(session, changed)
    say(f"{parameter.name} = {_show(changed[parameter.name])}", DIM)


def _split_setting(argument: str) -> tuple[str, str]:
    words = argument.split(None, 1)
    name, _, rest = words[0].partition("=")
    if rest:  # temperature=0.3
        return name, " ".join([rest, *words[1:]])
    if len(words) == 1:
        parameter = find_setting(name)
        if parameter.kind == "flag":
            return name, "true"
        raise SettingError(f"/set {name} needs a value: {parameter.help}")
    return name, words[1].removeprefix("=").lstrip() if not words[0].endswith("=") else words[1]


def _unset(session: Session, argument: str) -> None:
    parameter = find_setting(argument)
    if parameter.name not in session.settings:
        raise SettingError(f"`{parameter.name}` is not set; /set lists what is")
    _change_settings(session, {name: value for name, value in session.settings.items() if name != parameter.name})
    say(f"{parameter.name} is as the model has it", DIM)


def _change_settings(session: Session, settings: dict[str, Any]) -> None:
    try:
        session.check(session.conversation, settings)
    except SettingError as error:
        if error.wording is not None and _SAMPLING in error.wording.settings:
            raise SettingError(f"{error}\nHere that is: /set do_sample true") from error
        raise
    session.settings = settings


def _list_settings(session: Session) -> None:
    of_model = session.lm.generation_config.to_diff_dict()
    rows = [(name, value, "") for name, value in session.settings.items()]
    rows += [
        (name, value, "  (the model's)")
        for name, value in of_model.items()
        if name in PARAMETERS and name not in session.settings
    ]
    if not rows:
        say("every setting is at its default", DIM)
    for name, value, origin in rows:
        say(f"  {name} = {_show(value)}{origin}")


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)


def _undo(session: Session, _argument: str) -> None:
    if not session.conversation.exchanges:
        raise InputError("there is nothing to undo")
    dropped = session.conversation.exchanges.pop()
    first = dropped.message if len(dropped.message) <= 60 else dropped.message[:59] + "…"
    say(f"forgotten: {first}", DIM)


def _clear(session: Session, _argument: str) -> None:
    session.conversation = Conversation(session.conversation.system)
    say("everything said is forgotten; the system message and the settings stay", DIM)


def _system(session: Session, argument: str) -> None:
    if not argument:
        say(f"  {session.conversation.system or '(none: the template may have its own)'}")
        return
    system = None if argument.lower() == "none" else check_text(argument, "the system message")
    changed = Conversation(system, session.conversation.exchanges)
    session.check(changed, session.settings)  # some templates have no place for one
    session.conversation = changed
    say("the system message is set" if system else "the system message is gone", DIM)


def _save(session: Session, argument: str) -> None:
    _write(session, argument, may_overwrite=False)


def _save_over(session: Session, argument: str) -> None:
    _write(session, argument, may_overwrite=True)


def _write(session: Session, argument: str, *, may_overwrite: bool) -> None:
    path = _read_path(argument, "/save")
    chat = SavedChat(session.lm.name, session.conversation, session.settings)
    try:
        if path.exists() and not may_overwrite:
            raise InputError(f"{path} is there already; /save! {argument} overwrites it")
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file that can be overwritten")
        write_text(path, json.dumps(describe_chat(chat), ensure_ascii=False, indent=2) + "\n")
    except UnspoolError:
        raise
    except OSError as error:
        raise InputError(f"{path} can't be written: {error.strerror or error}") from error
    say(f"saved to {path}", DIM)


def _load(session: Session, argument: str) -> None:
    path = _read_path(argument, "/load")
    try:
        chat = read_chat(path)
    except UnspoolError:
        raise
    except (OSError, ValueError) as error:  # also a number of more digits than Python reads
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{path} can't be read: {reason or error}") from error
    session.check(chat.conversation, chat.settings)
    session.conversation, session.settings = chat.conversation, chat.settings
    say(f"{count(len(chat.conversation.exchanges), 'exchange')} read from {path}", DIM)
    if chat.model != session.lm.name:
        say(f"(it was held with {chat.model}; {session.lm.name} goes on)", DIM)


def _read_path(argument: str, command: str) -> Path:
    if not argument or "\0" in argument:
        raise InputError(f"{command} needs the name of a file")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # the home of a user there is not
        raise InputError(f"{argument!r}: {error}") from error


def _stats(session: Session, _argument: str) -> None:
    if session.last_stats is None:
        raise InputError("there is no answer yet")
    say_parts("  ", paint("last answer", BOLD, stream=sys.stderr), f"  {format_stats(session.last_stats)}")
    context = session.lm.model.info.max_context
    num_exchanges = len(session.conversation.exchanges)
    room = f" of {context}" if context is not None else ""
    held = f"{count(num_exchanges, 'exchange')}, {session.count_tokens()}{room} tokens of context"
    say_parts("  ", paint("conversation", BOLD, stream=sys.stderr), f" {held}")


def _quit(_session: Session, _argument: str) -> None:
    raise Quit


COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand("", "Show this.", _help),
    "/set": SlashCommand("[NAME VALUE]", "Change a setting (temperature 0.3); alone: list what differs.", _set),
    "/unset": SlashCommand("NAME", "Put a setting back.", _unset),
    "/undo": SlashCommand("", "Forget the last exchange.", _undo),
    "/clear": SlashCommand("", "Forget everything said.", _clear),
    "/system": SlashCommand("[TEXT]", "Set the system message (none removes it); alone: show it.", _system),
    "/save": SlashCommand("FILE", "Write the conversation and the settings to a file.", _save),
    "/save!": SlashCommand("FILE", "The same, overwriting an existing file.", _save_over),
    "/load": SlashCommand("FILE", "Continue a conversation written by /save.", _load),
    "/stats": SlashCommand("", "Show the speed of the last answer, and how full the context is.", _stats),
    "/quit": SlashCommand("", "Leave.", _quit),
}
_ALIASES = {"/exit": "/quit", "/?": "/help"}
