"""The order of the processors: each with its settings, and how it is made from them.

The order is the reference's; docs/processors.md prints it (`python -m unspool.logits.order_table`). A new processor is
its class and an entry here, or in `sampling_order` if it shapes what is drawn from: defaults, checks, flags, public
names and docs follow from that. Nothing heavy is imported for reading this table, so classes are named by where they
are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from unspool.config.parameter import (
    Kind,
    Parameter,
    make_count,
    make_flag,
    make_number,
    make_other,
    make_token,
)
from unspool.errors import SettingError
from unspool.logits.entry import ProcessorEntry, Stage, check_entry
from unspool.logits.sampling_order import SAMPLING
from unspool.registry import Table, resolve
from unspool.wording import about

if TYPE_CHECKING:
    from unspool.logits.building import Build

_HERE: Final = "unspool.logits"


def _take_ids(processor: Any, build: Build) -> Any:
    """Made from a setting that names tokens of the vocabulary."""
    return processor(build.value_ids)


def _take_read(processor: Any, build: Build) -> Any:
    """Made from its setting and what the encoder reads, or the prompt."""
    return processor(build.value, build.read_ids)


def _take_new(processor: Any, build: Build) -> Any:
    """Made from its setting, for new tokens alone."""
    return processor(build.value, build.context.prompt_width)


def _make_sequence_bias(processor: Any, build: Build) -> Any:
    made = processor(build.settings.sequence_bias)
    for tokens in made.sequence_bias:
        outside = [token for token in tokens if token >= build.context.vocab_size]
        if outside:
            raise SettingError(
                about(
                    "sequence_bias",
                    f"names the token {outside[0]}, outside the model's vocabulary of "
                    f"{build.context.vocab_size} tokens; use ids from 0 to {build.context.vocab_size - 1}",
                )
            )
    return made


def _make_repetition_penalty(processor: Any, build: Build) -> Any:
    ignores = build.settings.repetition_penalty_ignores_prompt
    return processor(build.value, build.context.prompt_width if ignores else None)


def _make_dry(processor: Any, build: Build) -> Any:
    breakers = () if build.settings.dry_sequence_breakers is None else build.ids("dry_sequence_breakers")
    return processor(build.value, build.get("dry_base"), build.get("dry_allowed_length"), breakers)


def _make_begin_suppression(processor: Any, build: Build) -> Any:
    """Forbids tokens at each row's first place, which a forced token may move."""
    made = resolve("unspool.logits.forced:SuppressTokensBehindForcedOnes") if build.forces_first else processor
    return made(build.value_ids, build.first_free_column)


def _make_grammar(processor: Any, build: Build) -> Any:
    """The processor of a grammar: of all that is written, or of what follows thoughts."""
    made = (
        resolve("unspool.grammar.after_thoughts:AnswerGrammarLogitsProcessor") if build.settings.thoughts else processor
    )
    return made.make(build)


def _grammar(name: str, kind: Kind, text: str, **more: Any) -> ProcessorEntry:
    """A setting that keeps the text to a grammar; a row has one of them."""
    parameter = Parameter(name, None, kind, "control", text, may_be_per_row=True, is_ours=True, **more)
    return ProcessorEntry(
        processor="unspool.grammar.processor:GrammarLogitsProcessor", parameters=(parameter,), make=_make_grammar
    )


