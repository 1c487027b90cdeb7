"""The table of fields: every name that a client may send, from which checks, the OpenAPI page and the docs follow.

Settings of `unspool.config` are fields under their own names. Beside them stand the names that clients of OpenAI, vLLM
and llama-server use. A field is applied, has no effect and says so here, or is refused unless its value is neutral.
"""

from __future__ import annotations

from typing import Any, Final

from unspool.config.parameter import LARGEST_COUNT, Kind, Parameter
from unspool.config.parameters import LARGEST_LOGPROBS, PARAMETERS
from unspool.server.fields import OFF, SAME, Field, FieldTable, Json, make_string


def _own(name: str, kind: Kind, description: str, default: Any = None, **more: Any) -> Parameter:
    return Parameter(name, default, kind, "output", description, **more)


def _alias(name: str, setting: str, **more: Any) -> Field:
    known = PARAMETERS[setting]
    made = Parameter(
        name,
        known.default,
        known.kind,
        known.group,
        known.help,
        known.at_least,
        known.at_most,
        known.choices,
        known.may_be_per_row,
    )
    return Field(made, "setting", setting, **{"neutral": OFF.get(setting, ()), "same": SAME.get(setting), **more})


def _length(name: str, least: int) -> Field:
    description = "The most tokens to write. Without it: 16 in completions, else what the context and the server allow."
    made = _own(name, "integer", description, at_least=least, at_most=LARGEST_COUNT)
    return Field(made, "setting", "max_new_tokens", neutral=(-1,))


def _idle(name: str, kind: Kind, why: str, description: str = "", **more: Any) -> Field:
    return Field(_own(name, kind, description, **more), "without effect", why=why)


def _refused(name: str, why: str, *neutral: Any) -> Field:
    return Field(_own(name, "object", ""), "refused", neutral=neutral, why=why)


_ARRAY: Final[Json] = {"type": "array"}
_STRUCTURED: Final[Json] = {
    "type": "object",
    "properties": {
        "json": {},
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": {"type": "string"}},
        "grammar": {"type": "string"},
        "json_object": {"type": "boolean"},
        "structural_tag": {},
    },
    "additionalProperties": False,
}
_FORMAT: Final[Json] = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}},
    "required": ["type"],
}
_LATER: Final = "this server does not offer it"

