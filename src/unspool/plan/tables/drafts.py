"""What does not go with drafted tokens, and which draft models fit a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unspool.config import pairs
from unspool.plan.pairs import CallMethod, CallPair, Facts

if TYPE_CHECKING:
    from unspool.protocols import ModelInfo  # torch is not needed to know the settings

DRAFTED = "{name:is {value!r}} does not go with a drafter ({source}): {why}"
DRAFTS: pairs.Method[pairs.ConfigFacts] = pairs.Method(
    lambda _: True,  # read if there is a drafter
    DRAFTED,
    (
        pairs.Pair("num_beams", "beam search follows several texts at once; use {num_beams:=1}"),
        pairs.Pair("num_beam_groups", "beam search follows several texts at once; use {num_beams:=1}"),
        pairs.Pair("constraints", "constraints are kept by beam search; use {num_beams} without a drafter"),
        pairs.Pair("force_words_ids", "forced words are kept by beam search; use {num_beams} without a drafter"),
        pairs.Pair("penalty_alpha", "contrastive search chooses by hidden states; leave {penalty_alpha} out"),
        pairs.Pair("dola_layers", "DoLa contrasts layers at every token; leave {dola_layers} out"),
        pairs.Pair("guidance_scale", "guidance reads a second prompt at every token; leave {guidance_scale} out"),
        pairs.Pair("mirostat_tau", "Mirostat's cut follows every token drawn; use {top_p} or {min_p}"),
        pairs.Pair(
            lambda facts: facts.settings.use_cache is False,
            "",
            message="{use_cache:is False} does not go with a drafter ({source}): drafts are checked against kept keys "
            "and values; leave {use_cache} on",
        ),
    ),
)
DRAFTED_ROWS = CallMethod(
    "return_legacy_cache",
    "{return_legacy_cache} gives tuples, which can't hold rows of different lengths, and rows accept different numbers "
    "of drafted tokens; leave it out",
    (CallPair(lambda facts: _count_rows(facts) > 1, ""),),
)


DRAFTED_SINGLY = CallMethod(
    lambda facts: bool(facts.info.why_single),
    "{info.why_single}, so it can't check several tokens of a draft at once; decode without a drafter",
    (CallPair(lambda _: True, ""),),
)
DRAFTED_UNEVENLY = CallMethod(
    lambda facts: bool(facts.given["why_even"]),
    "{why_even}, so drafts that one row of several refuses can't be left out; decode one prompt at a time, or "
    "without a drafter",
    (CallPair(lambda facts: _count_rows(facts) > 1, ""),),
)


def _count_rows(facts: Facts) -> int:
    return facts.shape.num_rows * (facts.settings.num_return_sequences or 1)


def _drafted_states(name: str) -> CallMethod:
    return CallMethod(
        name,
        f"{{{name}}} gives one entry per step, and this model runs over transformers' caches, where rows take "
        "different numbers of drafted tokens in columns that others skip; decode one row at a time, or "
        "without a drafter",
        (CallPair(lambda facts: _count_rows(facts) > 1 and "whole_prompts" in facts.info.can, ""),),
    )


DRAFTED_STATES = (_drafted_states("output_hidden_states"), _drafted_states("output_attentions"))


def _can_hear(assistant: ModelInfo) -> bool:
    return assistant.features is not None or "borrowed_states" in assistant.can


_SAME_KIND = "use a draft model of the same kind, or {prompt_lookup_num_tokens}"

ASSISTANT = CallMethod(
    lambda facts: facts.given["assistant"] is not None,
    "`assistant_model` {why}",
    (
        CallPair(
            lambda facts: facts.info.features is not None and not _can_hear(facts.given["assistant"]),
            "reads text and the model reads sound; use a model of speech with the same tokenizer, or "
            "{prompt_lookup_num_tokens}",
        ),
        CallPair(
            lambda facts: facts.info.is_encoder_decoder and not facts.given["assistant"].is_encoder_decoder,
            f"is decoder-only and the model is an encoder-decoder; {_SAME_KIND}",
        ),
        CallPair(
            lambda facts: facts.given["assistant"].is_encoder_decoder and not facts.info.is_encoder_decoder,
            f"is an encoder-decoder and the model is decoder-only; {_SAME_KIND}",
        ),
        CallPair(
            lambda facts: facts.info.features is None and facts.given["assistant"].features is not None,
            f"reads sound and the model reads text; {_SAME_KIND}",
        ),
        CallPair(
            lambda facts: (
                "borrowed_states" not in facts.given["assistant"].can
                and facts.given["assistant"].features != facts.info.features
            ),
            "reads features (rows, {assistant.features.channels}, {assistant.features.frames}) and the model (rows, "
            "{info.features.channels}, {info.features.frames}); use one that reads the same, or "
            "{prompt_lookup_num_tokens}",
        ),
        CallPair(
            lambda facts: (
                "borrowed_states" in facts.given["assistant"].can
                and facts.given["assistant"].hidden_size != facts.info.hidden_size
            ),
            "has no encoder and reads states {assistant.hidden_size} wide, and those of the model are "
            "{info.hidden_size} wide; load it with its encoder",
        ),
        CallPair(
            lambda facts: (
                facts.info.is_encoder_decoder
                and (facts.given["relation"] != "same" or facts.given["assistant"].vocab_size != facts.info.vocab_size)
            ),
            "has another tokenizer than the model ({assistant.vocab_size} and {info.vocab_size} tokens), and what an "
            "encoder-decoder reads and writes is not put into other tokens; use a draft model with the same tokenizer, "
            "or {prompt_lookup_num_tokens}",
        ),
        CallPair(
            lambda facts: (
                facts.given["relation"] == "same" and facts.given["assistant"].vocab_size != facts.info.vocab_size
            ),
            "has a vocabulary of {assistant.vocab_size} tokens and the model one of {info.vocab_size}: its drafts "
            "would mean other texts; pass `tokenizer` and `assistant_tokenizer` to draft across tokenizers, or use a "
            "draft model with the same one",
        ),
        CallPair(
            lambda facts: facts.shape.has_embeds,
            "reads tokens, and inputs_embeds are the model's own; pass input_ids, or use {assistant_early_exit}",
        ),
    ),
)
