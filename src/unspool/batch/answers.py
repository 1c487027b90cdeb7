"""Rows of a batch as requests of an engine, and finished requests as answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unspool.api import LanguageModel
from unspool.batch.lines import CHAT, COMPLETIONS, RESPONSES, BadLineError, Line
from unspool.decoding.randomness import derive_seed
from unspool.engine import Engine
from unspool.errors import EngineError, SettingError, UnspoolError
from unspool.numeric import is_whole
from unspool.outputs import TokenLogprob
from unspool.server.chat import ChatDialect
from unspool.server.completions import CompletionDialect
from unspool.server.dialect import Dialect, Reply
from unspool.server.fields import FieldTable, read_fields
from unspool.server.names import CHAT as CHAT_FIELDS
from unspool.server.names import COMPLETIONS as COMPLETION_FIELDS
from unspool.server.names import RESPONSES as RESPONSE_FIELDS
from unspool.server.options import ClientLimits
from unspool.server.orders import Order, Target
from unspool.server.refusals import RequestError, read_error
from unspool.server.responses import ResponseDialect
from unspool.server.tokens import LOWEST, ClientTokens
from unspool.server.usage import count_usage
from unspool.server.work import Choice, Work

_LIMITS = ClientLimits(new_tokens=1 << 20, choices=1024, request_seconds=1e9, top_logprobs=64)
_SEVERAL = {"text": "texts", "finish_reason": "finish_reasons"}  # what stands for several in one line
_DIALECTS: dict[str, tuple[Dialect, FieldTable]] = {
    CHAT: (ChatDialect(), CHAT_FIELDS),
    COMPLETIONS: (CompletionDialect(), COMPLETION_FIELDS),
    RESPONSES: (ResponseDialect(), RESPONSE_FIELDS),
}


_OF_A_ROW = ("prompt", "messages", "input", "model", "stream", "request_id")  # nothing that all rows can have


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise for a setting that is to hold for all rows and that none can have."""
    for name, value in settings.items():
        tables = [table for _, table in _DIALECTS.values() if name in table]
        if name in _OF_A_ROW:
            raise SettingError(f"`{name}` is not a setting for all rows; leave it out")
        try:
            read_fields({name: value}, tables[0] if tables else CHAT_FIELDS)
        except RequestError as error:
            raise SettingError(str(error)) from error


