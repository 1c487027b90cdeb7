"""A conversation: what was said, in a form that can be undone, saved and read back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool.cli.reading import LARGEST_TEXT, check_text
from unspool.cli.settings import find_setting
from unspool.config.values import check_value
from unspool.errors import InputError
from unspool.small_files import read_json_object

FORMAT = "unspool chat 1"
MOST_EXCHANGES = 8192

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message and its answer, which may have been stopped before its end."""

    message: str
    answer: str
    is_stopped: bool = False


@dataclass(slots=True)
class Conversation:
    """A system message, if any, and the exchanges after it."""

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self, following: str | None = None) -> list[Message]:
        """Everything said, as a chat template takes it, with the message that follows."""
        said: list[Message] = []
        if self.system is not None:
            said.append({"role": "system", "content": self.system})
        for exchange in self.exchanges:
            said.append({"role": "user", "content": exchange.message})
            said.append({"role": "assistant", "content": exchange.answer})
        if following is not None:
            said.append({"role": "user", "content": following})
        return said


@dataclass(frozen=True, slots=True)
class SavedChat:
    """What a file made by /save holds."""

    model: str
    conversation: Conversation
    settings: dict[str, Any]


def describe_chat(chat: SavedChat) -> dict[str, Any]:
    """The chat as JSON values."""
    messages: list[dict[str, Any]] = [dict(message) for message in chat.conversation.messages()]
    answers = [message for message in messages if message["role"] == "assistant"]
    for answer, exchange in zip(answers, chat.conversation.exchanges, strict=True):
        if exchange.is_stopped:
            answer["stopped"] = True
    return {"format": FORMAT, "model": chat.model, "settings": chat.settings, "messages": messages}


def read_chat(path: Path) -> SavedChat:
    """Read a file made by /save; anything invalid in it raises an error that names it."""
    if not path.is_file():  # neither a folder nor something without an end
        raise InputError(f"there is no file {str(path)!r}")
    content = read_json_object(path, is_strict=False)  # a bias may be -Infinity; every value is checked below
    if content.get("format") != FORMAT:
        raise InputError(f"{path} is not a saved chat: its 'format' is not {FORMAT!r}. /save makes such files")
    model, settings = content.get("model"), content.get("settings")
    if not isinstance(model, str):
        raise InputError(f"{path}: 'model' must be a string")
    if not isinstance(settings, dict):
        raise InputError(f"{path}: 'settings' must be an object")
    for name, value in settings.items():
        check_value(find_setting(name), value)
    return SavedChat(model, _read_messages(content.get("messages"), path), settings)


def _read_messages(messages: Any, path: Path) -> Conversation:
    if not isinstance(messages, list) or len(messages) > 2 * MOST_EXCHANGES + 1:
        raise InputError(f"{path}: 'messages' must be a list of at most {MOST_EXCHANGES} exchanges")
    rest = [_read_message(message, index, path) for index, message in enumerate(messages)]
    conversation = Conversation()
    if rest and rest[0][0] == "system":
        conversation.system = rest.pop(0)[1]
    roles = [role for role, _, _ in rest]
    if roles != ["user", "assistant"] * (len(rest) // 2):
        raise InputError(f"{path}: after an optional 'system' message, 'user' and 'assistant' must take turns")
    for (_, message, _), (_, answer, is_stopped) in zip(rest[::2], rest[1::2], strict=True):
        conversation.exchanges.append(Exchange(message, answer, is_stopped))
    return conversation


def _read_message(message: Any, index: int, path: Path) -> tuple[str, str, bool]:
    where = f"{path}: messages[{index}]"
    if not isinstance(message, dict):
        raise InputError(f"{where} must be an object with 'role' and 'content'")
    role, content, is_stopped = message.get("role"), message.get("content"), message.get("stopped", False)
    if role not in ("system", "user", "assistant"):
        raise InputError(f"{where} has the role {str(role)[:40]!r}; it must be system, user or assistant")
    if not isinstance(content, str) or len(content) > LARGEST_TEXT:
        raise InputError(f"{where} must have a 'content' that is a text of at most {LARGEST_TEXT} characters")
    if not isinstance(is_stopped, bool):
        raise InputError(f"{where}: 'stopped' must be true or false")
    return role, check_text(content, where), is_stopped
