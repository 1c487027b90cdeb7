"""The processors of a call: those that its settings switch on, in their order, and the caller's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import PARAMETERS, GenerationConfig
from unspool.errors import SettingError
from unspool.logits.alone import show_alone
from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.building import Build, Context
from unspool.logits.entry import STAGES, ProcessorEntry, Stage
from unspool.logits.forced import PrefixConstrainedLogitsProcessor
from unspool.logits.order import PROCESSORS, list_stage
from unspool.registry import is_from, resolve
from unspool.wording import Setting, Wording, about, word

GIVEN = frozenset({"uniforms", "logits", "current_tokens", "beam_group_idx"})
"""What decoding gives to processors that require it; `pads` only if there are any."""


def build_processors(
    settings: GenerationConfig, context: Context, known: dict[Any, Any] | None = None
) -> LogitsProcessorList:
    """The processors of a call: control, the caller's own, sampling, and what comes last.

    `known` is what calls with equal settings have in common: which processors are on is looked up there.
    """
    build = Build(settings, context)
    is_on = _find_on(build, {} if known is None else known)
    processors = LogitsProcessorList(_replace_by_custom(_make_all(is_on["control"], build), context))
    if settings.do_sample:
        processors.extend(processor for _, processor in _make_all(is_on["sampling"], build))
    processors.extend(processor for _, processor in _make_all(is_on["last"], build))
    processors.check_arguments(GIVEN)
    if context.apart is None:
        return processors
    own = [one for one in processors if isinstance(one, PrefixConstrainedLogitsProcessor)]
    return LogitsProcessorList(show_alone(processors, [*context.custom, *own], context.apart))


def _find_on(build: Build, known: dict[Any, Any]) -> dict[Stage, list[ProcessorEntry]]:
    context = build.context
    # What decides beside the settings.
    key = ("processors", context.encoder_input_ids is None, context.prefix_allowed_tokens_fn is None)
    found: dict[Stage, list[ProcessorEntry]] | None = known.get(key)
    if found is None:
        found = known[key] = {stage: [one for one in list_stage(stage) if _is_on(one, build)] for stage in STAGES}
    return found


def _make_all(entries: list[ProcessorEntry], build: Build) -> list[tuple[ProcessorEntry, LogitsProcessor]]:
    return [(entry, _make(entry, build)) for entry in entries]


def _is_on(entry: ProcessorEntry, build: Build) -> bool:
    if entry.argument:
        return getattr(build.context, entry.argument) is not None
    if entry.needs_eos and not build.eos:
        return False
    if entry.needs_read and build.context.encoder_input_ids is None and entry.setting not in build.context.asked:
        return False
    if PARAMETERS[entry.setting].is_overridden(build.settings):
        return False
    if entry.unless is not None and _is_set(build, entry.unless, PROCESSORS[entry.unless].off):
        return False
    return _is_set(build, entry.setting, entry.off)


def _is_set(build: Build, name: str, off: tuple[Any, ...]) -> bool:
    value = getattr(build.settings, name)
    if PARAMETERS[name].holds_rows(value):
        return any(item not in off for item in value)
    return value is not None and value not in off


def _make(entry: ProcessorEntry, build: Build) -> LogitsProcessor:
    try:
        made: LogitsProcessor = entry.make(resolve(entry.processor), replace(build, setting=entry.setting))
        return made
    except SettingError as error:
        reason = str(error) if error.wording is None else error.wording
        if isinstance(reason, Wording) and entry.setting in {one.name for one in reason.settings}:
            raise
        given = Setting(entry.setting, repr(getattr(build.settings, entry.setting, None)))
        raise SettingError(word("{given} can't be: {reason}", given=given, reason=reason)) from error


def _replace_by_custom(made: list[tuple[ProcessorEntry, LogitsProcessor]], context: Context) -> list[LogitsProcessor]:
    """The caller's processors after the others; one of a type that the model's settings make takes its place.

    One of transformers' takes it also from a setting of the call, as it does there.
    """
    own = {_find_kind(processor): processor for processor in context.custom}
    result: list[LogitsProcessor] = []
    for entry, processor in made:
        custom = own.get(type(processor).__name__, processor)
        if custom is not processor and type(custom) is type(processor) and entry.setting in context.asked:
            raise SettingError(
                about(
                    entry.setting,
                    f"and a {type(processor).__name__} among the logits_processor ask for the same thing twice; give "
                    "one of them",
                )
            )
        result.append(custom)
    placed = {id(processor) for processor in result}
    return result + [processor for processor in context.custom if id(processor) not in placed]


def _find_kind(processor: LogitsProcessor) -> str | None:
    """The name of a processor's class, which ours and transformers' share; None for any other."""
    kind = type(processor)
    return kind.__name__ if is_from(kind, "unspool", "transformers") else None
