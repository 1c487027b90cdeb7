"""`/v1/systemone`: typed questions about a state, answered by probabilities instead of text.

Every allowed answer has a label of one token. Its probability is the model's, among the labels, right after the
question; nothing is generated.
"""

from __future__ import annotations

import asyncio
import json
import math
import string
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from unspool.engine import Engine
from unspool.errors import excerpt
from unspool.outputs import TokenLogprob
from unspool.server.bodies import JsonResponse, get_record, until_gone
from unspool.server.chat import render_chat
from unspool.server.errands import Errand
from unspool.server.orders import Order, Target
from unspool.server.refusals import RequestError, read_error, refuse_field
from unspool.server.state import ServerState
from unspool.server.work import Work

MOST_QUESTIONS: Final = 64
MOST_OPTIONS: Final = 26
_LIKELIEST: Final = 512  # labels are looked for among so many tokens first
_FIELDS: Final = ("model", "state", "questions", "instructions", "keep_alive", "chat_template_kwargs")


@dataclass(frozen=True)
class Question:
    """A question with the answers that it allows."""

    name: str
    kind: str  # "choice", "score" or "noul"
    prompt: list[int]
    options: list[str]
    labels: list[int]  # a token for each option
    legend: list[str]


class SystemOneRoute:
    """The endpoint, over one server's state."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def answer(self, request: Request) -> Response:
        """Answer all questions of a request."""
        state, record = self._state, get_record(request)
        limits = state.options.limits
        with ExitStack() as stack:
            stack.enter_context(state.gate.enter(record.key))
            errand = stack.enter_context(Errand(state, request))
            body = await errand.read_json()
            served = await state.models.borrow(body.get("model"))
            stack.callback(state.models.give_back, served)
            record.model = served.name
            if served.engine is None:
                raise RequestError(400, f"{served.name} reads sound, not text", param="model")
            target = state.models.target(served, limits)
            try:
                errand.weigh(weigh_questions(body))
                questions = await errand.run(partial(read_questions, body, target))
                errand.close()
                tenant = state.keys.make_tenant(record.key, "")
                found = await until_gone(request, ask(served.engine, target, questions, tenant))
            except Exception as error:
                raise read_error(error) from error
            record.prompt_tokens = sum(len(question.prompt) for question in questions)
            answers = {one.name: write_answer(one, mass) for one, mass in zip(questions, found, strict=True)}
            usage = {"input_tokens": record.prompt_tokens, "output_tokens": 0}
            return JsonResponse({"model": served.name, "answers": answers, "usage": usage})


async def ask(engine: Engine, target: Target, questions: list[Question], tenant: str) -> list[list[float]]:
    """The probabilities of each question's options, which sum to 1."""
    settings = {"max_new_tokens": 1, "do_sample": False, "logprobs": _LIKELIEST}
    order = _order(target, [question.prompt for question in questions], settings, tenant)
    work = await asyncio.to_thread(Work, engine, order, target.lm.tokenizer)
    try:
        choices = await work.choices()
        found = []
        for question, choice in zip(questions, choices, strict=True):
            assert choice.logprobs is not None
            known = dict(choice.logprobs[0].top)
            missing = [label for label in question.labels if label not in known]
            if missing:
                known |= await _score(engine, target, question, missing, tenant)
            found.append(_normalise([known[label] for label in question.labels]))
        return found
    finally:
        work.close()


async def _score(
    engine: Engine, target: Target, question: Question, labels: list[int], tenant: str
) -> dict[int, float]:
    """The log-probabilities of labels that are not among the likeliest tokens: read as a prompt's last token."""
    settings = {"max_new_tokens": 1, "do_sample": False, "prompt_logprobs": 0}
    order = _order(target, [[*question.prompt, label] for label in labels], settings, tenant)
    work = await asyncio.to_thread(Work, engine, order, target.lm.tokenizer)
    try:
        found: list[TokenLogprob | None] = [(choice.prompt_logprobs or [None])[-1] for choice in await work.choices()]
        return {label: -math.inf if one is None else one.logprob for label, one in zip(labels, found, strict=True)}
    finally:
        work.close()


def _order(target: Target, prompts: list[list[int]], settings: dict[str, Any], tenant: str) -> Order:
    return Order("systemone", "", target.name, prompts, settings, {}, logprobs=0, tenant=tenant)


def _normalise(logprobs: list[float]) -> list[float]:
    highest = max(logprobs)
    masses = [math.exp(one - highest) for one in logprobs]
    return [mass / math.fsum(masses) for mass in masses]


def write_answer(question: Question, masses: list[float]) -> dict[str, Any]:
    """An answer in the form of its question's kind."""
    by_option = dict(zip(question.options, masses, strict=True))
    best = max(range(len(masses)), key=lambda place: masses[place])
    count = len(masses)
    if question.kind == "noul":
        return {"type": "noul", "noul": by_option["true"]}
    if question.kind == "choice":
        # 0 where all options are alike, 1 where one has all of the mass
        sure = 1.0 if count == 1 else max(0.0, (masses[best] - 1 / count) / (1 - 1 / count))
        return {
            "type": "choice",
            "choice": question.options[best],
            "probabilities": by_option,
            "confidence": sure,
        }
    away = math.fsum(mass * abs(place - best) for place, mass in enumerate(masses))
    usual = math.fsum(abs(place - (count - 1) / 2) for place in range(count)) / count
    return {
        "type": "score",
        "score": math.fsum(place * mass for place, mass in enumerate(masses)),
        "legend": dict(zip(question.options, question.legend, strict=True)),
        "probabilities": by_option,
        "confidence": 1.0 if count == 1 else max(0.0, 1 - away / usual),
    }