_CONTROL: tuple[ProcessorEntry, ...] = (
    # Guidance comes first, when there is any.
    ProcessorEntry(
        processor=f"{_HERE}.bias:SequenceBiasLogitsProcessor",
        parameters=(
            make_other(
                "sequence_bias", "bias", "control", "Token sequences and what is added to their last token's logit."
            ),
        ),
        make=_make_sequence_bias,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.bias:LogitBiasLogitsProcessor",
        parameters=(
            make_other(
                "logit_bias",
                "token bias",
                "control",
                "Token ids and what is added to their score: {id: bias}.",
                is_ours=True,
            ),
        ),
        make=_take_ids,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.diversity:HammingDiversityLogitsProcessor",
        parameters=(
            make_number(
                "diversity_penalty",
                0.0,
                "control",
                "Taken from tokens other beam groups chose at this step.",
                off=(0.0,),
                needs=("num_beams",),
            ),
        ),
        make=lambda kind, build: kind(build.value, build.get("num_beams"), build.get("num_beam_groups")),
        also=("num_beams", "num_beam_groups"),
    ),
    ProcessorEntry(
        processor=f"{_HERE}.penalties:EncoderRepetitionPenaltyLogitsProcessor",
        parameters=(
            make_number(
                "encoder_repetition_penalty",
                1.0,
                "control",
                "Above 1 makes tokens of the encoder's input (or the prompt) likelier.",
                per_row=True,
                off=(1.0,),
            ),
        ),
        make=_take_read,
        needs_read=True,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.penalties:RepetitionPenaltyLogitsProcessor",
        parameters=(
            make_number(
                "repetition_penalty",
                1.0,
                "control",
                "Above 1 makes tokens already seen less likely.",
                per_row=True,
                off=(1.0,),
            ),
            make_flag(
                "repetition_penalty_ignores_prompt",
                False,
                "control",
                "Let repetition_penalty see new tokens alone.",
                is_ours=True,
            ),
        ),
        make=_make_repetition_penalty,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.penalties:PresencePenaltyLogitsProcessor",
        parameters=(
            make_number(
                "presence_penalty",
                0.0,
                "control",
                "Taken from the score of every token written so far.",
                per_row=True,
                off=(0.0,),
                is_ours=True,
            ),
        ),
        make=_take_new,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.penalties:FrequencyPenaltyLogitsProcessor",
        parameters=(
            make_number(
                "frequency_penalty",
                0.0,
                "control",
                "Taken from a token's score each time it was written.",
                per_row=True,
                off=(0.0,),
                is_ours=True,
            ),
        ),
        make=_take_new,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.ngrams:DRYLogitsProcessor",
        parameters=(
            make_number(
                "dry_multiplier",
                0.0,
                "control",
                "Penalty on tokens that repeat a sequence; 0 is off.",
                per_row=True,
                off=(0.0,),
                is_ours=True,
            ),
            make_number(
                "dry_base",
                1.75,
                "control",
                "How the DRY penalty grows with each repeated token.",
                per_row=True,
                is_ours=True,
            ),
            make_count(
                "dry_allowed_length", 2, "control", "Tokens that may repeat before the DRY penalty.", 1, is_ours=True
            ),
            make_other(
                "dry_sequence_breakers",
                "id list",
                "control",
                "Token ids that no DRY match reaches across.",
                is_ours=True,
            ),
        ),
        make=_make_dry,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.ngrams:NoRepeatNGramLogitsProcessor",
        parameters=(
            make_count("no_repeat_ngram_size", 0, "control", "No n-gram of this size comes twice; 0 is off.", off=(0,)),
        ),
    ),
    ProcessorEntry(
        processor=f"{_HERE}.ngrams:EncoderNoRepeatNGramLogitsProcessor",
        parameters=(
            make_count(
                "encoder_no_repeat_ngram_size",
                0,
                "control",
                "No n-gram of this size from the encoder's input; 0 is off.",
                off=(0,),
            ),
        ),
        make=_take_read,
        needs_read=True,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.bias:NoBadWordsLogitsProcessor",
        parameters=(make_other("bad_words_ids", "id lists", "control", "Token sequences that may not be written."),),
        make=lambda kind, build: kind(build.value_ids, build.eos),
    ),
    ProcessorEntry(
        processor=f"{_HERE}.length:MinLengthLogitsProcessor",
        parameters=(
            make_count(
                "min_length",
                0,
                "length",
                "Shortest sequence, prompt included; no end token before it. min_new_tokens overrides it.",
                per_row=True,
                off=(0,),
                yields_to="min_new_tokens",
            ),
        ),
        make=lambda kind, build: kind(build.columns, build.eos),
        needs_eos=True,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.length:MinNewTokensLengthLogitsProcessor",
        parameters=(
            make_count(
                "min_new_tokens",
                None,
                "length",
                "Fewest tokens to write before an end token may come.",
                per_row=True,
                off=(0,),
            ),
        ),
        make=lambda kind, build: kind(build.context.prompt_width, build.value, build.eos),
        needs_eos=True,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.forced:PrefixConstrainedLogitsProcessor",
        argument="prefix_allowed_tokens_fn",
        make=lambda kind, build: kind(build.context.prefix_allowed_tokens_fn, build.settings.num_beams or 1),
    ),
    ProcessorEntry(
        processor="unspool.thoughts.budget:ThinkingBudgetLogitsProcessor",
        parameters=(
            make_count(
                "max_thinking_tokens",
                None,
                "length",
                "Most tokens of thoughts; then they are ended in the model's own words, and the answer begins.",
                per_row=True,
                is_ours=True,
            ),
        ),
        make=lambda kind, build: kind.make(build),
    ),
    # What is forced below may cut a structured text off, as max_new_tokens may.
    _grammar("json_schema", "schema", "The text is a JSON document that this schema describes."),
    _grammar("json_object", "flag", "The text is a JSON object.", off=(False,)),
    _grammar("regex", "long text", "The whole text matches this regular expression."),
    _grammar("choice", "choices", "The text is one of these."),
    _grammar("grammar", "long text", "The text follows this grammar, in Lark's form or GBNF."),
    _grammar("structural_tag", "tags", "Structures inside free text: {triggers, structures}."),
    ProcessorEntry(
        processor=f"{_HERE}.forced:ForcedBOSTokenLogitsProcessor",
        parameters=(
            make_token("forced_bos_token_id", "Token forced right after the start token.", group="control", off=(-1,)),
        ),
        make=_take_ids,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.forced:ForcedEOSTokenLogitsProcessor",
        parameters=(
            make_token("forced_eos_token_id", "Token(s) forced at max_length.", "ids", group="control", off=(-1,)),
        ),
        make=lambda kind, build: kind(build.context.max_length, build.value_ids),
        also=("max_length",),
    ),
    ProcessorEntry(
        processor=f"{_HERE}.cleanup:InfNanRemoveLogitsProcessor",
        parameters=(
            make_flag("remove_invalid_values", False, "control", "Replace NaN and infinite scores.", off=(False,)),
        ),
        make=lambda kind, _: kind(),
    ),
    ProcessorEntry(
        processor=f"{_HERE}.length:ExponentialDecayLengthPenalty",
        parameters=(
            make_other(
                "exponential_decay_length_penalty",
                "decay",
                "control",
                "(start, factor): the end token grows likelier after `start` new tokens.",
            ),
        ),
        make=lambda kind, build: kind(build.value, build.eos, build.context.prompt_width),
        needs_eos=True,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.forced:SuppressTokensLogitsProcessor",
        parameters=(
            make_other("suppress_tokens", "id list", "control", "Tokens that are never written.", off=([], ())),
        ),
        make=_take_ids,
    ),
    ProcessorEntry(
        processor=f"{_HERE}.forced:SuppressTokensAtBeginLogitsProcessor",
        parameters=(
            make_other(
                "begin_suppress_tokens", "id list", "control", "Tokens that are not written first.", off=([], ())
            ),
        ),
        make=_make_begin_suppression,
    ),
    # The caller's own processors stand here.
)


