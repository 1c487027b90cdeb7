"""Pictures in messages, in the forms of every dialect: what is sent along, or lies on a host that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unspool.errors import UnspoolError
from unspool.models.adapters.pictures import PicturePrompt
from unspool.pictures import Limits, take_pictures
from unspool.pictures.opening import decode_base64, default_limits
from unspool.server.orders import Target
from unspool.server.refusals import refuse_field


def join_images(message: Mapping[str, Any], where: str, target: Target) -> dict[str, Any]:
    """A message whose `images` (Ollama's, base64) are parts of its content."""
    given = message["images"]
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise refuse_field(where, f"{where}: `images` is a list of pictures in base64")
    limits = read_limits(target)
    try:
        parts: list[dict[str, Any]] = [
            {
                "type": "image",
                "image": decode_base64(one.partition(",")[2] or one, limits, f"images[{place}] of {where}"),
            }
            for place, one in enumerate(given)
        ]
    except UnspoolError as error:
        raise refuse_field(where, str(error)) from error
    content = message.get("content")
    parts += [{"type": "text", "text": content}] if isinstance(content, str) and content else []
    return {**{name: value for name, value in message.items() if name != "images"}, "content": parts}


def check_reads_pictures(message: Mapping[str, Any], where: str, target: Target) -> None:
    """Raise for a message with pictures that the model does not read."""
    content = message.get("content")
    if isinstance(content, list) and target.lm.pictures is None:
        raise refuse_field(where, f"{where} has a picture, and {target.name} reads text alone; leave it out")


def read_limits(target: Target) -> Limits:
    """What a request's pictures may be."""
    limits = target.limits
    return Limits(
        num_bytes=limits.body_bytes,
        num_pixels=limits.picture_pixels,
        num_pictures=limits.pictures,
        hosts=default_limits().hosts,
    )


def has_parts(messages: list[dict[str, Any]]) -> bool:
    """Whether any message has pictures."""
    return any(isinstance(message.get("content"), list) for message in messages)


def open_pictures(messages: list[dict[str, Any]], target: Target) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages as templates read them, and their pictures, opened."""
    found = take_pictures(messages, read_limits(target))
    return found.messages, found.pictures


def prepare_prompt(text: str, pictures: list[Any], target: Target) -> dict[str, Any]:
    """A rendered chat and its pictures as the model takes them: ids and pixels."""
    reader = target.lm.pictures
    assert reader is not None
    return reader.prepare(PicturePrompt(text, pictures, is_rendered=True))
