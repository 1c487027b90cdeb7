"""What differs by design: each with its reason, most of them in tests/conformance/differences.md."""

from __future__ import annotations

import re

from tests.fuzz.beside import models
from tests.fuzz.beside.calls import OUR_KINDS, OWN, Call
from tests.fuzz.beside.families import STATES, WINDOWS

# What transformers refuses or fails at, and ours does.
MORE = (
    "assisted generate is only supported for batch_size = 1",
    "assisted generate is not supported with Static cache",
    "assisted generation is not supported with stateful models",
    "Cannot use prefill chunking without a cache",
    "'Mamba.*Output' object has no attribute 'attentions'",
    "cannot use beam search with a cache currently",
    "'CausalLMOutput' object has no attribute 'past_key_values'",
    "assisted decoding requires a cache",
    "doesn't have its forwarding implemented",
    r"`model_kwargs` are not used by the model: \['past_key_values'\]",
    "a window is read for ever",
    "Whisper expects the mel input features to be of length",  # of short ones whose language is to be found
    "IndexError: index . is out of bounds for dimension 0",  # times of sounds, if one of several was read to its end
    r"Expected parameter logits .* of distribution Categorical",  # `top_h` over one token that is left
    "Passing both `cache_implementation` .* and `past_key_values`",  # of the assistant, in its own code
)
# What ours refuses because it would be without effect, or can't be; transformers warns, or ignores it.
REFUSED = (
    "an encoder must read something in place of the prompt",
    "it compares with tokens that were read, and there are none",
    "`prefill_chunk_size` reads the prompt in pieces and `output_.*` returns",
    "would shift the columns of the prompts",
    "reads one token at a time, so it can't check several tokens of a draft",
    # Its ALiBi over a static cache; there too.
    "FalconForCausalLM failed: (ValueError: too many values to unpack|RuntimeError: The size of tensor a)",
    "You need to install optimum-quanto",  # an object that runs over transformers' own caches
    "holds nothing but pad tokens",
    "no token is left to choose",  # transformers takes the first token of the vocabulary then
    "gives one entry per step, and a drafter lets rows take different numbers of tokens",
    "drafts that one row of several refuses can't be left out",
    "`force_unique_generate_call` returns the text of one run",
    r"and a window of the model is \(rows",  # force_unique_generate_call
    "`use_cache` is only supported for `decoder_input_ids` of length 1",  # ProphetNet's forward
    "This model does not support the quantized cache",  # the object's forward over its own cache
    "FSMT.* would read the empty columns of a static cache",
    "embeddings and the other prompt's tokens are read in two passes",  # guidance, and states of one pass
    "reads the source with an encoder of its own",  # a draft model, which was not given the source
    "past_key_values (are what a beam search left|hold . rows and the prompt has)",
    "so its inputs belong to the prompts alone",  # guidance of an object whose own cache or states are returned
)


def has_no_reference(call: Call) -> bool:
    """Whether transformers has no answer to compare with: a method that it dropped, or one that it gets wrong."""
    if call.strategy == "guidance" and (call.is_pair or call.model in (*STATES, "roberta") or call.has_beams):
        return True  # its other rows have no encoder, no states, other positions, and do not follow the beams
    if len(set(map(len, call.extras.get("negative", ())))) > 1:
        return True  # it counts the padding of a negative prompt as positions
    if models.DEVICE != "cpu" and "watermarking_config" in call.settings:
        return True  # its green lists come from the device's own generator
    if call.is_pair and "prefill_chunk_size" in call.settings and call.mask is not None:
        return True  # it gives the encoder's mask the columns of the decoder's chunks
    if call.model in STATES and call.has_padding and call.settings.get("prefill_chunk_size") == 1:
        return True  # a chunk of padding alone goes into its states
    if "longest" in call.extras and "forced_eos_token_id" in call.settings:
        return True  # it forces the end at the length that a criterion has taken the place of
    if call.model in STATES and "again" in call.extras:
        return True  # it begins states anew with several tokens, or takes the last one alone
    if call.model in ("recurrent_gemma", "minimax") and call.has_beams:
        return True  # its states do not follow the beams
    reads_several = bool({"again", "begun"} & call.extras.keys()) or call.strategy in ("lookup", "assisted")
    reads_several |= call.settings.get("use_cache") is False
    if call.model == "fsmt" and reads_several:
        return True  # several tokens that it reads in one pass see each other
    if call.model == "m2m_100" and "again" in call.extras and len(call.ids) > 1:
        return True  # padding of rows that ended counts in positions behind a cache, and not where all is read anew
    if call.model in ("fsmt", "led", "prophetnet") and call.is_static:
        return True  # it writes something else then, or fails
    if call.settings.get("condition_on_prev_tokens") and (call.is_static or len(call.sounds) > 1):
        return True  # its positions count the padding before what came earlier, and the first row decides for all
    writes_anew = isinstance(call.settings.get("temperature"), tuple) and not call.settings.get("return_timestamps")
    if call.sounds and call.returns_dict and writes_anew:
        return True  # it stacks the outputs of rows that were written anew, or fails; ours are in `segments`
    if call.is_packed:
        return True  # it has such caches with other packages alone
    if call.is_pair and call.mask is None and call.seen is not None:
        return True  # it reads the pad tokens of a source without a mask as tokens, which 4.52 did not
    if call.has_beams and "again" in call.extras:
        return True  # it goes on with the beams that its search left, whichever sequences it returned
    if call.has_empty_rows:
        return True  # it masks all of them; ours refuses them, or reads them as tokens
    if _joins_tokens(call) and call.seen is not None and any(row != sorted(row) for row in call.seen):
        return True  # it sees the pad tokens in a row's holes as tokens of the text
    if (call.model in WINDOWS or call.model == "mpt") and (call.has_hidden_holes or "leaves out" in call.extras):
        return True  # its windows and biases count masked columns
    reads_source = any(name.startswith("encoder_") for name in call.settings)
    if reads_source and (call.embeds != "none" or call.has_beams):
        return True  # it compares with the embeddings' numbers, and with the prompts of other beams
    return call.strategy in OWN


