"""`unspool chat`, over a pipe and piece by piece."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unspool
from unspool.cli.chat_commands import COMMANDS, execute_line
from unspool.cli.conversation import Conversation, Exchange, SavedChat, describe_chat, read_chat
from unspool.cli.interrupt import Interrupt
from unspool.cli.session import Session
from unspool.errors import InputError, SettingError, UnspoolError

FEW = ("--max-new-tokens", "4")


def say(*messages: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]


@pytest.fixture
def session(lm: unspool.LanguageModel) -> Session:
    return Session(lm, None, {"max_new_tokens": 4}, is_interactive=True)


# --- over a pipe ------------------------------------------------------------------------------------
def test_lines_are_turns_and_the_history_grows(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    first = lm.generate(say("Hi"), max_new_tokens=4).text
    second = lm.generate(say("Hi", first, "And?"), max_new_tokens=4).text
    ended = cli("chat", "-m", tiny, *FEW, stdin=b"Hi\n\n  \nAnd?")
    lines = "".join(text.removesuffix("\n") + "\n" for text in (first, second))
    assert (ended.code, ended.out, ended.err) == (0, lines, "")


def test_a_system_message_and_stats(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    messages = [{"role": "system", "content": "S"}, *say("Hi")]
    ended = cli("chat", "-m", tiny, *FEW, "--system", "S", "--stats", stdin=b"Hi\n")
    assert ended.out == lm.generate(messages, max_new_tokens=4).text.removesuffix("\n") + "\n"
    assert "prompt + 4 new tokens" in ended.err


def test_what_fails_is_said_and_the_rest_goes_on(cli: Callable[..., Any], tiny: str) -> None:
    ended = cli("chat", "-m", tiny, *FEW, stdin=b"/sett top_k 3\nHi\n/undo\n/undo\n/quit\nnever read")
    assert ended.code == 2 and ended.out.count("\n") >= 1
    assert ended.err.splitlines() == [
        "unspool: error: there is no command /sett; did you mean /set? /help lists them; "
        "//… sends a line that begins with a slash",
        "forgotten: Hi",
        "unspool: error: there is nothing to undo",
    ]


def test_settings_are_checked_before_the_first_turn(cli: Callable[..., Any], tiny: str) -> None:
    for words, said in (
        (("--temperature", "0.3", "--no-do-sample"), "only read when sampling"),
        (("--logprobs", "2"), "`logprobs` has no place in a chat"),
        (("--num-return-sequences", "2"), "goes on from one answer"),
        (("--output-scores",), "returns tensors"),
    ):
        ended = cli("chat", "-m", tiny, *words, stdin=b"Hi\n")
        assert ended.code == 2 and ended.out == "" and said in ended.err


def test_a_model_without_a_template(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for file in Path(tiny).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink()
    ended = cli("chat", "-m", str(folder), stdin=b"Hi\n")
    assert ended.code == 2 and ended.out == "" and "template" in ended.err


def test_a_line_that_begins_with_a_slash(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    cli("chat", "-m", tiny, *FEW, stdin=f"//etc/passwd\n/save {file}".encode())
    assert read_chat(file).conversation.exchanges[0].message == "/etc/passwd"


def test_a_conversation_that_no_longer_fits(cli: Callable[..., Any], tiny: str) -> None:
    lines = ["word " * 12] * 5
    ended = cli("chat", "-m", tiny, *FEW, stdin="\n".join([*lines, "/undo", "Hi"]).encode())
    errors = [line for line in ended.err.splitlines() if "error" in line]
    assert ended.code == 2 and errors
    assert all("no longer fits" in line and "/undo" in line and "/clear" in line for line in errors)
    assert "forgotten: word" in ended.err and not ended.err.rstrip().endswith("not sent")


def test_input_that_is_no_text(cli: Callable[..., Any], tiny: str) -> None:
    ended = cli("chat", "-m", tiny, *FEW, stdin=b"\xff\xfe\n")
    assert ended.code == 2 and "standard input is not UTF-8 text" in ended.err
    ended = cli("chat", "-m", tiny, *FEW, stdin=b"x" * (2 << 20))
    assert ended.code == 2 and "more than 1048576 bytes" in ended.err


# --- commands ---------------------------------------------------------------------------------------
def test_help_names_every_command(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    execute_line(session, "/help")
    out, err = capsys.readouterr()
    assert out == "" and all(f"  {name} " in err for name in COMMANDS)


def test_settings_are_set_listed_and_unset(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    execute_line(session, "/set do_sample")
    execute_line(session, "/set temperature 0.3")
    execute_line(session, "/set top-k=7")
    execute_line(session, "/set top_p = 0.5")
    execute_line(session, '/set stop_strings ["a b", "c"]')
    assert session.settings == {
        "max_new_tokens": 4,
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 7,
        "top_p": 0.5,
        "stop_strings": ["a b", "c"],
    }
    capsys.readouterr()
    execute_line(session, "/set")
    listed = capsys.readouterr().err
    assert "  temperature = 0.3\n" in listed and '  stop_strings = ["a b", "c"]\n' in listed
    assert "  eos_token_id = 2  (the model's)\n" in listed
    execute_line(session, "/unset temperature")
    assert "temperature" not in session.settings


def test_what_sampling_reads_turns_it_on(session: Session) -> None:
    execute_line(session, "/set temperature 0.3")
    assert session.settings["temperature"] == 0.3 and session.settings["do_sample"] is True
    execute_line(session, "/unset temperature")
    execute_line(session, "/set do_sample false")
    with pytest.raises(UnspoolError, match="Here that is: /set do_sample true"):
        execute_line(session, "/set temperature 0.3")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 0.3", "did you mean temperature?"),
        ("/set top_k many", "`top_k` can't be read from 'many'"),
        ("/set top_k", "/set top_k needs a value"),
        ("/set penalty_alpha 1.5", "`penalty_alpha` must be at most 1"),
        ("/set max_new_tokens 500", "at most `max_new_tokens="),
        ("/set logprobs 1", "no place in a chat"),
        ("/set watermarking_config x", "is an object"),
        ("/unset top_k", "`top_k` is not set"),
        ("/unset nothing", "no setting 'nothing'"),
        ("/undo now", "/undo takes nothing after it"),
        ("/save", "/save needs the name of a file"),
        ("/load", "/load needs the name of a file"),
        ("/load /nowhere/chat", "there is no file '/nowhere/chat'"),
        ("/load /dev/zero", "there is no file '/dev/zero'"),
        ("/save /nowhere/chat", "can't be written: No such file"),
        ("/save " + "x" * 5000, "can't be written: File name too long"),
        ("/stats", "there is no answer yet"),
    ],
)
def test_what_can_not_be_changes_nothing(session: Session, line: str, said: str) -> None:
    with pytest.raises(UnspoolError) as caught:
        execute_line(session, line)
    assert said in str(caught.value)
    assert session.settings == {"max_new_tokens": 4} and session.conversation == Conversation()


def test_undo_clear_and_system(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("One", "Two"):
        session.answer(text)
    execute_line(session, "/undo")
    assert [exchange.message for exchange in session.conversation.exchanges] == ["One"]
    execute_line(session, "/system Be kind.")
    assert session.conversation.messages("Next")[0] == {"role": "system", "content": "Be kind."}
    execute_line(session, "/clear")
    assert session.conversation == Conversation("Be kind.")
    capsys.readouterr()
    execute_line(session, "/system")
    assert "Be kind." in capsys.readouterr().err
    execute_line(session, "/system none")
    assert session.conversation == Conversation()


def test_stats_tell_the_room_left(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.answer("One")
    capsys.readouterr()
    execute_line(session, "/stats")
    told = capsys.readouterr().err
    assert "4 new tokens" in told and f"1 exchange, {session.count_tokens()} of 128 tokens" in told


def test_a_setting_may_still_be_changed_when_the_context_is_full(session: Session) -> None:
    session.conversation.exchanges = [Exchange("word " * 60, "x")]
    execute_line(session, "/set max_new_tokens 2")
    assert session.settings["max_new_tokens"] == 2
    with pytest.raises(InputError, match=r"no longer fits: .*/undo.*your message was not sent"):
        session.answer("Hi")
    assert len(session.conversation.exchanges) == 1


# --- files ------------------------------------------------------------------------------------------
def test_a_saved_chat_goes_on_where_it_was(session: Session, lm: unspool.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    session.answer("One")
    session.conversation.exchanges.append(Exchange("Zwei – ü", "Half an ans", is_stopped=True))
    execute_line(session, "/system Be kind.")
    execute_line(session, f"/save {file}")
    other = Session(lm, "Else", {}, is_interactive=True)
    execute_line(other, f"/load {file}")
    assert other.conversation == session.conversation and other.settings == session.settings
    content = json.loads(file.read_text())
    assert content["messages"][-1] == {"role": "assistant", "content": "Half an ans", "stopped": True}
    assert content["settings"] == {"max_new_tokens": 4} and content["model"] == lm.name


def test_saving_does_not_overwrite_unless_told(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text("mine")
    with pytest.raises(InputError, match=r"/save! .* overwrites it"):
        execute_line(session, f"/save {file}")
    assert file.read_text() == "mine"
    execute_line(session, f"/save! {file}")
    assert read_chat(file) == SavedChat(session.lm.name, Conversation(), {"max_new_tokens": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    with pytest.raises(InputError, match="not a file"):
        execute_line(session, f"/save! {tmp_path}")


GOOD = describe_chat(SavedChat("m", Conversation("S", [Exchange("Q", "A", True)]), {"top_k": 3}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "other"}, "not a saved chat"),
        ({"model": 3}, "'model' must be a string"),
        ({"settings": []}, "'settings' must be an object"),
        ({"settings": {"top_q": 3}}, "no setting 'top_q'"),
        ({"settings": {"top_k": "3"}}, "`top_k` must be a whole number"),
        ({"settings": {"temperature": float("nan")}}, "must be a finite number"),
        ({"settings": {"generation_kwargs": {}}}, "is an object"),
        ({"settings": {"temperature": 0.5, "do_sample": False}}, "only read when sampling"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": ["hello"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "user"}]}, "messages[0] must have a 'content'"),
        ({"messages": [{"role": "tool", "content": ""}]}, "has the role 'tool'"),
        ({"messages": say("Q")}, "must take turns"),
        ({"messages": say("Q", "A")[::-1]}, "must take turns"),
        ({"messages": [*say("Q"), {"role": "assistant", "content": "A", "stopped": 1}]}, "'stopped' must be"),
        ({"messages": say("\udcff", "A")}, "not UTF-8"),
        ({"messages": say("Q") * 20_000}, "at most 8192 exchanges"),
    ],
)
def test_files_that_are_no_chats_change_nothing(
    session: Session, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(UnspoolError) as caught:
        execute_line(session, f"/load {file}")
    assert said in str(caught.value)
    assert session.conversation == Conversation() and session.settings == {"max_new_tokens": 4}


@pytest.mark.parametrize("text", ["", "[]", "{", "{" * 5000, '{"format": ' + "9" * 5000 + "}", "\x00"])
def test_files_that_are_no_json(session: Session, tmp_path: Path, text: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    with pytest.raises(UnspoolError, match=r"chat\.json"):
        execute_line(session, f"/load {tmp_path / 'chat.json'}")


# --- ctrl-c -----------------------------------------------------------------------------------------
def test_ctrl_c_stops_the_answer_and_keeps_what_was_written(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    execute_line(session, "/set max_new_tokens 50")
    before = signal.getsignal(signal.SIGINT)
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("unspool.cli.session.AnswerWriter.write", lambda _, text, **__: write(text))
    session.answer("One")
    (exchange,) = session.conversation.exchanges
    assert exchange == Exchange("One", "".join(written), is_stopped=True) and len(written) == 3
    assert "(stopped)" in capsys.readouterr().err and signal.getsignal(signal.SIGINT) is before
    session.answer("Two")
    assert [exchange.is_stopped for exchange in session.conversation.exchanges] == [True, False]


def test_the_second_ctrl_c_does_not_wait_for_the_step() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_asked
        signal.raise_signal(signal.SIGINT)
    with Interrupt(is_enabled=False) as interrupt, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not interrupt.is_asked


def test_a_session_refuses_settings_that_can_not_be(lm: unspool.LanguageModel) -> None:
    with pytest.raises(SettingError):
        Session(lm, None, {"temperature": 0.3, "do_sample": False}, is_interactive=True)