class Answers:
    """Begins rows in an engine and writes their answers; `settings` hold for rows that don't say otherwise."""

    def __init__(
        self,
        lm: LanguageModel,
        engine: Engine,
        *,
        name: str,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        any_model: bool = False,
        created: int = 0,  # the time that answers are dated with
    ) -> None:
        if not is_whole(seed):
            raise SettingError(f"`seed` is a whole number, from which the seeds of rows follow, not {seed!r:.40}")
        check_settings(settings or {})
        self._engine, self._created = engine, created
        self._settings, self._seed, self._any_model = dict(settings or {}), seed, any_model
        self._target = Target(name, lm, _LIMITS, engine)
        self._texts = ClientTokens(lm.tokenizer)

    def begin(self, line: Line) -> Work:
        """Submit a row. Raises what is wrong with it, or the EngineError of an engine that takes no more."""
        try:
            return Work(self._engine, self._read(line), self._target.lm.tokenizer)
        except Exception as error:
            if isinstance(error.__cause__, EngineError):  # no row's fault: it is answered by the next run
                raise error.__cause__ from None
            if isinstance(error, UnspoolError) and not isinstance(error, EngineError):
                raise read_error(error) from error
            raise

    def _read(self, line: Line) -> Order:
        dialect, table = _DIALECTS[line.url]
        body = dict(line.body)
        asked = body.pop("model", None)
        if asked is not None and asked != self._target.name and not self._any_model:
            raise BadLineError(
                f"the line asks for the model {asked!r:.80} and this job runs {self._target.name!r}; use --any-model"
            )
        if body.get("stream"):
            raise BadLineError("`stream` has no meaning in a file; leave it out")
        taken = {table[name].target for name, value in body.items() if name in table and value is not None}
        body |= {name: value for name, value in self._settings.items() if name not in taken}
        if "seed" not in taken:
            body["seed"] = derive_seed(self._seed, line.number) % 2**31
        order = dialect.read(body, self._target)
        order.created = self._created
        if body.get("request_id") is None:
            order.name = _name_line(line)
        return order

    def wait(self, work: Work) -> list[Choice]:
        """The choices of a row. Raises why it failed, or the EngineError of an engine that has died."""
        try:
            return work.wait()
        except EngineError:
            raise
        except Exception as error:
            raise read_error(error, work.order.names, is_submitted=True) from error

    def write(self, line: Line, work: Work, choices: list[Choice]) -> dict[str, Any]:
        """The answer to a row, in the form that it was asked in."""
        return self._write_plain(line, choices, work) if line.is_plain else self._write_openai(line, choices, work)

    def _write_openai(self, line: Line, choices: list[Choice], work: Work) -> dict[str, Any]:
        order = work.order
        body = _DIALECTS[line.url][0].write(Reply(order, self._texts, "unspool"), choices, work)
        return {
            "id": f"batch_req_{_name_line(line)}",
            "custom_id": line.custom_id,
            "line": line.number,
            "response": {"status_code": 200, "request_id": order.id, "body": body},
            "error": None,
        }

    def _write_plain(self, line: Line, choices: list[Choice], work: Work) -> dict[str, Any]:
        """An answer in our own form: the texts, why they ended, what else was asked for, and what it cost."""
        order = work.order
        each: dict[str, list[Any]] = {
            "text": [self._write_text(choice, order) for choice in choices],
            "finish_reason": [choice.finish_reason for choice in choices],
        }
        if any(choice.calls for choice in choices):
            each["tool_calls"] = [[call.as_openai() for call in choice.calls] for choice in choices]
        if any(choice.thought for choice in choices):
            each["thoughts"] = [choice.thought for choice in choices]
        if order.returns_ids:
            each["token_ids"] = [choice.token_ids for choice in choices]
        made: dict[str, Any] = {"line": line.number}
        if line.custom_id is not None:
            made["id"] = line.custom_id
        if len(choices) == 1:
            made |= {name: values[0] for name, values in each.items()}
        else:
            made |= {_SEVERAL.get(name, name): values for name, values in each.items()}
        if order.logprobs is not None:
            made["logprobs"] = [_list_logprobs(choice.logprobs or [], order.logprobs) for choice in choices]
        if choices[0].prompt_logprobs is not None:
            asked = order.settings["prompt_logprobs"]
            made["prompt_logprobs"] = [
                _list_logprobs(choice.prompt_logprobs or [], asked) for choice in choices[:: order.num_choices]
            ]
        return {**made, "usage": count_usage(work)}

    def _write_text(self, choice: Choice, order: Order) -> str:
        if not order.echo:
            return choice.text
        return self._texts.decode(choice.prompt_ids, skip_special_tokens=order.skips_specials) + choice.text


def _name_line(line: Line) -> str:
    """A name for a row's answer, the same every time."""
    return hashlib.sha256(f"{line.number}\0{line.custom_id}".encode()).hexdigest()[:24]


def _list_logprobs(given: Sequence[TokenLogprob | None], num_top: int) -> list[Any]:
    """A token's id and log-probability, and those of as many of the likeliest as were asked for."""
    made: list[Any] = []
    for one in given:
        if one is None:  # a prompt's first token
            made.append(None)
            continue
        top = [[token, _round(value)] for token, value in one.top[:num_top]]
        made.append([one.token_id, _round(one.logprob), *([top] if num_top else [])])
    return made


def _round(logprob: float) -> float:
    return round(max(logprob, LOWEST), 6)


def write_failure(number: int, line: Line | None, error: Exception) -> dict[str, Any]:
    """The line that says why a row has no answer."""
    described = error.as_openai()["error"] if isinstance(error, RequestError) else {"message": str(error)}
    named = error if line is None else line
    return {"line": number, "custom_id": getattr(named, "custom_id", None), "error": described}


def follow(work: Work, notify: Callable[[], None], place: int = 0) -> None:
    """Call `notify` once the last request of a work is done, from the thread that ends it."""
    if place == len(work.requests):
        notify()
    else:
        work.requests[place].when_done(lambda _: follow(work, notify, place + 1))


def find_name(model: str) -> str:
    """The name of a model that answers carry: a path's last part."""
    return Path(model).name or model
