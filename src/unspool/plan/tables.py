"""The tables of pairs: what can't stand together, why, and what to use instead.

Who adds a method that does not go with another adds a line here; a plug-in brings tables of its own in its entry.
"""

from __future__ import annotations

from unspool.config.watermarking import GumbelWatermarkingConfig
from unspool.errors import UnsupportedError
from unspool.plan.contrastive import find_num_candidates
from unspool.plan.pairs import Facts, Method, Pair
from unspool.plan.structures import list_structures

# --- settings among themselves: a GenerationConfig checks these itself ---------------------------------------


def _count_returned(facts: Facts) -> int:
    given = facts.settings.num_return_sequences
    return 1 if given is None else int(given)


def _asks_groups(facts: Facts) -> bool:
    has_groups = facts.num_groups != 1 or bool(facts.settings.diversity_penalty)
    return facts.num_beams > 1 and has_groups and not facts.is_constrained


RETURNED = Method(
    lambda facts: _count_returned(facts) != 1,
    "{why}",
    (
        Pair(
            lambda facts: facts.num_beams == 1 and not facts.settings.do_sample,
            "Greedy methods without beam search do not support `num_return_sequences` different than 1 (got "
            "{settings.num_return_sequences}): all would be the same. Set `do_sample=True` or `num_beams`.",
        ),
        Pair(
            lambda facts: 1 < facts.num_beams < _count_returned(facts),
            "`num_return_sequences` ({settings.num_return_sequences}) has to be smaller than or equal to `num_beams` "
            "({settings.num_beams}).",
        ),
    ),
)
CONSTRAINED = Method(
    lambda facts: facts.num_beams > 1 and facts.is_constrained,
    "`constraints` or `force_words_ids` asks for constrained beam search, {why}, or unset them.",
    (
        Pair("do_sample", "which does not sample: set `do_sample=False`"),
        Pair("num_beam_groups", "which has no groups: set `num_beam_groups=1`"),
    ),
)
GROUPS = Method(
    _asks_groups,
    "`num_beam_groups` or `diversity_penalty` asks for group beam search, {why}, or unset both.",
    (
        Pair(
            lambda facts: not facts.settings.diversity_penalty,
            "",
            told="`diversity_penalty` should be greater than 0.0, otherwise the beam groups are identical.",
        ),
        Pair("do_sample", "which does not sample: set `do_sample=False`"),
    ),
)
CACHE_CONFIG = Method(
    lambda facts: facts.settings.cache_config is not None,
    "`cache_config` is set, but cache_implementation={settings.cache_implementation!r} has nothing to configure. Set "
    "`cache_implementation` to one of {facts.configurable}, or unset `cache_config`.",
    (Pair(lambda facts: facts.settings.cache_implementation not in facts.configurable, ""),),
)
STRUCTURED = Method(
    lambda facts: bool(list_structures(facts.settings)),
    "{why}",
    (
        Pair(
            lambda facts: len(list_structures(facts.settings)) > 1,
            "`json_schema`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag` each describe the whole "
            "text; set one of them",
        ),
    ),
)
DRAFTER = Method(
    lambda facts: facts.settings.drafter == "grammar",
    "`drafter`='grammar' drafts what a structured text must go on with, and there is none; set json_schema, regex, "
    "choice or grammar, or leave it out",
    (Pair(lambda facts: not list_structures(facts.settings), ""),),
)
OF_CONFIG = (CACHE_CONFIG, RETURNED, CONSTRAINED, GROUPS, STRUCTURED, DRAFTER)

# --- settings beside a model ---------------------------------------------------------------------------------


def _can_not(ability: str, hint: str = "") -> tuple[Pair, ...]:
    return (Pair(lambda facts: ability not in facts.info.can, hint, UnsupportedError),)


def _in_pieces(states: str) -> Method:
    return Method(
        states,
        f"`{{name}}` reads the prompt in pieces and `{states}` returns the prompt's states whole; ask for one of them",
        (Pair("prefill_chunk_size", ""), Pair("prompt_logprobs", "")),
    )


