"""The short way: prompts of every kind in, text out, and mistakes told before any work is done."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS
from tests.fakes import make_tokenizer, pad_left

import unspool
from unspool import GenerationConfig, LanguageModel, LogitsProcessor, Piece, TextIteratorStreamer, TextStreamer
from unspool.api.language_model import _read_quantize
from unspool.errors import InputError, SettingError, UnspoolError

TEXTS = ["hello the cat", "a", "stop and the world"]
CHAT = [{"role": "user", "content": "hello"}]
CONTEXT = 128  # of the little model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The little llama with a little tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    shutil.copytree(GOLDENS / "models" / "llama", folder)
    make_tokenizer().save(folder)
    return folder


@pytest.fixture
def lm(folder: Path) -> LanguageModel:
    return unspool.load(folder, device="cpu")


@pytest.fixture
def passes(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every forward pass."""
    seen: list[int] = []
    forward = lm.model.forward

    def count(tokens: Any, cache: Any, **kwargs: Any) -> Any:
        seen.append(tokens.shape[0])
        return forward(tokens, cache, **kwargs)

    monkeypatch.setattr(lm.model, "forward", count)
    return seen


class Dictate(LogitsProcessor):
    """Makes a model write known tokens: the same for every row, or a list a row."""

    def __init__(self, *rows: list[int], prompt_width: int) -> None:
        self.rows = rows
        self.width = prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.width
        scores = torch.full_like(scores, -torch.inf)
        for row in range(scores.shape[0]):
            tokens = self.rows[row % len(self.rows)]
            scores[row, tokens[step] if step < len(tokens) else 2] = 0.0
        return scores


def dictate(lm: LanguageModel, text: str, **settings: Any) -> dict[str, Any]:
    """Settings with which the prompt "hello" is continued by `text` and the end token."""
    tokens = lm.tokenizer.encode(text)
    return {"logits_processor": [Dictate(tokens, prompt_width=1)], "max_new_tokens": len(tokens) + 3} | settings


# --- prompts ------------------------------------------------------------------------------------------------


def new_tokens(lm: LanguageModel, ids: list[int], num_new: int = 6) -> list[int]:
    """What the model writes after ids, by the other front door."""
    found = unspool.generate(lm.model, torch.tensor([ids]), max_new_tokens=num_new)
    return found[0, len(ids) :].tolist()


def test_a_text(lm: LanguageModel) -> None:
    result = lm.generate(TEXTS[0], max_new_tokens=6)
    ids = lm.tokenizer.encode(TEXTS[0])
    assert result.prompt_token_ids == [ids]
    assert result.token_ids == [new_tokens(lm, ids)]
    assert result.texts == [lm.tokenizer.decode(result.token_ids[0], skip_special_tokens=True)]
    assert result.text == str(result) == result.texts[0]
    assert result.finish_reasons == ["eos" if result.token_ids[0][-1] == 2 else "length"]
    assert (result.stats.prompt_tokens, result.stats.new_tokens) == (len(ids), len(result.token_ids[0]))
    assert result.logprobs is None and result.output is None


def test_texts_in_a_batch_are_texts_alone(lm: LanguageModel) -> None:
    for settings in ({}, {"do_sample": True, "seed": [4, 5, 6], "temperature": [0.7, 1.3, 1.0]}):
        batch = lm.generate(TEXTS, max_new_tokens=6, **settings)
        for row, text in enumerate(TEXTS):
            own = {name: value[row] if isinstance(value, list) else value for name, value in settings.items()}
            alone = lm.generate(text, max_new_tokens=6, **own)
            assert (batch.texts[row], batch.token_ids[row]) == (alone.text, alone.token_ids[0])
            assert batch.prompt_token_ids[row] == alone.prompt_token_ids[0]


