"""Running chat templates: the one place that does. They come with models, from anyone, so they are not trusted.

A template runs in jinja2's sandbox, which keeps it away from Python. That leaves its appetite: loops in loops,
strings doubled forty times. So only known operations exist there (`sandbox`, `methods`, `filters`), the tree is
rewritten before it is compiled (`instrument`), and everything pays for what it makes, before it is made (`budget`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import jinja2
import jinja2.meta

from unspool.errors import InputError, SettingError
from unspool.text.chat.budget import Budget, refuse, spending
from unspool.text.chat.instrument import instrument
from unspool.text.chat.messages import copy_messages, copy_plain
from unspool.text.chat.sandbox import ChatEnvironment

MAX_TEMPLATE_CHARACTERS = 128 << 10
MAX_TOKENS = 24_000  # that a template is made of, beside its plain text
MAX_TOOLS = 4096

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str],
    **variables: Any,
) -> str:
    """The text of a conversation, as the model's template writes it."""
    compiled, known = _compile(template)
    _check_variables(variables, tools, documents, known)
    given = {
        **special_tokens,
        **{name: copy_plain(value, name) for name, value in variables.items()},
        "messages": copy_messages(messages),
        "tools": _copy_list(tools, "tools"),
        "documents": _copy_list(documents, "documents"),
        "add_generation_prompt": bool(add_generation_prompt),
    }
    try:
        with spending(Budget()):
            return compiled.render(given)
    except Exception as error:  # a template can fail in every way that Python can
        reason = _describe(error)
        parts = sorted({kind for message in messages for kind in _list_parts(message)})
        if parts:
            reason += f". Messages have parts ({', '.join(parts)}), which it may not take: give `content` as one text"
        raise InputError(f"the chat template failed: {reason}") from error


def cut_after_last_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation's text up to where its last message's words end, so that a model goes on with that message.

    Spaces around the words stay as the template wrote them before them; those behind stay if it kept them.
    """
    content = messages[-1].get("content") if messages and isinstance(messages[-1], Mapping) else None
    words = content.strip() if isinstance(content, str) else ""
    place = text.rfind(words) if words else -1
    if place < 0:
        raise InputError(
            "the last message can't be continued: it has no text, or the chat template does not write its text as it is"
        )
    whole = str(content).lstrip()
    return text[: place + len(whole if text.startswith(whole, place) else words)]


def _list_parts(message: Mapping[str, Any]) -> list[str]:
    """The types of a message's parts; none if its content is a text."""
    content = message.get("content")
    found = [part.get("type") for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return [kind[:40] for kind in found if isinstance(kind, str)]


@lru_cache(maxsize=32)
def _compile(template: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The compiled template, and the names of the variables that it reads."""
    if not isinstance(template, str):
        raise InputError(f"a chat template is a string, not {type(template).__name__}")
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise InputError(
            f"the chat template has {len(template)} characters; the longest that is run has {MAX_TEMPLATE_CHARACTERS}"
        )
    environment = _environment()
    try:
        if len(list(islice(environment.lex(template), 2 * MAX_TOKENS + 1))) > 2 * MAX_TOKENS:  # spaces count there
            raise refuse(f"it has more than {MAX_TOKENS} words and signs")
        tree = environment.parse(template)
        known = frozenset(jinja2.meta.find_undeclared_variables(tree))
        return environment.from_string(instrument(tree, environment)), known
    except Exception as error:
        raise InputError(f"the chat template can't be compiled: {_describe(error)}") from error


@lru_cache(maxsize=1)
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


def _check_variables(
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    known: frozenset[str],
) -> None:
    """Refuse what the template would never read: nobody should believe that it was applied."""
    given = {**variables, **{k: v for k, v in (("tools", tools), ("documents", documents)) if v is not None}}
    unread = sorted(set(given) - known)
    if unread:
        own = sorted(known - {*_RESERVED, "raise_exception", "strftime_now"})
        raise SettingError(
            f"this model's chat template does not read {', '.join(unread)}, so it can't be applied; "
            f"leave it out. Variables that the template reads: {', '.join(own) or 'none'}"
        )


def _copy_list(values: Sequence[Mapping[str, Any]] | None, name: str) -> list[Any] | None:
    if values is None:
        return None
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence) or len(values) > MAX_TOOLS:
        raise InputError(f"{name} must be a list of at most {MAX_TOOLS} dicts (JSON schemas for tools)")
    if not all(isinstance(value, Mapping) for value in values):
        raise InputError(f"every entry of {name} must be a dict, such as a tool's JSON schema")
    return [copy_plain(value, f"{name}[{index}]") for index, value in enumerate(values)]


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    if isinstance(error, jinja2.TemplateError):
        return str(error.message or error)
    return f"{type(error).__name__}: {error}"
