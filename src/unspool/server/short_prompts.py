"""The field `compress`: prompts that lose what the served model could have guessed, before they are read."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from unspool.compression.losses import Losses
from unspool.compression.prompt import CompressedPrompt, read_call, run_call
from unspool.engine import Engine
from unspool.errors import UnspoolError, excerpt
from unspool.server.names import COMPRESS_OPTIONS
from unspool.server.orders import Target
from unspool.server.refusals import RequestError, refuse_field

_LARGEST_WINDOW: Final = 4096


def shorten_prompts(given: Any, options: Any, target: Target) -> Any:
    """The prompts of a completion; each text is a context of its own call."""
    if options is None:
        return given
    texts = [given] if isinstance(given, str) else given
    if (
        not isinstance(texts, list)
        or len(texts) > target.limits.prompts
        or not all(isinstance(one, str) for one in texts)
    ):
        raise refuse_field("compress", "`compress` shortens texts, and the prompt has token ids; send texts")
    return [_shorten([text], options, target) for text in texts]


def shorten_messages(given: Any, options: Any, target: Target) -> Any:
    """The messages of a chat, of which the last of the user's is shortened. Of several parts the last is the question:
    it stays, and decides what stays of the others."""
    if options is None:
        return given
    places = [
        place
        for place, message in enumerate(given if isinstance(given, list) else [])
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    if not places:
        raise refuse_field("compress", "`compress` shortens the user's last message, and there is none; leave it out")
    message = given[places[-1]]
    parts = _list_parts(message.get("content"))
    if len(parts) > 1:
        if isinstance(options, dict) and "question" in options:
            raise refuse_field("compress", "the last part of the message is the question; leave `question` out")
        options = {**options, "question": parts.pop()}
    made = {**message, "content": _shorten(parts, options, target)}
    return [*given[: places[-1]], made, *given[places[-1] + 1 :]]


def _list_parts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    given = [part.get("text") if isinstance(part, dict) else part for part in parts]
    texts = [text for text in given if isinstance(text, str) and text]
    if not texts or len(texts) < len(given):
        raise refuse_field(
            "compress", "`compress` shortens texts, and the user's last message has other parts, or none"
        )
    return texts


def _shorten(contexts: list[str], options: Any, target: Target) -> str:
    return compress_texts(contexts, "", options, target).text


def compress_texts(contexts: list[str], instruction: str, options: Any, target: Target) -> CompressedPrompt:
    """The contexts without what could be guessed, between instruction and question."""
    if not isinstance(options, dict) or set(options) - set(COMPRESS_OPTIONS):
        raise refuse_field("compress", f"`compress` takes {', '.join(COMPRESS_OPTIONS)}, not {excerpt(options)}")
    if target.engine is None:
        raise refuse_field("compress", "`compress` needs a running engine, which reads no prompts here; leave it out")
    for text in contexts:
        target.encode_text(text, add_special_tokens=False, field="compress")  # raises for texts that are too long
    try:
        call = read_call(
            contexts,
            instruction,
            options.get("question", ""),
            options.get("rate", 0.5),
            options.get("target_token", -1),
            options.get("window", 200),
            options.get("keep", []),
            options.get("keep_digits", False),
        )
        if call.window > _LARGEST_WINDOW:
            raise refuse_field("compress", f"`window`={call.window} is more than {_LARGEST_WINDOW}")
        return run_call(EngineLosses(target.engine, target.longest_prompt), target.tokenizer, call)
    except RequestError:
        raise
    except UnspoolError as error:
        raise refuse_field("compress", f"`compress`: {error}") from error


class EngineLosses:
    """Losses by requests of an engine, whose passes others share."""

    def __init__(self, engine: Engine, longest: int | None) -> None:
        self._engine, self.longest = engine, longest
        # Its requests share what they have read with each other, and with nobody else's.
        self._tenant = f"compress-{uuid.uuid4().hex}"

    def start(self) -> EnginePieces:
        """A text to be read piece by piece."""
        return EnginePieces(self)

    def measure(self, rows: Sequence[Sequence[int]]) -> list[Losses]:
        """The losses of texts but of their first tokens."""
        asked = {"max_new_tokens": 1, "do_sample": False, "prompt_logprobs": 0, "skip_special_tokens": True}
        requests = [self._engine.submit(list(row), tenant=self._tenant, **asked) for row in rows]
        found = []
        for request in requests:
            listed = request.result().prompt_logprobs
            assert listed is not None
            found.append(np.array([-one.logprob for one in listed[0] if one is not None], dtype=np.float32))
        return found


class EnginePieces:
    """A text that is asked for anew with every piece: the engine keeps what it has read of it."""

    def __init__(self, source: EngineLosses) -> None:
        self._source, self._held = source, list[int]()

    @property
    def num_held(self) -> int:
        """Tokens that are held."""
        return len(self._held)

    def read(self, ids: Sequence[int], keeps: int) -> Losses:
        """The losses of the next tokens but the first; afterwards only the first `keeps` of all are held."""
        whole = [*self._held, *ids]
        losses = self._source.measure([whole])[0][len(self._held) :]
        self._held = whole[:keeps]
        return losses
