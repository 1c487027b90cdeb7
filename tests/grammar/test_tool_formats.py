"""Tool calls in the formats of the models' cards: read whole and in pieces, and kept to by grammars."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from tests.grammar.tiny import load_tiny, make_tokenizer
from unspool.grammar.call_forms import ToolForm, collect_calls, read_events
from unspool.grammar.call_text import Added, Begun, CallText, Ended, Event, Said
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.sources import read_source, spell
from unspool.grammar.tool_kinds import TOOL_FORMATS, find_entry
from unspool.grammar.tools import make_settings
from unspool.grammar.vocabulary import find_vocabulary
from unspool.outputs import ToolCall

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "detailed": {"type": "boolean"},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
PARIS = ToolCall("get_weather", {"city": "Paris", "days": 2})
NOW = ToolCall("now", {})
JSON = '{"city": "Paris", "days": 2}'

# In the words of the models' cards and templates: a format, its text, what is said in it, and its calls.
GOLDEN: list[tuple[str, str, str, list[ToolCall]]] = [
    (
        "harmony",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>",
        "",
        [PARIS],
    ),
    ("harmony", f"to=functions.get_weather<|channel|>commentary json<|message|>{JSON}<|call|>", "", [PARIS]),
    (
        "deepseek-v3",
        "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me look.",
        [PARIS, NOW],
    ),
    (
        "deepseek-v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [PARIS, NOW],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [PARIS, NOW],
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [PARIS, NOW],
    ),
    (
        "qwen-coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.\n",
        [PARIS, NOW],
    ),
    (
        "qwen-coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nSt. "X"\n <b>\n</parameter>\n'
        "<parameter=detailed>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [ToolCall("get_weather", {"city": 'St. "X"\n <b>', "detailed": True})],
    ),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        [PARIS, NOW],
    ),
    (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>2</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [ToolCall("get_weather", {"city": "2", "days": 2}), NOW],
    ),
    ("functionary", f"<function=get_weather>{JSON}</function><function=now>{{}}</function>", "", [PARIS, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}", "", [PARIS, NOW]),
    ("mistral", f"Hm.[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{JSON}", "Hm.", [PARIS]),
    (
        "mistral-list",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [PARIS, NOW],
    ),
    ("mistral-list", f'[TOOL_CALLS][{{"name":"get_weather","arguments":{JSON}, "id": "abcDEF123"}}]', "", [PARIS]),
    (
        "command",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{JSON}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
        "",
        [PARIS, NOW],
    ),
    (
        "gemma",
        'Yes.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "Yes.",
        [PARIS, NOW],
    ),
    (
        "gemma",
        '<|tool_call>call:f{a:[<|"|>x, }<|"|>,2],b:{c:<|"|>"q"<|"|>,d:true}}<tool_call|>',
        "",
        [ToolCall("f", {"a": ["x, }", 2], "b": {"c": '"q"', "d": True}})],
    ),
    ("lfm", '<|tool_call_start|>[get_weather(city="Paris", days=2), now()]<|tool_call_end|>', "", [PARIS, NOW]),
    ("llama-4", "[get_weather(city='Paris', days=2), now()]", "", [PARIS, NOW]),
    (
        "llama-4",
        '<|python_start|>[now(a=[1, "x)"], b={"k": None}, c=True)]<|python_end|>',
        "",
        [ToolCall("now", {"a": [1, "x)"], "b": {"k": None}, "c": True})],
    ),
]
# What is no call is said.
PLAIN: list[tuple[str, str]] = [
    ("glm", "A <tool_call> is a mark, and so is <arg_key>."),
    ("qwen-coder", "x <tool_call>\n<function= y"),
    ("functionary", "if a <function then"),
    ("llama-4", "[see (1)] and f(x)"),
    ("llama-4", "[see(1), now(2)]"),
    ("llama-4", "[f(a=1)] is Python"),
    ("lfm", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
    ("mistral", "[TOOL_CALLS] are made by [ARGS]"),
    ("kimi", "<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}"),
    ("command", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("gemma", "<|tool_call>call: me {x}"),
]


def read_pieces(form: ToolForm, pieces: list[str]) -> list[Event]:
    reader = CallText(lambda source: form.read(source, SCHEMAS))
    return [event for piece in pieces for event in reader.put(piece)] + reader.end()


def join(events: list[Event]) -> list[Event]:
    """Events whose texts are not cut."""
    made: list[Any] = []
    for event in events:
        if made and isinstance(event, Said | Added) and type(made[-1]) is type(event):
            made[-1] = type(event)(made[-1].text + event.text)
        elif not isinstance(event, Said | Added) or event.text:
            made.append(event)
    return made


def say(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Said))


@pytest.mark.parametrize(("name", "text", "said", "calls"), GOLDEN)
def test_golden_texts(name: str, text: str, said: str, calls: list[ToolCall]) -> None:
    form = TOOL_FORMATS[name].form
    whole = read_events(form, text, SCHEMAS)
    assert (collect_calls(whole), say(whole)) == (calls, said)
    assert join(read_pieces(form, list(text))) == join(whole)
    for place in range(len(text)):
        assert join(read_pieces(form, [text[:place], text[place:]])) == join(whole), place
    assert all(isinstance(event, Begun | Added | Ended) or event.text for event in whole)


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_is_said(name: str, text: str) -> None:
    form = TOOL_FORMATS[name].form
    assert say(read_pieces(form, list(text))) == say(read_events(form, text, SCHEMAS)) == text


def test_texts_that_are_cut_and_spoiled_are_the_same_in_pieces() -> None:
    draw = random.Random(5)
    for name, text, _, _ in GOLDEN:
        form = TOOL_FORMATS[name].form
        for _ in range(25):
            first = draw.randrange(len(text))
            spoiled = text[:first] + draw.choice(["", "<", '"', "}", " ", "\\", text[: draw.randrange(20)]])
            spoiled += text[first + draw.randrange(4) : draw.randrange(first, len(text)) + 1]
            whole = join(read_events(form, spoiled, SCHEMAS))
            assert join(read_pieces(form, list(spoiled))) == whole, (name, spoiled)
            places = sorted(draw.sample(range(len(spoiled) + 1), k=min(len(spoiled), 3)))
            cut = [spoiled[a:b] for a, b in zip([0, *places], [*places, len(spoiled)], strict=True)]
            assert join(read_pieces(form, cut)) == whole, (name, cut)
            begun, ended = (sum(isinstance(event, kind) for event in whole) for kind in (Begun, Ended))
            assert begun == ended


def test_arguments_appear_as_they_are_written() -> None:
    for name, text, _, _ in GOLDEN[:9]:
        reader = CallText(lambda source, name=name: TOOL_FORMATS[name].form.read(source, SCHEMAS))  # type: ignore[misc]
        at = text.index("Paris") if "Paris" in text else text.index("St.")
        early = [event for letter in text[: at + 3] for event in reader.put(letter)]
        assert any(isinstance(event, Begun) and event.name == "get_weather" for event in early)
        assert "".join(event.text for event in early if isinstance(event, Added)).startswith('{"city": "'), name


def test_formats_are_found_in_templates() -> None:
    for entry in TOOL_FORMATS.values():
        found = find_entry(f"{{{{ tools }}}} {' '.join(entry.found_by)}")
        assert found is entry, entry.name
        assert find_entry(" ".join(entry.found_by)) is None


def write(matcher: Any, tokenizer: Any, text: str) -> bool:
    """Whether a grammar takes a text as a whole."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


