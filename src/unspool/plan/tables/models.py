"""Settings that a model, its cache or its steps can't serve."""

from __future__ import annotations

from unspool.config.modes import find_num_candidates
from unspool.errors import UnsupportedError
from unspool.plan.pairs import CallMethod, CallPair


def _can_not(ability: str, hint: str = "") -> tuple[CallPair, ...]:
    return (CallPair(lambda facts: ability not in facts.info.can, hint, UnsupportedError),)


def _in_pieces(states: str) -> CallMethod:
    return CallMethod(
        states,
        f"{{name}} reads the prompt in pieces and {{{states}}} returns the prompt's states whole; ask for one of them",
        (CallPair("prefill_chunk_size", ""), CallPair("prompt_logprobs", "")),
    )


OF_MODEL = (
    CallMethod(
        lambda facts: facts.settings.decoder_start_token_id is not None and "decoder_start_token_id" in facts.asked,
        "{decoder_start_token_id} begins the text of an encoder-decoder; {info.family} is none",
        (CallPair(lambda facts: not facts.info.is_encoder_decoder, ""),),
    ),
    CallMethod(
        "output_hidden_states",
        "{output_hidden_states} was asked for, and this {info.family} model can't return them; leave it out",
        _can_not("hidden_states"),
    ),
    CallMethod(
        "output_attentions",
        "{output_attentions} was asked for, and this {info.family} model can't return them{why}; leave it out",
        _can_not("attentions", " (a transformers model can with attn_implementation='eager')"),
    ),
    CallMethod(
        lambda facts: bool(find_num_candidates(facts.settings)),
        "{penalty_alpha}, set {spoken[penalty_alpha]}, asks for contrastive search, which compares hidden states, and "
        "a {info.family} model does not return one for each token; leave it out",
        _can_not("last_states"),
    ),
    CallMethod(
        lambda facts: bool(find_num_candidates(facts.settings)),
        "{penalty_alpha}, set {spoken[penalty_alpha]}, tries tokens in rows of their own, and {info.why_placed}; leave "
        "it out",
        (CallPair(lambda facts: bool(facts.info.why_placed), "", UnsupportedError),),
    ),
    _in_pieces("output_hidden_states"),
    _in_pieces("output_attentions"),
    CallMethod(
        "prompt_logprobs",
        "{prompt_logprobs} can't be computed: {why}",
        (
            CallPair(
                lambda facts: facts.info.is_encoder_decoder,
                "an encoder-decoder model's prompt is not predicted token by token",
            ),
            CallPair(lambda facts: facts.shape.has_embeds, "inputs_embeds have no tokens"),
            CallPair(
                lambda facts: "whole_prompts" in facts.info.can,
                "the model runs over transformers' own cache, which predicts after whole prompts alone; leave it out",
                UnsupportedError,
            ),
            CallPair(
                lambda facts: facts.shape.has_cache, "past_key_values hide the prompt's first part from the model"
            ),
        ),
    ),
)

# --- compiled steps ---

_COMPILED = "{wish}, set {origin}, asks for compiled steps, and {why}"
COMPILABLE = CallMethod(
    lambda _: True,  # read if compiled steps were asked for
    _COMPILED,
    (
        CallPair(
            lambda facts: "compile" not in facts.info.can,
            "those of a {info.family} model can't be compiled yet; leave it out",
            UnsupportedError,
        ),
    ),
)
COMPILED = CallMethod(
    lambda _: True,
    _COMPILED + "; leave one of them out",
    (
        CallPair(
            lambda facts: facts.settings.use_cache is False, "{use_cache:is False} reads every text anew at every step"
        ),
        CallPair("output_hidden_states", "{name} returns what a compiled step does not keep"),
        CallPair("output_attentions", "{name} returns what a compiled step does not keep"),
        CallPair(
            lambda facts: not facts.given["is_plain"],
            "this cache does not keep its keys in plain buffers; use a 'dynamic' or 'static' one",
        ),
    ),
)

# --- the cache ---


def _makes_another(name: str) -> CallPair:
    return CallPair(
        lambda facts: facts.is_asked(name),
        "",
        message=f"{{{name}}} says what cache to make and past_key_values is one already; leave one of them out",
    )


GIVEN_CACHE = CallMethod(
    lambda facts: facts.shape.has_cache,
    "past_key_values were given and {why}; leave one of them out",
    (
        CallPair(lambda facts: facts.settings.use_cache is False, "{use_cache} is False"),
        *(_makes_another(name) for name in ("cache_implementation", "cache_config", "max_cache_len")),
    ),
)
OF_WHOLE_PROMPTS = CallMethod(
    lambda facts: facts.shape.is_whole,
    "the tokens of a picture see each other in this {info.family} model, so its prompt is read in one pass, and {why}",
    (
        CallPair("prefill_chunk_size", "{prefill_chunk_size} reads it in pieces; leave it out", UnsupportedError),
        CallPair(
            lambda facts: facts.cache_kind in ("quantized", "paged_quantized", "sink"),
            "a {cache_kind} cache shows keys by their positions alone; use 'dynamic', 'static' or 'paged'",
            UnsupportedError,
        ),
    ),
)
LEGACY_CACHE = CallMethod(
    "return_legacy_cache",
    "{return_legacy_cache} gives tuples, which can't hold {why}; leave it out",
    (
        CallPair(lambda facts: facts.cache_kind != "dynamic", "a {cache_kind} cache"),
        CallPair(lambda facts: facts.shape.is_ragged, "rows of different lengths"),
    ),
)
