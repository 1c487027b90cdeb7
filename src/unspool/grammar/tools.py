"""Tool calls in the format of a model's own chat template: found by rendering one, forced by a grammar, read back."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from unspool.errors import InputError, SettingError, UnspoolError, UnsupportedError, excerpt
from unspool.grammar.call_forms import CallFormat, ToolForm
from unspool.grammar.sources import OWN_HEADER, spell
from unspool.grammar.tool_kinds import find_entry
from unspool.thoughts.kinds import find_kind

MOST_TOOLS: Final = 128
_NAME: Final = "toolnamemark"
_KEY: Final = "toolkeymark"
_VALUE: Final = "toolvaluemark"
_ID: Final = "callmark1"  # nine letters and digits, as some templates demand
_ARGUMENTS: Final = re.compile(r'\{\s*"' + _KEY + r'"\s*:\s*"' + _VALUE + r'"\s*\}')
CHOICES: Final = ("none", "auto", "required")


def find_format(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> ToolForm:
    """The format of the tokenizer's chat template; raises if it has none."""
    entry = find_entry(tokenizer.chat_template)
    return _probe_format(tokenizer, tools) if entry is None else entry.form


def _probe_format(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> CallFormat:
    """The format of calls with JSON in them, found by rendering one."""
    question = [{"role": "user", "content": "?"}]
    call = {
        "id": _ID,
        "type": "function",
        "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
    }
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False, tools=tools)
        whole = tokenizer.apply_chat_template([*question, answer], tokenize=False, tools=tools)
    except UnspoolError as error:
        raise UnsupportedError(f"this model's chat template can't write a tool call: {error}") from error
    start = _count_common(before, whole)
    written = whole[start:]
    arguments = _ARGUMENTS.search(written)
    name = written.find(_NAME)
    if arguments is None or not 0 <= name < arguments.start():
        raise UnsupportedError(
            "this model's chat template has no tool calls whose name comes before their arguments as JSON, so none can "
            "be asked for; use json_schema, or tool_choice='none'"
        )
    begin, middle = written[:name], written[name + len(_NAME) : arguments.start()]
    return CallFormat(begin.lstrip(), middle, _cut_end(written[arguments.end() :], tokenizer))


def try_format(tokenizer: Any, tools: Any) -> ToolForm | None:
    """The format, or None if the template has none: nobody asked for calls."""
    try:
        return find_format(tokenizer, tools)
    except UnspoolError:
        return None


def _count_common(before: str, whole: str) -> int:
    """Characters of the answer's beginning: the generation prompt may differ from it in white space at its end."""
    stop = before.rstrip()
    return len(before) if whole.startswith(before) else len(stop) if whole.startswith(stop) else _refuse_prompt()


def _refuse_prompt() -> int:
    raise UnsupportedError(
        "this model's chat template writes an answer with tool calls otherwise than it begins one, so their format "
        "can't be found; use json_schema, or tool_choice='none'"
    )


def _cut_end(text: str, tokenizer: Any) -> str:
    """What follows the arguments, up to the end of the turn."""
    ends = [text.find(token) for token in _list_ends(tokenizer) if token in text]
    text = text[: min(ends)] if ends else text
    if _ID in text:  # an id of the call's own: the model writes one
        text = text[: text.index(_ID)].rsplit(",", 1)[0] + text[text.index(_ID) + len(_ID) :].lstrip('"')
    return text.rstrip()


