"""Every generation setting in one table, from which defaults, checks, flags and docs are made.

Here are the settings that several parts read. Those of one part alone (a processor, a stop) stand in its entry.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any, Final

from unspool.config.named import NamedSettings
from unspool.config.parameter import (
    LARGEST_COUNT,
    Kind,
    Parameter,
    make_count,
    make_flag,
    make_number,
    make_other,
    make_token,
)
from unspool.errors import PluginError
from unspool.registry import resolve
from unspool.registry.tables import count_changes

__all__ = ["LARGEST_COUNT", "PARAMETERS", "Kind", "Parameter", "check_new"]

LARGEST_SEED = 2**63 - 1
LARGEST_LOGPROBS = 1024
_LOGPROBS: dict[str, Any] = {"at_least": 0, "at_most": LARGEST_LOGPROBS, "is_ours": True}
_BEAMS: Final = ("num_beams",)
_CACHE: Final = ("use_cache",)
_OUTPUT: Final = ("return_dict_in_generate",)

_TABLE: tuple[Parameter, ...] = (
    # How long the output gets
    Parameter(
        "early_stopping",
        False,
        "choice",
        "length",
        "When beam search ends: true at num_beams done, false by a guess, 'never' when none can improve.",
        choices=(True, False, "never"),
        needs=_BEAMS,
    ),
    # How the next token is chosen
    make_flag("do_sample", False, "strategy", "Draw from the distribution instead of taking the likeliest token."),
    make_count("num_beams", 1, "strategy", "Hypotheses kept by beam search; 1 is no beam search.", at_least=1),
    make_count("num_beam_groups", 1, "strategy", "Groups the beams are split into, to differ.", 1, needs=_BEAMS),
    Parameter(
        "penalty_alpha",
        None,
        "number",
        "strategy",
        "Contrastive search among the top_k likeliest tokens: how much likeness to the text so far counts; 0 is off.",
        at_least=0,
        at_most=1,
        off=(0,),
    ),
    make_other("dola_layers", "layers", "strategy", "Layers contrasted by DoLa: 'low', 'high' or a list."),
    # Keys and values kept between steps
    make_flag("use_cache", True, "cache", "Keep keys and values between steps."),
    Parameter(
        "cache_implementation",
        None,
        "choice",
        "cache",
        "Kind of cache; docs/caches.md says what each keeps.",
        choices=(
            "hybrid_chunked",
            "offloaded_hybrid_chunked",
        ),  # for objects of the reference; native models refuse them
        named_by="unspool.cache.kinds:KINDS",
        needs=_CACHE,
    ),
    make_other("cache_config", "object", "cache", "Settings of the cache, for the kinds that have any.", needs=_CACHE),
    make_flag("return_legacy_cache", None, "cache", "Return the cache as tuples.", needs=_CACHE),
    make_count("prefill_chunk_size", None, "cache", "Read the prompt in pieces of this many tokens.", at_least=1),
    # How logits are changed whatever the strategy
    make_number(
        "length_penalty", 1.0, "control", "Power of the length that a beam's score is divided by.", needs=_BEAMS
    ),
    make_other("force_words_ids", "id lists", "control", "Token sequences that must be written."),
    make_other("constraints", "object", "control", "Constraint objects that the output must satisfy.", needs=_BEAMS),
    make_other("forced_decoder_ids", "forced ids", "control", "Pairs of position and token forced there."),
    make_flag("token_healing", False, "control", "Rewrite the prompt's last token so that it can grow."),
    make_number(
        "guidance_scale",
        None,
        "control",
        "Weight of classifier-free guidance; above 1 follows the prompt more.",
        off=(1,),
    ),
    make_flag("low_memory", None, "control", "Read the candidates of contrastive search one after the other."),
    # What comes back
    make_count("num_return_sequences", 1, "output", "Sequences returned for each prompt.", at_least=1),
    make_flag("output_attentions", False, "output", "Return the attentions of every step.", needs=_OUTPUT),
    make_flag("output_hidden_states", False, "output", "Return the hidden states of every step.", needs=_OUTPUT),
    make_flag("output_scores", False, "output", "Return the processed scores of every step.", needs=_OUTPUT),
    make_flag("output_logits", None, "output", "Return the model's own logits of every step.", needs=_OUTPUT),
    make_flag("return_dict_in_generate", False, "output", "Return an output object instead of the sequences alone."),
    # Special tokens
    make_token("pad_token_id", "Token that fills rows up."),
    make_token("bos_token_id", "Token that begins a sequence."),
    make_token("decoder_start_token_id", "Token(s) the decoder starts with.", kind="ids"),
    # Drafts checked by the model
    make_count("num_assistant_tokens", 20, "assistance", "Tokens drafted before each check.", at_least=1),
    Parameter(
        "num_assistant_tokens_schedule",
        "constant",
        "choice",
        "assistance",
        "How the number of drafted tokens changes: constant, heuristic or heuristic_transient.",
        choices=("constant", "heuristic", "heuristic_transient"),
    ),
    make_number("assistant_confidence_threshold", 0.4, "assistance", "The drafter stops below this confidence."),
    make_count(
        "assistant_lookbehind", 10, "assistance", "Drafter tokens re-read when the tokenizers differ.", at_least=1
    ),
    make_count("target_lookbehind", 10, "assistance", "Model tokens re-read when the tokenizers differ.", at_least=1),
    # Speed
    make_other(
        "compile_config", "object", "performance", "A CompileConfig: run the steps through torch.compile with it."
    ),
    make_flag("disable_compile", False, "performance", "Never compile the step."),
    make_other("generation_kwargs", "object", "performance", "Further arguments for generate().", default={}),
    # unspool's own
    Parameter(
        "seed",
        None,
        "integer",
        "sampling",
        "Seed of the draws, one number or one per row: the same request gives the same tokens alone or in a batch.",
        at_least=0,
        at_most=LARGEST_SEED,
        may_be_per_row=True,
        is_ours=True,
    ),
    Parameter(
        "logprobs",
        None,
        "integer",
        "output",
        "Log-probabilities: 0 for the chosen tokens, n for the n likeliest too.",
        **_LOGPROBS,
    ),
    Parameter("prompt_logprobs", None, "integer", "output", "The same, for the prompt's tokens.", **_LOGPROBS),
    make_flag(
        "thoughts",
        None,
        "output",
        "Set thoughts apart from the text, so that structures hold for what follows them; by default in chats.",
        is_ours=True,
    ),
    make_flag("keep_stop_strings", False, "output", "Leave the stop string in the text.", is_ours=True),
    make_count("max_cache_len", None, "cache", "Room of a static cache, in tokens.", at_least=1, is_ours=True),
    make_flag("return_beam_trace", False, "output", "Return every step's candidates of a beam search.", is_ours=True),
    make_flag(
        "strict_constraints",
        False,
        "control",
        "Every returned sequence writes all that is forced, or an error.",
        is_ours=True,
    ),
    Parameter(
        "speculate",
        None,
        "choice",
        "assistance",
        "'auto' drafts while it pays: the length follows what is accepted and what it costs.",
        choices=("auto",),
        is_ours=True,
    ),
    make_flag(
        "compile",
        None,
        "performance",
        "Run the steps through torch.compile if nothing faster is built.",
        is_ours=True,
    ),
)

# Tables whose entries have settings of their own, which their entries' `settings` give.
SOURCES: Final = (
    "unspool.stopping.order:STOPS",
    "unspool.logits.order:PROCESSORS",
    "unspool.plan.strategies:STRATEGIES",
    "unspool.plan.drafters:DRAFTERS",
)
# Arguments of generate() in the reference's signature, which it refuses as settings.
CALL_ARGUMENTS: Final = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "use_model_defaults",
)
# Every argument of a call that is no setting: a plug-in's setting can't have such a name.
ARGUMENTS: Final = (
    *CALL_ARGUMENTS,
    "assistant_encoder_outputs",
    "assistant_tokenizer",
    "attention_mask",
    "beams",
    "custom_generate",
    "decoder_input_ids",
    "defaults",
    "encoder_outputs",
    "generation_config",
    "hides_padding",
    "input_features",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "model",
    "native",
    "observer",
    "owns_cache",
    "past_key_values",
    "prefix_ids",
    "shows_rows_alone",
    "tokenizer",
)
# Arguments of lm.generate() and its kin beside these.
TEXT_ARGUMENTS: Final = ("chat", "negative_prompt", "prefix", "skip_special_tokens", "tool_choice", "tools")


class Parameters(Mapping[str, Parameter]):
    """The settings of this table and of every part's entry, the reference's first; made anew when a part is added."""

    def __init__(self) -> None:
        self._known: dict[str, Parameter] = {}
        self._made_at = -1

    def __getitem__(self, name: str) -> Parameter:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def items(self) -> ItemsView[str, Parameter]:
        """The names and settings; the table's own view, because every call goes through all of them several times."""
        return self._read().items()

    def _read(self) -> dict[str, Parameter]:
        if self._made_at != count_changes():
            entries = [entry for source in SOURCES for entry in resolve(source).values()]
            listed = [*(parameter for entry in entries for parameter in entry.settings), *_TABLE]
            listed.sort(key=lambda parameter: parameter.is_ours)  # stable: the reference's in their order, then ours
            self._made_at, self._known = count_changes(), {parameter.name: parameter for parameter in listed}
        return self._known