OF_MODEL = (
    Method(
        lambda facts: facts.settings.decoder_start_token_id is not None and "decoder_start_token_id" in facts.asked,
        "`decoder_start_token_id` begins the text of an encoder-decoder; {info.family} is none",
        (Pair(lambda facts: not facts.info.is_encoder_decoder, ""),),
    ),
    Method(
        "output_hidden_states",
        "`output_hidden_states` was asked for, and this {info.family} model can't return them; leave it out",
        _can_not("hidden_states"),
    ),
    Method(
        "output_attentions",
        "`output_attentions` was asked for, and this {info.family} model can't return them{why}; leave it out",
        _can_not("attentions", " (a transformers model can with attn_implementation='eager')"),
    ),
    Method(
        lambda facts: bool(find_num_candidates(facts.settings)),
        "`penalty_alpha`, set {spoken[penalty_alpha]}, asks for contrastive search, which compares hidden states, and "
        "a {info.family} model returns none; leave it out",
        _can_not("last_states"),
    ),
    _in_pieces("output_hidden_states"),
    _in_pieces("output_attentions"),
    Method(
        "prompt_logprobs",
        "`prompt_logprobs` can't be told: {why}",
        (
            Pair(
                lambda facts: facts.info.is_encoder_decoder,
                "an encoder-decoder model's prompt is not predicted token by token",
            ),
            Pair(lambda facts: facts.shape.has_embeds, "inputs_embeds have no tokens"),
            Pair(lambda facts: facts.shape.has_cache, "past_key_values hide the prompt's first part from the model"),
        ),
    ),
)

# --- methods beside one another --------------------------------------------------------------------------------


def _has_encoder(facts: Facts) -> bool:
    return facts.info.is_encoder_decoder


LOW_MEMORY = Method(
    lambda facts: facts.is_asked("low_memory"),  # a model's file may say it for its beams
    "`low_memory`, set {spoken[low_memory]}, reads the beams of a search in parts, or candidates of contrastive search "
    "one by one, and this is neither; set `num_beams` above 1, or `penalty_alpha` and `top_k`, or leave it out",
    (Pair(lambda facts: facts.num_beams == 1 and not find_num_candidates(facts.settings), ""),),
)
DOLA = Method(
    "dola_layers",
    "`dola_layers`={settings.dola_layers!r} can't be here: {why}",
    (
        Pair(
            _has_encoder,
            "it is defined for decoder-only models, whose every layer predicts the next token, and this model has an "
            "encoder",
            UnsupportedError,
        ),
        Pair(
            lambda facts: "early_logits" not in facts.info.can,
            "it reads the logits of earlier layers, and this model can't return them",
            UnsupportedError,
        ),
        Pair(
            "num_beams",
            "its scores are differences between layers, not log-probabilities that beams could add up; leave out "
            "`num_beams`",
        ),
        Pair("penalty_alpha", "contrastive search weighs the model's own probabilities; leave out `penalty_alpha`"),
        Pair(
            "guidance_scale",
            "guidance weighs the log-probabilities of two prompts, and these are differences between layers; leave out "
            "`guidance_scale`",
        ),
    ),
)
GUIDANCE = Method(
    "guidance_scale",
    "`guidance_scale`={settings.guidance_scale!r} can't be here: {why}",
    (
        Pair(
            "penalty_alpha",
            "contrastive search weighs the probabilities of one prompt, with a look ahead that the other rows don't "
            "take; leave out `penalty_alpha`",
        ),
        Pair(
            lambda facts: _has_encoder(facts) and not facts.shape.has_negative,
            "an encoder must read something in place of the prompt; pass negative_prompt_ids (or negative_prompt)",
        ),
        Pair(
            lambda facts: _has_encoder(facts) and facts.shape.has_cache,
            "past_key_values hold the prompt's encoded text and not the negative prompt's; leave them out",
        ),
        Pair(
            lambda facts: not facts.shape.width and not facts.shape.has_negative,
            "without a negative prompt it starts from the prompt's last token, and inputs_embeds have none; pass "
            "negative_prompt_ids, or input_ids beside the embeddings",
        ),
        Pair(
            lambda facts: (
                facts.shape.has_embeds
                and (facts.is_on("output_hidden_states") or facts.is_on("output_attentions"))
                and not _has_encoder(facts)
            ),
            "embeddings and the other prompt's tokens are read in two passes, and hidden states and attentions are "
            "those of one; leave out `output_hidden_states` and `output_attentions`",
        ),
    ),
)
STRICT = Method(
    lambda facts: facts.is_asked("strict_constraints"),
    "`strict_constraints` is about what a constrained beam search must write, and nothing is forced; "
    "set num_beams and force_words_ids or constraints, or leave it out",
    (Pair(lambda facts: not facts.is_constrained or facts.num_beams == 1, ""),),
)


def _beams_alone(name: str) -> Method:
    return Method(
        lambda facts: facts.is_asked(name),
        f"`{name}`, set {{spoken[{name}]}}, is read by beam search alone; set `num_beams` above 1, or leave it out",
        (Pair(lambda facts: facts.num_beams == 1, ""),),
    )


