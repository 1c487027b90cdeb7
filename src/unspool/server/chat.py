"""`/v1/chat/completions`: messages in, an answer out."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from unspool.errors import InputError, UnspoolError, excerpt
from unspool.grammar.call_forms import Schemas, ToolForm
from unspool.grammar.generic_tools import choose_format, is_described, move_system, write_tools
from unspool.grammar.sources import check_choices, embed_schema, spell
from unspool.grammar.tools import check_tools, make_settings, read_choice, try_format
from unspool.grammar.vocabulary import list_specials
from unspool.server.calls import CallPart
from unspool.server.contents import join_content, join_parts
from unspool.server.dialect import Reply
from unspool.server.fields import Found, read_fields
from unspool.server.frames import frame
from unspool.server.names import CHAT
from unspool.server.openai import OpenAIErrors, make_head, send_chunks
from unspool.server.orders import Order, Target, make_order, take_structures
from unspool.server.pictures import (
    check_reads_pictures,
    has_parts,
    join_images,
    open_pictures,
    prepare_prompt,
)
from unspool.server.refusals import RequestError, read_error, refuse_field
from unspool.server.short_prompts import shorten_messages
from unspool.server.usage import count_usage
from unspool.server.work import Choice, Delta, Work
from unspool.text import Tokenizer
from unspool.thoughts.histories import FIELDS, place_thoughts
from unspool.thoughts.kinds import find_kind

EFFORT_TOKENS: Final = {"none": 0, "minimal": 512, "low": 2048}
"""Budgets of efforts, where a chat template has no variable for them; those above have none."""

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
# Chats whose tool calls a template has been seen to write, so that the next ones like them are rendered once: the
# template, whether there are tools, and whether messages with calls have a text, and several calls.
_WRITTEN: Final = WeakKeyDictionary[Tokenizer, set[tuple[str, bool, frozenset[tuple[bool, bool]]]]]()


class ChatDialect(OpenAIErrors):
    """OpenAI's chat completions."""

    media_type = "text/event-stream"

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for."""
        return read_chat(read_fields(body, CHAT, ["messages"]), target)

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """The body of a whole answer."""
        order = reply.order
        made: dict[str, Any] = {
            **make_head(reply, "chat.completion"),
            "choices": [_write_choice(reply, choice) for choice in choices],
            "usage": count_usage(work),
        }
        if choices[0].prompt_logprobs is not None:
            made["prompt_logprobs"] = reply.texts.write_prompt(choices[0].prompt_logprobs)
        if order.returns_ids:
            made["prompt_token_ids"] = order.prompts[0]
        return made

    async def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """Chunks, the usage if it was asked for, and the end."""
        order, head = reply.order, make_head(reply, "chat.completion.chunk")
        for index in range(order.num_choices):
            opening = {"role": "assistant", "content": ""}
            chunk = {"index": index, "delta": opening, "logprobs": None, "finish_reason": None}
            yield frame({**head, "choices": [chunk]})
        async for event in send_chunks(reply, work, head, lambda delta: _write_delta(reply, delta)):
            yield event


def _write_choice(reply: Reply, choice: Choice) -> dict[str, Any]:
    order = reply.order
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
    message["refusal"] = None
    message |= _write_thought(choice.thought)
    if choice.calls:
        message["tool_calls"] = [call.as_openai() for call in choice.calls]
    logprobs = None
    if order.logprobs is not None and choice.logprobs is not None:
        logprobs = reply.texts.write_chat(choice.logprobs, order.logprobs)
    made = {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}
    made["stop_reason"] = "repetition" if choice.reason == "repetition" else choice.stop
    if order.returns_ids:
        made["token_ids"] = choice.token_ids
    return made


def _write_delta(reply: Reply, delta: Delta) -> dict[str, Any]:
    order = reply.order
    added: dict[str, Any] = {**_write_thought(delta.thought), **({"content": delta.text} if delta.text else {})}
    if delta.parts:
        added["tool_calls"] = [_write_part(part) for part in delta.parts if part.begins or part.text]
    logprobs = None
    if order.logprobs is not None and delta.logprobs:
        logprobs = reply.texts.write_chat(delta.logprobs, order.logprobs)
    made = {"index": delta.index, "delta": added, "logprobs": logprobs, "finish_reason": delta.finish_reason}
    if delta.reason is not None:
        made["stop_reason"] = "repetition" if delta.reason == "repetition" else delta.stop
    if order.returns_ids:
        made["token_ids"] = delta.token_ids
    return made


def _write_part(part: CallPart) -> dict[str, Any]:
    """What is added to a call: its name stands in the first chunk alone."""
    if not part.begins:
        return {"index": part.index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": part.text}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _write_thought(thought: str) -> dict[str, str]:
    """Thoughts under both of the names that clients read."""
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


# --- reading ----------------------------------------------------------------------------------------------------------
def read_chat(found: Found, target: Target, kind: str = "chatcmpl-") -> Order:
    """The order of a chat whose fields are known; other dialects come here with theirs translated."""
    logprobs = _read_logprobs(found, target)
    shows = found.take("include_reasoning", True)
    _settle_thoughts(found, target)
    prompt, tools, pictured = _read_prompt(found, target)
    order = make_order(found, [prompt], target, kind)
    order.shows_thoughts = shows
    order.logprobs, order.call_format, order.most_calls = logprobs, tools.form, tools.most
    order.call_schemas, order.pictured = tools.schemas, pictured
    if logprobs is not None:
        order.settings["logprobs"] = logprobs
    return order


def count_prompt(found: Found, target: Target) -> int:
    """Tokens of a chat's prompt, be it longer than the model's context or not."""
    return len(_read_prompt(found, target, counts=True)[0])


def _read_prompt(
    found: Found, target: Target, *, counts: bool = False
) -> tuple[list[int], _Tools, dict[str, Any] | None]:
    """A chat's prompt, what its tools ask for, and its pictures' pixels if it has any."""
    given = shorten_messages(found.take("messages"), found.take("compress"), target)
    messages = read_messages(given, target)
    tools = _settle_tools(found, target)
    ids, pictured = _render(found, messages, target, is_generic=tools.is_generic, counts=counts)
    return ids, tools, pictured


def _read_logprobs(found: Found, target: Target) -> int | None:
    wanted, top = found.take("logprobs"), found.take("top_logprobs")
    probs = found.take("n_probs")
    if wanted is None and probs is None:
        if top:
            raise refuse_field("top_logprobs", "`top_logprobs` needs `logprobs`: true")
        return None
    count = max(top or 0, probs or 0, 0 if isinstance(wanted, bool) or wanted is None else wanted)
    if count > target.limits.top_logprobs:
        raise refuse_field("top_logprobs", f"at most {target.limits.top_logprobs} likeliest tokens are returned")
    return count


def read_messages(given: Any, target: Target) -> list[dict[str, Any]]:
    """Messages as chat templates read them: contents are texts, arguments of calls are objects."""
    if not isinstance(given, list):
        raise refuse_field("messages", "`messages` is a list of messages, each with a role and a content")
    if len(given) > target.limits.messages:
        raise refuse_field("messages", f"{len(given)} messages; at most {target.limits.messages} are taken")
    return [_read_message(message, place, target) for place, message in enumerate(given)]


def _check_role(role: str, where: str, target: Target) -> None:
    """Raise for a role that neither clients nor the chat template know: a template would write anything as one."""
    template = "" if target.lm.tokenizer is None else str(target.lm.tokenizer.chat_template)
    if role not in _ROLES and not re.search(rf"""['"]{re.escape(role)}['"]""", template):
        raise refuse_field(
            where, f"{where} has the role {excerpt(role)}; roles are {', '.join(_ROLES)}", "invalid_value"
        )


