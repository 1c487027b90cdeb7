"""A traced call from its first event to its last."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Protocol

from unspool.config import PARAMETERS, BaseWatermarkingConfig, GenerationConfig
from unspool.decoding.loop import Emitted
from unspool.decoding.run import Run
from unspool.errors import SettingError
from unspool.outputs import Generation, Stats
from unspool.trace.tracer import Tracer
from unspool.trace.values import shorten

MOST_PROMPT_TOKENS = 8192  # that the first event lists: the last ones
LONGEST_SETTING = 4096  # characters of a setting, as JSON
TRACED = "a traced call takes its steps one by one, and runs every processor by itself"


class Answering(Protocol):
    """The answer whose run is traced: it makes the text."""

    @property
    def run(self) -> Run: ...

    def write(self, emitted: Emitted) -> Iterable[str]: ...

    def result(self) -> Generation: ...


NOT_TRACED: Mapping[str, str] = {
    "return_dict_in_generate": "an output object is returned by generate()",
    "output_scores": "tensors are returned by generate()",
    "output_logits": "tensors are returned by generate()",
    "output_hidden_states": "tensors are returned by generate()",
    "output_attentions": "tensors are returned by generate()",
    "logprobs": "every token of a trace has its probabilities",
    "prompt_logprobs": "a trace begins after the prompt",
    "return_beam_trace": "a trace has the beams of every step",
    "beams": "a trace has the beams of every step",
}


def check_traced(settings: Mapping[str, Any]) -> None:
    """Raise for arguments of a call that a trace has no place for."""
    for name, why in NOT_TRACED.items():
        if settings.get(name) is not None and settings[name] is not False:
            raise SettingError(f"`{name}`={settings[name]!r:.40} does not go with a trace: {why}; leave it out")


def follow(trace: Trace) -> Generator[dict[str, Any], None, None]:
    """The events of a run that is iterated here."""
    yield trace.start()
    for emitted in trace.run:
        yield from trace.read(emitted)
    yield trace.end()


class Trace:
    """Turns what a traced run emits into events; `tracer` is the run's observer."""

    def __init__(self, answer: Answering, tracer: Tracer, *, model: str, name: str | None = None) -> None:
        self._answer, self._tracer = answer, tracer
        self._model, self._name = model, name or f"trace-{uuid.uuid4().hex}"
        prompts = self.run.parts.prompts
        self._prefix: list[int] = prompts.ids[0, prompts.width - prompts.num_written :].tolist()

    @property
    def run(self) -> Run:
        """The run that is traced."""
        return self._answer.run

    def start(self) -> dict[str, Any]:
        """The first event: what was asked for."""
        run, prefix = self.run, self._prefix
        parts = run.parts
        plan = parts.plan
        prompt = parts.prompts.list_tokens()
        ids = prompt[0] if prompt else []
        if prefix and parts.prompts.source is None:
            ids = ids[: -len(prefix)]
        if prefix:
            list(self._answer.write(Emitted(dict.fromkeys(range(run.num_rows), prefix), {})))
        shown = ids[-MOST_PROMPT_TOKENS:]
        mode = plan.settings.get_generation_mode(parts.hooks.assistant)
        return {
            "type": "start",
            "id": self._name,
            "model": self._model,
            "strategy": plan.strategy if plan.strategy not in _KNOWN else mode.value,
            "drafter": None if plan.drafting is None else plan.drafting.kind,
            "settings": describe_settings(plan.settings),
            "seed": run.settle_seed(),
            "prompt": [{"id": token, "text": self._tracer.show(token)} for token in shown],
            "num_prompt_tokens": len(ids),
            "prefix": [{"id": token, "text": self._tracer.show(token)} for token in prefix],
            "num_beams": plan.num_beams,
            "num_beam_groups": plan.settings.num_beam_groups or 1,
            "layers": parts.model.info.num_layers,
        }

    def read(self, emitted: Emitted) -> list[dict[str, Any]]:
        """The events of a turn."""
        events: list[dict[str, Any]] = emitted.seen or []
        tokens = [event for event in events if event["type"] == "token"]
        if not tokens:
            list(self._answer.write(emitted))
        for event in tokens:
            is_last = event is tokens[-1]
            part = Emitted({0: [event["id"]]}, dict(emitted.finished) if is_last else {})
            event["delta"] = "".join(self._answer.write(part))
        return events

    def end(self) -> dict[str, Any]:
        """The last event: what was written, and what it cost."""
        result, beams = self._answer.result(), self._tracer.beams
        sequences = []
        for row, (text, ids) in enumerate(zip(result.texts, result.token_ids, strict=True)):
            alone: dict[str, Any] = {"score": shorten(self._tracer.sum_logprobs), "beams": []}
            found = alone if beams is None else beams.describe_returned(row)
            sequences.append({"text": text, "ids": [*self._prefix, *ids], **found})
        return {
            "type": "end",
            "finish_reason": result.finish_reasons[0],
            "text": result.texts[0],
            "sequences": sequences,
            "stats": describe_stats(result.stats),
        }


_KNOWN = ("tokens", "contrastive", "beams", "beam_groups", "constrained")  # whose names are the reference's modes


def describe_stats(stats: Stats) -> dict[str, Any]:
    """The cost of a traced call."""
    speculation = stats.speculation
    return {
        "seconds": round(stats.total_seconds, 6),
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "num_passes": stats.forward_passes,
        "path": stats.path,
        "path_reason": "; ".join(filter(None, (stats.path_reason, TRACED))),
        "drafted": 0 if speculation is None else sum(speculation.drafted),
        "accepted": 0 if speculation is None else sum(speculation.accepted),
    }


def describe_settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, as plain values; a watermark's key is not shown."""
    found: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        value = getattr(config, name)
        if value is None or value == parameter.default:
            continue
        text = json.dumps(_hide_key(value), default=_describe_object)
        found[name] = json.loads(text) if len(text) <= LONGEST_SETTING else f"({len(text)} characters)"
    return found


def _hide_key(value: Any) -> Any:
    if isinstance(value, BaseWatermarkingConfig):
        return value.without_key()
    return [_hide_key(one) for one in value] if isinstance(value, (list, tuple)) else value


def _describe_object(value: Any) -> str:
    return f"a {type(value).__name__}"
