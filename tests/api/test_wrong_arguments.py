"""Every entry given something else than it takes: an error of unspool's that says what to give, before any pass."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes import FakeModel

import unspool
from unspool import LanguageModel
from unspool.errors import InputError, ModelNotFoundError, NoTokenLeftError, SettingError, UnspoolError

WRONG: dict[str, Any] = {
    "none": None,
    "text": "text",
    "list": [1, 2, 3],
    "mixed": [[1], ["a"]],
    "number": 7,
    "fraction": 1.5,
    "object": object(),
    "mapping": {"a": 1},
    "class": int,
    "bytes": b"x",
    "tensor": torch.ones(3, 2, 1),
    "function": lambda *_: None,
    "path": Path("nothing/here"),
}
ENTRIES: dict[str, tuple[Callable[[LanguageModel, Any], Any], tuple[str, ...]]] = {
    "load": (lambda _, it: unspool.load(it, offline=True), ()),
    "Engine": (lambda _, it: unspool.Engine(it), ("text", "path")),  # names, which are looked for on the hub
    "generate": (lambda _, it: unspool.generate(it, [[1, 2]], max_new_tokens=2), ()),
    "stream": (lambda _, it: list(unspool.stream(it, [[1, 2]], max_new_tokens=2)), ()),
    "inputs": (lambda lm, it: unspool.generate(lm.model, it, max_new_tokens=2), ("none",)),
    "lm.generate": (lambda lm, it: lm.generate(it, max_new_tokens=2), ("text", "list")),
    "lm.stream": (lambda lm, it: list(lm.stream(it, max_new_tokens=2)), ("text", "list")),
    "lm.trace": (lambda lm, it: list(lm.trace(it, max_new_tokens=2)), ("text", "list")),
    "lm.prefix": (lambda lm, it: lm.prefix(it), ("text", "list")),
    "lm.load_prefix": (lambda lm, it: lm.load_prefix(it), ()),
    "lm.transcribe": (lambda lm, it: lm.transcribe(it), ()),
    "pipeline": (lambda lm, it: unspool.pipeline("text-generation", model=it), ("none", "path")),
    "task": (lambda lm, it: unspool.pipeline(it, model=lm), ("none",)),
    "generation_config": (lambda lm, it: lm.generate("a", max_new_tokens=2, generation_config=it), ("none",)),
    "logits_processor": (lambda lm, it: lm.generate("a", max_new_tokens=2, logits_processor=it), ("none",)),
    "stopping_criteria": (lambda lm, it: lm.generate("a", max_new_tokens=2, stopping_criteria=it), ("none",)),
    "allowed": (lambda lm, it: lm.generate("a", max_new_tokens=2, prefix_allowed_tokens_fn=it), ("none",)),
    "streamer": (lambda lm, it: lm.generate("a", max_new_tokens=2, streamer=it), ("none",)),
    "prefix": (lambda lm, it: lm.generate("a", max_new_tokens=2, prefix=it), ("none",)),
    "past_key_values": (lambda lm, it: lm.generate("a", max_new_tokens=2, past_key_values=it), ("none",)),
    "assistant_model": (
        lambda lm, it: lm.generate("a", max_new_tokens=2, assistant_model=it),
        ("none", "text", "path"),
    ),
    "tokenizer": (
        lambda lm, it: unspool.generate(lm.model, [[1]], max_new_tokens=2, tokenizer=it, stop_strings=["a"]),
        (),
    ),
    "attach": (lambda _, it: unspool.attach(it), ("none",)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_an_entry_does_not_take_is_told(lm: LanguageModel, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    call, taken = ENTRIES[entry]
    for name, it in WRONG.items():
        if name in taken:
            continue
        with pytest.raises(UnspoolError) as raised:
            call(lm, it)
        assert len(str(raised.value)) > 20, name


def test_what_to_give_instead_is_said(lm: LanguageModel) -> None:
    told: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: unspool.generate(lm.model, "text"), InputError, r"the text 'text': lm.generate\(\) takes text"),
        (lambda: unspool.generate(lm.model, ["a", "b"]), InputError, r"a list of texts: lm.generate\(\)"),
        (lambda: unspool.generate(lm.model, [1, 2, 3]), InputError, r"a prompt is a row, so put it into a list"),
        (lambda: unspool.load(None), SettingError, "named by a text or a path, not by a NoneType"),  # type: ignore[arg-type]
        (lambda: lm.generate(None), InputError, "the prompt is None; give a text"),
        (lambda: list(lm.stream("a", streamer=print)), SettingError, "a stream gives its pieces itself"),
        (lambda: unspool.generate("smollm2-135m", [[1]]), SettingError, r"lm = unspool.load\('smollm2-135m'\)"),
        (lambda: lm.generate("a", logits_processor=[int]), SettingError, r"holds the class int; give an object"),
        (lambda: unspool.pipeline(["x"]), SettingError, "takes a task's name first"),
    ]
    for call, error, message in told:
        with pytest.raises(error, match=message):
            call()
    assert unspool.generate(lm.model, np.array([[1, 2]]), max_new_tokens=1).shape == (1, 3)


@pytest.mark.parametrize("method", ["generate", "stream", "start"])
def test_errors_of_a_batch_name_the_row(lm: LanguageModel, method: str) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (["a", "b", ""], InputError, "prompt 2: the prompt is empty"),
        (["a", None], InputError, "prompt 1: a prompt is text"),
        (["\ud800", "a"], InputError, "prompt 0: .*not valid Unicode"),
        ([[1], []], InputError, "prompt 1: "),
        ([[1], [2], [99_999]], InputError, "the id 99999 in row 2"),
        ([[{"role": "user", "content": "x"}], [{"role": "user"}]], UnspoolError, "prompt 1: .*content"),
    ]
    for prompts, error, message in wrong:
        with pytest.raises(error, match=message):
            getattr(lm, method)(prompts, max_new_tokens=2)


def test_a_missing_path_is_no_unknown_name(tmp_path: Path) -> None:
    (tmp_path / "llama-1b").mkdir()
    for missing in (tmp_path / "lama-1b", str(tmp_path / "lama-1b"), "./nothing", "nothing.gguf", Path("nothing")):
        with pytest.raises(ModelNotFoundError, match="there is no folder and no file"):
            unspool.load(missing, offline=True)
    with pytest.raises(ModelNotFoundError, match="has 'llama-1b'"):
        unspool.load(tmp_path / "lama-1b")
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2-135m'"):
        unspool.load("smolm2-135m", offline=True)


def test_names_stand_for_models(folder: Path, lm: LanguageModel) -> None:
    expected = lm.generate("a", max_new_tokens=6).token_ids
    for name in (str(folder), folder):
        drafted = lm.generate("a", max_new_tokens=6, assistant_model=name)
        assert drafted.token_ids == expected and drafted.speculation is not None
    with unspool.Engine(str(folder)) as engine:
        assert engine.submit("a", max_new_tokens=6).result().token_ids == expected


# --- beams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 2},
        {"num_beams": 3, "do_sample": True},
        {"num_beams": 2, "num_return_sequences": 2},
        {"num_beams": 2, "eos_token_id": 0},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    ],
)
def test_beams_over_the_smallest_vocabularies(vocab: int, settings: dict[str, Any]) -> None:
    found = unspool.generate(FakeModel(vocab), [[0, 0]], max_new_tokens=3, **settings)
    assert isinstance(found, torch.Tensor) and found.shape[0] == settings.get("num_return_sequences", 1)
    assert int(found.max()) < vocab


@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"num_beam_groups": 2, "diversity_penalty": 1.0}])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_beams_refuse_scores_that_are_no_numbers(settings: dict[str, Any], value: float) -> None:
    def spoil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 5] = value
        return scores

    with pytest.raises(NoTokenLeftError, match="spoil made scores NaN or infinite"):
        unspool.generate(FakeModel(), [[1, 2]], max_new_tokens=3, num_beams=2, logits_processor=[spoil], **settings)


# --- the program ------------------------------------------------------------------------------------------


def test_an_early_interrupt_ends_the_program_without_a_traceback() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "unspool", "run", "x"]  # says what is being imported
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rstrip().endswith("argparse"):  # of the program's front: the first heavy one
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest and "KeyboardInterrupt" not in rest


def test_an_interrupt_while_torch_is_imported_ends_the_program() -> None:
    command = [sys.executable, "-m", "unspool", "run", "x"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode in (130, 0, 2, -signal.SIGINT)
    assert "Traceback" not in said