def _joins_tokens(call: Call) -> bool:
    """Whether a processor looks for sequences of tokens."""
    joining = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "sequence_bias")
    objects = [name for name, _ in call.extras.get("their processors", ())]
    return any(name in call.settings for name in joining) or any(name.startswith("No") for name in objects)


def can_more(call: Call, error: BaseException) -> bool:
    """Whether transformers' refusal is of something that ours has on purpose."""
    if "longest" in call.extras and isinstance(error, IndexError):
        return True  # a criterion takes the place of a setting's length, and its beams and caches have room for that
    if call.model == "falcon_alibi" and call.is_static:
        return True  # its biases have no columns for room that is not in use
    return any(re.search(pattern, f"{type(error).__name__}: {error}") for pattern in MORE)


def refuses(call: Call, way: str, error: BaseException) -> bool:
    """Whether our refusal is on purpose."""
    if way != "native" and "the model's own logits are NaN" in str(error):
        return True  # an object's forward gave them (Qwen4-Exp's, of padded rows in eager attention): it writes token 0
    return any(re.search(pattern, str(error)) for pattern in REFUSED)


def differs(call: Call, way: str, found: str) -> bool:
    """Whether a difference is on purpose."""
    if call.model == "gpt_neo" and call.is_static:
        return True  # transformers takes the rows of its causal mask from the room's end; so does the object's forward
    has_holes = call.seen is not None and any(row != sorted(row) for row in call.seen)
    if call.model in ("mamba", "mamba2") and way == "native" and has_holes:
        return True  # a masked token is as if it were not there; transformers' states go on over it
    if call.model == "recurrent_gemma" and call.has_padding and "again" in call.extras:
        return True  # its forward masks padding in a whole text and not in the steps behind it
    if call.model in WINDOWS and "leaves out" in call.extras and way != "native":
        return True  # windows over a cache of transformers count the padding of rows that had ended
    if (call.has_hidden_holes or call.is_right_padded) and found.startswith("told"):
        return True  # a streamer is told the prompt as it was given; transformers was asked with pad tokens in front
    has_gaps = call.is_right_padded or call.has_hidden_holes or has_holes
    is_wider = "negative" in call.extras and "again" in call.extras  # the cache has the longer prompt's columns
    lacks_positions = call.model == "roformer" or (call.model == "mpt" and way == "adapter")
    if lacks_positions and (has_gaps or is_wider):
        return True  # the object's forward takes no positions, and counts masked columns
    if call.sounds and call.has_beams and re.search("(attentions|hidden_states|scores|logits) of step", found):
        return True  # it keeps one beam's for each row, whichever stands in the row's place
    heat = call.settings.get("temperature")
    if call.sounds and call.has_beams and isinstance(heat, tuple) and len(heat) > 1 and "wrote" in found:
        return True  # behind a window of any row that was written anew it goes on without beams
    if call.settings.get("return_segments") and "returned a dict for a Generate" in found:
        return True  # it leaves out the segments that were asked for, unless there are timestamps
    is_odd = "masked" in call.extras and any(frames % 2 for frames in call.sounds)
    if (is_odd or len(call.sounds) > 1) and "token_timestamps" in found:
        return True  # in a window of one frame, times before it; and a row's among those of its padding
    if call.has_beams and (
        "forced_bos_token_id" in call.settings
        or ("forced_eos_token_id" in call.settings and call.settings.get("max_new_tokens") == 1)
    ):
        return True  # one token may be written first, and all beams but one stand at -1e9
    if "again" in call.extras and call.is_pair and "returned [] more and ['encoder_" in found:
        return True  # an encoder whose keys are in the cache is not run again
    reads_all = "again" in call.extras and (call.is_pair or has_no_reference(call))
    if reads_all and re.search("(attentions|hidden_states) of step 0", found):
        return True  # what was compared with has read all of the text in that step, ours what was new
    if "room" in call.extras and found == "past_key_values are a StaticCache for a DynamicCache":
        return True  # what was compared with has read all of the text, into a cache of its own
    has_own_cache = way == "native" or call.settings.get("cache_implementation") in OUR_KINDS
    if "again" in call.extras and has_own_cache and "have the shape" in found:
        return True  # our caches hold no padding of rows that ended, so more is read anew
    cuts_keys = call.model in WINDOWS or call.is_static
    if cuts_keys and re.search(r"attentions of step \d+, layer \d+ have the shape", found):
        return True  # ours are over all columns of the text, transformers' over what its cache has memory for
    if "positions for" in found and ("negative" in call.extras or call.has_beams):
        return True  # the longer prompt's columns; and native beams that have all ended hold nothing
    is_drafted = call.strategy in ("lookup", "assisted")
    if is_drafted and ("attentions" in found or "hidden_states" in found):
        return True  # ours are those of the call without drafts; transformers cuts its passes at other tokens
    has_criterion = "criterion" in call.extras or {"stop_strings", "max_time"} & call.settings.keys()
    if is_drafted and has_criterion and "wrote" in found:
        return True  # transformers asks a criterion at the end of a draft alone
    raises_lowest = {"exponential_decay_length_penalty", "remove_invalid_values"} <= call.settings.keys()
    if raises_lowest and (call.has_beams or "inf)" in found):
        return True  # a forbidden end token's lowest finite score grows to infinity, and all beams that end tie there
    return "watermarking_config" in call.settings and "-inf, -3.40" in found