_LAST: tuple[ProcessorEntry, ...] = (
    # A watermark comes after everything that shapes the distribution, and before it is normalised.
    ProcessorEntry(
        processor=f"{_HERE}.watermark:WatermarkProcessor",
        parameters=(
            Parameter(
                "watermarking_config",
                None,
                "object",
                "control",
                "A watermark: WatermarkingConfig, SynthIDTextWatermarkingConfig or GumbelWatermarkingConfig.",
                off=(None,),
                may_be_per_row=True,
            ),
        ),
        make=lambda kind, build: kind.make(build),
        stage="last",
    ),
    ProcessorEntry(
        processor=f"{_HERE}.cleanup:LogitNormalization",
        parameters=(
            make_flag(
                "renormalize_logits", False, "control", "Normalise the scores after all processors.", off=(False,)
            ),
        ),
        make=lambda kind, _: kind(),
        stage="last",
    ),
)

PROCESSORS: Final = Table[ProcessorEntry](
    "processor", (*_CONTROL, *SAMPLING, *_LAST), lambda entry: entry.setting, check_entry
)
"""Every processor that a setting switches on, by that setting, in the order of application."""


def list_stage(stage: Stage) -> list[ProcessorEntry]:
    """The processors of a stage in their order."""
    return [entry for entry in PROCESSORS.values() if entry.stage == stage]
