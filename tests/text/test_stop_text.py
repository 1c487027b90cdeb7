"""Stop strings in streamed text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.errors import SettingError
from unspool.text import StopText


def cut_by_hand(text: str, stops: list[str], keep: bool) -> str:
    """The text up to the first stop string to be complete; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if keep else text[: end - max(map(len, found))]
    return text


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    keep=st.booleans(),
)
def test_equals_cutting_the_whole_text(pieces: list[str], stops: list[str], keep: bool) -> None:
    stream = StopText(stops, keep)
    out = "".join(stream.put(piece) for piece in pieces) + stream.end()
    text = "".join(pieces)
    assert out == cut_by_hand(text, stops, keep)
    assert stream.is_stopped == any(stop in text for stop in stops)


@given(text=st.text(alphabet="ab", max_size=20), stop=st.text(alphabet="ab", min_size=1, max_size=5))
def test_holds_back_no_more_than_it_must(text: str, stop: str) -> None:
    stream = StopText([stop])
    out = stream.put(text)
    if not stream.is_stopped:
        held = text[len(out) :]
        assert stop.startswith(held)
        assert held == max((stop[:n] for n in range(len(stop)) if text.endswith(stop[:n])), key=len)


def test_by_hand() -> None:
    stream = StopText(["</s>", "END"], keep=False)
    assert stream.put("Hello <") == "Hello "
    assert stream.put("/b") == "</b"
    assert stream.put("> EN") == "> "
    assert stream.put("DED") == ""
    assert (stream.is_stopped, stream.stop_string) == (True, "END")
    assert stream.put("more") == ""
    assert stream.end() == ""


def test_keeps_the_stop_string_and_drops_what_follows() -> None:
    stream = StopText("stop", keep=True)
    assert stream.put("a st") + stream.put("op b") == "a stop"


@pytest.mark.parametrize("stops", [[""], [3], ["a"] * 2000, ["a" * 20000]])
def test_refuses_what_cannot_be_looked_for(stops: list[str]) -> None:
    with pytest.raises(SettingError):
        StopText(stops)