def _read_message(message: Any, place: int, target: Target) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise refuse_field(where, f"{where} must be an object with a role, such as user, and a content")
    _check_role(message["role"], where, target)
    made = {name: value for name, value in message.items() if value is not None}
    made["role"] = "system" if message["role"] == "developer" else message["role"]
    join = join_content if message["role"] in ("user", "tool") else join_parts
    made["content"] = join(_take_thoughts(message, made, where), where)
    if made.get("images"):
        made = join_images(made, where, target)
    check_reads_pictures(made, where, target)
    if made.get("audio"):
        raise refuse_field(where, f"{where}: models here do not read audio in messages; use /v1/audio/transcriptions")
    calls = made.get("tool_calls")
    if calls is not None:
        made["tool_calls"] = [_read_call(call, where) for call in _check_list(calls, where)]
    elif "content" not in message:
        raise refuse_field(where, f"{where} has no content")
    return made


def _take_thoughts(message: dict[str, Any], made: dict[str, Any], where: str) -> Any:
    """A message's content without the parts that are thoughts, which are entered beside it."""
    for name in FIELDS:
        if name in made and not isinstance(made[name], str):
            raise refuse_field(where, f"{where}: {name} is a text, not {excerpt(made[name])}")
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, list):
        return content
    thoughts = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
    texts = [part.get("thinking") for part in thoughts]
    if not all(isinstance(text, str) for text in texts):
        raise refuse_field(where, f"{where}: a part of type thinking has a text as its thinking")
    if texts:
        made["reasoning_content"] = "".join(map(str, texts))
    return [part for part in content if part not in thoughts]