# Fields of every route that generates text.
_EVERYWHERE: Final = (
    Field(_own("model", "text", "The name of a served model; may be left out if there is only one.")),
    Field(_own("stream", "flag", "Send the answer as it is written, as server-sent events.", False)),
    _alias("min_tokens", "min_new_tokens"),
    _alias("repeat_penalty", "repetition_penalty"),
    _alias("include_stop_str_in_output", "keep_stop_strings"),
    _alias("guided_json", "json_schema"),
    _alias("guided_regex", "regex"),
    _alias("guided_choice", "choice"),
    _alias("guided_grammar", "grammar"),
    _alias("watermark", "watermarking_config", schema={"type": "object"}),
    _alias("stop", "stop_strings"),
    Field(
        _own("n", "integer", "Answers to write.", 1, at_least=1, at_most=LARGEST_COUNT),
        "setting",
        "num_return_sequences",
    ),
    Field(_own("bad_words", "texts", "Texts that may not be written."), becomes="bad_words"),
    Field(_own("force_words", "texts", "Texts that must be written; with num_beams.")),
    Field(_own("allowed_token_ids", "id list", "The only tokens that may be written.")),
    Field(_own("stop_token_ids", "ids", "Tokens that end the text, beside the model's own.")),
    Field(_own("ignore_eos", "flag", "Go on after the model's end token.", False)),
    Field(_own("use_beam_search", "flag", "Search with max(n, best_of, num_beams) beams.", False)),
    Field(_own("negative_prompt", "long text", "What guidance_scale leads away from.")),
    Field(_own("mirostat", "integer", "2 steers the surprise of the text.", 0, at_least=0, at_most=2), neutral=(0,)),
    Field(
        Parameter("logit_bias", None, "object", "control", PARAMETERS["logit_bias"].help),
        "setting",
        schema={"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, _ARRAY]},
    ),
    Field(
        Parameter(
            "dry_sequence_breakers", None, "object", "control", "Tokens, by id or text, that DRY does not cross."
        ),
        "setting",
        schema={"type": "array", "items": {"type": ["integer", "string"]}},
    ),
    Field(_own("structured_outputs", "object", "vLLM's form of a structured text."), schema=_STRUCTURED),
    Field(_own("response_format", "object", "What the text must be."), schema=_FORMAT),
    Field(_own("skip_special_tokens", "flag", "Leave special tokens out of the text.", True)),
    Field(_own("cache_salt", "text", "Prompts share what was read with those of the same salt alone.")),
    Field(_own("cache_prompt", "flag", "Whether what others have read of the same prompt may be used.", True)),
    Field(_own("priority", "integer", "Higher ones wait less.", 0, at_least=-100, at_most=100)),
    Field(_own("request_id", "text", "A name for this request, in the answer's id.")),
    Field(_own("return_token_ids", "flag", "Return the ids of prompt and answer.", False)),
    _idle("user", "text", "keys separate clients"),
    _idle("safety_identifier", "text", "keys separate clients"),
    _idle("metadata", "object", "nothing is stored"),
    _idle("prompt_cache_key", "text", "prompts that begin alike are found by their tokens"),
    _idle("prompt_cache_options", "object", "blocks are kept while there is room"),
    _idle("prompt_cache_retention", "text", "blocks are kept while there is room"),
    _idle("spaces_between_special_tokens", "flag", "no tokenizer here adds any"),
    _idle("id_slot", "integer", "rows have no fixed places", at_least=-1, at_most=LARGEST_COUNT),
    _idle("n_cache_reuse", "integer", "prompts that begin alike are found by their tokens"),
    Field(_own("service_tier", "choice", "", choices=("auto", "default")), "without effect", why="there is one tier"),
    _refused("store", "nothing is stored", False),
    _refused("chat_template", "templates run code, and come with the model alone"),
    _refused("truncate_prompt_tokens", "shorten the prompt yourself, so that you know what is read", -1),
    _refused("logprob_token_ids", "log-probabilities are those of the likeliest tokens; use top_logprobs"),
    _refused("repeat_last_n", "repetition_penalty reads the whole text", -1),
    _refused("dry_penalty_last_n", "DRY reads the whole text", -1),
    _refused("adaptive_target", _LATER, -1, -1.0),
    _refused("adaptive_decay", _LATER, 0.9),
    _refused("samplers", "the order of samplers is fixed; docs/processors.md has it"),
    _refused("min_keep", "each sampler keeps at least one token", 0, 1),
    _refused("n_keep", "a text is not shifted when the context is full; it ends", 0, -1),
    _refused("n_discard", "a text is not shifted when the context is full; it ends", 0),
    _refused("post_sampling_probs", "log-probabilities are the model's own", False),
    _refused("timings_per_token", "the times are in /metrics", False),
    _refused("return_progress", _LATER, False),
    _refused("return_tokens_as_token_ids", "use return_token_ids", False),
    _refused("repetition_detection", "use stop_on_repeats, a number of tokens"),
    _refused("watermarking", "give watermarking_config, with a key of your own", False),
    _refused("lora", "adapters are not loaded by requests"),
    _refused("vllm_xargs", "give every setting by its own name"),
    _refused("kv_transfer_params", _LATER),
)

COMPRESS_OPTIONS: Final = {
    "rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "target_token": {"type": "integer", "minimum": 1, "maximum": LARGEST_COUNT},
    "question": {"type": "string"},
    "window": {"type": "integer", "minimum": 2, "maximum": 4096},
    "keep": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "keep_digits": {"type": "boolean"},
}
"""What `compress` says, as schemas."""
_COMPRESS: Final = Field(
    _own("compress", "object", f"Shorten the prompt: {', '.join(COMPRESS_OPTIONS)}."),
    schema={"type": "object", "properties": COMPRESS_OPTIONS, "additionalProperties": False},
)
_EFFORT: Final = Field(
    _own(
        "reasoning_effort",
        "choice",
        "How long the model thinks, where its chat template has a variable for it.",
        choices=("none", "minimal", "low", "medium", "high", "xhigh"),
    )
)
_TALK: Final = (
    Field(
        _own("messages", "object", "The conversation."),
        schema={"type": "array", "items": {"type": "object", "required": ["role"]}, "minItems": 1},
    ),
    _length("max_tokens", 1),
    _length("max_completion_tokens", 1),
    _length("n_predict", 1),
    Field(
        Parameter(
            "logprobs", None, "object", "output", "Return log-probabilities: true, or how many of the likeliest."
        ),
        schema={"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": LARGEST_LOGPROBS}]},
        neutral=(False,),
    ),
    Field(
        _own("top_logprobs", "integer", "Of how many of the likeliest tokens.", 0, at_least=0, at_most=LARGEST_LOGPROBS)
    ),
    Field(_own("n_probs", "integer", "As top_logprobs.", 0, at_least=0, at_most=LARGEST_LOGPROBS), neutral=(0,)),
    Field(_own("stream_options", "object", "include_usage, continuous_usage_stats."), schema={"type": "object"}),
    Field(
        _own("tools", "object", "Functions that may be called."), schema={"type": "array", "items": {"type": "object"}}
    ),
    Field(
        _own("tool_choice", "object", "none, auto, required, or the function to call."),
        schema={"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    ),
    Field(_own("parallel_tool_calls", "flag", "Whether one answer may call several.", True)),
    Field(_own("add_generation_prompt", "flag", "Begin an answer after the messages.", True)),
    Field(_own("continue_final_message", "flag", "Go on with the last message instead of answering it.", False)),
    Field(_own("chat_template_kwargs", "object", "Variables of the model's chat template."), schema={"type": "object"}),
    Field(_own("documents", "object", "Documents for the chat template."), schema={"type": "array"}),
    _COMPRESS,
    _refused("add_special_tokens", "the chat template writes them", False),
    _refused("echo", "a chat's prompt is its messages", False),
    _refused("modalities", "answers are text", ["text"]),
    _refused("audio", "answers are text"),
    _refused("prediction", "use prompt_lookup_num_tokens", {"type": "content", "content": ""}),
    _refused("functions", "use tools"),
    _refused("function_call", "use tool_choice", "none"),
    _refused("web_search_options", _LATER),
    _refused("verbosity", _LATER, "medium"),
    _EFFORT,
    Field(
        _own(
            "reasoning_format",
            "choice",
            "none leaves thoughts in the text; else they are set apart.",
            choices=("none", "auto", "deepseek", "parsed"),
        )
    ),
    *(
        _alias(name, "max_thinking_tokens", neutral=(-1,))
        for name in ("reasoning_budget_tokens", "thinking_token_budget", "thinking_budget")
    ),
    Field(_own("include_reasoning", "flag", "Whether the answer has its thoughts beside its text.", True)),
    _refused("moderation", _LATER),
)

_CONTINUE: Final = (
    Field(
        _own("prompt", "object", "A text, token ids, or a list of either."),
        schema={"anyOf": [make_string(1, 1 << 22), {"type": "array", "minItems": 1}]},
    ),
    _length("max_tokens", 0),
    _length("max_completion_tokens", 0),
    _length("n_predict", 0),
    Field(
        _own("best_of", "integer", "Answers to write, of which the n likeliest are returned.", at_least=1, at_most=1024)
    ),
    Field(_own("echo", "flag", "Begin the text with the prompt.", False)),
    _COMPRESS,
    Field(
        _own(
            "logprobs",
            "integer",
            "Return log-probabilities, with this many of the likeliest tokens.",
            at_least=0,
            at_most=LARGEST_LOGPROBS,
        ),
        neutral=(False,),
    ),
    Field(
        _own("n_probs", "integer", "As logprobs.", 0, at_least=0, at_most=LARGEST_LOGPROBS),
        becomes="logprobs",
        neutral=(0,),
    ),
    Field(_own("stream_options", "object", "include_usage, continuous_usage_stats."), schema={"type": "object"}),
    Field(_own("add_special_tokens", "flag", "Let the tokenizer add its special tokens to a text.", True)),
    _refused("suffix", "no model here fills in the middle", ""),
    _refused("thoughts", "this form of an answer has no place for them; use /v1/chat/completions", False),
)


_NO_PLACE: Final = "this form of an answer has no place for it; use /v1/chat/completions"
_ONE_ANSWER: Final = (
    _refused("n", _NO_PLACE, 1),
    _refused("num_return_sequences", _NO_PLACE, 1),
    _refused("prompt_logprobs", _NO_PLACE),
    _refused("return_token_ids", _NO_PLACE, False),
)
_RESPOND: Final = (
    Field(
        _own("input", "object", "A text, or a list of messages, calls and their outputs."),
        schema={"anyOf": [make_string(1, 1 << 22), {"type": "array", "minItems": 1}]},
    ),
    Field(_own("instructions", "long text", "A system message before the input.")),
    Field(
        _own("max_output_tokens", "integer", "The most tokens to write.", at_least=1, at_most=LARGEST_COUNT),
        "setting",
        "max_new_tokens",
    ),
    Field(_own("text", "object", "format: what the text must be."), schema={"type": "object"}),
    Field(_own("include", "object", "message.output_text.logprobs."), schema={"type": "array"}),
    Field(
        _own("top_logprobs", "integer", "Likeliest tokens to return.", 0, at_least=0, at_most=LARGEST_LOGPROBS),
        neutral=(0,),
    ),
    *_ONE_ANSWER,
    _refused("logprobs", "use include and top_logprobs", False),
    _refused(
        "stream_options", "an event has no padding, and the last one has the usage", {"include_obfuscation": False}
    ),
    _refused("previous_response_id", "nothing is stored; send the whole conversation as input"),
    _refused("conversation", "nothing is stored; send the whole conversation as input"),
    _refused("prompt", "nothing is stored; send the text as input"),
    _refused("background", "nothing is stored", False),
    Field(_own("reasoning", "object", "effort: as reasoning_effort."), schema={"type": "object"}),
    _refused("truncation", "shorten the input yourself, so that you know what is read", "disabled"),
    _refused("max_tool_calls", "tools run at the client"),
    _refused("context_management", "shorten the input yourself, so that you know what is read"),
    _refused("moderation", _LATER),
)
_MESSAGE: Final = (
    Field(
        _own("system", "object", "A system message."),
        schema={"anyOf": [{"type": "string"}, {"type": "array"}]},
    ),
    _alias("stop_sequences", "stop_strings"),
    *_ONE_ANSWER,
    _refused("logprobs", "this form of an answer has no place for them; use /v1/chat/completions", False),
    Field(
        _own("thinking", "object", "type: enabled with budget_tokens, adaptive or disabled; display: omitted."),
        schema={"type": "object"},
    ),
    _refused("container", _LATER),
    _refused("context_management", _LATER),
    _refused("mcp_servers", "tools run at the client"),
    Field(_own("output_config", "object", "format: what the text must be."), schema={"type": "object"}),
    _idle("cache_control", "object", "prompts that begin alike are found by their tokens"),
    _idle("user_profile_id", "text", "keys separate clients"),
    _idle("workspace_id", "text", "keys separate clients"),
    _refused("diagnostics", _LATER),
    _refused("inference_geo", _LATER),
    _refused("speed", _LATER, "standard"),
    _refused("fallbacks", _LATER),
    Field(
        _own("service_tier", "choice", "", choices=("auto", "standard_only")), "without effect", why="there is one tier"
    ),
)
_MACHINE: Final = "how the machine is used is decided where the server is started"
_OLLAMA: Final = (
    _length("num_predict", 1),
    Field(
        _own("format", "object", "json, or a JSON schema of the text."),
        schema={"anyOf": [{"enum": ["json"]}, {"type": "object"}]},
    ),
    Field(_own("logprobs", "flag", "Return log-probabilities.", False)),
    Field(
        _own("top_logprobs", "integer", "Of how many of the likeliest tokens.", 0, at_least=0, at_most=LARGEST_LOGPROBS)
    ),
    *(one for one in _ONE_ANSWER),
    _idle("keep_alive", "object", "models stay loaded while there is room"),
    _idle("num_ctx", "integer", "the model's whole context is used", at_least=0, at_most=LARGEST_COUNT),
    *(_idle(name, "integer", _MACHINE) for name in ("num_batch", "num_gpu", "num_thread", "main_gpu", "num_keep")),
    *(_idle(name, "flag", _MACHINE) for name in ("use_mmap", "use_mlock", "numa", "low_vram", "f16_kv")),
    Field(
        _own("think", "object", "As reasoning_effort; true and false too."),
        schema={"anyOf": [{"type": "boolean"}, {"enum": ["low", "medium", "high"]}]},
    ),
    _refused("template", "templates run code, and come with the model alone", ""),
    _refused("suffix", "no model here fills in the middle", ""),
    _refused("context", "send the conversation to /api/chat"),
    _refused("tfs_z", "tail-free sampling is not offered; use min_p", 1, 1.0),
    _refused("penalize_newline", "penalties see every token", True),
    _refused("vocab_only", _LATER, False),
    _refused("embedding_only", _LATER, False),
    _refused("logits_all", _LATER, False),
)
_OLLAMA_GENERATE: Final = (
    Field(_own("prompt", "long text", "What to answer.")),
    Field(_own("images", "object", "Pictures in base64, before the prompt."), schema=_ARRAY),
    Field(_own("system", "long text", "A system message.")),
    Field(_own("raw", "flag", "Continue the prompt as it is, without the chat template.", False)),
)
_SHARED: Final = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "max_tokens")
_BORROWED: Final = tuple(one for one in _TALK if one.name in _SHARED)

