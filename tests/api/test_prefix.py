"""A shared beginning: calls after it answer as calls with everything at once, and read only what is new."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.cases import load_model

import unspool
from unspool.errors import InputError, LoadError, SettingError, UnsupportedError

IDS = [7, 9, 11, 13, 8, 21, 30]
MODELS = Path(__file__).parents[1] / "conformance" / "goldens" / "models"
MORE = [[5, 6], [40, 41, 42, 43], [12]]


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return load_model("llama")


def count_read(lm: unspool.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every pass from now on."""
    read: list[int] = []
    real = type(lm.model).forward

    def forward(self: Any, tokens: Any, cache: Any, **more: Any) -> Any:
        counts = more.get("counts")
        read.append(tokens.numel() if counts is None else sum(counts))
        return real(self, tokens, cache, **more)

    monkeypatch.setattr(type(lm.model), "forward", forward)
    return read


@pytest.mark.parametrize(
    "way",
    [{}, {"num_beams": 3}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 1}],
)
@pytest.mark.parametrize("kind", ["dynamic", "offloaded", "sink", "paged"])
def test_answers_are_those_of_whole_prompts(lm: unspool.LanguageModel, way: dict[str, Any], kind: str) -> None:
    prefix = lm.prefix(IDS, cache_implementation=kind)
    for prompt in (MORE, MORE[1]):
        whole = [IDS + row for row in MORE] if prompt is MORE else IDS + MORE[1]
        found = lm.generate(prompt, prefix=prefix, max_new_tokens=8, **way)
        assert found.token_ids == lm.generate(whole, max_new_tokens=8, **way).token_ids
    assert prefix.cache.lengths == [len(IDS)]


def test_only_what_is_new_is_read(lm: unspool.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_read(lm, monkeypatch)
    prefix = lm.prefix(IDS)
    assert read == [7]
    prefix.generate(MORE, max_new_tokens=2)
    assert read[:2] == [7, 7] and len(prefix) == 7  # 2 + 4 + 1 tokens


def test_what_was_read_before_is_counted(lm: unspool.LanguageModel) -> None:
    prefix = lm.prefix(IDS)
    for prompt, num_prompts in ((MORE, 3), (MORE[1], 1)):
        stats = lm.generate(prompt, prefix=prefix, max_new_tokens=3, num_return_sequences=2, do_sample=True).stats
        assert stats.cached_tokens == num_prompts * len(IDS)
        assert stats.prompt_tokens == stats.cached_tokens + sum(map(len, MORE if prompt is MORE else [prompt]))
    assert lm.generate(IDS, max_new_tokens=3).stats.cached_tokens == 0
    held = lm.model.new_cache(rows=1)
    lm.model(torch.tensor([IDS[:4]]), past_key_values=held)
    found = lm.generate(IDS, past_key_values=held, max_new_tokens=3)
    assert found.stats.cached_tokens == 4 and found.token_ids == lm.generate(IDS, max_new_tokens=3).token_ids
    with unspool.Engine(lm, memory=1 << 24, max_rows=4) as engine:
        assert engine.submit(MORE[0], prefix=prefix, max_new_tokens=3).result().stats.cached_tokens == len(IDS)


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
def test_several_go_on_at_once(lm: unspool.LanguageModel, kind: str) -> None:
    prefix = lm.prefix(IDS, cache_implementation=kind)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda row: prefix.generate(row, max_new_tokens=8).token_ids, MORE))
    assert found == [lm.generate(IDS + row, max_new_tokens=8).token_ids for row in MORE]
    assert [list(p.token_ids) for p in prefix.stream(MORE[0], max_new_tokens=3)]


