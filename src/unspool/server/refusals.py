"""Errors as clients see them: a status, a message, and the field that it is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from unspool.errors import (
    EngineError,
    InputError,
    LoadError,
    MissingExtraError,
    NoTokenLeftError,
    ResourceError,
    SettingError,
    UnfulfilledError,
    UnspoolError,
    UnsupportedError,
)

_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
}
_NAMED: Final = re.compile(r"`(\w+)`")
_CONTEXT: Final = "the model's context ends at"
MADE_OF: Final = {
    "bad_words_ids": "bad_words",
    "force_words_ids": "force_words",
    "mirostat_tau": "mirostat",
    "num_beams": "use_beam_search",
}
"""Settings that the server makes of fields, whose values are others."""

# What a message may say of a setting that the server has chosen for the client.
_DRAWING: Final = (
    (re.compile(r"`do_sample`=True, set in the call,"), "a `temperature` above 0"),
    (re.compile(r"`?do_sample=True`?"), "a `temperature` above 0"),
    (re.compile(r"`?do_sample=False`?"), "`temperature=0`"),
    (re.compile(r"\bdo_sample\b"), "temperature"),
    (re.compile(r"`constraints` or "), ""),  # Python objects: no client sends them
)
_WORD: Final = re.compile(r"`(\w+)`(=(?:'[^']*'|[^\s,;:)]+))?|\b[a-z0-9]+(?:_[a-z0-9]+)+\b")


class RequestError(UnspoolError):
    """A request that is not carried out, or not to its end."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def kind(self) -> str:
        """The type of the error, in OpenAI's words."""
        return _KINDS.get(self.status, "server_error")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def as_openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def refuse_field(name: str, message: str, code: str | None = None) -> RequestError:
    """A field that can't be."""
    return RequestError(400, message, param=name, code=code)


def say_to_client(message: str, names: Mapping[str, str]) -> str:
    """A message of the library in the client's names of settings, without any that the client has not sent."""

    def rename(found: re.Match[str]) -> str:
        setting = found[1] or found[0]
        field = names.get(setting, setting)
        if found[1] is None:
            return field
        value = found[2] or ""
        return f"`{field}`" if field != setting and MADE_OF.get(setting) == field else f"`{field}`{value}"

    if "do_sample" not in names:
        for pattern, words in _DRAWING:
            message = pattern.sub(words, message)
    return _WORD.sub(rename, message)


def read_error(
    error: BaseException, names: Mapping[str, str] | None = None, *, is_submitted: bool = False
) -> RequestError:
    """What a client reads of an error: the library's own words, and nothing of any other.

    `names` are the client's names of settings. `is_submitted`: the request was at work.
    """
    if isinstance(error, RequestError):
        return error
    message = str(error)
    if isinstance(error, EngineError):
        return RequestError(
            503, "the engine has stopped and this request is lost; send it again", code="engine", retry_after=5
        )
    if isinstance(error, ResourceError):
        if is_submitted:
            return RequestError(503, message, code="no_memory", retry_after=5)
        return RequestError(400, message, code="too_large")
    if isinstance(error, MissingExtraError):
        return RequestError(501, message, code="missing_extra")
    if isinstance(error, LoadError):
        return RequestError(503, "the model can't be loaded; the server's log says why", code="model_not_loaded")
    if isinstance(error, NoTokenLeftError | UnfulfilledError):
        return RequestError(
            400, message, code="no_token_left" if isinstance(error, NoTokenLeftError) else "unfulfilled"
        )
    if isinstance(error, SettingError | InputError | UnsupportedError):
        if names is not None:
            message = say_to_client(message, names)
        named, sent = _NAMED.findall(message), set((names or {}).values())
        param = next((name for name in named if name in sent), named[0] if named else None)
        return RequestError(400, message, param=param, code="context_length_exceeded" if _CONTEXT in message else None)
    if isinstance(error, MemoryError):
        return RequestError(503, "there is not enough memory for this request", code="no_memory", retry_after=5)
    return RequestError(500, "something went wrong in the server; its log says what, under this request's id")