BEAMS_ALONE = (_beams_alone("force_words_ids"), _beams_alone("return_beam_trace"))
BEAMS = Method(
    "num_beams",
    "`{name}` does not go with num_beams={settings.num_beams}: {why}; leave one of them out",
    (
        Pair("logprobs", "a beam's tokens are chosen together"),
        Pair("mirostat_tau", "its state follows one sequence, and beams branch"),
        Pair(
            lambda facts: facts.num_beams % facts.num_groups != 0,
            "",
            told="`num_beams` ({settings.num_beams}) must be divisible by `num_beam_groups` "
            "({settings.num_beam_groups}): groups are of one size",
        ),
        Pair(
            lambda facts: (facts.settings.diversity_penalty or 0.0) > 0.0 and facts.num_groups == 1,
            "",
            told="`diversity_penalty`={settings.diversity_penalty} is between groups of beams, and there is one group; "
            "set num_beam_groups too",
        ),
    ),
)
CONTRASTIVE = Method(
    lambda facts: bool(find_num_candidates(facts.settings)),
    "`penalty_alpha` compares each candidate with the states of the whole text, {why}",
    (
        Pair(
            lambda facts: facts.shape.cache_is_filled,
            "and past_key_values hold keys and values of its first part, not its states; leave past_key_values out, or "
            "begin with an empty cache",
        ),
    ),
)


def _another_strategy(name: str, off: str) -> Pair:
    return Pair(
        name,
        f"and `{name}`={{value}}, set {{spoken[{name}]}}, for another way to decode; pass {off}, or leave "
        "`penalty_alpha` out",
    )


CONTRASTIVE_ASKED = Method(
    lambda facts: facts.is_asked("penalty_alpha"),
    "`penalty_alpha` asks for contrastive search, {why}",
    (_another_strategy("num_beams", "num_beams=1"), _another_strategy("do_sample", "do_sample=False")),
)
DRAFTS = Method(
    lambda _: True,  # read where there is a drafter
    "`{name}`={value!r} does not go with a drafter ({drafter}): {why}",
    (
        Pair("num_beams", "beam search follows several texts at once; use num_beams=1"),
        Pair("num_beam_groups", "beam search follows several texts at once; use num_beams=1"),
        Pair("constraints", "constraints are kept by beam search; use num_beams without a drafter"),
        Pair("force_words_ids", "forced words are kept by beam search; use num_beams without a drafter"),
        Pair("penalty_alpha", "contrastive search chooses by hidden states; leave penalty_alpha out"),
        Pair("dola_layers", "DoLa contrasts layers at every token; leave dola_layers out"),
        Pair("guidance_scale", "guidance reads a second prompt at every token; leave guidance_scale out"),
        Pair("mirostat_tau", "Mirostat's cut follows every token drawn; use top_p or min_p"),
        Pair(
            lambda facts: facts.settings.use_cache is False,
            "",
            told="`use_cache`=False does not go with a drafter ({drafter}): drafts are checked against kept keys and "
            "values; leave use_cache on",
        ),
        Pair("output_hidden_states", "a check reads tokens that may be refused; decode without a drafter"),
        Pair("output_attentions", "a check reads tokens that may be refused; decode without a drafter"),
    ),
)
DRAFTED_ROWS = Method(
    "return_legacy_cache",
    "`return_legacy_cache` gives tuples, which can't hold rows of different lengths, and rows accept different numbers "
    "of drafted tokens; leave it out",
    (Pair(lambda facts: facts.shape.num_rows * (facts.settings.num_return_sequences or 1) > 1, ""),),
)

_SAME_KIND = "use a draft model of the same kind, or prompt_lookup_num_tokens"

ASSISTANT = Method(
    lambda facts: facts.given["assistant"] is not None,
    "`assistant_model` {why}",
    (
        Pair(
            lambda facts: (
                facts.given["relation"] == "same" and facts.given["assistant"].vocab_size != facts.info.vocab_size
            ),
            "has a vocabulary of {assistant.vocab_size} tokens and the model one of {info.vocab_size}: its drafts "
            "would mean other texts; pass `tokenizer` and `assistant_tokenizer` to draft across tokenizers, or use a "
            "draft model with the same one",
        ),
        Pair(
            lambda facts: facts.info.is_encoder_decoder and not facts.given["assistant"].is_encoder_decoder,
            f"is decoder-only and the model is an encoder-decoder; {_SAME_KIND}",
        ),
        Pair(
            lambda facts: facts.given["assistant"].is_encoder_decoder and not facts.info.is_encoder_decoder,
            f"is an encoder-decoder and the model is decoder-only; {_SAME_KIND}",
        ),
        Pair(
            lambda facts: facts.shape.has_embeds,
            "reads tokens, and inputs_embeds are the model's own; pass input_ids, or use assistant_early_exit",
        ),
        Pair(
            lambda facts: facts.given["relation"] != "same" and facts.info.is_encoder_decoder,
            "has another tokenizer than the model, and an encoder-decoder's source is not put into other tokens; use a "
            "draft model with the same tokenizer, or prompt_lookup_num_tokens",
        ),
    ),
)


