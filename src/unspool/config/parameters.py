"""Every generation setting in one table, from which defaults, checks, flags and docs are made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from unspool.errors import SettingError

Kind = Literal[
    "flag",  # true or false
    "integer",
    "number",
    "text",
    "texts",  # one string or a list of them
    "choice",  # one of `choices`
    "ids",  # one token id or a list of them
    "id list",
    "id lists",  # lists of token ids, nested once or twice
    "layers",  # "low", "high" or a list of layer indices
    "bias",  # token sequences and the number added to the logit of their last token
    "token bias",  # {token id: number}
    "decay",  # (start, factor)
    "forced ids",  # pairs of index and token id
    "object",
]
Group = Literal[
    "length",
    "strategy",
    "sampling",
    "control",
    "output",
    "special tokens",
    "assistance",
    "cache",
    "performance",
]

_TYPED: dict[Kind, str] = {"flag": "true or false", "integer": "a whole number", "number": "a number"}
LARGEST_COUNT = 2**31 - 1
LARGEST_SEED = 2**63 - 1
LARGEST_LOGPROBS = 1024
CACHE_IMPLEMENTATIONS = (
    "dynamic",
    "static",
    "offloaded",
    "offloaded_static",
    "sliding_window",
    "hybrid",
    "hybrid_chunked",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "mamba",
    "paged",
    "quantized",
    "quantized_static",
    "quantized_hybrid",
    "offloaded_quantized_hybrid",
    "sink",
)


@dataclass(frozen=True)
class Parameter:
    """One generation setting: what it is called, what it is when nobody sets it, and what it may be."""

    name: str
    default: Any
    kind: Kind
    group: Group
    help: str
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] = ()
    may_be_per_row: bool = False

    def parse(self, text: str) -> Any:
        """Read a value typed by a person (`--temperature 0.3`, `/set temperature 0.3`)."""
        word = text.strip()
        if word.lower() in ("none", "null"):
            return None
        if self.kind == "text" or (self.kind == "texts" and not word.startswith("[")):
            return text
        if word.lower() in ("true", "on", "yes") and self.kind in ("flag", "choice"):
            return True
        if word.lower() in ("false", "off", "no") and self.kind in ("flag", "choice"):
            return False
        if self.kind in ("choice", "layers") and not word.startswith("["):
            return word
        try:
            return json.loads(word)
        except (ValueError, RecursionError) as error:  # not JSON, or a number of thousands of digits
            shown = text if len(text) <= 80 else text[:80] + "…"
            wanted = f"it must be {_TYPED.get(self.kind, 'JSON, such as [1, 2]')}. {self.help}"
            raise SettingError(f"`{self.name}` can't be read from {shown!r}: {wanted}") from error


def _flag(name: str, default: bool | None, group: Group, text: str) -> Parameter:
    return Parameter(name, default, "flag", group, text)


def _count(
    name: str, default: int | None, group: Group, text: str, at_least: int = 0, per_row: bool = False
) -> Parameter:
    return Parameter(
        name, default, "integer", group, text, at_least=at_least, at_most=LARGEST_COUNT, may_be_per_row=per_row
    )


def _number(name: str, default: float | None, group: Group, text: str, per_row: bool = False) -> Parameter:
    return Parameter(name, default, "number", group, text, may_be_per_row=per_row)


def _token(name: str, text: str, kind: Kind = "integer", group: Group = "special tokens") -> Parameter:
    # Negative ids are let through: -1 is a common way to say "no such token".
    return Parameter(name, None, kind, group, text, at_least=-LARGEST_COUNT, at_most=LARGEST_COUNT)


def _other(name: str, kind: Kind, group: Group, text: str, default: Any = None) -> Parameter:
    return Parameter(name, default, kind, group, text)


def _logprobs(name: str, text: str) -> Parameter:
    return Parameter(name, None, "integer", "output", text, at_least=0, at_most=LARGEST_LOGPROBS)


_TABLE: tuple[Parameter, ...] = (
    # How long the output gets
    _count("max_length", 20, "length", "Longest sequence, prompt included."),
    _count("max_new_tokens", None, "length", "Most tokens to write, the prompt not counted.", at_least=1),
    _count("min_length", 0, "length", "Shortest sequence, prompt included; no end token before it.", per_row=True),
    _count("min_new_tokens", None, "length", "Fewest tokens to write before an end token may come.", per_row=True),
    Parameter(
        "early_stopping",
        False,
        "choice",
        "length",
        "When beam search ends: true at num_beams done, false by a guess, 'never' when none can improve.",
        choices=(True, False, "never"),
    ),
    Parameter("max_time", None, "number", "length", "Seconds after which to stop.", at_least=0),
    _other("stop_strings", "texts", "length", "Text, or several, at which to stop."),
    # How the next token is chosen
    _flag("do_sample", False, "strategy", "Draw from the distribution instead of taking the likeliest token."),
    _count("num_beams", 1, "strategy", "Hypotheses kept by beam search; 1 is no beam search.", at_least=1),
    _count("num_beam_groups", 1, "strategy", "Groups the beams are split into, to differ.", at_least=1),
    Parameter(
        "penalty_alpha",
        None,
        "number",
        "strategy",
        "Contrastive search among the top_k likeliest tokens: how much likeness to the text so far counts; 0 is off.",
        at_least=0,
        at_most=1,
    ),
    _other("dola_layers", "layers", "strategy", "Layers contrasted by DoLa: 'low', 'high' or a list."),
    # Keys and values kept between steps
    _flag("use_cache", True, "cache", "Keep keys and values between steps."),
    Parameter(
        "cache_implementation",
        None,
        "choice",
        "cache",
        "Kind of cache; docs/caches.md says what each keeps.",
        choices=CACHE_IMPLEMENTATIONS,
    ),
    _other("cache_config", "object", "cache", "Settings of the cache, for the kinds that have any."),
    _flag("return_legacy_cache", None, "cache", "Return the cache as tuples."),
    _count("prefill_chunk_size", None, "cache", "Read the prompt in pieces of this many tokens.", at_least=1),
    # How the distribution is shaped for sampling
    _number(
        "temperature",
        1.0,
        "sampling",
        "Above 1 flattens the distribution, below 1 sharpens it.",
        per_row=True,
    ),
    Parameter(
        "top_k",
        50,
        "integer",
        "sampling",
        "Keep the k likeliest tokens; 0 keeps all.",
        at_least=0,
        at_most=LARGEST_COUNT,
        may_be_per_row=True,
    ),
    _number("top_p", 1.0, "sampling", "Keep the likeliest tokens that hold this much probability.", per_row=True),
    _number("min_p", None, "sampling", "Keep tokens at least this likely, relative to the likeliest.", per_row=True),
    _number(
        "typical_p", 1.0, "sampling", "Keep the most typical tokens that hold this much probability.", per_row=True
    ),
    _number("epsilon_cutoff", 0.0, "sampling", "Keep tokens with at least this probability.", per_row=True),
    _number("eta_cutoff", 0.0, "sampling", "Keep tokens above a floor that follows the entropy.", per_row=True),
    # How logits are changed whatever the strategy
    _number("diversity_penalty", 0.0, "control", "Taken from tokens other beam groups chose at this step."),
    _number("repetition_penalty", 1.0, "control", "Above 1 makes tokens already seen less likely.", per_row=True),
    _number(
        "encoder_repetition_penalty",
        1.0,
        "control",
        "Above 1 makes tokens of the encoder's input (or the prompt) likelier.",
        per_row=True,
    ),
    _number("length_penalty", 1.0, "control", "Power of the length that a beam's score is divided by."),
    _count("no_repeat_ngram_size", 0, "control", "No n-gram of this size comes twice; 0 is off."),
    _other("bad_words_ids", "id lists", "control", "Token sequences that may not be written."),
    _other("force_words_ids", "id lists", "control", "Token sequences that must be written."),
    _flag("renormalize_logits", False, "control", "Normalise the scores after all processors."),
    _other("constraints", "object", "control", "Constraint objects that the output must satisfy."),
    _token("forced_bos_token_id", "Token forced right after the start token.", group="control"),
    _token("forced_eos_token_id", "Token(s) forced at max_length.", kind="ids", group="control"),
    _flag("remove_invalid_values", False, "control", "Replace NaN and infinite scores."),
    _other(
        "exponential_decay_length_penalty",
        "decay",
        "control",
        "(start, factor): the end token grows likelier after `start` new tokens.",
    ),
    _other("suppress_tokens", "id list", "control", "Tokens that are never written."),
    _other("begin_suppress_tokens", "id list", "control", "Tokens that are not written first."),
    _other("forced_decoder_ids", "forced ids", "control", "Pairs of position and token forced there."),
    _other("sequence_bias", "bias", "control", "Token sequences and what is added to their last token's logit."),
    _flag("token_healing", False, "control", "Rewrite the prompt's last token so that it can grow."),
    _number(
        "guidance_scale",
        None,
        "control",
        "Weight of classifier-free guidance; above 1 follows the prompt more.",
    ),
    _flag("low_memory", None, "control", "Read the candidates of contrastive search one after the other."),
    Parameter(
        "watermarking_config",
        None,
        "object",
        "control",
        "A watermark's settings: WatermarkingConfig, SynthIDTextWatermarkingConfig or GumbelWatermarkingConfig.",
        may_be_per_row=True,
    ),
    # What comes back
    _count("num_return_sequences", 1, "output", "Sequences returned for each prompt.", at_least=1),
    _flag("output_attentions", False, "output", "Return the attentions of every step."),
    _flag("output_hidden_states", False, "output", "Return the hidden states of every step."),
    _flag("output_scores", False, "output", "Return the processed scores of every step."),
    _flag("output_logits", None, "output", "Return the model's own logits of every step."),
    _flag("return_dict_in_generate", False, "output", "Return an output object instead of the sequences alone."),
    # Special tokens
    _token("pad_token_id", "Token that fills rows up."),
    _token("bos_token_id", "Token that begins a sequence."),
    _token("eos_token_id", "Token(s) that end a sequence.", kind="ids"),
    _count(
        "encoder_no_repeat_ngram_size",
        0,
        "control",
        "No n-gram of this size from the encoder's input; 0 is off.",
    ),
    _token("decoder_start_token_id", "Token(s) the decoder starts with.", kind="ids"),
    # Drafts checked by the model
    _count("num_assistant_tokens", 20, "assistance", "Tokens drafted before each check.", at_least=1),
    Parameter(
        "num_assistant_tokens_schedule",
        "constant",
        "choice",
        "assistance",
        "How the number of drafted tokens changes: constant, heuristic or heuristic_transient.",
        choices=("constant", "heuristic", "heuristic_transient"),
    ),
    _number("assistant_confidence_threshold", 0.4, "assistance", "The drafter stops below this confidence."),
    _count("prompt_lookup_num_tokens", None, "assistance", "Tokens drafted from the prompt itself.", at_least=1),
    _count("max_matching_ngram_size", None, "assistance", "Longest n-gram looked up in the prompt.", at_least=1),
    _count(
        "assistant_early_exit",
        None,
        "assistance",
        "Layer after which the model drafts for itself.",
        at_least=1,
    ),
    _count("assistant_lookbehind", 10, "assistance", "Drafter tokens re-read when the tokenizers differ.", at_least=1),
    _count("target_lookbehind", 10, "assistance", "Model tokens re-read when the tokenizers differ.", at_least=1),
    # Speed
    _other("compile_config", "object", "performance", "A CompileConfig: run the steps through torch.compile with it."),
    _flag("disable_compile", False, "performance", "Never compile the step."),
    _other("generation_kwargs", "object", "performance", "Further arguments for generate().", default={}),
    # unspool's own
    Parameter(
        "seed",
        None,
        "integer",
        "sampling",
        "Seed of the draws, one or one a row: the same request gives the same tokens alone or in a batch.",
        at_least=0,
        at_most=LARGEST_SEED,
        may_be_per_row=True,
    ),
    _logprobs("logprobs", "Log-probabilities: 0 for the chosen tokens, n for the n likeliest too."),
    _logprobs("prompt_logprobs", "The same, for the prompt's tokens."),
    _flag("keep_stop_strings", False, "output", "Leave the stop string in the text."),
    _count("max_cache_len", None, "cache", "Room of a static cache, in tokens.", at_least=1),
    _number("presence_penalty", 0.0, "control", "Taken from the score of every token written so far.", per_row=True),
    _number("frequency_penalty", 0.0, "control", "Taken from a token's score each time it was written.", per_row=True),
    _flag("repetition_penalty_ignores_prompt", False, "control", "Let repetition_penalty see new tokens alone."),
    _other("logit_bias", "token bias", "control", "Token ids and what is added to their score: {id: bias}."),
    _number("dry_multiplier", 0.0, "control", "Penalty on tokens that repeat a sequence; 0 is off.", per_row=True),
    _number("dry_base", 1.75, "control", "How the DRY penalty grows with each repeated token.", per_row=True),
    _count("dry_allowed_length", 2, "control", "Tokens that may repeat before the DRY penalty.", at_least=1),
    _other("dry_sequence_breakers", "id list", "control", "Token ids that no DRY match reaches across."),
    _number("top_h", None, "sampling", "Keep the likeliest tokens that hold this share of the entropy.", per_row=True),
    _number("top_n_sigma", None, "sampling", "Keep scores within so many deviations of the highest.", per_row=True),
    _number("top_a", 0.0, "sampling", "Keep tokens this likely, relative to the likeliest's square.", per_row=True),
    _number("xtc_probability", 0.0, "sampling", "How often the likeliest tokens are left out; 0 is off.", per_row=True),
    _number("xtc_threshold", 0.1, "sampling", "Probability from which XTC may leave a token out.", per_row=True),
    _number("mirostat_tau", None, "sampling", "Surprise, in bits, that Mirostat steers towards.", per_row=True),
    _number("mirostat_eta", 0.1, "sampling", "How fast Mirostat steers.", per_row=True),
    _number("dynatemp_range", 0.0, "sampling", "How far temperature moves with the entropy; 0 is off.", per_row=True),
    _number("dynatemp_exponent", 1.0, "sampling", "Power of the entropy in dynamic temperature.", per_row=True),
    _flag("return_beam_trace", False, "output", "Return every step's candidates of a beam search."),
    _flag("strict_constraints", False, "control", "Every returned sequence writes all that is forced, or an error."),
    Parameter(
        "speculate",
        None,
        "choice",
        "assistance",
        "'auto' drafts while it pays: the length follows what is accepted and what it costs.",
        choices=("auto",),
    ),
    _flag("compile", None, "performance", "Run the steps through torch.compile where nothing faster is built."),
)

OURS = (
    "seed",
    "logprobs",
    "prompt_logprobs",
    "keep_stop_strings",
    "max_cache_len",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty_ignores_prompt",
    "logit_bias",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_sequence_breakers",
    "top_h",
    "top_n_sigma",
    "top_a",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
    "dynatemp_range",
    "dynatemp_exponent",
    "return_beam_trace",
    "strict_constraints",
    "speculate",
    "compile",
)
PARAMETERS: dict[str, Parameter] = {parameter.name: parameter for parameter in _TABLE}
