"""Contents of messages, in the forms of every dialect: texts, or parts of texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from unspool.errors import excerpt
from unspool.server.refusals import refuse_field

_PICTURES: Final = ("image", "image_url", "input_image")


def join_parts(content: Any, where: str) -> str:
    """A content as text: parts of text are joined, others refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse_field(where, f"{where}: a content is a text or a list of parts, not {excerpt(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise refuse_field(where, f"{where}: a part of type {excerpt(kind)} is not read here; texts are")
        texts.append(text)
    return "".join(texts)


def join_content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """A content as text, or as parts of texts and pictures if it has pictures."""
    if not isinstance(content, list) or not any(
        isinstance(part, dict) and part.get("type") in _PICTURES for part in content
    ):
        return join_parts(content, where)
    made: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _PICTURES:
            made.append({"type": "image", "image_url": _find_address(part, where)})
        else:
            made.append({"type": "text", "text": join_parts([part], where)})
    return made


def _find_address(part: Mapping[str, Any], where: str) -> str:
    """Where a picture is: a data: URI or an address. Paths of this machine are nobody's to name."""
    held = part.get("image_url", part.get("source"))
    if isinstance(held, Mapping):
        data = held.get("data")
        if held.get("type") == "base64" and isinstance(data, str):
            kind = held.get("media_type")
            return f"data:{kind if isinstance(kind, str) else 'image/png'};base64,{data}"
        held = held.get("url")
    if not isinstance(held, str) or not held.startswith(("data:", "https://", "http://")):
        raise refuse_field(
            where,
            f"{where}: a picture is a data: URI (data:image/png;base64,…) or an https address, not {excerpt(held, 40)}",
        )
    return held
