"""Generation settings as options."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.api.answer import FRIENDLY_DEFAULTS
from unspool.cli.parser import Parser, UsageError
from unspool.cli.settings import (
    FRIENDLY,
    TENSORS_ONLY,
    add_settings,
    collect_settings,
    find_setting,
    read_value,
    refuse_tensors,
)
from unspool.config.parameters import PARAMETERS
from unspool.errors import SettingError, UnsupportedError

TYPED = [parameter for parameter in PARAMETERS.values() if parameter.kind != "object"]
SAMPLES: dict[str, tuple[str, Any]] = {
    "flag": ("true", True),
    "integer": ("3", 3),
    "number": ("0.25", 0.25),
    "texts": ("stop", ["stop"]),
    "ids": ("[1, 2]", [1, 2]),
    "id list": ("[1, 2]", [1, 2]),
    "id lists": ("[[1], [2, 3]]", [[1], [2, 3]]),
    "layers": ("low", "low"),
    "bias": ("[[[1, 2], -1.5]]", [[[1, 2], -1.5]]),
    "token bias": ('{"5": -1.5}', {"5": -1.5}),
    "decay": ("[5, 1.1]", [5, 1.1]),
    "forced ids": ("[[1, 2]]", [[1, 2]]),
    "schema": ('{"type": "null"}', {"type": "null"}),
    "long text": ("a+", "a+"),
    "choices": ("yes", ["yes"]),
    "tags": ('{"triggers": []}', {"triggers": []}),
}


def read(*words: str) -> dict[str, Any]:
    parser = Parser("test", "", "")
    add_settings(parser)
    return collect_settings(parser.read(words))


@pytest.mark.parametrize("parameter", TYPED, ids=lambda parameter: parameter.name)
def test_every_setting_is_an_option_in_both_spellings(parameter: Any) -> None:
    text, value = SAMPLES.get(parameter.kind, (str(parameter.choices[-1]) if parameter.choices else "", None))
    value = parameter.choices[-1] if parameter.kind == "choice" else value
    for option in ("--" + parameter.name, "--" + parameter.name.replace("_", "-")):
        assert read(option, text) == read(f"{option}={text}") == {parameter.name: value}
        assert read(option, "none")[parameter.name] is None


def test_nothing_typed_is_nothing_set() -> None:
    assert read() == {}


def test_objects_are_no_options() -> None:
    with pytest.raises(UsageError, match="unknown option --watermarking-config"):
        read("--watermarking-config", "{}")


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--do-sample"], True),
        (["--do-sample", "no"], False),
        (["--no-do-sample"], False),
        (["--no_do_sample"], False),
        (["--do_sample=on"], True),
        (["--do-sample", "--no-do-sample"], False),
    ],
)
def test_flags(words: list[str], value: bool) -> None:
    assert read(*words) == {"do_sample": value}


def test_stop_strings_add_up() -> None:
    assert read("--stop-strings", "a", "--stop_strings", '["\\n", "[b]"]') == {"stop_strings": ["a", "\n", "[b]"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-k", "many"], "argument --top-k: `top_k` can't be read from 'many'"),
        (["--top_k", "1.5"], "argument --top_k: `top_k` must be a whole number, but is 1.5"),
        (["--top-k", "-1"], "argument --top-k: `top_k` must be at least 0, but is -1"),
        (["--temperature", "NaN"], "argument --temperature: `temperature` must be a finite number, but is nan"),
        (["--temperature", "1e999"], "argument --temperature: `temperature` must be a finite number, but is inf"),
        (["--temperature", "warm"], "`temperature` can't be read from 'warm': it must be a number"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens: `max_new_tokens` must be greater than 0"),
        (["--max-new-tokens", "9" * 5000], "argument --max-new-tokens: `max_new_tokens` can't be read from '999"),
        (["--max-new-tokens", "true"], "`max_new_tokens` must be a whole number, but is True"),
        (["--do-sample=maybe"], "argument --do-sample: `do_sample`"),
        (["--cache-implementation", "paper"], "`cache_implementation` must be one of dynamic, static"),
        (["--bad-words-ids", "[" * 100_000], "argument --bad-words-ids: `bad_words_ids` can't be read"),
        (["--stop-strings", "x" * (2 << 20)], "has 2097152 characters"),
    ],
)
def test_bad_values_say_which_option(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(*words)
    assert said in str(caught.value) and len(str(caught.value)) < 450


@given(
    st.integers(0, 2**31 - 1), st.floats(allow_nan=False, allow_infinity=False), st.lists(st.integers(0, 9), min_size=1)
)
def test_values_are_read_as_they_are_written(count: int, number: float, ids: list[int]) -> None:
    assert read_value(PARAMETERS["top_k"], str(count)) == count
    assert read_value(PARAMETERS["temperature"], repr(number)) == number
    assert read_value(PARAMETERS["suppress_tokens"], json.dumps(ids)) == ids


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for name in ("temperature", "do_sample", "sequence_bias", "early_stopping", "dola_layers"):
        try:
            read_value(PARAMETERS[name], text)
        except SettingError as error:
            assert name in str(error)


def test_the_defaults_shown_are_the_ones_used() -> None:
    assert {name: value for name, value in FRIENDLY.items() if value is not None} == FRIENDLY_DEFAULTS
    parser = Parser("test", "", "")
    add_settings(parser)
    shown = " ".join(parser.format_help().split())
    assert "Most tokens to write, the prompt not counted. [256]" in shown and "[20]" in shown
    assert "--max-length N Longest sequence, prompt included. --max-new" in shown


def test_help_groups_by_the_table() -> None:
    parser = Parser("test", "", "")
    add_settings(parser)
    text = parser.format_help()
    for parameter in TYPED:
        dashed = parameter.name.replace("_", "-")
        option = f"  --[no-]{dashed}" if parameter.kind == "flag" else f"  --{dashed}"
        found = re.search(re.escape(option) + r"\s", text)
        assert (found is not None) == (parameter.name not in TENSORS_ONLY), parameter.name
        if found is not None:
            heading = [line for line in text[: found.start()].splitlines() if line and line[0] != " "][-1]
            assert heading.startswith(parameter.group)


@pytest.mark.parametrize("name", TENSORS_ONLY)
def test_what_returns_tensors_is_refused(name: str) -> None:
    refuse_tensors(read(f"--no-{name.replace('_', '-')}"))
    with pytest.raises(UnsupportedError, match=f"`{name}` returns tensors"):
        refuse_tensors(read(f"--{name}"))


def test_finding_a_setting_by_what_was_typed() -> None:
    assert find_setting("top-k") is find_setting("top_k") is find_setting("--top-k") is PARAMETERS["top_k"]
    with pytest.raises(SettingError, match=r"no setting 'temprature'; did you mean temperature\?"):
        find_setting("temprature")
    with pytest.raises(UnsupportedError, match="`constraints` is an object"):
        find_setting("constraints")


def test_settings_do_not_mix_with_other_options() -> None:
    assert collect_settings(argparse.Namespace(model="x", debug=False)) == {}