def _check_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise refuse_field(where, f"{where}: tool_calls is a list of calls, not {excerpt(value)}")
    return value


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise refuse_field(where, f"{where}: a tool call is {{id, type, function: {{name, arguments}}}}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise refuse_field(where, f"{where}: the arguments of {excerpt(function['name'])} are not JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class _Tools:
    """What a chat's tools ask for."""

    form: ToolForm | None = None  # of calls in the answer
    is_generic: bool = False  # the template has no form of its own, so tools are described and calls written as texts
    most: int | None = None  # calls of an answer
    schemas: Schemas = field(default_factory=dict)  # of arguments, by tool


def _settle_tools(found: Found, target: Target) -> _Tools:
    """What a chat's tools ask for; `tools` stay among the values if the template is shown them."""
    tools, choice = found.values.get("tools"), found.take("tool_choice")
    parallel = found.take("parallel_tool_calls", True)
    if tools is None or choice == "none":
        found.take("tools")
        if choice is not None and choice != "none" and not (choice == "auto" and tools is None):
            raise refuse_field("tool_choice", "`tool_choice` chooses among tools, and there are none; send tools")
        return _Tools()
    tokenizer = target.tokenizer
    try:
        known = check_tools(tools)
        names = [name for name, _ in known]
        choice, allowed = _read_allowed("auto" if choice is None else choice, names)
        form, is_generic = choose_format(tokenizer, tools)
        otherwise = _take_answer(found, is_needed=read_choice(choice, names) == "auto")
        made = make_settings(
            tools,
            choice,
            tokenizer,
            list_specials(tokenizer),
            stops_after_first=not parallel,
            form=form,
            allowed=allowed,
            otherwise=otherwise,
        )
    except RequestError:
        raise
    except UnspoolError as error:
        raise RequestError(400, str(error), param="tool_choice" if "tool_choice" in str(error) else "tools") from error
    found.settings |= made
    return _Tools(form, is_generic, None if parallel else 1, dict(known))


def _read_allowed(choice: Any, names: Sequence[str]) -> tuple[Any, list[str] | None]:
    """A choice, and the tools that may be called if it lists them: OpenAI's `allowed_tools`, in either form."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, None
    held = choice.get("allowed_tools", choice)
    mode, listed = (held.get("mode", "auto"), held.get("tools")) if isinstance(held, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise refuse_field(
            "tool_choice", "`allowed_tools` are {mode: auto or required, tools: [{type: function, name}, …]}"
        )
    allowed = list[str]()
    for tool in listed:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in names:
            raise refuse_field("tool_choice", f"`allowed_tools` has {excerpt(name)}, which is none of the tools")
        allowed.append(name)
    return mode, allowed


def _take_answer(found: Found, *, is_needed: bool) -> str:
    """What an answer without calls must be, as a part of a grammar; empty if nothing is said of it.

    A call that must come stands in place of such an answer.
    """
    asked = take_structures(found)
    if len(asked) > 1:
        raise refuse_field(asked[1][0], "two fields describe what the text must be; give one of them")
    for sent, name, value in asked if is_needed else []:
        if name == "json_schema":
            return embed_schema(value)
        if name == "json_object":
            return embed_schema({"type": "object"})
        if name == "choice":
            return f"({' | '.join(spell(one, ()) for one in check_choices(value))})"
        raise refuse_field(
            sent,
            f"`{sent}` beside tools may be a JSON schema, json_object or a choice, and not {name}; give one of those, "
            "or tool_choice 'none'",
        )
    return ""


def _settle_thoughts(found: Found, target: Target) -> None:
    """Set thoughts apart where the chat template has them, unless they are to stay in the text."""
    form = found.take("reasoning_format")
    if form == "none":
        if found.settings.get("thoughts"):
            raise refuse_field("reasoning_format", "`reasoning_format` none leaves thoughts in the text; leave it out")
        found.settings["thoughts"] = False
    own = target.lm.generation_config
    if find_kind(target.lm.tokenizer) is not None and "thoughts" not in own.explicit:
        found.settings.setdefault("thoughts", True)


def _read_effort(found: Found, target: Target) -> dict[str, Any]:
    """The variable of the chat template that says how long the model thinks."""
    effort = found.take("reasoning_effort")
    if effort is None:
        return {}
    template = str(target.tokenizer.chat_template)
    if "reasoning_effort" in template and not (effort == "none" and "enable_thinking" in template):
        return {"reasoning_effort": effort}
    field = found.names.get("reasoning_effort", "reasoning_effort")
    switch = _find_switch(template)
    has_budgets = find_kind(target.tokenizer) is not None
    is_settled = "max_thinking_tokens" in found.settings or (effort == "none" and switch)
    if has_budgets and effort in EFFORT_TOKENS and not is_settled:
        found.settings["max_thinking_tokens"] = EFFORT_TOKENS[effort]
        found.names["max_thinking_tokens"] = field
    if switch:
        return {switch: effort != "none"}
    if effort == "none" or has_budgets:
        return {}
    raise refuse_field(
        field,
        f"`{field}` is not offered: the chat template of {target.name} has no setting for how long it thinks; leave it "
        "out, and ask for thoughts in the prompt",
        "unsupported_parameter",
    )


def _find_switch(template: str) -> str:
    """The variable of a template that switches thoughts on and off, if it has one."""
    if "enable_thinking" in template:
        return "enable_thinking"
    return "thinking" if re.search(r"\bthinking is defined|\bif (not )?thinking\b", template) else ""


def _render(
    found: Found, messages: list[dict[str, Any]], target: Target, *, is_generic: bool, counts: bool
) -> tuple[list[int], dict[str, Any] | None]:
    if not target.tokenizer.chat_template:
        raise refuse_field(
            "messages", f"{target.name} has no chat template; send a text as the prompt of /v1/completions instead"
        )
    tools, documents = found.take("tools"), found.take("documents")
    variables = found.take("chat_template_kwargs", {})
    taken = {"messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "return_tensors"}
    if (taken | {"continue_final_message", "return_dict"}) & set(variables):
        raise refuse_field("chat_template_kwargs", "`chat_template_kwargs` are variables of the template's own")
    variables = {**_read_effort(found, target), **variables}
    goes_on = found.take("continue_final_message", False)
    begins = found.take("add_generation_prompt", not goes_on)
    if goes_on and (begins or messages[-1]["role"] != "assistant"):
        raise refuse_field(
            "continue_final_message",
            "`continue_final_message` goes on with an assistant's last message; set add_generation_prompt to false",
        )
    field = found.names.get("messages", "messages")
    if is_generic:
        messages, tools = write_tools(messages, tools), None
    try:
        pictures: list[Any] = []
        if has_parts(messages):
            messages, pictures = open_pictures(messages, target)
        text = write_chat(target, messages, tools, documents, variables, begins=begins, goes_on=goes_on)
        if not pictures:
            return encode_chat(target, text, counts=counts, field=field), None
        pictured = prepare_prompt(text, pictures, target)
        return pictured["input_ids"][0].tolist(), pictured
    except RequestError:
        raise
    except UnspoolError as error:
        refused = read_error(error)
        raise refused if refused.status != 400 else refuse_field("messages", str(error)) from error


def render_chat(
    target: Target,
    messages: list[dict[str, Any]],
    tools: Any = None,
    documents: Any = None,
    variables: Mapping[str, Any] | None = None,
    *,
    begins: bool = True,
    goes_on: bool = False,
    counts: bool = False,
    field: str = "messages",
) -> list[int]:
    """The token ids of a conversation, which has to fit unless its tokens are only counted."""
    text = write_chat(target, messages, tools, documents, variables, begins=begins, goes_on=goes_on)
    return encode_chat(target, text, counts=counts, field=field)


def encode_chat(target: Target, text: str, *, counts: bool, field: str) -> list[int]:
    """The token ids of a conversation's text."""
    encode = target.encode_text if counts else target.encode_prompt
    ids = encode(text, add_special_tokens=False, field=field)
    if not ids:
        raise InputError("the chat template writes nothing for these messages; there is nothing to continue")
    return ids


def write_chat(
    target: Target,
    messages: list[dict[str, Any]],
    tools: Any,
    documents: Any,
    variables: Mapping[str, Any] | None,
    *,
    begins: bool,
    goes_on: bool,
) -> str:
    """The text of a conversation, as the chat template writes it."""
    tokenizer = target.tokenizer
    messages = place_thoughts(messages, tokenizer.chat_template)

    def write(messages: list[dict[str, Any]]) -> str:
        written: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=begins,
            continue_final_message=goes_on,
            tools=tools,
            documents=documents,
            **dict(variables or {}),
        )
        return written

    calling = [message for message in messages if message.get("tool_calls")]
    seen = _WRITTEN.setdefault(tokenizer, set())
    kinds = frozenset((bool(message.get("content")), len(message["tool_calls"]) > 1) for message in calling)
    kind = (str(tokenizer.chat_template), tools is not None, kinds)
    text = _write_somehow(messages, write, tokenizer)
    if calling and (variables or kind not in seen):
        if _are_calls_unread(messages, text, write):
            if try_format(tokenizer, [_TOOL]) is not None:
                place = next(place for place, message in enumerate(messages) if message.get("tool_calls"))
                raise InputError(
                    f"messages[{place}] has tool_calls, which this model's chat template does not write; send them as "
                    "text"
                )
            text = _write_somehow(write_tools(messages, None), write, tokenizer)
        elif not variables:  # with other variables the template may write otherwise
            seen.add(kind)
    return text


def _write_somehow(
    messages: list[dict[str, Any]], write: Callable[[list[dict[str, Any]]], str], tokenizer: Tokenizer
) -> str:
    """The text of messages; a template that refuses calls, results or tools in a system message gets them as texts."""
    try:
        return write(messages)
    except UnspoolError:
        has_calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        changed = write_tools(messages, None) if has_calls and try_format(tokenizer, [_TOOL]) is None else messages
        if is_described(changed[0]):
            changed = move_system(changed)
        if changed == messages:
            raise
        return write(changed)


def _are_calls_unread(messages: list[dict[str, Any]], text: str, write: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether the template writes the same without the messages' tool calls: nobody should believe they were read."""
    bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    try:
        return write(bare) == text
    except UnspoolError:  # a template that wants a call before its result has read them
        return False
