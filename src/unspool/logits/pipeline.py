"""Which processors a call's settings switch on, and in which order. The order is the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from unspool.config import PARAMETERS, GenerationConfig
from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.bias import LogitBiasLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from unspool.logits.cleanup import InfNanRemoveLogitsProcessor, LogitNormalization
from unspool.logits.diversity import HammingDiversityLogitsProcessor
from unspool.logits.exclusion import XTCLogitsWarper
from unspool.logits.forced import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from unspool.logits.length import (
    ExponentialDecayLengthPenalty,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from unspool.logits.mirostat import MirostatLogitsWarper
from unspool.logits.ngrams import (
    DRYLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)
from unspool.logits.penalties import (
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from unspool.logits.temperature import DynamicTemperatureLogitsWarper, TemperatureLogitsWarper
from unspool.logits.truncation import (
    MinPLogitsWarper,
    TopALogitsWarper,
    TopKLogitsWarper,
    TopNSigmaLogitsWarper,
    TopPLogitsWarper,
)
from unspool.logits.typicality import EpsilonLogitsWarper, EtaLogitsWarper, TopHLogitsWarper, TypicalLogitsWarper

GIVEN = frozenset({"uniforms", "current_tokens", "beam_group_idx"})
"""What decoding gives to processors that require it; `pads` only where there are any."""
Stage = Literal["control", "sampling", "last"]


@dataclass(frozen=True)
class Context:
    """What processors are built from besides the settings."""

    num_rows: int
    vocab_size: int
    prompt_width: int  # columns of the prompt, padding included
    max_length: int  # columns, prompt included
    eos_token_ids: tuple[int, ...] = ()
    encoder_input_ids: torch.Tensor | None = None  # (rows, length): what is read; the prompt where nothing else is
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], Sequence[int]] | None = None
    custom: tuple[LogitsProcessor, ...] = ()
    asked: frozenset[str] = frozenset()  # settings that the caller set, not the model's file


@dataclass(frozen=True)
class Build:
    """One building of the processors: the settings, read for the call's rows, and the context."""

    settings: GenerationConfig
    context: Context

    def get(self, name: str) -> Any:
        """A setting: one value, or a list with one for each row of the call."""
        value = getattr(self.settings, name)
        if not PARAMETERS[name].may_be_per_row or not isinstance(value, (list, tuple)):
            return value
        return [item for item in value for _ in range(self.context.num_rows // len(value))]

    def ids(self, name: str) -> Any:
        """A setting that names tokens, all of them in the vocabulary."""
        value = getattr(self.settings, name)
        for token in _flatten(value):
            if not 0 <= token < self.context.vocab_size:
                raise SettingError(
                    f"`{name}` names the token {token}, outside the model's vocabulary of "
                    f"{self.context.vocab_size} tokens; use ids from 0 to {self.context.vocab_size - 1}"
                )
        return value

    @property
    def eos(self) -> list[int]:
        """The end tokens."""
        return [token for token in self.context.eos_token_ids if token >= 0]

    @property
    def read_ids(self) -> torch.Tensor:
        """What the encoder reads, or the prompt."""
        if self.context.encoder_input_ids is None:
            raise SettingError("it compares with tokens that were read, and there are none: pass input_ids")
        return self.context.encoder_input_ids

    @property
    def fewest(self) -> int:
        """Tokens that no cut goes below: beams need one more than may end them."""
        return len(self.eos or (0,)) + 1 if (self.settings.num_beams or 1) > 1 else 1


@dataclass(frozen=True)
class Entry:
    """One line of the order: a processor, the setting that switches it on, and how it is made."""

    processor: type[LogitsProcessor]
    setting: str
    off: tuple[Any, ...]  # values, beside None, at which it is not there
    make: Callable[[Build], LogitsProcessor]
    stage: Stage = "control"
    also: tuple[str, ...] = ()  # settings it reads besides
    needs_eos: bool = False  # without an end token there is nothing for it to do
    unless: str | None = field(default=None)  # another setting that takes its place

    def is_on(self, build: Build) -> bool:
        """Whether the settings switch it on."""
        if self.setting == "prefix_allowed_tokens_fn":
            return build.context.prefix_allowed_tokens_fn is not None
        if self.needs_eos and not build.eos:
            return False
        if self.unless is not None and _is_set(build, self.unless, ENTRY_OF[self.unless].off):
            return False
        return _is_set(build, self.setting, self.off)


def _is_set(build: Build, name: str, off: tuple[Any, ...]) -> bool:
    value = getattr(build.settings, name)
    if PARAMETERS[name].may_be_per_row and isinstance(value, (list, tuple)):
        return any(item not in off for item in value)
    return value is not None and value not in off


def _flatten(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [token for key in value for token in _flatten(int(key) if isinstance(key, str) else key)]
    if isinstance(value, (list, tuple)):
        return [token for part in value for token in _flatten(part)]
    return [int(value)]


def _make_sequence_bias(build: Build) -> LogitsProcessor:
    processor = SequenceBiasLogitsProcessor(build.settings.sequence_bias)
    for tokens in processor.sequence_bias:
        outside = [token for token in tokens if token >= build.context.vocab_size]
        if outside:
            raise SettingError(
                f"`sequence_bias` names the token {outside[0]}, outside the model's vocabulary of "
                f"{build.context.vocab_size} tokens"
            )
    return processor


def _begin_index(build: Build) -> int:
    """The column of the first token that is not forced."""
    width = build.context.prompt_width
    return width + 1 if width <= 1 and build.settings.forced_bos_token_id is not None else width


ORDER: tuple[Entry, ...] = (
    # Guidance comes first, when there is any.
    Entry(SequenceBiasLogitsProcessor, "sequence_bias", (), _make_sequence_bias),
    Entry(LogitBiasLogitsProcessor, "logit_bias", (), lambda build: LogitBiasLogitsProcessor(build.ids("logit_bias"))),
    Entry(
        HammingDiversityLogitsProcessor,
        "diversity_penalty",
        (0.0,),
        lambda build: HammingDiversityLogitsProcessor(
            build.get("diversity_penalty"), build.get("num_beams"), build.get("num_beam_groups")
        ),
        also=("num_beams", "num_beam_groups"),
    ),
    Entry(
        EncoderRepetitionPenaltyLogitsProcessor,
        "encoder_repetition_penalty",
        (1.0,),
        lambda build: EncoderRepetitionPenaltyLogitsProcessor(build.get("encoder_repetition_penalty"), build.read_ids),
    ),
    Entry(
        RepetitionPenaltyLogitsProcessor,
        "repetition_penalty",
        (1.0,),
        lambda build: RepetitionPenaltyLogitsProcessor(
            build.get("repetition_penalty"),
            build.context.prompt_width if build.settings.repetition_penalty_ignores_prompt else None,
        ),
        also=("repetition_penalty_ignores_prompt",),
    ),
    Entry(
        PresencePenaltyLogitsProcessor,
        "presence_penalty",
        (0.0,),
        lambda build: PresencePenaltyLogitsProcessor(build.get("presence_penalty"), build.context.prompt_width),
    ),
    Entry(
        FrequencyPenaltyLogitsProcessor,
        "frequency_penalty",
        (0.0,),
        lambda build: FrequencyPenaltyLogitsProcessor(build.get("frequency_penalty"), build.context.prompt_width),
    ),
    Entry(
        DRYLogitsProcessor,
        "dry_multiplier",
        (0.0,),
        lambda build: DRYLogitsProcessor(
            build.get("dry_multiplier"),
            build.get("dry_base"),
            build.get("dry_allowed_length"),
            () if build.settings.dry_sequence_breakers is None else build.ids("dry_sequence_breakers"),
        ),
        also=("dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    ),
    Entry(
        NoRepeatNGramLogitsProcessor,
        "no_repeat_ngram_size",
        (0,),
        lambda build: NoRepeatNGramLogitsProcessor(build.get("no_repeat_ngram_size")),
    ),
    Entry(
        EncoderNoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size",
        (0,),
        lambda build: EncoderNoRepeatNGramLogitsProcessor(build.get("encoder_no_repeat_ngram_size"), build.read_ids),
    ),
    Entry(
        NoBadWordsLogitsProcessor,
        "bad_words_ids",
        (),
        lambda build: NoBadWordsLogitsProcessor(build.ids("bad_words_ids"), build.eos),
    ),
    Entry(
        MinLengthLogitsProcessor,
        "min_length",
        (0,),
        lambda build: MinLengthLogitsProcessor(build.get("min_length"), build.eos),
        needs_eos=True,
    ),
    Entry(
        MinNewTokensLengthLogitsProcessor,
        "min_new_tokens",
        (0,),
        lambda build: MinNewTokensLengthLogitsProcessor(
            build.context.prompt_width, build.get("min_new_tokens"), build.eos
        ),
        needs_eos=True,
    ),
    Entry(
        PrefixConstrainedLogitsProcessor,
        "prefix_allowed_tokens_fn",
        (),
        lambda build: PrefixConstrainedLogitsProcessor(
            build.context.prefix_allowed_tokens_fn,  # type: ignore[arg-type]  # is_on says that it is there
            build.settings.num_beams or 1,
        ),
    ),
    Entry(
        ForcedBOSTokenLogitsProcessor,
        "forced_bos_token_id",
        (-1,),
        lambda build: ForcedBOSTokenLogitsProcessor(build.ids("forced_bos_token_id")),
    ),
    Entry(
        ForcedEOSTokenLogitsProcessor,
        "forced_eos_token_id",
        (-1,),
        lambda build: ForcedEOSTokenLogitsProcessor(build.context.max_length, build.ids("forced_eos_token_id")),
        also=("max_length",),
    ),
    Entry(
        InfNanRemoveLogitsProcessor,
        "remove_invalid_values",
        (False,),
        lambda build: InfNanRemoveLogitsProcessor(),  # noqa: ARG005
    ),
    Entry(
        ExponentialDecayLengthPenalty,
        "exponential_decay_length_penalty",
        (),
        lambda build: ExponentialDecayLengthPenalty(
            build.get("exponential_decay_length_penalty"), build.eos, build.context.prompt_width
        ),
        needs_eos=True,
    ),
    Entry(
        SuppressTokensLogitsProcessor,
        "suppress_tokens",
        ([], ()),
        lambda build: SuppressTokensLogitsProcessor(build.ids("suppress_tokens")),
    ),
    Entry(
        SuppressTokensAtBeginLogitsProcessor,
        "begin_suppress_tokens",
        ([], ()),
        lambda build: SuppressTokensAtBeginLogitsProcessor(build.ids("begin_suppress_tokens"), _begin_index(build)),
    ),
    # The caller's own processors stand here.
    Entry(
        TemperatureLogitsWarper,
        "temperature",
        (1.0,),
        lambda build: TemperatureLogitsWarper(build.get("temperature")),
        "sampling",
        unless="dynatemp_range",
    ),
    Entry(
        DynamicTemperatureLogitsWarper,
        "dynatemp_range",
        (0.0,),
        lambda build: DynamicTemperatureLogitsWarper(
            1.0 if build.settings.temperature is None else build.get("temperature"),
            build.get("dynatemp_range"),
            build.get("dynatemp_exponent"),
        ),
        "sampling",
        also=("temperature", "dynatemp_exponent"),
    ),
    Entry(
        TopNSigmaLogitsWarper,
        "top_n_sigma",
        (),
        lambda build: TopNSigmaLogitsWarper(build.get("top_n_sigma")),
        "sampling",
    ),
    Entry(TopHLogitsWarper, "top_h", (), lambda build: TopHLogitsWarper(build.get("top_h")), "sampling"),
    Entry(
        TopKLogitsWarper,
        "top_k",
        (0,),
        lambda build: TopKLogitsWarper(build.get("top_k"), min_tokens_to_keep=build.fewest),
        "sampling",
    ),
    Entry(
        TopPLogitsWarper,
        "top_p",
        (1.0,),
        lambda build: TopPLogitsWarper(build.get("top_p"), min_tokens_to_keep=build.fewest),
        "sampling",
    ),
    Entry(
        MinPLogitsWarper,
        "min_p",
        (),
        lambda build: MinPLogitsWarper(build.get("min_p"), min_tokens_to_keep=build.fewest),
        "sampling",
    ),
    Entry(TopALogitsWarper, "top_a", (0.0,), lambda build: TopALogitsWarper(build.get("top_a")), "sampling"),
    Entry(
        TypicalLogitsWarper,
        "typical_p",
        (1.0,),
        lambda build: TypicalLogitsWarper(build.get("typical_p"), min_tokens_to_keep=build.fewest),
        "sampling",
    ),
    Entry(
        EpsilonLogitsWarper,
        "epsilon_cutoff",
        (0.0,),
        lambda build: EpsilonLogitsWarper(build.get("epsilon_cutoff"), min_tokens_to_keep=build.fewest),
        "sampling",
    ),
    Entry(
        EtaLogitsWarper,
        "eta_cutoff",
        (0.0,),
        lambda build: EtaLogitsWarper(build.get("eta_cutoff"), min_tokens_to_keep=build.fewest),
        "sampling",
    ),
    Entry(
        XTCLogitsWarper,
        "xtc_probability",
        (0.0,),
        lambda build: XTCLogitsWarper(build.get("xtc_probability"), build.get("xtc_threshold")),
        "sampling",
        also=("xtc_threshold",),
    ),
    Entry(
        MirostatLogitsWarper,
        "mirostat_tau",
        (),
        lambda build: MirostatLogitsWarper(build.get("mirostat_tau"), build.get("mirostat_eta")),
        "sampling",
        also=("mirostat_eta",),
    ),
    # A watermark comes after everything that shapes the distribution, and before it is normalised.
    Entry(
        LogitNormalization,
        "renormalize_logits",
        (False,),
        lambda build: LogitNormalization(),  # noqa: ARG005
        "last",
    ),
)
"""Every processor that a setting switches on, in the order of application; docs/processors.md is made from it."""

ENTRY_OF: dict[str, Entry] = {entry.setting: entry for entry in ORDER}


def build_processors(settings: GenerationConfig, context: Context) -> LogitsProcessorList:
    """The processors of a call: control, the caller's own, sampling, and what comes last."""
    build = Build(settings, context)
    processors = LogitsProcessorList(_replace_by_custom(_make_stage(build, "control"), context))
    if settings.do_sample:
        processors.extend(processor for _, processor in _make_stage(build, "sampling"))
    processors.extend(processor for _, processor in _make_stage(build, "last"))
    processors.check_arguments(GIVEN)
    return processors


def _make_stage(build: Build, stage: Stage) -> list[tuple[Entry, LogitsProcessor]]:
    return [(entry, _make(entry, build)) for entry in ORDER if entry.stage == stage and entry.is_on(build)]


def _make(entry: Entry, build: Build) -> LogitsProcessor:
    try:
        return entry.make(build)
    except SettingError as error:
        if f"`{entry.setting}`" in str(error):
            raise
        given = getattr(build.settings, entry.setting, None)
        raise SettingError(f"`{entry.setting}`={given!r} can't be: {error}") from error


def _replace_by_custom(made: list[tuple[Entry, LogitsProcessor]], context: Context) -> list[LogitsProcessor]:
    """The caller's processors after the others; one of a type that the model's settings make takes its place."""
    own = {type(processor): processor for processor in context.custom}
    for processor in context.custom:
        if not callable(processor):
            raise SettingError(f"logits_processor holds a {type(processor).__name__}, which can't be called")
    result: list[LogitsProcessor] = []
    for entry, processor in made:
        if type(processor) in own and entry.setting in context.asked:
            raise SettingError(
                f"`{entry.setting}` and a {type(processor).__name__} among the logits_processor ask for the same "
                "thing twice; give one of them"
            )
        result.append(own.get(type(processor), processor))
    placed = {id(processor) for processor in result}
    return result + [processor for processor in context.custom if id(processor) not in placed]
