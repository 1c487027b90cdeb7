"""What a call returns beside the tokens, in the reference's left-padded arrangement."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import GOLDENS, load_model
from tests.fakes import FakeModel, decode_slowly, pad_left
from unspool import DynamicCache, GenerateDecoderOnlyOutput, generate
from unspool.decoding.prompt_logprobs import CHUNK as PROMPT_LOGPROBS_CHUNK
from unspool.errors import SettingError, UnsupportedError

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


# --- beside the reference, on a real model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(GOLDENS / "models" / "llama", attn_implementation="eager")
    return model.eval()


@pytest.mark.parametrize("width", [5, 7])
@pytest.mark.parametrize("use_cache", [True, False])
def test_states_stand_where_the_reference_has_them(reference: Any, width: int, use_cache: bool) -> None:
    given = pad_left(ROWS, width=width)
    settings = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache, "eos_token_id": None} | EVERYTHING
    theirs = reference.generate(**given, **settings)
    mine = generate(load_model("llama").model, **given, **settings)
    assert isinstance(mine, GenerateDecoderOnlyOutput)
    assert torch.equal(mine.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert len(mine[name]) == 4
        for found, expected in zip(mine[name], theirs[name], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    columns = torch.arange(width + 4)
    for step in range(4):
        is_real = columns >= width - torch.tensor([[3], [5], [1]])  # (rows, columns)
        is_query = is_real[:, width + step - mine.hidden_states[step][0].shape[1] : width + step]
        for found, expected in zip(mine.hidden_states[step], theirs.hidden_states[step], strict=True):
            assert found.shape == expected.shape
            torch.testing.assert_close(found[is_query], expected[is_query], atol=1e-4, rtol=0)
            assert not found[~is_query].any()
        for found, expected in zip(mine.attentions[step], theirs.attentions[step], strict=True):
            assert found.shape == expected.shape
            found, expected = (weights.transpose(1, 2)[is_query] for weights in (found, expected))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("is_embedded", [False, True])
def test_states_of_prompts_with_holes_stand_in_the_columns_that_were_given(
    reference: Any, beams: int, is_embedded: bool
) -> None:
    ids = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12], [13, 14, 15, 16, 17]])
    mask = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 0, 1, 1], [0, 1, 1, 1, 1]])
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if is_embedded:
        given = {"inputs_embeds": reference.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "num_beams": beams} | EVERYTHING
    theirs = reference.generate(**given, **settings)
    mine = generate(load_model("llama").model, **given, **settings)
    assert torch.equal(mine.sequences, theirs.sequences)
    for step in range(3):
        is_real = mask.bool() if step == 0 else torch.ones(3, 1, dtype=torch.bool)
        is_real = is_real.repeat_interleave(beams, dim=0)
        for found, expected in zip(mine.hidden_states[step], theirs.hidden_states[step], strict=True):
            assert found.shape == expected.shape
            torch.testing.assert_close(found[is_real], expected[is_real], atol=1e-4, rtol=0)
        for found, expected in zip(mine.attentions[step], theirs.attentions[step], strict=True):
            assert found.shape == expected.shape
            found, expected = (weights.transpose(1, 2)[is_real] for weights in (found, expected))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_padding_of_embeddings_alone_has_columns(reference: Any) -> None:
    ids, mask = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1]])
    given = {"inputs_embeds": reference.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    settings = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None} | EVERYTHING
    theirs = reference.generate(**given, **settings)
    mine = generate(load_model("llama").model, **given, **settings)
    for step in range(2):
        assert mine.hidden_states[step][0].shape == theirs.hidden_states[step][0].shape
        torch.testing.assert_close(mine.attentions[step][0][:, :, -1], theirs.attentions[step][0][:, :, -1])


# --- on the fake, where every number is known ---------------------------------------------------------------


def test_every_number_is_where_it_belongs() -> None:
    model = FakeModel()
    given = pad_left(ROWS, width=6)
    output = generate(model, **given, max_new_tokens=3, **EVERYTHING)
    embedded = model.embed(output.sequences).clone()
    embedded[:, :6][given["attention_mask"] == 0] = 0
    for step in range(3):
        first = 0 if step == 0 else 5 + step
        states = output.hidden_states[step]
        assert torch.equal(states[0], embedded[:, first : 6 + step])
        weights = output.attentions[step][0]  # (rows, heads, new, keys)
        assert weights.shape == (3, 1, 6 if step == 0 else 1, 6 + step)
        for row, ids in enumerate(ROWS):
            pads = 6 - len(ids)
            for query in range(max(pads, first), 6 + step):
                expected = [0.0] * pads + [0.5 ** (query - key) for key in range(pads, query + 1)]
                assert weights[row, 0, query - first].tolist() == expected + [0.0] * (6 + step - len(expected))
            assert not weights[row, 0, : max(0, pads - first)].any()


def test_ragged_embeddings_alone_are_left_padded_too() -> None:
    model = FakeModel()
    given = pad_left(ROWS)
    from_ids = generate(model, **given, max_new_tokens=3, **EVERYTHING)
    output = generate(
        model,
        inputs_embeds=model.embed(given["input_ids"]),
        attention_mask=given["attention_mask"],
        max_new_tokens=3,
        **EVERYTHING,
    )
    for name in ("hidden_states", "attentions"):
        for mine, theirs in zip(output[name], from_ids[name], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_states_of_a_second_turn_are_those_of_its_new_tokens() -> None:
    model = FakeModel()
    cache = DynamicCache()
    first = generate(model, **pad_left(ROWS), past_key_values=cache, max_new_tokens=2, return_dict_in_generate=True)
    rows = [row + first.sequences[i, 5:].tolist() + [7] * i for i, row in enumerate(ROWS)]  # 5, 8, 5 tokens
    given = pad_left(rows)
    held = [4, 6, 2]
    output = generate(model, **given, past_key_values=cache, max_new_tokens=1, **EVERYTHING)
    states, weights = output.hidden_states[0][0], output.attentions[0][0]
    assert states.shape == (3, 3, 4) and weights.shape[:3] == (3, 1, 3)
    for row, ids in enumerate(rows):
        unread = ids[held[row] :]
        assert states[row, :, 0].tolist() == [0.0] * (3 - len(unread)) + [float(token) for token in unread]
        last = weights[row, 0, -1].tolist()
        assert last[8 - len(ids) : 8] == [0.5 ** (len(ids) - 1 - key) for key in range(len(ids))]


def test_several_sequences_each_have_their_own() -> None:
    model = FakeModel()
    settings = {"do_sample": True, "top_k": 0, "seed": [1, 2, 3], "temperature": 2.0, "num_return_sequences": 2}
    output = generate(model, **pad_left(ROWS), max_new_tokens=3, **settings, **EVERYTHING)
    assert output.sequences.shape == (6, 8)
    for step in range(3):
        for row in range(6):
            ids = ROWS[row // 2] + output.sequences[row, 5 : 5 + step].tolist()
            torch.testing.assert_close(output.logits[step][row], model.score(ids))
            assert output.hidden_states[step][0][row, -1, 0] == ids[-1]
        assert output.attentions[step][0].shape == (6, 1, 5 if step == 0 else 1, 5 + step)


def test_what_is_not_asked_for_is_absent() -> None:
    output = generate(FakeModel(), [[1, 2]], max_new_tokens=2, return_dict_in_generate=True)
    assert list(output) == ["sequences", "past_key_values"]
    without = generate(FakeModel(), [[1, 2]], max_new_tokens=2, return_dict_in_generate=True, use_cache=False)
    assert list(without) == ["sequences"]


# --- log-probabilities --------------------------------------------------------------------------------------


def known(model: FakeModel, ids: list[int], token: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    logprobs = torch.log_softmax(model.score(ids), -1)
    top = logprobs.topk(num_top)
    return float(logprobs[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def check(told: Any, model: FakeModel, before: list[int], token: int, num_top: int) -> None:
    logprob, top = known(model, before, token, num_top)
    assert told.token_id == token
    assert told.logprob == pytest.approx(logprob, abs=1e-4)
    assert [one for one, _ in told.top] == [one for one, _ in top]
    assert [value for _, value in told.top] == pytest.approx([value for _, value in top], abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 1, 5])
@pytest.mark.parametrize("is_output", [True, False])
def test_logprobs_of_new_tokens(num_top: int, is_output: bool) -> None:
    """The model's own, whatever processors say; an entry for each token a row got, the end token included."""
    model = FakeModel()
    eos = [decode_slowly(model, ROWS[0], 3)[2]]
    settings = {"max_new_tokens": 6, "eos_token_id": eos, "pad_token_id": 0, "logprobs": num_top}
    if is_output:
        told = generate(model, **pad_left(ROWS), return_dict_in_generate=True, **settings).logprobs
    else:
        from unspool import stream

        told = [[], [], []]
        for emitted in stream(model, **pad_left(ROWS), **settings):
            for row, tokens in emitted.logprobs.items():
                told[row] += tokens
    for row, ids in enumerate(ROWS):
        new = decode_slowly(model, ids, 6, eos)
        assert len(told[row]) == len(new)
        for step, token in enumerate(new):
            check(told[row][step], model, ids + new[:step], token, num_top)


