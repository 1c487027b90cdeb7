"""Pictures among the parts of messages: those that templates mark, in every form in which clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from unspool.errors import InputError, excerpt
from unspool.pictures.opening import Limits, decode_base64, default_limits, open_picture

_KINDS: Final = ("image", "image_url", "input_image")
_PLACES: Final = ("image", "image_url", "url", "path", "base64", "source")


@dataclass(frozen=True)
class Pictured:
    """A chat whose pictures were opened: its messages have parts {"type": "image"} in their places."""

    messages: list[dict[str, Any]]
    pictures: list[Any]


def has_pictures(messages: Any) -> bool:
    """Whether a chat has a picture among its parts."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return False
    return any(isinstance(one, Mapping) and (_is_pictured(one) or one.get("images")) for one in messages)


def _is_pictured(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list | tuple) and any(
        isinstance(part, Mapping) and part.get("type") in _KINDS for part in content
    )


def take_pictures(messages: Sequence[Mapping[str, Any]], limits: Limits | None = None) -> Pictured:
    """Open the pictures of a chat, in their order. Raises for one that can't be, before anything is computed."""
    limits = default_limits() if limits is None else limits
    sources: list[tuple[str, Any]] = []
    made = [_take_message(message, f"messages[{place}]", sources) for place, message in enumerate(messages)]
    if len(sources) > limits.num_pictures:
        raise InputError(f"a chat has {len(sources)} pictures; at most {limits.num_pictures} are taken")
    return Pictured(made, [_open(source, limits, name) for name, source in sources])


def _open(source: Any, limits: Limits, name: str) -> Any:
    if isinstance(source, Base64):
        source = decode_base64(source, limits, name)
    return open_picture(source, limits, name)


class Base64(str):
    """A text that stands for bytes."""


def _take_message(message: Mapping[str, Any], where: str, sources: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message with every picture's source taken out; one whose parts are all texts stays as it is."""
    kept = dict(message)
    beside = kept.pop("images", None)  # Ollama's
    content = kept.get("content")
    if not beside and not _is_pictured(message):
        return kept
    parts: list[Any] = []
    for source in _check_beside(beside, where):
        sources.append((f"the picture images[{len(parts)}] of {where}", source))
        parts.append({"type": "image"})
    if isinstance(content, str):
        parts += [{"type": "text", "text": content}] if content else []
    for place, part in enumerate(content if isinstance(content, list | tuple) else ()):
        if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
            parts.append({"type": "text", "text": part} if isinstance(part, str) else part)
            continue
        sources.append((f"the picture of {where}.content[{place}]", _find_source(part, f"{where}.content[{place}]")))
        parts.append({"type": "image"})
    return {**kept, "content": parts}


def _check_beside(given: Any, where: str) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise InputError(f"{where}: `images` is a list of pictures, not {excerpt(given)}")
    return [Base64(one) if isinstance(one, str) and not one.startswith("data:") else one for one in given]


def _find_source(part: Mapping[str, Any], where: str) -> Any:
    """Where the picture of a part is: in any of the forms of transformers, OpenAI and Anthropic."""
    named = [name for name in _PLACES if part.get(name) is not None]
    if len(named) != 1:
        count = "several" if named else "none"
        raise InputError(
            f"{where} is a picture and gives {count} of {', '.join(_PLACES)}; give one, as in "
            '{"type": "image", "image": picture}'
        )
    source = part[named[0]]
    if named[0] == "base64":
        source = Base64(source) if isinstance(source, str) else source
    if isinstance(source, Mapping):
        if source.get("type") == "base64" and isinstance(source.get("data"), str):
            return Base64(source["data"])
        source = source.get("url")
    if source is None or (isinstance(source, str) and not source):
        raise InputError(f"{where} is a picture without a source; give its data: URI")
    return source