def test_chats(lm: LanguageModel) -> None:
    ids = lm.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert lm.tokenizer.decode(ids) == "user: hello\nassistant:"
    one = lm.generate(CHAT, max_new_tokens=4)
    assert one.prompt_token_ids == [ids] and one.token_ids == [new_tokens(lm, ids, 4)]
    assert lm.generate("hello", chat=True, max_new_tokens=4).prompt_token_ids == [ids]
    longer = [*CHAT, {"role": "assistant", "content": "a"}, {"role": "user", "content": "the cat"}]
    several = lm.generate([longer, CHAT], max_new_tokens=4)
    assert several.prompt_token_ids == [lm.tokenizer.apply_chat_template(longer, add_generation_prompt=True), ids]
    assert several.token_ids[1] == one.token_ids[0]
    assert lm.generate(["hello", "a"], chat=True, max_new_tokens=4).prompt_token_ids[0] == ids
    with_tools = lm.generate(CHAT, tools=[{"type": "function", "function": {"name": "f"}}], max_new_tokens=1)
    assert lm.tokenizer.decode(with_tools.prompt_token_ids[0]) == "user: hello\n1 tools\nassistant:"


def test_ids_of_every_form(lm: LanguageModel) -> None:
    rows = [lm.tokenizer.encode(text) for text in TEXTS]
    expected = [new_tokens(lm, ids) for ids in rows]
    padded = pad_left(rows)
    for prompt, extra in (
        (rows, {}),
        ([torch.tensor(row) for row in rows], {}),
        (tuple(map(tuple, rows)), {}),
        (padded["input_ids"], {"attention_mask": padded["attention_mask"]}),
        (padded["input_ids"], {}),  # the pad token tells
        (padded, {}),
        (None, padded),
        (lm.tokenizer(TEXTS), {}),
        (lm.tokenizer(TEXTS, padding=True), {}),
        (lm.tokenizer(TEXTS, padding=True, return_tensors="pt"), {}),
        ({**padded, "token_type_ids": torch.zeros_like(padded["input_ids"])}, {}),
        ([TEXTS[0], rows[1], TEXTS[2]], {}),
    ):
        result = lm.generate(prompt, max_new_tokens=6, **extra)
        assert result.token_ids == expected
        assert result.prompt_token_ids == rows