def _list_ends(tokenizer: Any) -> list[str]:
    named = [getattr(tokenizer, "eos_token", None), "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "</s>"]
    return [str(token) for token in named if token]


def check_tools(tools: Any) -> list[tuple[str, Any]]:
    """The names of the tools, and the schemas of their arguments."""
    if not isinstance(tools, (list, tuple)) or not 1 <= len(tools) <= MOST_TOOLS:
        raise InputError(f"tools must be a list of 1 to {MOST_TOOLS} tools, not {excerpt(tools)}")
    found: list[tuple[str, Any]] = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not re.fullmatch(r"[\w.:-]{1,128}", name):
            raise InputError(
                'a tool is {"type": "function", "function": {"name": …, "description": …, "parameters": a schema}} '
                f"with a name of letters, digits and _.:-; got {excerpt(tool)}"
            )
        assert isinstance(function, Mapping)
        found.append((name, function.get("parameters") or {"type": "object"}))
    return found


def find_schemas(tools: Any) -> dict[str, Any]:
    """The schemas of tools' arguments by their names, as far as they have any: nobody asked that calls keep to them."""
    try:
        return dict(check_tools(tools))
    except UnspoolError:
        return {}


def read_choice(tool_choice: Any, names: Container[str]) -> str:
    """ "none", "auto", "required", or the name of the tool that must be called."""
    if isinstance(tool_choice, str) and tool_choice in CHOICES:
        return tool_choice
    named = tool_choice
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function", tool_choice)
        named = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(named, str) and named in names:
        return f"tool:{named}"
    raise SettingError(
        f"`tool_choice`={excerpt(tool_choice)} is none of 'none', 'auto', 'required' or the name of one of the tools"
    )


def make_settings(
    tools: Any,
    tool_choice: Any,
    tokenizer: Any,
    specials: Container[str],
    *,
    stops_after_first: bool = False,
    form: ToolForm | None = None,
    allowed: Container[str] | None = None,
    otherwise: str = "",
) -> dict[str, Any]:
    """The setting that keeps tool calls to their format (`form`, or the template's) and arguments to their schemas.

    A call that must come is the only one; those that may come can be several, unless the text ends behind the first.
    Only `allowed` tools are called. `otherwise` is a part of a grammar: the text of an answer without calls.
    """
    known = check_tools(tools)
    choice = read_choice(tool_choice, [name for name, _ in known])
    if choice == "none":
        return {}
    form = find_format(tokenizer, tools) if form is None else form
    known = [(name, schema) for name, schema in known if allowed is None or name in allowed]
    kind = find_kind(tokenizer)
    has_header = kind is not None and bool(kind.header.strip())
    if choice == "auto" and not otherwise:
        if has_header or not form.trigger:
            return {}  # calls stand where no grammar of free text can tell them from it: they are read alone
        return _tag_calls(form, known, specials, stops_after_first=stops_after_first)
    wanted = [(name, schema) for name, schema in known if choice in ("auto", "required", f"tool:{name}")]
    calls, rules = _write_calls(form, wanted, specials, is_lone=choice != "auto" or stops_after_first)
    lead = f"({spell(form.lead, specials)})? " if form.lead else ""
    start = f"{lead}{calls}"
    if choice == "auto":
        said = otherwise
        if kind is not None and has_header:
            said = f"({spell(kind.header, specials)} | {spell(kind.direct, specials)}) {otherwise}"
        start, rules = "calls | answer", [*rules, f"calls: {lead}{calls}", f"answer: {said}"]
    head = ["%llguidance {}", *([OWN_HEADER] if has_header else [])]
    return {"grammar": "\n".join([*head, f"start: {start}", *rules])}


def _write_calls(
    form: ToolForm, known: Sequence[tuple[str, Any]], specials: Container[str], *, is_lone: bool, cut: str = ""
) -> tuple[str, list[str]]:
    """One call of some tools, or several, as an expression of a Lark grammar, and its rules."""
    rules: list[str] = []
    for place, (name, schema) in enumerate(known):
        for first in (False, True) if cut and not form.section[0] else (False,):
            call, more = form.write_call(place, name, schema, specials, cut if first else "")
            rules.append(f"{'first' if first else 'call'}_{place}: {call}")
            rules += [] if first else more
    names = [" | ".join(f"{kind}_{place}" for place in range(len(known))) for kind in ("first", "call")]
    one = f"({names[1]})"
    first_one = f"({names[0]})" if cut and not form.section[0] else one
    between = spell(form.between, specials)
    opening = spell(form.section[0].removeprefix(cut), specials) if form.section[0] else ""
    rest = "" if is_lone else f"({between} {one})*"
    end = form.section[1]
    space = end[: len(end) - len(end.lstrip())]  # a literal of its own: one that stands between calls may begin alike
    return f"{opening} {first_one} {rest} {spell(space, ())} {spell(end.lstrip(), specials)}", rules


def _tag_calls(
    form: ToolForm, known: Sequence[tuple[str, Any]], specials: Container[str], *, stops_after_first: bool
) -> dict[str, Any]:
    """The setting that leaves a text free until it begins a call."""
    if isinstance(form, CallFormat) and not form.section[0] and "{index}" not in form.begin + form.middle:
        structures = [
            {"begin": f"{form.begin}{name}{form.middle}", "schema": schema, "end": form.end} for name, schema in known
        ]
        tag = {"triggers": [form.begin], "structures": structures, "stop_after_first": stops_after_first}
        return {"structural_tag": tag}
    trigger = form.trigger
    calls, rules = _write_calls(form, known, specials, is_lone=stops_after_first, cut=trigger)
    if trigger in specials:
        tag_rules = [f"tag: TEXT {spell(trigger, specials)} {calls}"]
    else:
        tag_rules = [f"open[lazy]: TEXT {spell(trigger, ())}", f"tag: open {calls}"]
    whole = "TEXT | tag" if stops_after_first else "tag* TEXT"
    return {"grammar": "\n".join(["%llguidance {}", f"start: {whole}", r"TEXT: /(.|\n)*/", *tag_rules, *rules])}