def test_logprobs_under_sampling_are_those_before_the_warpers() -> None:
    model = FakeModel()
    output = generate(
        model,
        **pad_left(ROWS),
        max_new_tokens=4,
        do_sample=True,
        temperature=3.0,
        top_k=2,
        seed=1,
        logprobs=3,
        return_dict_in_generate=True,
    )
    for row, ids in enumerate(ROWS):
        new = output.sequences[row, 5:].tolist()
        for step, token in enumerate(new):
            check(output.logprobs[row][step], model, ids + new[:step], token, 3)


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    output = generate(FakeModel(), [[1, 2]], max_new_tokens=1, logprobs=1000, return_dict_in_generate=True)
    assert len(output.logprobs[0][0].top) == 23


LONG = [(5 * place + 3) % 23 for place in range(2 * PROMPT_LOGPROBS_CHUNK + 9)]


@pytest.mark.parametrize(
    "way", [{}, {"prefill_chunk_size": 7}, {"prefill_chunk_size": 500}, {"use_cache": False}], ids=str
)
@pytest.mark.parametrize(
    "rows",
    [ROWS, [LONG, LONG[:PROMPT_LOGPROBS_CHUNK], LONG[3 : PROMPT_LOGPROBS_CHUNK + 4], [1]], [[1], [2]]],
    ids=["short", "long", "one token"],
)
def test_logprobs_of_the_prompt(rows: list[list[int]], way: dict[str, Any]) -> None:
    model = FakeModel()
    output = generate(model, **pad_left(rows), max_new_tokens=3, prompt_logprobs=2, return_dict_in_generate=True, **way)
    width = max(map(len, rows))
    assert output.sequences[:, width:].tolist() == [decode_slowly(model, row, 3) for row in rows]
    for row, told in zip(rows, output.prompt_logprobs, strict=True):
        assert len(told) == len(row) and told[0] is None  # nothing comes before the first token
        for place in range(1, len(row)):
            check(told[place], model, row[:place], row[place], 2)
    if not way:
        assert model.num_tokens_read == sum(map(len, rows)) + 2 * len(rows)  # once, in spite of the telling