# --- reading ----------------------------------------------------------------------------------------------------------
def weigh_questions(body: dict[str, Any]) -> int:
    """About how many bytes of prompts a body stands for: every question's has the whole state."""
    state, questions = body.get("state"), body.get("questions")
    size = len(state) if isinstance(state, str) else len(json.dumps(state))
    return size * min(MOST_QUESTIONS, len(questions)) if isinstance(questions, dict) else size


def read_questions(body: dict[str, Any], target: Target) -> list[Question]:
    """The questions of a body, each with its prompt."""
    for name in body:
        if name not in _FIELDS:
            raise refuse_field(name[:64], f"unknown field {excerpt(name)}; known are {', '.join(_FIELDS)}")
    state, questions = body.get("state"), body.get("questions")
    if not isinstance(state, str | dict | list):
        raise refuse_field("state", "`state` is a text, an object or a list")
    if not isinstance(questions, dict) or not 1 <= len(questions) <= MOST_QUESTIONS:
        raise refuse_field("questions", f"`questions` is an object of 1 to {MOST_QUESTIONS} questions by name")
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or {"messages", "tools", "chat_template", "tokenize"} & set(variables):
        raise refuse_field("chat_template_kwargs", "`chat_template_kwargs` are variables of the template's own")
    system = body.get("instructions")
    return [_read_question(name, one, state, system, target, variables) for name, one in questions.items()]


def _read_question(
    name: str, given: Any, state: Any, system: Any, target: Target, variables: dict[str, Any]
) -> Question:
    where = f"questions.{name[:64]}"
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("choice", "score", "noul") or set(given) - {"type", "instructions", "criteria"}:
        raise refuse_field(where, f"{where} is {{type: choice | score | noul, instructions, criteria}}")
    options, meanings = _read_criteria(kind, given.get("criteria"), where)
    labels = _find_labels(kind, len(options), target)
    text = _write_prompt(kind, state, given.get("instructions"), options, meanings, [label for label, _ in labels])
    messages = [] if system is None else [{"role": "system", "content": _write(system)}]
    messages.append({"role": "user", "content": text})
    prompt = render_chat(target, messages, variables=variables)
    if target.context is not None and len(prompt) + 2 > target.context:
        raise refuse_field("state", f"the prompt has {len(prompt)} tokens, more than the model's context holds")
    return Question(name, kind, prompt, options, [token for _, token in labels], meanings)


def _read_criteria(kind: str, given: Any, where: str) -> tuple[list[str], list[str]]:
    """The options, and what each means."""
    if kind == "noul":
        given = given or {}
        if not isinstance(given, dict) or set(given) - {"true", "false"}:
            raise refuse_field(where, f"{where}: the criteria of a noul are {{true, false}}")
        return ["true", "false"], [_write(given.get(name)) for name in ("true", "false")]
    fits = isinstance(given, dict if kind == "choice" else list)
    if not fits or not 1 <= len(given) <= MOST_OPTIONS:
        shape = "an object of options" if kind == "choice" else "a list of levels, from the lowest"
        raise refuse_field(where, f"{where}: the criteria of a {kind} are {shape}, 1 to {MOST_OPTIONS}")
    if kind == "choice":
        return [str(name) for name in given], [_write(meaning) for meaning in given.values()]
    return [str(place) for place in range(len(given))], [_write(meaning) for meaning in given]


def _write(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _find_labels(kind: str, count: int, target: Target) -> list[tuple[str, int]]:
    """Words of one token each: Yes and No if they are, else letters."""
    names = [["Yes", "No"]] if kind == "noul" else []
    for words in [*names, list(string.ascii_uppercase[:count])]:
        spelled = [target.tokenizer.encode(word, add_special_tokens=False) for word in words]
        tokens = {ids[0] for ids in spelled if len(ids) == 1}
        if len(tokens) == len(words):
            return [(word, ids[0]) for word, ids in zip(words, spelled, strict=True)]
    raise RequestError(400, "this model's vocabulary has no letters of one token each, which answers need")


def _write_prompt(kind: str, state: Any, asked: Any, options: list[str], meanings: list[str], labels: list[str]) -> str:
    lines = [_write(state), ""]
    if asked is not None:
        lines.append(_write(asked))
    for label, option, meaning in zip(labels, options, meanings, strict=True):
        if kind == "noul" and label in ("Yes", "No"):
            lines += [f"{label}: {meaning}"] if meaning else []
        else:
            shown = meaning if kind == "score" else f"{option}: {meaning}" if meaning else option
            lines.append(f"{label}. {shown}")
    lines.append(f"Answer with {' or '.join(labels) if kind == 'noul' else 'one letter'} only.")
    return "\n".join(lines)
