"""Errors as clients see them: a status, a message, and the field that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from unspool.errors import (
    ContextError,
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
from unspool.wording import Names, Setting, Wording

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
MADE_OF: Final = {
    "bad_words_ids": "bad_words",
    "force_words_ids": "force_words",
    "mirostat_tau": "mirostat",
    "num_beams": "use_beam_search",
}
"""Settings that the server makes of fields, whose values are others."""


class ClientNames(Names):
    """The client's names of settings: the fields that it sent, and those that stand for what it can't send."""

    def __init__(self, sent: Mapping[str, str]) -> None:
        self.sent = sent  # field by setting

    def word(self, setting: Setting) -> str:
        """A setting as the client reads it."""
        field = self._find_field(setting)
        if setting.name == "do_sample" and field == "temperature":
            return self._word_drawing(setting.value)
        if field != setting.name and MADE_OF.get(setting.name) == field:
            return f"`{field}`"  # the client has sent another value
        return super().word(replace(setting, name=field))

    def find_param(self, message: Wording) -> str | None:
        """The field that a message is about: the first that was sent, or the first that it names."""
        fields = [self._find_field(one) for one in message.settings]
        sent = set(self.sent.values())
        return next((field for field in fields if field in sent), fields[0] if fields else None)

    def _find_field(self, setting: Setting) -> str:
        return self.sent.get(setting.name, "temperature" if setting.name == "do_sample" else setting.name)

    @staticmethod
    def _word_drawing(value: str | None) -> str:
        """`do_sample`, which follows from the temperature."""
        if value is None:
            return "`temperature`"
        return "a `temperature` above 0" if value == "True" else "`temperature=0`"


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
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

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
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        if error.wording is None:
            return RequestError(400, message, param=_find_marked(message), code=code)
        words = ClientNames(names or {})
        return RequestError(400, error.wording.say(words), param=words.find_param(error.wording), code=code)
    if isinstance(error, MemoryError):
        return RequestError(503, "there is not enough memory for this request", code="no_memory", retry_after=5)
    return RequestError(500, "something went wrong in the server; its log says what, under this request's id")


def _find_marked(message: str) -> str | None:
    """The first name that a message marks."""
    marked = message.split("`")[1:2]
    return marked[0] if marked else None
