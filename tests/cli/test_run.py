"""`unspool run`."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import make_tokenizer

import unspool
from unspool.loading import source

FEW = ("--max-new-tokens", "6")


def test_the_text_is_the_library_s(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    text = lm.generate("Hello there", max_new_tokens=6).text
    ended = cli("run", "Hello there", "--model", tiny, *FEW)
    assert (ended.code, ended.out, ended.err) == (0, text.removesuffix("\n") + "\n", "")


@pytest.mark.parametrize("words", [(), ("-",)])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_prompt_may_come_from_standard_input(
    cli: Callable[..., Any], tiny: str, words: tuple[str, ...], end: bytes
) -> None:
    expected = json.loads(cli("run", "Hello\n there", "-m", tiny, *FEW, "--json").out)
    report = json.loads(cli("run", *words, "-m", tiny, *FEW, "--json", stdin=b"Hello\n there" + end).out)
    assert report["prompt"] == "Hello\n there" and report["token_ids"] == expected["token_ids"]


def test_json_is_one_object_and_all_there_is(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    ended = cli("run", "Hello", "-m", tiny, *FEW, "--json", "--logprobs", "2", "--prompt-logprobs", "0")
    assert ended.code == 0 and ended.err == "" and ended.out.count("\n") == 1
    report = json.loads(ended.out)
    expected = lm.generate("Hello", max_new_tokens=6, logprobs=2, prompt_logprobs=0)
    assert set(report) == {
        *("model", "prompt", "settings", "text", "texts", "token_ids", "prompt_token_ids", "finish_reasons"),
        *("logprobs", "prompt_logprobs", "stats"),
    }
    assert report["model"] == tiny and report["prompt"] == "Hello"
    assert report["settings"] == {"max_new_tokens": 6, "logprobs": 2, "prompt_logprobs": 0}
    assert report["texts"] == expected.texts == [report["text"]]
    assert report["token_ids"] == expected.token_ids and report["prompt_token_ids"] == expected.prompt_token_ids
    assert report["finish_reasons"] == expected.finish_reasons
    assert expected.logprobs is not None and expected.prompt_logprobs is not None and lm.tokenizer is not None
    for told, token in zip(report["logprobs"][0], expected.logprobs[0], strict=True):
        assert told["token_id"] == token.token_id and math.isclose(told["logprob"], token.logprob, rel_tol=1e-5)
        assert told["token"] == lm.tokenizer.decode([token.token_id])
        assert [top["token_id"] for top in told["top"]] == [token_id for token_id, _ in token.top]
    assert report["prompt_logprobs"][0][0] is None and set(report["prompt_logprobs"][0][1]) == {
        *("token_id", "token", "logprob")
    }
    stats = report["stats"]
    assert stats["new_tokens"] == 6 and stats["prompt_tokens"] == len(report["prompt_token_ids"][0])
    assert stats["forward_passes"] >= 1 and 0 < stats["first_token_seconds"] <= stats["total_seconds"]
    assert stats["tokens_per_second"] > 0


def test_chat_and_system(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    report = json.loads(cli("run", "Hi", "-m", tiny, "--chat", "--system", "Be brief.", *FEW, "--json").out)
    assert report["prompt_token_ids"] == lm.encode(messages) and report["system"] == "Be brief."
    assert report["texts"] == lm.generate(messages, max_new_tokens=6).texts
    alone = json.loads(cli("run", "Hi", "-m", tiny, "--chat", *FEW, "--json").out)
    assert alone["prompt_token_ids"] == lm.encode(messages[1:]) and alone["chat"] is True


def test_a_seed_decides(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    sampling = ("--do-sample", "--temperature", "1.5", "--top_k", "0", *FEW)
    first, again, other = (cli("run", "Hello", "-m", tiny, *sampling, "--seed", seed).out for seed in ("1", "1", "2"))
    text = lm.generate("Hello", do_sample=True, temperature=1.5, top_k=0, max_new_tokens=6, seed=1).text
    assert first == again == text.removesuffix("\n") + "\n" and first != other


def test_stop_strings(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    text = lm.generate("Hello", max_new_tokens=20).text
    stop = text[4:6]
    report = json.loads(cli("run", "Hello", "-m", tiny, "--stop-strings", "@@@@", "--stop-strings", stop, "--json").out)
    assert report["text"] == text[: text.index(stop)] and report["finish_reasons"] == ["stop_string"]


def test_several_sequences_are_printed_whole(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    settings = ("--do-sample", "--seed", "3", "--num-return-sequences", "2", *FEW)
    texts = lm.generate("Hello", do_sample=True, seed=3, num_return_sequences=2, max_new_tokens=6).texts
    ended = cli("run", "Hello", "-m", tiny, *settings)
    assert ended.out == "".join(f"[{row}] {text}".removesuffix("\n") + "\n" for row, text in enumerate(texts, 1))


def test_prompts_from_a_file(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffHello\r\n\nA longer prompt\n".encode())
    expected = lm.generate(["Hello", "A longer prompt"], max_new_tokens=6)
    ended = cli("run", "--prompts-file", str(file), "-m", tiny, *FEW, "--stats")
    rows = [f"[{row}] {text}".removesuffix("\n") + "\n" for row, text in enumerate(expected.texts, 1)]
    assert ended.code == 0 and ended.out == "".join(rows) and "12 new tokens" in ended.err
    report = json.loads(cli("run", "--prompts_file", str(file), "-m", tiny, *FEW, "--json").out)
    assert report["prompts"] == ["Hello", "A longer prompt"] and report["texts"] == expected.texts
    copies = cli("run", "--prompts-file", str(file), "-m", tiny, *FEW, "--do-sample", "--num-return-sequences", "2")
    assert [f"[{label}]" in copies.out for label in ("1.1", "1.2", "2.1", "2.2")] == [True] * 4
    as_chats = json.loads(
        cli("run", "--prompts-file", str(file), "-m", tiny, *FEW, "--json", "--chat", "--system", "S").out
    )
    assert as_chats["prompt_token_ids"] == lm.encode(
        [[{"role": "system", "content": "S"}, {"role": "user", "content": text}] for text in report["prompts"]]
    )


def test_stats_are_one_line_on_standard_error(cli: Callable[..., Any], tiny: str) -> None:
    plain = cli("run", "Hello", "-m", tiny, *FEW)
    ended = cli("run", "Hello", "-m", tiny, *FEW, "--stats")
    assert ended.out == plain.out and ended.err.count("\n") == 1
    for part in ("tokens/s · first token ", " prompt + 6 new tokens · ", " forward passes", "ended by length"):
        assert part in ended.err
    assert json.loads(cli("run", "Hello", "-m", tiny, *FEW, "--stats", "--json").out)["text"] + "\n" == plain.out


def test_a_setting_that_sampling_reads_turns_it_on(cli: Callable[..., Any], tiny: str) -> None:
    for words in (("--temperature", "0.7"), ("--top-p", "0.5"), ("--top-k", "3", "--min-p", "0.1")):
        settings = json.loads(cli("run", "Hello", "-m", tiny, *FEW, "--seed", "1", *words, "--json").out)["settings"]
        assert settings["do_sample"] is True
    for words in (("--top-k", "3", "--penalty-alpha", "0.5"), ("--repetition-penalty", "1.2"), ("--top-p", "1.0")):
        settings = json.loads(cli("run", "Hello", "-m", tiny, *FEW, *words, "--json").out)["settings"]
        assert "do_sample" not in settings


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("Hello", "--temperature", "0.3", "--no-do-sample"),
            "`temperature` is set to `0.3`, which is only read when",
        ),
        (("Hello", "--top-k", "a lot"), "--top-k"),
        (("Hello", "--penalty-alpha", "1.5"), "`penalty_alpha` must be at most 1"),
        (("",), "the prompt is empty"),
        (("Hello", "--system", "x"), "add --chat"),
        (("Hello", "--logprobs", "1"), "printed with --json"),
        (("Hello", "--output-scores", "--return-dict-in-generate"), "`output_scores` returns tensors"),
        (("Hello", "--prompts-file", "x"), "a prompt and --prompts-file were both given"),
        (("--prompts-file", "/nowhere/prompts"), "'/nowhere/prompts' can't be read: No such file"),
        (("--prompts-file", "/"), "'/' can't be read: Is a directory"),
        (("--prompts-file", "/dev/null"), "has no prompts"),
        (("Hello", "--device", "abacus"), "device='abacus'"),
        (("Hello", "--dtype", "int3"), "dtype='int3' is not one of"),
        (("Hello", "--revision", "main"), "revision='main' can't be used"),
        (("Hello \udcff",), "the prompt is not UTF-8 text"),
    ],
)
def test_what_can_not_be_is_refused(cli: Callable[..., Any], tiny: str, words: tuple[str, ...], said: str) -> None:
    ended = cli("run", *words, "-m", tiny)
    assert ended.code == 2 and ended.out == ""
    assert ended.err.startswith("unspool: error: ") and said in ended.err and "Traceback" not in ended.err


def test_standard_input_that_is_no_text(cli: Callable[..., Any], tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cli("run", "-m", tiny, stdin=b"Hello \xff")
    assert ended.code == 2 and "standard input is not UTF-8 text (byte 6" in ended.err
    monkeypatch.setattr("unspool.cli.reading.LARGEST_TEXT", 4)
    ended = cli("run", "-m", tiny, stdin=b"Hello")
    assert ended.code == 2 and "more than 4 bytes" in ended.err


def test_too_many_prompts(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    (tmp_path / "many").write_text("Hello\n" * 257)
    ended = cli("run", "-m", tiny, "--prompts-file", str(tmp_path / "many"))
    assert ended.code == 2 and "has 257 prompts; at most 256" in ended.err


def test_a_model_that_is_not_there(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cli("run", "Hello", "-m", "smollm3")
    assert ended.code == 2 and "no model 'smollm3'" in ended.err and "unspool pull smollm2-135m" in ended.err
    ended = cli("run", "Hello", "-m", str(tmp_path / "nowhere"))
    assert ended.code == 2 and "nowhere" in ended.err
    ended = cli("run", "Hello", "-m", str(tmp_path))
    assert ended.code == 2 and str(tmp_path) in ended.err
    monkeypatch.setattr(source, "find_model", lambda _name: None)
    ended = cli("run", "Hello")
    assert ended.code == 2 and "To fetch it (98 MB): unspool pull smollm2-135m" in ended.err


def test_a_model_without_a_tokenizer(cli: Callable[..., Any]) -> None:
    folder = Path(__file__).parents[1] / "conformance" / "goldens" / "models" / "llama"
    ended = cli("run", "Hello", "-m", str(folder))
    assert ended.code == 2 and "needs a tokenizer" in ended.err


def test_a_prompt_that_looks_like_an_option(cli: Callable[..., Any], tiny: str) -> None:
    report = json.loads(cli("run", "-m", tiny, *FEW, "--json", "--", "--do-sample").out)
    assert report["prompt"] == "--do-sample"
    report = json.loads(cli("run", "--do-sample", "Hello", "-m", tiny, *FEW, "--json").out)
    assert report["prompt"] == "Hello" and report["settings"]["do_sample"] is True


def test_a_negative_prompt(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, tmp_path: Path) -> None:
    guided = lm.generate("Hello", negative_prompt="Bye", guidance_scale=2.5, max_new_tokens=6)
    words = ("-m", tiny, *FEW, "--guidance-scale", "2.5", "--negative-prompt")
    report = json.loads(cli("run", "Hello", *words, "Bye", "--json").out)
    assert report["token_ids"] == guided.token_ids != lm.generate("Hello", max_new_tokens=6).token_ids
    assert report["negative_prompt"] == "Bye"
    chat = [[{"role": "user", "content": text}] for text in ("Hello", "Bye")]
    talked = lm.generate(chat[0], negative_prompt=chat[1], guidance_scale=2.5, max_new_tokens=6)
    assert json.loads(cli("run", "Hello", *words, "Bye", "--json", "--chat").out)["token_ids"] == talked.token_ids
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\nThe cat\n")
    both = json.loads(cli("run", "--prompts-file", str(file), *words, "Bye", "--json").out)
    assert both["token_ids"][0] == guided.token_ids[0]
    ended = cli("run", "Hello", "-m", tiny, "--negative-prompt", "Bye")
    assert ended.code != 0 and "add --guidance-scale" in ended.err


def test_the_layers_that_dola_chose(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel) -> None:
    report = json.loads(cli("run", "Hello", "-m", tiny, *FEW, "--dola-layers", "[0, 1, 2]", "--json").out)
    expected = lm.generate("Hello", dola_layers=[0, 1, 2], max_new_tokens=6)
    assert (report["token_ids"], report["dola_layers"]) == (expected.token_ids, expected.dola_layers)
    assert len(expected.dola_layers[0]) == len(expected.token_ids[0])


@pytest.mark.parametrize(
    "flags", [["--prompt-lookup-num-tokens", "4"], ["--assistant-early-exit", "2"], ["--speculate", "auto"]]
)
def test_drafters_and_their_stats(cli: Callable[..., Any], tiny: str, flags: list[str]) -> None:
    plain = cli("run", "abc abc abc", "-m", tiny, "--max-new-tokens", "30")
    ended = cli("run", "abc abc abc", "-m", tiny, "--max-new-tokens", "30", *flags, "--stats")
    assert ended.out == plain.out
    assert "drafted token" in ended.err and " right" in ended.err
    told = json.loads(cli("run", "abc abc abc", "-m", tiny, *FEW, *flags, "--json").out)["stats"]["speculation"]
    assert len(told["drafted"]) == len(told["accepted"]) == 1 and told["mean_accepted_length"] >= 0


@pytest.mark.parametrize("flags", [[], ["--do-sample", "--seed", "3"]])
def test_a_draft_model_with_another_tokenizer(
    cli: Callable[..., Any], tiny: str, tmp_path: Path, flags: list[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    make_tokenizer().save(other)
    call = ("run", "abc", "-m", tiny, "--max-new-tokens", "13", "--stats", *flags)
    told = cli(*call, "--assistant-model", str(other))
    assert told.code == 0 and re.search(r"\d+ of [1-9]\d* drafted tokens? right", told.err)
    if not flags:
        assert told.out == cli(*call).out


def test_a_draft_model_by_name(cli: Callable[..., Any], tiny: str) -> None:
    plain = cli("run", "abc", "-m", tiny, "--max-new-tokens", "13")
    told = cli(
        "run", "abc", "-m", tiny, "--max-new-tokens", "13", "--assistant-model", tiny, "--stats",
        "--assistant-confidence-threshold", "0", "--num-assistant-tokens", "5",
    )  # fmt: skip
    assert told.out == plain.out and "10 of 10 drafted tokens right, 5.0 a check" in told.err
    assert "--assistant-model NAME" in cli("run", "--help").out
