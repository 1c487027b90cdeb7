"""The formats of tool calls that chat templates name by their marks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from unspool.errors import PluginError
from unspool.grammar.call_forms import CallFormat, GemmaFormat, ParameterFormat, PythonFormat, ToolForm
from unspool.registry import Table


@dataclass(frozen=True, kw_only=True)
class ToolFormatEntry:
    """A format of tool calls, found in chat templates by its marks."""

    table: ClassVar[str] = "unspool.grammar.tool_kinds:TOOL_FORMATS"

    name: str
    found_by: tuple[str, ...]  # texts all of which a template of this format has
    form: ToolForm

    def is_in(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        return all(text in template for text in self.found_by)


def _check_entry(entry: ToolFormatEntry) -> None:
    if not entry.found_by or not all(isinstance(text, str) and text for text in entry.found_by):
        raise PluginError(f"the tool format {entry.name!r} needs texts by which templates of it are found")


_BUILT_IN: tuple[ToolFormatEntry, ...] = (
    ToolFormatEntry(
        name="harmony",
        found_by=("<|channel|>", "functions."),
        form=CallFormat(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "<|call|>",
            begins=("to=functions.", "<|start|>assistant to=functions."),
            middles=(
                " json<|message|>",
                "<|message|>",
                "<|channel|>commentary json<|message|>",
                "<|channel|>commentary <|constrain|>json<|message|>",
            ),
            lead="<|start|>assistant",
        ),
    ),
    ToolFormatEntry(
        name="deepseek-v3",
        found_by=("<｜tool▁sep｜>", "```json"),
        form=CallFormat(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            between="\n",
        ),
    ),
    ToolFormatEntry(
        name="deepseek-v3.1",
        found_by=("<｜tool▁sep｜>",),
        form=CallFormat(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    ToolFormatEntry(
        name="kimi",
        found_by=("<|tool_call_argument_begin|>",),
        form=CallFormat(
            "<|tool_call_begin|>functions.",
            ":{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            names_ids=True,
        ),
    ),
    ToolFormatEntry(
        name="minimax",
        found_by=("<minimax:tool_call>", "<invoke name="),
        form=ParameterFormat(
            '<invoke name="',
            '">\n',
            '<parameter name="',
            '">',
            "</parameter>\n",
            "</invoke>",
            section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
            between="\n",
        ),
    ),
    ToolFormatEntry(
        name="qwen-coder",
        found_by=("<function=", "<parameter="),
        form=ParameterFormat(
            "<tool_call>\n<function=",
            ">\n",
            "<parameter=",
            ">\n",
            "\n</parameter>\n",
            "</function>\n</tool_call>",
            between="\n",
            begins=("<function=",),
        ),
    ),
    ToolFormatEntry(
        name="glm",
        found_by=("<arg_key>", "<arg_value>"),
        form=ParameterFormat(
            "<tool_call>",
            "\n",
            "<arg_key>",
            "</arg_key>\n<arg_value>",
            "</arg_value>\n",
            "</tool_call>",
            between="\n",
        ),
    ),
    ToolFormatEntry(
        name="functionary",
        found_by=("<function=", "</function>"),
        form=CallFormat("<function=", ">", "</function>"),
    ),
    ToolFormatEntry(
        name="mistral",
        found_by=("[TOOL_CALLS]", "[ARGS]"),
        form=CallFormat("[TOOL_CALLS]", "[ARGS]", "", middles=("[CALL_ID]{id}[ARGS]",), id_length=9),
    ),
    ToolFormatEntry(
        name="mistral-list",
        found_by=("[TOOL_CALLS]",),
        form=CallFormat(
            '{"name": "',
            '", "arguments": ',
            "}",
            section=("[TOOL_CALLS] [", "]"),
            between=", ",
            ends=(', "id": "{id}"}',),
            id_length=9,
        ),
    ),
    ToolFormatEntry(
        name="command",
        found_by=("<|START_ACTION|>",),
        form=CallFormat(
            '{"tool_call_id": "{index}", "tool_name": "',
            '", "parameters": ',
            "}",
            section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
            between=",\n    ",
        ),
    ),
    ToolFormatEntry(name="gemma", found_by=("<|tool_call>",), form=GemmaFormat()),
    ToolFormatEntry(
        name="lfm",
        found_by=("<|tool_call_start|>",),
        form=PythonFormat(
            before=("<|tool_call_start|>",),
            after=("<|tool_call_end|>",),
            section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        ),
    ),
    ToolFormatEntry(
        name="llama-4",
        found_by=("<|python_start|>",),
        form=PythonFormat(before=("<|python_start|>",), after=("<|python_end|>",), is_bare=True),
    ),
)

TOOL_FORMATS: Final = Table[ToolFormatEntry]("tool format", _BUILT_IN, lambda entry: entry.name, _check_entry)
"""Every format that templates name by marks, in the order in which they are searched: plug-ins' first."""


def find_entry(template: Any) -> ToolFormatEntry | None:
    """The format whose marks a chat template has, if it takes tools at all."""
    text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    if "tools" not in text:
        return None
    entries, own = list(TOOL_FORMATS.values()), len(TOOL_FORMATS.built_in)
    return next((entry for entry in (*entries[own:], *entries[:own]) if entry.is_in(text)), None)