def test_one_row_of_ids_of_every_form(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode(TEXTS[2])
    for prompt in (
        ids,
        [ids],
        torch.tensor(ids),
        torch.tensor([ids]),
        lm.tokenizer(TEXTS[2]),
        lm.tokenizer(TEXTS[2], return_tensors="pt"),
    ):
        result = lm.generate(prompt, max_new_tokens=6)
        assert (result.token_ids, result.prompt_token_ids) == ([new_tokens(lm, ids)], [ids])


def test_encode_gives_the_rows(lm: LanguageModel) -> None:
    rows = [lm.tokenizer.encode(text) for text in TEXTS]
    assert lm.encode(TEXTS) == rows
    assert lm.encode(rows[0]) == lm.encode([rows[0]]) == lm.encode(torch.tensor(rows[0])) == [rows[0]]
    assert lm.encode(CHAT) == lm.encode("hello", chat=True) == lm.encode([CHAT])


def test_embeddings_and_no_prompt(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode(TEXTS[0])
    embeds = lm.model.get_input_embeddings()(torch.tensor([ids]))
    result = lm.generate(inputs_embeds=embeds, max_new_tokens=6)
    assert (result.token_ids, result.prompt_token_ids) == ([new_tokens(lm, ids)], [[]])
    assert lm.generate(max_new_tokens=6).token_ids == [new_tokens(lm, [1])]  # from the start token


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "told"),
    [
        ("", {}, InputError, "the prompt is empty"),
        (["a", ""], {}, InputError, "the prompt is empty"),
        ([], {}, InputError, "an empty list"),
        ([[]], {}, InputError, "an empty list"),
        ([[], [1]], {}, InputError, "an empty list"),
        (5, {}, InputError, "not a int"),
        (2.5, {}, InputError, "not a float"),
        (b"hello", {}, InputError, "not a bytes"),
        ({"a", "b"}, {}, InputError, "not a set"),
        ([1, "a"], {}, InputError, "not a list of int, str"),
        ([True, False], {}, InputError, "not a list of bool"),
        ([[1.5, 2.5]], {}, InputError, "not a list of float"),
        ([[["a"]]], {}, InputError, "not a list of list"),
        ([[[1, 2], [3, 4]]], {}, InputError, "not a list of list"),
        ([["a", "b"], "c"], {}, InputError, "not a list of str"),
        ([None], {}, InputError, "not a NoneType"),
        ({}, {}, InputError, "what a tokenizer returns"),
        ({"role": "user", "content": "hello"}, {}, InputError, "a chat is a list of messages"),
        ({"input_ids": [[1, 2]], "pixel_values": 1}, {}, InputError, "pixel_values"),
        ({"input_ids": [1.5]}, {}, InputError, "whole numbers"),
        ([[1, 2**70]], {}, InputError, "can't be a token id"),
        ([1, 160], {}, InputError, "the id 160, outside the model's vocabulary of 160"),
        ([[5], [-1]], {}, InputError, "the id -1"),
        (torch.tensor([[1.0, 2.0]]), {}, InputError, "whole numbers"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, InputError, "not a list of list"),
        (torch.tensor(5), {}, InputError, "not a int"),
        ("a", {"attention_mask": [[1]]}, SettingError, "`attention_mask` and a prompt were given"),
        ("a", {"input_ids": [[1]]}, SettingError, "`input_ids` and a prompt were given"),
        ([1, 2], {"chat": True}, SettingError, "past it; give messages"),
        ({"input_ids": [1, 2]}, {"chat": True}, SettingError, "past it; give messages"),
        (None, {"input_ids": [[1, 2]], "tools": []}, SettingError, "past it; give messages"),
        ("a", {"tools": []}, SettingError, "tools go with a chat"),
        ([1] * CONTEXT, {}, InputError, f"the prompt has {CONTEXT} tokens and the model's context ends at {CONTEXT}"),
        ("a", {"max_new_tokens": CONTEXT}, SettingError, f"at most max_new_tokens={CONTEXT - 1} fit"),
        ("a", {"temperatur": 1}, SettingError, "did you mean 'temperature'"),
        ("a", {"top_k": 3}, SettingError, "only read when sampling"),
        ([{"role": "user"}], {}, UnspoolError, "content"),
        ("\ud800", {}, InputError, "not valid Unicode"),
    ],
)
def test_mistakes_are_told_before_any_work(
    lm: LanguageModel, passes: list[int], prompt: Any, settings: dict[str, Any], error: type, told: str
) -> None:
    with pytest.raises(error, match=told):
        lm.generate(prompt, **settings)
    with pytest.raises(error, match=told):
        lm.stream(prompt, **settings)  # at the call, not at the first piece
    assert passes == []


def test_deep_nesting_is_no_way_in(lm: LanguageModel) -> None:
    nested: Any = [1]
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(InputError):
        lm.generate(nested)


# --- settings of the short way ------------------------------------------------------------------------------


def test_friendly_defaults_end_at_the_context(lm: LanguageModel) -> None:
    result = lm.generate("a", eos_token_id=None)
    assert len(result.token_ids[0]) == CONTEXT - 1
    lm.generation_config = GenerationConfig(max_length=20, eos_token_id=None)  # as many files say
    assert len(lm.generate("a").token_ids[0]) == CONTEXT - 1
    assert lm.model.generation_config is lm.generation_config
    lm.generation_config.max_new_tokens = 3
    assert len(lm.generate("a").token_ids[0]) == 3
    assert len(lm.generate("a", max_length=9).token_ids[0]) == 8
    config = GenerationConfig(max_new_tokens=4)
    assert len(lm.generate("a", generation_config=config).token_ids[0]) == 4


def test_several_sequences_and_seeds(lm: LanguageModel) -> None:
    settings = {"do_sample": True, "num_return_sequences": 3, "seed": 1, "max_new_tokens": 8, "temperature": 2.0}
    result = lm.generate("hello", **settings)
    assert len(result.texts) == len(result.token_ids) == len(result.finish_reasons) == 3
    assert len(set(map(tuple, result.token_ids))) == 3
    assert result.token_ids == lm.generate("hello", **settings).token_ids