def _has_gumbel(facts: Facts) -> bool:
    marks = facts.settings.watermarking_config
    return any(isinstance(one, GumbelWatermarkingConfig) for one in (marks if isinstance(marks, list) else [marks]))


GUMBEL = Method(
    _has_gumbel,  # it draws its tokens itself
    "the Gumbel watermark, set {spoken[watermarking_config]}, {why}",
    (
        Pair(
            lambda facts: not facts.settings.do_sample or facts.num_beams > 1,
            "is a way to sample, and this call does not sample one token at a time; set do_sample=True without beams, "
            "or use a WatermarkingConfig, which marks every way to decode",
        ),
        Pair(
            "num_return_sequences",
            "draws the same text for the same prompt and key, so num_return_sequences={value} would give copies; ask "
            "for one, or give prompts of the same text keys of their own (a list in `watermarking_config`)",
        ),
    ),
)

# --- compiled steps ----------------------------------------------------------------------------------------------

_COMPILED = "`{wish}`, set {told}, asks for compiled steps, and {why}"
COMPILABLE = Method(
    lambda _: True,  # read where compiled steps were asked for
    _COMPILED,
    (
        Pair(
            lambda facts: "compile" not in facts.info.can,
            "those of a {info.family} model can't be compiled yet; leave it out",
            UnsupportedError,
        ),
    ),
)
COMPILED = Method(
    lambda _: True,
    _COMPILED + "; leave one of them out",
    (
        Pair(lambda facts: facts.settings.use_cache is False, "`use_cache`=False reads every text anew at every step"),
        Pair("output_hidden_states", "`{name}` returns what a compiled step does not keep"),
        Pair("output_attentions", "`{name}` returns what a compiled step does not keep"),
        Pair(
            lambda facts: not facts.given["is_plain"],
            "this cache does not keep its keys in plain buffers; use a 'dynamic' or 'static' one",
        ),
    ),
)

# --- the cache ---------------------------------------------------------------------------------------------------


def _makes_another(name: str) -> Pair:
    return Pair(
        lambda facts: facts.is_asked(name),
        "",
        told=f"`{name}` says what cache to make and past_key_values is one already; leave one of them out",
    )


GIVEN_CACHE = Method(
    lambda facts: facts.shape.has_cache,
    "past_key_values were given and {why}; leave one of them out",
    (
        Pair(lambda facts: facts.settings.use_cache is False, "`use_cache` is False"),
        *(_makes_another(name) for name in ("cache_implementation", "cache_config", "max_cache_len")),
    ),
)
LEGACY_CACHE = Method(
    "return_legacy_cache",
    "`return_legacy_cache` gives tuples, which can't hold {why}; leave it out",
    (
        Pair(lambda facts: facts.cache_kind != "dynamic", "a {cache_kind} cache"),
        Pair(lambda facts: facts.shape.is_ragged, "rows of different lengths"),
    ),
)

# --- a call's arguments --------------------------------------------------------------------------------------------

OF_CALL = (
    Method(
        lambda facts: facts.given["beams"] is not None,
        "beams='all' streams the table of a beam search; add num_beams",
        (Pair(lambda facts: facts.num_beams == 1, ""),),
    ),
    Method(
        "stop_strings",
        "`stop_strings` are found in text: pass the model's `tokenizer` too",
        (Pair(lambda facts: facts.given["tokenizer"] is None, ""),),
    ),
    Method(
        "guidance_scale",
        "`guidance_scale` and a {guide} among the logits_processor ask for the same thing twice; give one of them",
        (Pair(lambda facts: facts.given["guide"] is not None, ""),),
    ),
    Method(
        "token_healing",
        "`token_healing` chooses the last token again, and past_key_values may hold it; give one",
        (Pair(lambda facts: facts.shape.has_cache, ""),),
    ),
)
OF_SEQUENCES = Method(
    lambda facts: not facts.settings.return_dict_in_generate,
    "{why}; add return_dict_in_generate=True, or use lm.generate()",
    (
        Pair("logprobs", "log-probabilities were asked for, and only an output object can carry them"),
        Pair("prompt_logprobs", "log-probabilities were asked for, and only an output object can carry them"),
        Pair("return_beam_trace", "`return_beam_trace` was asked for, and only an output object can carry the trace"),
    ),
)
OF_STREAM = Method(
    "return_beam_trace",
    "`return_beam_trace` is told at the end, and a stream has no place for it: use generate(), or beams='all' for the "
    "table of beams at every step",
    (Pair(lambda _: True, ""),),
)
