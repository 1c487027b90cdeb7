"""Arguments of a call that can't stand beside its settings."""

from __future__ import annotations

from unspool.config import pairs
from unspool.plan.pairs import CallMethod, CallPair

OF_CALL = (
    CallMethod(
        lambda facts: facts.given["beams"] is not None,
        "beams='all' streams the table of a beam search; add {num_beams}",
        (CallPair(lambda facts: facts.num_beams == 1, ""),),
    ),
    CallMethod(
        "stop_strings",
        "{stop_strings} are found in text: pass the model's `tokenizer` too",
        (CallPair(lambda facts: facts.given["tokenizer"] is None, ""),),
    ),
    CallMethod(
        "guidance_scale",
        "{guidance_scale} and a {guide} among the logits_processor ask for the same thing twice; give one of them",
        (CallPair(lambda facts: facts.given["guide"] is not None, ""),),
    ),
    CallMethod(
        "token_healing",
        "{why}",
        (
            CallPair(
                lambda facts: facts.given["tokenizer"] is None,
                "{token_healing} looks for tokens by their text: pass the model's `tokenizer` too",
            ),
            CallPair(
                lambda facts: facts.shape.has_embeds or facts.info.is_encoder_decoder,
                "{token_healing} rewrites a decoder's prompt of tokens; this call has none. Leave it out",
            ),
            CallPair(
                lambda facts: facts.shape.has_cache,
                "{token_healing} chooses the last token again, and past_key_values may hold it; give one",
            ),
            CallPair(
                "forced_bos_token_id",
                "{token_healing} begins a prompt of one token anew with the start token, and {forced_bos_token_id} "
                "forces the token behind the first; give one",
            ),
        ),
    ),
)
OF_SEQUENCES: pairs.Method[pairs.ConfigFacts] = pairs.Method(
    lambda facts: not facts.settings.return_dict_in_generate,
    "{why}; add {return_dict_in_generate:=True}, or use lm.generate()",
    (
        pairs.Pair("logprobs", "log-probabilities were asked for, and only an output object can carry them"),
        pairs.Pair("prompt_logprobs", "log-probabilities were asked for, and only an output object can carry them"),
        pairs.Pair(
            "return_beam_trace", "{return_beam_trace} was asked for, and only an output object can carry the trace"
        ),
    ),
)
OF_STREAM: pairs.Method[pairs.ConfigFacts] = pairs.Method(
    "return_beam_trace",
    "{return_beam_trace} is returned at the end, and a stream has no place for it: use generate(), or beams='all' for "
    "the table of beams at every step",
    (pairs.Pair(lambda _: True, ""),),
)