RESPONSES: Final = FieldTable(_EVERYWHERE, [one for one in _BORROWED if one.name[:3] not in ("mes", "max")], _RESPOND)
MESSAGES: Final = FieldTable(_EVERYWHERE, [one for one in _BORROWED if one.name != "parallel_tool_calls"], _MESSAGE)
OLLAMA_CHAT: Final = FieldTable(_EVERYWHERE, [one for one in _BORROWED if one.name in ("messages", "tools")], _OLLAMA)
OLLAMA_GENERATE: Final = FieldTable(_EVERYWHERE, _OLLAMA, _OLLAMA_GENERATE)
CHAT: Final = FieldTable(_EVERYWHERE, _TALK)
COMPLETIONS: Final = FieldTable(_EVERYWHERE, _CONTINUE)
_FOLLOW: Final = (
    Field(
        _own("prompt", "object", "A text, or token ids."),
        schema={"anyOf": [make_string(1, 1 << 22), {"type": "array", "minItems": 1}]},
    ),
    Field(_own("prefix_ids", "id list", "Tokens that are written after the prompt already; the trace goes on there.")),
    Field(_own("add_special_tokens", "flag", "Let the tokenizer add its special tokens to a text.", True)),
    _refused("stream", "a trace is a stream", True),
    _refused("logprobs", "every token of a trace has its probabilities", False),
    _refused("prompt_logprobs", "a trace begins after the prompt"),
    _refused("return_token_ids", "a trace has them", True, False),
)
_NOT_FOLLOWED: Final = ("logprobs", "top_logprobs", "n_probs", "stream_options", "add_special_tokens")
_FOLLOWED: Final = [one for one in _TALK if one.name not in _NOT_FOLLOWED]
OF_CHATS: Final = tuple(one.name for one in _FOLLOWED if one.use == "read" and one.name != "messages")
"""Fields of a trace that go with messages alone."""
TRACE: Final = FieldTable(_EVERYWHERE, _FOLLOWED, _FOLLOW)