def test_what_else_can_come_back(lm: LanguageModel) -> None:
    settings = {"return_dict_in_generate": True, "output_scores": True, "logprobs": 2, "prompt_logprobs": 0}
    result = lm.generate(TEXTS, max_new_tokens=3, eos_token_id=None, **settings)
    assert len(result.output.scores) == 3 and result.output.scores[0].shape == (3, 160)
    assert result.output.sequences[0, -3:].tolist() == result.token_ids[0]
    for row in range(3):
        assert [told.token_id for told in result.logprobs[row]] == result.token_ids[row]
        assert [len(told.top) for told in result.logprobs[row]] == [2, 2, 2]
        ids = result.prompt_token_ids[row]
        assert [told and told.token_id for told in result.prompt_logprobs[row]] == [None, *ids[1:]]
        scores = result.output.scores[1][row]
        expected = torch.log_softmax(scores, -1)[result.token_ids[row][1]]
        assert result.logprobs[row][1].logprob == pytest.approx(float(expected), abs=1e-4)


def test_it_shows_what_it_is(lm: LanguageModel, folder: Path) -> None:
    assert repr(lm) == f"LanguageModel({str(folder)!r}, llama, torch.float32, cpu)"
    assert lm.device == torch.device("cpu") and lm.source == folder


def test_the_other_front_door_takes_it_too(lm: LanguageModel) -> None:
    ids = torch.tensor([lm.tokenizer.encode("hello")])
    found = unspool.generate(lm, ids, **dictate(lm, " the cat stop and a"), stop_strings="stop")
    assert lm.tokenizer.decode(found[0]) == "hello the cat stop"


