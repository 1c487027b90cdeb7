"""Which command is run, and what its end means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unspool
from unspool.cli import main as front
from unspool.cli import models
from unspool.cli.parser import join_flags


def test_version(cli: Callable[..., Any]) -> None:
    for flag in ("--version", "-V"):
        assert cli(flag) == type(cli(flag))(0, f"unspool {unspool.__version__}\n", "")


def test_help_names_every_command_and_fits_a_screen(cli: Callable[..., Any]) -> None:
    ended = cli("--help")
    assert ended.code == 0 and ended.err == ""
    assert all(f"\n  {name} " in ended.out for name in front.COMMANDS)
    lines = ended.out.splitlines()
    assert len(lines) < 25 and max(map(len, lines)) < 80
    assert cli("help").out == cli("-h").out == ended.out


@pytest.mark.parametrize("name", list(front.COMMANDS))
def test_every_command_has_help(cli: Callable[..., Any], name: str) -> None:
    ended = cli(name, "--help")
    assert ended.code == 0 and ended.out.startswith(f"usage: unspool {name} ") and ended.err == ""
    assert cli("help", name).out == ended.out


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("name", list(front.COMMANDS))
def test_help_fits_the_terminal(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown, _, examples = cli(name, "--help").out.partition("examples:\n")
    text = [one for one in shown.splitlines() if not one.startswith(("usage:", " ")) and not one.endswith(":")]
    assert all(len(line) <= columns for line in text), text
    assert all(line.startswith("  unspool ") for line in examples.splitlines() if line.startswith("  u"))
    assert "  unspool" in examples or not examples  # to be copied as they are


def test_without_a_command_the_help_is_an_error(cli: Callable[..., Any]) -> None:
    ended = cli()
    assert ended.code == 2 and ended.out == "" and "usage: unspool COMMAND" in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("rum",),
            "there is no command 'rum'; did you mean run? The commands are: run, chat, batch, serve, studio",
        ),
        (
            ("frobnicate",),
            "there is no command 'frobnicate'. The commands are: "
            "run, chat, batch, serve, studio, transcribe, speak, explain, compress",
        ),
        (("--versoin",), "unknown option --versoin; did you mean --version?"),
        (("run", "--temprature", "0.3", "hi"), "unknown option --temprature; did you mean --temperature?"),
        (("run", "--max_new_tokns=3", "hi"), "unknown option --max_new_tokns; did you mean --max-new-tokens?"),
        (("run", "Hello", "world"), "one argument too many: 'world'. Put text of several words in quotes"),
        (("run", "./models/x", "hi"), "Put text of several words in quotes; a model is named with --model (see"),
        (("chat", "./models/x"), "one argument too many: './models/x'. Give options alone; a model is named with --mo"),
        (("doctor", "now"), "one argument too many: 'now'. Give options alone (see"),
        (("serve", "--model", "x"), "unknown option --model: a model is named without one, as in unspool serve NAME"),
        (("bench", "-m", "x"), "unknown option -m: a model is named without one, as in unspool bench NAME"),
        (("run", "hi", "--model"), "--model: expected one argument"),
        (("serve", "--port", "abc"), "unspool: error: argument --port: 'abc' is not a whole number (see"),
        (("pull",), "the following arguments are required: NAME"),
        (("chat", "--load", "x"), "unknown option --load (see"),  # nothing is near it
        (("models", "--jsn"), "unknown option --jsn; did you mean --json?"),
    ],
)
def test_what_can_not_be_read_is_refused(cli: Callable[..., Any], words: tuple[str, ...], said: str) -> None:
    ended = cli(*words)
    assert ended.code == 2 and ended.out == ""
    assert ended.err.startswith("unspool: error: ") and said in ended.err and ended.err.count("\n") == 1


def test_a_bug_is_one_line_and_debug_shows_where(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_arguments: object) -> int:
        raise RuntimeError("the ribbon is torn")

    monkeypatch.setattr(models, "execute", fail)
    monkeypatch.delenv("UNSPOOL_DEBUG", raising=False)
    ended = cli("models")
    assert ended.code == 1 and "Traceback" not in ended.err
    assert ended.err.splitlines() == [
        "unspool: error: internal: RuntimeError: the ribbon is torn",
        "(--debug or UNSPOOL_DEBUG=1 shows where this happened)",
    ]
    for words in (("--debug", "models"), ("models", "--debug")):
        ended = cli(*words)
        assert ended.code == 1 and "Traceback" in ended.err and "in fail" in ended.err
    monkeypatch.setenv("UNSPOOL_DEBUG", "1")
    assert "Traceback" in cli("models").err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141), (SystemExit(3), 3)])
def test_other_ends_are_quiet(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def end(_arguments: object) -> int:
        raise error

    monkeypatch.setattr(models, "execute", end)
    ended = cli("models")
    assert (ended.code, ended.out, ended.err) == (code, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("words", [("models",), ("run", "hi", "--max-new-tokens", "2"), ("recipe", "list")])
def test_a_full_disk_behind_standard_output_is_no_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tiny: str
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert front.main([*words, *(["-m", tiny] if words[0] == "run" else [])]) == 1
    assert capsys.readouterr().err == "unspool: error: standard output can't be written: No space left on device\n"


def test_arguments_come_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["unspool", "--version"])
    assert front.main() == 0
    assert capsys.readouterr().out == f"unspool {unspool.__version__}\n"


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        (["--do-sample", "A prompt"], ["--do-sample=true", "A prompt"]),
        (["--do-sample", "false", "A prompt"], ["--do-sample=false", "A prompt"]),
        (["--do-sample", "OFF"], ["--do-sample=OFF"]),
        (["A prompt", "--do-sample"], ["A prompt", "--do-sample=true"]),
        (["--do-sample=no", "yes"], ["--do-sample=no", "yes"]),
        (["--", "--do-sample"], ["--", "--do-sample"]),
    ],
)
def test_flags_take_a_value_only_where_it_is_one(words: list[str], joined: list[str]) -> None:
    assert join_flags(words, {"--do-sample"}) == joined
