"""The order of the processors, one line each: the setting that switches it on and how it is made from it.

The order is the reference's; docs/processors.md prints it (`python -m unspool.logits.order_table`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.bias import LogitBiasLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from unspool.logits.building import Build
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
from unspool.logits.watermark import WatermarkProcessor, make_watermark

Stage = Literal["control", "sampling", "last"]


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
    unless: str | None = None  # another setting that takes its place


def _take(processor: Callable[[Any], LogitsProcessor], setting: str) -> Callable[[Build], LogitsProcessor]:
    """Made from its setting and nothing else."""
    return lambda build: processor(build.get(setting))


def _cut(processor: Callable[..., LogitsProcessor], setting: str) -> Callable[[Build], LogitsProcessor]:
    """Made from its setting, and cutting no deeper than beams can bear."""
    return lambda build: processor(build.get(setting), min_tokens_to_keep=build.fewest)


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
        _take(NoRepeatNGramLogitsProcessor, "no_repeat_ngram_size"),
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
            build.context.prefix_allowed_tokens_fn,  # type: ignore[arg-type]  # made only where it is given
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
    Entry(InfNanRemoveLogitsProcessor, "remove_invalid_values", (False,), lambda _: InfNanRemoveLogitsProcessor()),
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
        _take(TemperatureLogitsWarper, "temperature"),
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
    Entry(TopNSigmaLogitsWarper, "top_n_sigma", (), _take(TopNSigmaLogitsWarper, "top_n_sigma"), "sampling"),
    Entry(TopHLogitsWarper, "top_h", (), _take(TopHLogitsWarper, "top_h"), "sampling"),
    Entry(TopKLogitsWarper, "top_k", (0,), _cut(TopKLogitsWarper, "top_k"), "sampling"),
    Entry(TopPLogitsWarper, "top_p", (1.0,), _cut(TopPLogitsWarper, "top_p"), "sampling"),
    Entry(MinPLogitsWarper, "min_p", (), _cut(MinPLogitsWarper, "min_p"), "sampling"),
    Entry(TopALogitsWarper, "top_a", (0.0,), _take(TopALogitsWarper, "top_a"), "sampling"),
    Entry(TypicalLogitsWarper, "typical_p", (1.0,), _cut(TypicalLogitsWarper, "typical_p"), "sampling"),
    Entry(EpsilonLogitsWarper, "epsilon_cutoff", (0.0,), _cut(EpsilonLogitsWarper, "epsilon_cutoff"), "sampling"),
    Entry(EtaLogitsWarper, "eta_cutoff", (0.0,), _cut(EtaLogitsWarper, "eta_cutoff"), "sampling"),
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
    Entry(WatermarkProcessor, "watermarking_config", (None,), make_watermark, "last"),  # type: ignore[type-abstract]
    Entry(LogitNormalization, "renormalize_logits", (False,), lambda _: LogitNormalization(), "last"),
)
"""Every processor that a setting switches on, in the order of application; docs/processors.md is made from it."""

ENTRY_OF: dict[str, Entry] = {entry.setting: entry for entry in ORDER}
