"""Methods that don't go together, or not with a prompt."""

from __future__ import annotations

from unspool.config.modes import find_num_candidates
from unspool.config.watermarking import GumbelWatermarkingConfig
from unspool.errors import UnsupportedError
from unspool.plan.pairs import CallMethod, CallPair, Facts


def _has_encoder(facts: Facts) -> bool:
    return facts.info.is_encoder_decoder


LOW_MEMORY = CallMethod(
    lambda facts: facts.is_asked("low_memory"),  # a model's file may say it for its beams
    "{low_memory}, set {spoken[low_memory]}, reads the beams of a search in parts, or candidates of contrastive search "
    "one by one, and this is neither; set {num_beams} above 1, or {penalty_alpha} and {top_k}, or leave it out",
    (CallPair(lambda facts: facts.num_beams == 1 and not find_num_candidates(facts.settings), ""),),
)
DOLA = CallMethod(
    "dola_layers",
    "{dola_layers:is {settings.dola_layers!r}} can't be here: {why}",
    (
        CallPair(
            _has_encoder,
            "it is defined for decoder-only models, whose every layer predicts the next token, and this model has an "
            "encoder",
            UnsupportedError,
        ),
        CallPair(
            lambda facts: "early_logits" not in facts.info.can,
            "it reads the logits of earlier layers, and this model can't return them",
            UnsupportedError,
        ),
        CallPair(
            "num_beams",
            "its scores are differences between layers, not log-probabilities that beams could add up; leave out "
            "{num_beams}",
        ),
        CallPair("penalty_alpha", "contrastive search weighs the model's own probabilities; leave out {penalty_alpha}"),
        CallPair(
            "guidance_scale",
            "guidance weighs the log-probabilities of two prompts, and these are differences between layers; leave out "
            "{guidance_scale}",
        ),
    ),
)
GUIDANCE = CallMethod(
    "guidance_scale",
    "{guidance_scale:is {settings.guidance_scale!r}} can't be here: {why}",
    (
        CallPair(
            "penalty_alpha",
            "contrastive search weighs the probabilities of one prompt, with a look ahead that the other rows don't "
            "take; leave out {penalty_alpha}",
        ),
        CallPair(
            lambda facts: _has_encoder(facts) and not facts.shape.has_negative,
            "an encoder must read something in place of the prompt, and no tokenizer puts tokens around empty texts; "
            "pass negative_prompt_ids (or negative_prompt)",
        ),
        CallPair(
            lambda facts: _has_encoder(facts) and facts.shape.has_cache,
            "past_key_values hold the prompt's encoded text and not the negative prompt's; leave them out",
        ),
        CallPair(
            lambda facts: not facts.shape.width and not facts.shape.has_negative,
            "without a negative prompt it starts from the prompt's last token, and inputs_embeds have none; pass "
            "negative_prompt_ids, or input_ids beside the embeddings",
        ),
        CallPair(
            lambda facts: (
                facts.shape.has_embeds
                and (facts.is_on("output_hidden_states") or facts.is_on("output_attentions"))
                and not _has_encoder(facts)
            ),
            "embeddings and the other prompt's tokens are read in two passes, and hidden states and attentions are "
            "those of one; leave out {output_hidden_states} and {output_attentions}",
        ),
    ),
)
STRICT = CallMethod(
    lambda facts: facts.is_asked("strict_constraints"),
    "{strict_constraints} is about what a constrained beam search must write, and nothing is forced; "
    "set {num_beams} and {force_words_ids} or {constraints}, or leave it out",
    (CallPair(lambda facts: not facts.is_constrained or facts.num_beams == 1, ""),),
)


def _beams_alone(name: str) -> CallMethod:
    return CallMethod(
        lambda facts: facts.is_asked(name),
        f"{{{name}}}, set {{spoken[{name}]}}, is read by beam search alone; set {{num_beams}} above 1, or leave it out",
        (CallPair(lambda facts: facts.num_beams == 1, ""),),
    )


BEAMS_ALONE = (_beams_alone("force_words_ids"), _beams_alone("return_beam_trace"))
BEAMS = CallMethod(
    "num_beams",
    "{name} does not go with {num_beams:is {settings.num_beams}}: {why}; leave one of them out",
    (
        CallPair("mirostat_tau", "its state follows one sequence, and beams branch"),
        CallPair(
            lambda facts: facts.num_beams % facts.num_groups != 0,
            "",
            message="{num_beams} ({settings.num_beams}) must be divisible by {num_beam_groups} "
            "({settings.num_beam_groups}): groups are of one size",
        ),
        CallPair(
            lambda facts: (facts.settings.diversity_penalty or 0.0) > 0.0 and facts.num_groups == 1,
            "",
            message="{diversity_penalty:is {settings.diversity_penalty}} is between groups of beams, and there is one "
            "group; set {num_beam_groups} too",
        ),
    ),
)
CONTRASTIVE = CallMethod(
    lambda facts: bool(find_num_candidates(facts.settings)),
    "{penalty_alpha} compares each candidate with the states of the whole text, {why}",
    (
        CallPair(
            lambda facts: facts.shape.cache_is_filled,
            "and past_key_values hold keys and values of its first part, not its states; leave past_key_values out, or "
            "begin with an empty cache",
        ),
    ),
)


def _another_strategy(name: str, off: object) -> CallPair:
    return CallPair(
        name,
        f"and {{{name}:is {{value}}}}, set {{spoken[{name}]}}, for another way to decode; pass {{{name}:={off}}}, or "
        "leave {penalty_alpha} out",
    )


CONTRASTIVE_ASKED = CallMethod(
    lambda facts: facts.is_asked("penalty_alpha"),
    "{penalty_alpha} asks for contrastive search, {why}",
    (_another_strategy("num_beams", 1), _another_strategy("do_sample", False)),
)


def _has_gumbel(facts: Facts) -> bool:
    marks = facts.settings.watermarking_config
    return any(isinstance(one, GumbelWatermarkingConfig) for one in (marks if isinstance(marks, list) else [marks]))


GUMBEL = CallMethod(
    _has_gumbel,  # it draws its tokens itself
    "the Gumbel watermark, set {spoken[watermarking_config]}, {why}",
    (
        CallPair(
            lambda facts: not facts.settings.do_sample or facts.num_beams > 1,
            "is a way to sample, and this call does not sample one token at a time; set {do_sample:=True} without "
            "beams, or use a WatermarkingConfig, which marks every way to decode",
        ),
        CallPair(
            "num_return_sequences",
            "draws the same text for the same prompt and key, so {num_return_sequences:is {value}} would give copies; "
            "ask for one, or give prompts of the same text keys of their own (a list in {watermarking_config})",
        ),
    ),
)