SPELLED = [case for case in GOLDEN if case[1].isascii() and case[0] != "harmony" and case[3] in ([PARIS, NOW], [PARIS])]


@pytest.mark.parametrize(("name", "text", "said", "calls"), SPELLED)
def test_grammars_keep_calls_to_their_schemas(name: str, text: str, said: str, calls: list[ToolCall]) -> None:
    """A grammar takes the models' own words for a call, and no other arguments."""
    tokenizer, form = make_tokenizer(), TOOL_FORMATS[name].form
    vocabulary = find_vocabulary(tokenizer, 160, (2,))

    def compile_for(choice: str) -> Any:
        settings = make_settings(TOOLS, choice, tokenizer, (), form=form)
        if not settings:
            return None
        ((setting, value),) = settings.items()
        source = read_source(setting, value, ())
        assert source is not None
        return compile_grammar(source, vocabulary)

    auto, required = compile_for("auto"), compile_for("required")
    assert (auto is None) == (name == "llama-4")
    is_canonical = name not in ("glm", "llama-4", "mistral") or "\n" in text
    if auto is not None and is_canonical and "CALL_ID" not in text and '"id"' not in text:
        assert write(auto.start(), tokenizer, text), (name, text)
        spoiled = text.replace("2", "99")
        assert not write(auto.start(), tokenizer, spoiled)
    if len(calls) == 1 and is_canonical and not said and '"id"' not in text:
        assert write(required.start(), tokenizer, text)
    assert not write(required.start(), tokenizer, "hello")


ASCII = [entry.name for entry in TOOL_FORMATS.values() if "deepseek" not in entry.name]
STRICT = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yz"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}


@pytest.mark.parametrize("name", ASCII)
def test_a_call_that_must_come_is_made(name: str) -> None:
    """Behind thoughts where the template has them, by a model that knows nothing of the format."""
    lm = copy.copy(load_tiny("llama"))
    lm.tokenizer = copy.copy(lm.tokenizer)
    marks = "{# " + " ".join(TOOL_FORMATS[name].found_by) + " #}"
    lm.tokenizer.chat_template = (
        f"{marks}{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}{{{{ tools }}}}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**STRICT, "additionalProperties": False}}}]
    for settings in ({"do_sample": True, "seed": 1}, {"num_beams": 2}):
        answer = lm.generate(
            [{"role": "user", "content": "a"}],
            tools=tools,
            tool_choice="required",
            max_new_tokens=250,
            eos_token_id=2,
            **({"max_thinking_tokens": 4} if name == "harmony" else {}),
            **settings,
        )
        assert answer.finish_reasons == ["eos"], answer.texts
        (call,) = answer.tool_calls
        assert call.name == "f" and call.arguments["a"] in ("x", "yz") and isinstance(call.arguments["b"], bool)


def test_special_tokens_are_named_or_numbered() -> None:
    specials = {"<a>": 7, "[TOOL_CALLS]": 8}
    assert spell("<a>b[TOOL_CALLS][ARGS]", specials) == '<a> "b" <[8]> "[ARGS]"'