def test_saved_and_loaded(lm: unspool.LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "prefix.safetensors"
    prefix = lm.prefix(IDS)
    prefix.save(path)
    loaded = lm.load_prefix(path)
    assert loaded.token_ids == IDS
    assert loaded.generate(MORE, max_new_tokens=5).token_ids == prefix.generate(MORE, max_new_tokens=5).token_ids
    with pytest.raises(SettingError, match=r"was made by the model llama-.*, and this one is mistral-"):
        load_model("mistral").load_prefix(path)
    prefix.cache.save(path)
    with pytest.raises(LoadError, match="without the tokens of a prefix"):
        lm.load_prefix(path)


def test_what_can_not_be(lm: unspool.LanguageModel) -> None:
    prefix = lm.prefix(IDS)
    for call, error, what in (
        (lambda: load_model("mistral").generate([5], prefix=prefix), SettingError, "mean nothing to another model"),
        (lambda: lm.generate([5], prefix="text"), SettingError, "what lm.prefix"),
        (lambda: lm.generate(prefix=prefix), SettingError, "what follows a `prefix`"),
        (lambda: lm.generate([5], prefix=prefix, past_key_values=prefix.cache), SettingError, "two beginnings"),
        (lambda: lm.generate([5], prefix=prefix, cache_implementation="static"), SettingError, "is one already"),
        (lambda: prefix.generate([{"role": "user", "content": "x"}]), SettingError, "prefix is text"),
        (lambda: lm.prefix(IDS, temperature=2.0), SettingError, "`temperature` goes to generate"),
        (lambda: lm.prefix(IDS, cache_implementation="static"), UnsupportedError, "use 'dynamic'"),
        (lambda: lm.prefix(MORE), InputError, "one beginning, and 3"),
        (lambda: lm.prefix([10_000]), InputError, "outside the model's vocabulary"),
        (lambda: load_model("gpt2").prefix([5] * 128), InputError, "context ends at 128"),
        (lambda: load_model("t5").prefix([5, 6]), UnsupportedError, "encoder"),
    ):
        with pytest.raises(error, match=what):
            call()
    assert prefix.cache.lengths == [len(IDS)]


@pytest.mark.parametrize("turns", [3])
def test_a_conversation_reads_what_is_new(
    default_model_file: Path, monkeypatch: pytest.MonkeyPatch, turns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each turn of a chat answers as it would alone, and does not read again what was said."""
    from unspool.cli.session import Session

    lm = unspool.load(default_model_file)
    settings = {"max_new_tokens": 6, "do_sample": False}
    session = Session(lm, "Be brief.", settings, is_interactive=False)
    read = count_read(lm, monkeypatch)
    for turn in range(turns):
        message = f"Say {turn}."
        whole = len(lm.encode(session.conversation.messages(message))[0])
        read.clear()
        session.answer(message)
        said = session.conversation.exchanges[-1].answer
        if turn:
            assert read[0] < whole / 2
        messages = [*session.conversation.messages()[:-1]]
        assert lm.generate(messages, **settings).text == said
    capsys.readouterr()


def test_messages_go_on_after_messages(default_model_file: Path) -> None:
    lm = unspool.load(default_model_file)
    prefix = lm.prefix("You are terse.", chat=True)
    assert torch.tensor(prefix.token_ids).numel() == len(prefix) > 5
    asked = {"role": "user", "content": "Hi"}
    whole = lm.generate([*prefix.messages, asked], max_new_tokens=8, do_sample=False)
    assert prefix.generate([asked], max_new_tokens=8, do_sample=False).text == whole.text
    assert prefix.generate("Hi", chat=True, max_new_tokens=8, do_sample=False).text == whole.text


def test_a_model_is_known_by_the_same_name_in_every_process(lm: unspool.LanguageModel, tmp_path: Path) -> None:
    """Sets of strings have another order in each, and a prefix that was saved must be read by the next."""
    path = tmp_path / "prefix.safetensors"
    lm.prefix([5, 6, 7]).save(path)
    code = (
        "import sys; from tests.conformance.cases import load_model; "
        "print(load_model('llama').load_prefix(sys.argv[1]).token_ids)"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=False,
    )
    assert done.stdout.strip() == "[5, 6, 7]", done.stderr[-2000:]


@pytest.mark.parametrize("native", [None, False])
def test_a_prefix_of_other_weights_with_the_same_embeddings_is_refused(tmp_path: Path, native: bool | None) -> None:
    """As after training with frozen embeddings: its keys would be continued by another model, without a word."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "llama", folder)
    unspool.load(folder, native=native).prefix(IDS).save(tmp_path / "prefix")
    assert unspool.load(folder, native=native).load_prefix(tmp_path / "prefix").token_ids == IDS
    tensors = load_file(folder / "model.safetensors")
    name = next(one for one in sorted(tensors) if "layers.1" in one and "down_proj" in one)
    tensors[name][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match="was made by the model"):
        unspool.load(folder, native=native).load_prefix(tmp_path / "prefix")
