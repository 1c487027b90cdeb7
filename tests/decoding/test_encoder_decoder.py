"""Encoder-decoders: the source is read once, rows may be ragged, and the decoder's prompt is its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conformance.cases import GOLDENS, load_model
from tests.fakes import FakeEncoderDecoder, FakeModel, decode_slowly, pad_left
from unspool import DynamicCache, EncoderDecoderCache, GenerateEncoderDecoderOutput, generate
from unspool.errors import InputError, SettingError

SOURCES = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
START = 1
NEW = 6


def make_model(**info: Any) -> FakeEncoderDecoder:
    return FakeEncoderDecoder(**info)


def pad_right(rows: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = [row + [pad] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def expect(model: FakeEncoderDecoder, prompts: list[list[int]], num_new: int = NEW, eos: Any = ()) -> list[list[int]]:
    return [
        prompt + decode_slowly(model, prompt, num_new, eos, source=source)
        for prompt, source in zip(prompts, SOURCES, strict=True)
    ]


def run(model: FakeEncoderDecoder, **settings: Any) -> Any:
    return generate(model, **{"decoder_start_token_id": START, "max_new_tokens": NEW, **settings})


@pytest.mark.parametrize("pad", [pad_left, pad_right])
@pytest.mark.parametrize(
    "way",
    [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 1}],
    ids=str,
)
def test_ragged_sources_equal_the_slow_loop(pad: Any, way: dict[str, Any]) -> None:
    model = make_model()
    found = run(model, **pad(SOURCES), **way)
    assert found.tolist() == expect(model, [[START]] * 3)
    assert model.num_encodings == 1


def test_rows_leave_with_their_source() -> None:
    model = make_model()
    eos = [expect(model, [[START]] * 3)[1][3]]
    assert len({len(row) for row in expect(model, [[START]] * 3, eos=eos)}) > 1, "choose another end"
    found = run(model, **pad_right(SOURCES), eos_token_id=eos, pad_token_id=0)
    expected = expect(model, [[START]] * 3, eos=eos)
    longest = max(map(len, expected))
    assert found.tolist() == [row + [0] * (longest - len(row)) for row in expected]
    assert min(model.rows_of_passes) < 3


def test_several_sequences_encode_once() -> None:
    model = make_model()
    settings = {"do_sample": True, "top_k": 0, "temperature": 2.0, "seed": [1, 2, 3], "num_return_sequences": 2}
    found = run(model, **pad_right(SOURCES), **settings)
    assert (found.shape, model.num_encodings) == ((6, NEW + 1), 1)
    for row, source in enumerate(SOURCES):
        alone = run(make_model(), input_ids=[source], **settings | {"seed": row + 1})
        assert alone.tolist() == found[2 * row : 2 * row + 2].tolist()


def test_padding_is_known_by_its_token_without_a_mask() -> None:
    model = make_model()
    for pad in (pad_left, pad_right):
        found = run(model, input_ids=pad(SOURCES)["input_ids"], pad_token_id=0)
        assert found.tolist() == expect(model, [[START]] * 3)


def test_states_and_embeddings_stand_for_the_source() -> None:
    model = make_model()
    given = pad_left(SOURCES)
    states, mask = model.embed(given["input_ids"]), given["attention_mask"]
    expected = expect(model, [[START]] * 3)
    assert run(model, inputs_embeds=states, attention_mask=mask).tolist() == expected
    assert model.num_encodings == 1
    for outputs in (states, (states,), SimpleNamespace(last_hidden_state=states)):
        assert run(model, encoder_outputs=outputs, attention_mask=mask).tolist() == expected
    assert model.num_encodings == 1


def test_a_draft_model_reads_the_states_that_stand_beside_a_cache() -> None:
    """With a cache the model encodes nothing, and the model that drafts for it needs the source all the same."""
    model, asked = make_model(), {"max_new_tokens": 4, "return_dict_in_generate": True}
    states = {"encoder_outputs": model.embed(torch.tensor(SOURCES[:1]))}
    first = run(model, **states, **asked)
    text = torch.cat((first.sequences, torch.tensor([[5]])), dim=1)
    expected = run(model, **states, decoder_input_ids=text)
    drafted = {"assistant_model": model, "past_key_values": first.past_key_values, **asked}
    found = run(model, **states, **drafted, decoder_input_ids=text)
    assert found.sequences.tolist() == expected[:, : found.sequences.shape[1]].tolist()
    assert sum(found.speculation.accepted) > 0 and model.num_encodings == 0


# --- the decoder's prompt -----------------------------------------------------------------------------------


def test_the_start_token_may_differ_by_row_and_fall_back() -> None:
    model = make_model()
    source = pad_right(SOURCES)
    assert run(model, **source, decoder_start_token_id=[2, 3, 4]).tolist() == expect(model, [[2], [3], [4]])
    without = run(model, **source, decoder_start_token_id=None, bos_token_id=3)
    assert without.tolist() == expect(model, [[3]] * 3)
    with pytest.raises(SettingError, match="pass decoder_start_token_id"):
        run(model, **source, decoder_start_token_id=None)
    with pytest.raises(SettingError, match="2 values for 3 rows"):
        run(model, **source, decoder_start_token_id=[1, 2])


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([[START, 4], [START, 5], [START, 6]], [[START, 4], [START, 5], [START, 6]]),
        ([[3, 4], [3, 5], [3, 6]], [[START, 3, 4], [START, 3, 5], [START, 3, 6]]),
        # As in the reference: where one row begins with the start token, none is changed.
        ([[START, 4], [3, 5], [3, 6]], [[START, 4], [3, 5], [3, 6]]),
    ],
)
def test_a_decoder_prompt_begins_with_the_start_token(given: list[list[int]], taken: list[list[int]]) -> None:
    model = make_model()
    assert run(model, **pad_right(SOURCES), decoder_input_ids=given).tolist() == expect(model, taken)
    assert model.num_tokens_read == sum(map(len, taken)) + 3 * (NEW - 1)


def test_max_length_counts_the_decoders_tokens() -> None:
    assert run(make_model(), **pad_right(SOURCES), max_new_tokens=None, max_length=4).shape == (3, 4)


# --- what comes back ----------------------------------------------------------------------------------------


def test_an_output_has_both_sides() -> None:
    model = make_model()
    output = run(
        model,
        **pad_right(SOURCES),
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        output_scores=True,
        logprobs=0,
    )
    assert isinstance(output, GenerateEncoderDecoderOutput)
    assert output.sequences.tolist() == expect(model, [[START]] * 3)
    assert output.encoder_hidden_states[0].shape == (3, 5, 4)
    assert output.encoder_attentions[0].shape == (3, 1, 5, 5)
    assert [layers[0].shape for layers in output.decoder_hidden_states] == [(3, 1, 4)] * NEW
    assert [layers[0].shape for layers in output.decoder_attentions] == [(3, 1, 1, n + 1) for n in range(NEW)]
    for layers in output.cross_attentions:
        for row, source in enumerate(SOURCES):
            near = [1 / (place + 1) for place in range(len(source))]
            assert layers[0][row, 0, 0].tolist() == pytest.approx(near + [0.0] * (5 - len(source)))
    for row, source in enumerate(SOURCES):
        ids = output.sequences[row].tolist()
        torch.testing.assert_close(output.scores[2][row], model.score(ids[:3], source=source))
        expected = torch.log_softmax(model.score(ids[:3], source=source), -1)[ids[3]]
        assert output.logprobs[row][2].logprob == pytest.approx(float(expected), abs=1e-4)


def test_a_second_call_goes_on_with_the_cache() -> None:
    model = make_model()
    first = run(model, **pad_right(SOURCES), return_dict_in_generate=True)
    assert isinstance(first.past_key_values, EncoderDecoderCache)
    longer = torch.cat((first.sequences, torch.tensor([[4], [5], [6]])), dim=1)
    model.num_tokens_read = 0
    found = run(model, **pad_right(SOURCES), decoder_input_ids=longer, past_key_values=first.past_key_values)
    assert found.tolist() == expect(model, longer.tolist())
    assert (model.num_encodings, model.num_tokens_read) == (1, 3 * 2 + 3 * (NEW - 1))


def test_tuples_are_taken_back() -> None:
    model = make_model()
    sources = {"input_ids": [[5, 6, 7], [8, 9, 10]]}
    legacy = {"return_dict_in_generate": True, "return_legacy_cache": True}
    first = run(model, **sources, **legacy)
    assert [len(layer) for layer in first.past_key_values] == [4]
    found = run(model, **sources, decoder_input_ids=first.sequences, past_key_values=first.past_key_values)
    whole = run(make_model(), **sources, max_new_tokens=2 * NEW)
    assert torch.equal(found, whole)
    with pytest.raises(SettingError, match="can't hold rows of different lengths"):
        run(model, **pad_right(SOURCES), **legacy)


# --- what can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"bos_token_id": None}, "no prompt was given"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[0, 0, 0]]}, "row 0 is empty"),
        ({"input_ids": [[0, 0]], "pad_token_id": 0}, "row 0 is empty"),
        ({"input_ids": [[1, 2]], "decoder_input_ids": [[1], [2]]}, "2 rows and the encoder's input 1"),
        ({"input_ids": [[1, 2]], "decoder_input_ids": [[99]]}, "decoder_input_ids holds the id 99"),
        ({"encoder_outputs": {"states": 1}}, "encoder_outputs must be a floating-point tensor"),
        ({"encoder_outputs": ()}, "encoder_outputs must be a floating-point tensor"),
    ],
)
def test_bad_inputs_are_refused_before_any_work(arguments: dict[str, Any], told: str) -> None:
    model = make_model()
    with pytest.raises(InputError, match=told):
        run(model, **arguments)
    assert model.num_encodings == model.num_passes == 0


def test_a_cache_without_a_source_is_refused() -> None:
    empty = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(SettingError, match="nothing of the encoder's states"):
        run(make_model(), input_ids=[[1, 2]], past_key_values=empty)
    with pytest.raises(SettingError, match="decodes with a EncoderDecoderCache"):
        run(make_model(), input_ids=[[1, 2]], past_key_values=DynamicCache())
    with pytest.raises(SettingError, match="not predicted token by token"):
        run(make_model(), input_ids=[[1, 2]], prompt_logprobs=1, return_dict_in_generate=True)
    with pytest.raises(InputError, match="has no encoder"):
        generate(FakeModel(), encoder_outputs=torch.zeros(1, 2, 4))


# --- a real one beside the reference ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(GOLDENS / "models" / "t5").eval()


@pytest.mark.parametrize("has_mask", [True, False])  # without one, padding is known by its token, as in 4.52
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decoder_input_ids": [[0, 7], [0, 8], [0, 9]]},
        {"decoder_input_ids": [[4, 7], [5, 8], [6, 9]]},
        {"decoder_input_ids": [[0, 7], [5, 8], [6, 9]]},
    ],
    ids=str,
)
def test_t5_equals_the_reference(reference: Any, settings: dict[str, Any], has_mask: bool) -> None:
    given = pad_right(SOURCES)
    arguments = {name: torch.tensor(value) for name, value in settings.items()}
    options = {"max_new_tokens": 5, "do_sample": False}
    theirs = reference.generate(**given, **arguments, **options)
    lm = load_model("t5")
    mine = generate(lm, **(given if has_mask else {"input_ids": given["input_ids"]}), **arguments, **options)
    assert torch.equal(mine, theirs)


def test_processors_see_a_source_as_it_was_given() -> None:
    """What stands in masked columns counts, as in the reference; the pad token does not take its place."""
    model = make_model()
    given = pad_right(SOURCES[:2])
    [first] = run(model, **{name: rows[:1] for name, rows in given.items()}, max_new_tokens=1)[0, 1:].tolist()
    other = pad_right(SOURCES[:2], pad=first)
    for pad_token_id in (0, first, 9):
        settings = {"max_new_tokens": 1, "encoder_no_repeat_ngram_size": 1, "pad_token_id": pad_token_id}
        assert run(model, **given, **settings)[0, 1] == first
        assert run(model, **other, **settings)[0, 1] != first
