"""What clients read of the library's errors: the fields that they sent, and nothing that they can't send."""

from __future__ import annotations

import pytest

from unspool.errors import ContextError, InputError, SettingError, UnspoolError, UnsupportedError
from unspool.server.refusals import ClientNames, read_error
from unspool.wording import Wording, about, word

SENT = {"max_new_tokens": "max_tokens", "temperature": "temperature", "mirostat_tau": "mirostat", "seed": "seed"}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (word("raise {max_new_tokens}"), "raise `max_tokens`"),
        (word("at most {max_new_tokens:=5} fit"), "at most `max_tokens=5` fit"),
        (word("{mirostat_tau:is 5.0} is odd"), "`mirostat` is odd"),
        (word("{num_beams:is 3} is odd"), "`num_beams`=3 is odd"),
        (word("set {do_sample:=True}"), "set a `temperature` above 0"),
        (word("set {do_sample:=False}"), "set `temperature=0`"),
        (word("{do_sample:is True} is odd"), "a `temperature` above 0 is odd"),
        (word("leave {do_sample} out"), "leave `temperature` out"),
    ],
)
def test_settings_have_the_client_s_names(message: Wording, said: str) -> None:
    assert message.say(ClientNames(SENT)) == said
    assert read_error(SettingError(message), SENT).args == (said,)


def test_a_client_that_sends_do_sample_reads_of_it() -> None:
    assert word("set {do_sample:=True}").say(ClientNames({"do_sample": "do_sample"})) == "set `do_sample=True`"


@pytest.mark.parametrize(
    ("error", "param", "code"),
    [
        (SettingError(word("{num_beams} beside {max_new_tokens}")), "max_tokens", None),
        (SettingError(word("{num_beams} beside {top_k}")), "num_beams", None),
        (UnsupportedError(word("{do_sample:is True} is odd")), "temperature", None),
        (InputError("`input_ids` are odd"), "input_ids", None),
        (InputError("odd"), None, None),
        (ContextError(about("max_new_tokens", "is too many")), "max_tokens", "context_length_exceeded"),
    ],
)
def test_the_field_and_the_code(error: UnspoolError, param: str | None, code: str | None) -> None:
    found = read_error(error, SENT)
    assert (found.status, found.param, found.code) == (400, param, code)