# --- stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "stops", "trimmed", "kept"),
    [
        (" the cat stop and a", "stop", " the cat ", " the cat stop"),
        (" the cat stop and a", ["zzz", "t s"], " the ca", " the cat s"),
        (" the cat stop and a", ["at", "cat"], " the ", " the cat"),
        (" the cat stops", "stops", " the cat ", " the cat stops"),
        ("a\n\nb", "\n\n", "a", "a\n\n"),
        ("é€日", "€", "é", "é€"),
        (" the ca", "cat", " the ca", " the ca"),  # never completed: what was held back comes at the end
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_end_the_text_and_stay_in_the_tokens(
    lm: LanguageModel, written: str, stops: Any, trimmed: str, kept: str, is_streamed: bool
) -> None:
    for keep, expected in ((False, trimmed), (True, kept)):
        settings = dictate(lm, written, stop_strings=stops, keep_stop_strings=keep)
        if is_streamed:
            pieces = list(lm.stream("hello", **settings))
            text, ids = "".join(pieces), [token for piece in pieces for token in piece.token_ids]
            reason = pieces[-1].finish_reason
        else:
            result = lm.generate("hello", **settings)
            text, ids, reason = result.text, result.token_ids[0], result.finish_reasons[0]
        assert text == expected
        whole = lm.tokenizer.decode(ids, skip_special_tokens=True)
        if reason == "stop_string":
            assert whole.startswith(kept) and len(ids) <= len(lm.tokenizer.encode(written))
        else:
            assert reason == "eos" and whole == written


def test_stop_strings_end_each_row_on_its_own(lm: LanguageModel) -> None:
    rows = [lm.tokenizer.encode(text) for text in (" the stop a a a", "ing", " and the cat stop")]
    processor = Dictate(*rows, prompt_width=1)
    settings = {"logits_processor": [processor], "stop_strings": "stop", "max_new_tokens": 20}
    result = lm.generate(["hello", "a", "stop"], **settings)
    assert result.texts == [" the ", "ing", " and the cat "]
    assert result.finish_reasons == ["stop_string", "eos", "stop_string"]
    assert [lm.tokenizer.decode(ids) for ids in result.token_ids] == [" the stop", "ing</s>", " and the cat stop"]


# --- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["hello the world", "é€日😀", "a😀", " the cat\nstop\n", ""])
def test_pieces_join_to_the_text(lm: LanguageModel, written: str) -> None:
    pieces = list(lm.stream("hello", **dictate(lm, written)))
    assert all(isinstance(piece, Piece) and isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == written
    assert not any("\ufffd" in piece for piece in pieces)  # never half a character
    ids = [token for piece in pieces for token in piece.token_ids]
    assert ids == [*lm.tokenizer.encode(written), 2]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["eos"]
    assert {piece.row for piece in pieces} == {0}


def test_rows_of_a_batch_are_interleaved(lm: LanguageModel) -> None:
    pieces = list(lm.stream(TEXTS, max_new_tokens=6, logprobs=0, eos_token_id=None))
    result = lm.generate(TEXTS, max_new_tokens=6, logprobs=0, eos_token_id=None)
    for row in range(3):
        own = [piece for piece in pieces if piece.row == row]
        assert "".join(own) == result.texts[row]
        assert [token for piece in own for token in piece.token_ids] == result.token_ids[row]
        assert [told.logprob for piece in own for told in piece.logprobs] == [
            told.logprob for told in result.logprobs[row]
        ]
        assert own[-1].finish_reason == "length"
    order = [piece.row for piece in pieces]
    assert order != sorted(order)


def test_special_tokens_are_left_out_unless_asked_for(lm: LanguageModel) -> None:
    settings = dictate(lm, " the cat")
    assert lm.generate("hello", **settings).text == " the cat"
    assert lm.generate("hello", skip_special_tokens=False, **settings).text == " the cat</s>"


def test_closing_a_stream_stops_the_work(lm: LanguageModel, passes: list[int]) -> None:
    pieces = lm.stream("hello", **dictate(lm, " the cat stop and a"))
    assert passes == []
    assert [next(pieces), next(pieces)] == [" the", " cat"]
    assert len(passes) == 2
    pieces.close()
    assert len(passes) == 2


async def test_astream_is_stream(lm: LanguageModel) -> None:
    for prompt, settings in ((TEXTS, {"max_new_tokens": 6}), ("hello", dictate(lm, "a😀 stop b", stop_strings="p b"))):
        expected = list(lm.stream(prompt, **settings))
        found = [piece async for piece in lm.astream(prompt, **settings)]
        assert found == expected
        for name in ("row", "token_ids", "finish_reason"):
            assert [getattr(piece, name) for piece in found] == [getattr(piece, name) for piece in expected]


async def test_astream_tells_mistakes(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        async for _ in lm.astream(""):
            pass


async def test_cancelling_an_astream_stops_the_work(lm: LanguageModel, passes: list[int]) -> None:
    go, reached = threading.Event(), threading.Event()

    def hold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 3:
            reached.set()
            assert go.wait(10)
        return scores

    read: list[str] = []

    async def work() -> None:
        async for piece in lm.astream([5, 6], max_new_tokens=60, eos_token_id=None, logits_processor=[hold]):
            read.append(piece)

    task = asyncio.create_task(work())
    assert await asyncio.to_thread(reached.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(passes) == 2  # the step under way was the last
    await asyncio.sleep(0.05)
    assert len(passes) == 2 and len(read) <= 1


async def test_leaving_an_astream_stops_the_work(lm: LanguageModel, passes: list[int]) -> None:
    pieces = lm.astream("hello", **dictate(lm, " the cat stop and a"))
    assert await anext(pieces) == " the"
    await pieces.aclose()
    assert len(passes) == 1


async def test_one_astream_fails_and_the_others_are_stopped(lm: LanguageModel) -> None:
    """Whatever ends a program's tasks, and however often they are cancelled, streams end without a complaint."""
    complaints: list[Any] = []

    async def work(fails: bool) -> None:
        async for piece in lm.astream([5, 6], max_new_tokens=60, eos_token_id=None, do_sample=True):
            if fails and piece.token_ids:
                raise KeyError("mine")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await asyncio.gather(work(True), work(False), work(False))

    def run_all() -> None:
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(run())  # cancels what still runs, tasks and all, and closes what is left

    for _ in range(5):
        await asyncio.to_thread(run_all)
    assert complaints == []


async def test_an_astream_that_is_cancelled_twice_or_closed_twice(lm: LanguageModel) -> None:
    go, reached = threading.Event(), threading.Event()

    def hold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 3:
            reached.set()
            assert go.wait(10)
        return scores

    async def work() -> None:
        async for _ in lm.astream([5, 6], max_new_tokens=60, eos_token_id=None, logits_processor=[hold]):
            pass

    task = asyncio.create_task(work())
    assert await asyncio.to_thread(reached.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task  # though its thread still runs
    go.set()
    pieces = lm.astream("hello", max_new_tokens=5)
    await anext(pieces)
    for _ in range(2):
        await pieces.aclose()
    assert [piece async for piece in pieces] == []
    async for _ in lm.astream("hello", max_new_tokens=5):
        break
    assert len(lm.generate("hello", max_new_tokens=5).token_ids[0]) == 5


def test_a_text_that_ends_inside_a_character(lm: LanguageModel) -> None:
    settings = dictate(lm, "a€")
    assert lm.tokenizer is not None
    num_tokens = len(lm.tokenizer.encode("a€"))
    for most in range(1, num_tokens):
        told = {**settings, "max_new_tokens": most}
        result, pieces = lm.generate("hello", **told), list(lm.stream("hello", **told))
        assert result.text == "".join(pieces) == "a" and len(result.token_ids[0]) == most
        assert [token for piece in pieces for token in piece.token_ids] == result.token_ids[0]


# --- streamers ----------------------------------------------------------------------------------------------


def test_streamers_and_the_result(lm: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    settings = dictate(lm, " the cat stop and", stop_strings="stop")
    streamer = TextStreamer(lm.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = lm.generate("hello", streamer=streamer, **settings)
    assert capsys.readouterr().out == " the cat stop\n"  # a streamer sees tokens
    assert (result.text, result.finish_reasons) == (" the cat ", ["stop_string"])
    reader = TextIteratorStreamer(lm.tokenizer, timeout=10)
    thread = threading.Thread(
        target=lm.generate, args=("hello",), kwargs={"streamer": reader, **dictate(lm, " the cat")}
    )
    thread.start()
    assert "".join(reader) == "hello the cat</s>"
    thread.join()


def test_a_cancelled_result_says_so(lm: LanguageModel) -> None:
    from unspool.streaming import StreamCancelled

    class Enough:
        num = 0

        def put(self, value: torch.Tensor) -> None:
            self.num += 1
            if self.num == 3:
                raise StreamCancelled("enough")

        def end(self) -> None:
            pass

    result = lm.generate("hello", streamer=Enough(), **dictate(lm, " the cat stop"))
    assert (result.text, result.finish_reasons) == (" the cat", ["cancelled"])


# --- without a tokenizer ------------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_speaks_ids() -> None:
    lm = unspool.load(GOLDENS / "models" / "llama", device="cpu")
    assert lm.tokenizer is None
    result = lm.generate([5, 6, 7], max_new_tokens=4, eos_token_id=None)
    assert (result.texts, len(result.token_ids[0])) == ([""], 4)
    pieces = list(lm.stream([5, 6, 7], max_new_tokens=4, eos_token_id=None))
    assert [piece.token_ids for piece in pieces] == [[token] for token in result.token_ids[0]]  # each as it comes
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    for prompt in ("hello", CHAT):
        with pytest.raises(InputError, match="came without one; pass token ids"):
            lm.generate(prompt)
    with pytest.raises(SettingError, match="tokenizer"):
        lm.generate([5, 6], stop_strings="x")


def test_an_encoder_decoder_by_ids() -> None:
    lm = unspool.load(GOLDENS / "models" / "t5", device="cpu")
    rows = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    result = lm.generate(rows, max_new_tokens=5)
    assert result.prompt_token_ids == rows
    for row, ids in enumerate(rows):
        assert lm.generate(ids, max_new_tokens=5).token_ids[0] == result.token_ids[row]
    assert result.stats.prompt_tokens == 9


def test_a_pad_token_that_is_none(lm: LanguageModel) -> None:
    """Some files say -1: rows are filled with something all the same."""
    expected = lm.generate(TEXTS, max_new_tokens=4).token_ids
    lm.generation_config.pad_token_id = -1
    assert lm.generate(TEXTS, max_new_tokens=4).token_ids == expected


def test_pieces_are_strings() -> None:
    piece = Piece("abc", 2, [1, 2], "eos")
    assert piece == "abc" and piece.upper() == "ABC"
    assert (piece.row, piece.token_ids, piece.finish_reason, piece.logprobs) == (2, [1, 2], "eos", [])


# --- guidance and DoLa --------------------------------------------------------------------------------------


def test_a_negative_prompt_of_any_kind(lm: LanguageModel, passes: list[int]) -> None:
    settings = {"guidance_scale": 2.0, "max_new_tokens": 6}
    ids = lm.encode("a stop")
    expected = lm.generate(TEXTS, negative_prompt="a stop", **settings).token_ids
    assert passes[0] == 2 * len(TEXTS) >= max(passes)
    assert expected != lm.generate(TEXTS, max_new_tokens=6).token_ids
    for negative in (["a stop"] * 3, ids[0], ids * 3, torch.tensor(ids)):
        assert lm.generate(TEXTS, negative_prompt=negative, **settings).token_ids == expected
    assert lm.generate(TEXTS, negative_prompt_ids=ids, **settings).token_ids == expected
    mixed = lm.generate(TEXTS, negative_prompt=["a", "hello the cat and", "stop"], **settings).token_ids
    for row, (text, negative) in enumerate(zip(TEXTS, ["a", "hello the cat and", "stop"], strict=True)):
        assert lm.generate(text, negative_prompt=negative, **settings).token_ids == [mixed[row]]
        assert "".join(lm.stream(text, negative_prompt=negative, **settings)) == lm.tokenizer.decode(
            mixed[row], skip_special_tokens=True
        )
    chat = lm.generate(CHAT, negative_prompt=[{"role": "user", "content": "a"}], **settings).token_ids
    assert chat == lm.generate("hello", negative_prompt="a", chat=True, **settings).token_ids


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"negative_prompt": "a"}, "add guidance_scale"),
        ({"negative_prompt": "", "guidance_scale": 2.0}, "empty"),
        ({"negative_prompt": ["a", "b"], "guidance_scale": 2.0}, "2 rows for 3 prompts"),
        ({"negative_prompt": "a", "negative_prompt_ids": [[1]], "guidance_scale": 2.0}, "the same thing twice"),
        ({"negative_prompt": 3, "guidance_scale": 2.0}, "a prompt is text"),
    ],
)
def test_negative_prompts_that_can_not_be(
    lm: LanguageModel, passes: list[int], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnspoolError, match=told):
        lm.generate(TEXTS, **settings)
    assert passes == []


def test_dola_chooses_a_layer_for_every_text(lm: LanguageModel) -> None:
    settings = {"dola_layers": [0, 1, 2, 3], "max_new_tokens": 8, "repetition_penalty": 1.2}
    together = lm.generate(TEXTS, **settings)
    for row, text in enumerate(TEXTS):
        alone = lm.generate(text, **settings)
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.dola_layers == [together.dola_layers[row]]
        assert len(alone.dola_layers[0]) == len(alone.token_ids[0])
    assert len({layer for row in together.dola_layers for layer in row}) > 1
    assert lm.generate(TEXTS, max_new_tokens=2).dola_layers is None


def test_none_is_a_word_for_plain_numbers_too() -> None:
    assert _read_quantize("none", False, False) is None
    assert _read_quantize("auto", False, True) == "int4"