def test_logprobs_of_the_prompt_come_once_a_prompt() -> None:
    output = generate(
        FakeModel(),
        **pad_left(ROWS),
        max_new_tokens=2,
        do_sample=True,
        num_return_sequences=3,
        prompt_logprobs=0,
        return_dict_in_generate=True,
    )
    assert [len(told) for told in output.prompt_logprobs] == [3, 5, 1]


# --- what can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_need_something_to_carry_them(name: str) -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match="add `return_dict_in_generate=True`"):
        generate(model, [[1, 2]], **{name: 1})
    assert model.num_passes == 0


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_states_a_model_can_not_return(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"`{name}` was asked for, and this fake model can't"):
        generate(FakeModel(can=frozenset()), [[1, 2]], return_dict_in_generate=True, **{name: True})
    for pieces in ("prefill_chunk_size", "prompt_logprobs"):
        with pytest.raises(SettingError, match=f"`{pieces}` reads the prompt in pieces and `{name}`"):
            generate(FakeModel(), [[1, 2]], return_dict_in_generate=True, **{name: True, pieces: 2})


def test_prompt_logprobs_need_tokens() -> None:
    with pytest.raises(SettingError, match="inputs_embeds have no tokens"):
        generate(FakeModel(), inputs_embeds=torch.zeros(1, 2, 4), prompt_logprobs=1, return_dict_in_generate=True)
