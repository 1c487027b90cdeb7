"""Errors: what they quote is short, and safe to print."""

from __future__ import annotations

import inspect

import pytest

from unspool import errors
from unspool.errors import LoadError, MissingExtraError, UnspoolError, excerpt, spell_controls

HOSTILE = "\x1b]0;owned\x07\x9b2J\x00\u202e\ud800 end\n\tkept"


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, UnspoolError) and kind is not MissingExtraError
    ],
)
def test_messages_have_no_control_characters(kind: type[UnspoolError]) -> None:
    message = str(kind(f"a template says {HOSTILE}"))
    assert message == "a template says \\x1b]0;owned\\x07\\x9b2J\\x00\\u202e\\ud800 end\n\tkept"
    message.encode("utf-8")


def test_a_long_message_loses_its_middle() -> None:
    message = str(LoadError("the beginning " + "x" * 70_000 + " what to use instead"))
    assert len(message) < 2100
    assert message.startswith("the beginning")
    assert message.endswith("what to use instead")
    assert str(LoadError("x" * 2000)) == "x" * 2000


def test_an_error_that_is_of_the_operating_system_too_keeps_its_message() -> None:
    error = LoadError("short")
    assert (str(error), error.args, error.errno) == ("short", ("short",), None)


def test_excerpt() -> None:
    assert excerpt("token") == "'token'"
    assert excerpt("a\n\x1b\u202e") == "'a\\n\\x1b\\u202e'"
    assert excerpt("x" * 100, 10) == "'xxxxxxxxxx'… (100 characters)"
    assert excerpt([1, 2]) == "[1, 2]"
    assert excerpt(10**5000) == "a number of 16610 bits"
    assert excerpt(None) == "None"


def test_controls_are_spelled_out() -> None:
    assert spell_controls("日本 é\n\t") == "日本 é\n\t"
    assert spell_controls("\x7f") == "\\x7f"
