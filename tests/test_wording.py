"""Messages keep the settings that they name apart, so that each reader has them in its own words."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.errors import MAX_MESSAGE, SettingError
from unspool.wording import Names, Setting, Wording, about, suggest, word


class Shouted(Names):
    def word(self, setting: Setting) -> str:
        return setting.name.upper() if setting.value is None else f"{setting.name.upper()} {setting.value}"


@pytest.mark.parametrize(
    ("message", "library", "shouted"),
    [
        (word("set {top_k}"), "set `top_k`", "set TOP_K"),
        (word("set {top_k:=5}"), "set `top_k=5`", "set TOP_K 5"),
        (word("{top_k:is {value!r}} is odd", value="x"), "`top_k`='x' is odd", "TOP_K 'x' is odd"),
        (word("{one} of {names[0]}", one=Setting("seed"), names=["a"]), "`seed` of a", "SEED of a"),
        (word("no: {why}", why=word("{seed} is set")), "no: `seed` is set", "no: SEED is set"),
        (word("{{top_k}} {left:>3}", left=1), "{top_k}   1", "{top_k}   1"),
        (about("seed", "is odd"), "`seed` is odd", "SEED is odd"),
        (about("seed", ": it is odd"), "`seed`: it is odd", "SEED: it is odd"),
        (about(Setting("seed", "3"), "is odd"), "`seed`=3 is odd", "SEED 3 is odd"),
    ],
)
def test_both_voices(message: Wording, library: str, shouted: str) -> None:
    assert str(message) == library and message.say(Shouted()) == shouted


def test_a_message_says_which_settings_it_names() -> None:
    message = word("{a:is 1} and {why}", why=word("{b:=2}"))
    assert message.settings == (Setting("a", "1"), Setting("b", "2", is_advice=True))


@given(st.text())
def test_values_are_not_read_as_templates(value: str) -> None:
    assert str(word("{setting:is {value}}: {value}", value=value)) == f"`setting`={value}: {value}"


def test_an_error_keeps_its_wording() -> None:
    error = SettingError(word("{seed} is odd"))
    again = copy.copy(error)
    assert str(error) == str(again) == "`seed` is odd" and again.wording == error.wording
    assert SettingError("odd").wording is None
    assert len(str(SettingError(about("seed", "x" * 9999)))) <= MAX_MESSAGE


KNOWN = ("stop_strings", "stopping_criteria", "top_p", "temperature", "num_beams", "num_beam_groups", "language")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("langauge", "language"),
        ("num_beam", "num_beams"),
        ("stop", "stop_strings"),
        ("temp", "temperature"),
        ("stopping", "stopping_criteria"),
        ("tpo_p", "top_p"),
        ("to", ""),
        ("picture", ""),
        ("", ""),
    ],
)
def test_what_a_name_was_meant_to_be(name: str, meant: str) -> None:
    assert suggest(name, KNOWN) == (f"; did you mean {meant!r}?" if meant else "")
    assert suggest(name, KNOWN, str) == (f"; did you mean {meant}?" if meant else "")


@given(st.text(max_size=90), st.lists(st.text(max_size=20), max_size=8))
def test_a_suggestion_is_a_known_name(name: str, known: list[str]) -> None:
    found = suggest(name, known)
    assert not found or any(found == f"; did you mean {one!r}?" for one in known)