PARAMETERS: Final[Mapping[str, Parameter]] = Parameters()


def is_on(settings: NamedSettings, name: str) -> bool:
    """Whether a setting is given, and not with a value that switches it off."""
    value = getattr(settings, name)
    return value is not None and value not in PARAMETERS[name].off


def find_own() -> tuple[str, ...]:
    """The settings that the reference does not have."""
    return tuple(name for name, parameter in PARAMETERS.items() if parameter.is_ours)


def check_new(part: str, parameters: Sequence[Parameter]) -> None:
    """Raise a PluginError for settings of a new part that can't be: none, wrong, or of a name that is taken."""
    if not parameters:
        raise PluginError(f"the {part} has no setting that switches it on")
    seen: set[str] = set()
    config = resolve("unspool.config.generation:GenerationConfig")
    for parameter in parameters:
        if not isinstance(parameter, Parameter):
            raise PluginError(f"a part's settings are Parameters, and {parameter!r:.80} is none")
        name = parameter.name
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise PluginError(f"a setting needs a Python name, and {name!r:.80} is none")
        if name in (*PARAMETERS, *seen, *ARGUMENTS, *TEXT_ARGUMENTS) or hasattr(config, name):
            raise PluginError(f"there is a setting or an argument {name!r} already; give yours another name")
        seen.add(name)
