"""What an object that runs natively returns as its cache is what transformers' own forward would have written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.fuzz.beside.families import DECODERS, PAIRS, STATES
from tests.fuzz.beside.models import make, make_again

import unspool
from unspool.models.adapters.description import describe, describe_loosely

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
IDS = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 12, 13, 14]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
ASKED = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
ENDLESS = {"eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("name", sorted({*DECODERS, *PAIRS} - {*STATES, "openai_gpt"}))
def test_keys_are_those_of_the_objects_own_forward(name: str) -> None:
    """Of what both hold: a window's layers forget in transformers, and sources stand right-filled in ours."""
    mask = MASK.flip(1) if name in PAIRS else MASK
    asked: dict[str, Any] = {**ASKED, **ENDLESS, "attention_mask": mask}
    ids = IDS.flip(1) if name in PAIRS else IDS
    theirs = make(name, 0, "eager").generate(ids, **asked)
    ours = unspool.generate(make_again(name, 0, "eager"), ids, **asked)
    assert torch.equal(theirs.sequences, ours.sequences)
    expected, found = theirs.past_key_values, ours.past_key_values
    assert isinstance(found, type(expected)) and found.get_seq_length() == expected.get_seq_length()
    if name in PAIRS:
        expected, found = expected.self_attention_cache, found.self_attention_cache
    for one, other in zip(expected.layers, found.layers, strict=True):
        for mine, its in ((one.keys, other.keys), (one.values, other.values)):
            assert mine.shape[:2] == its.shape[:2] and mine.shape[3] == its.shape[3]
            held = min(mine.shape[2], its.shape[2])
            assert torch.allclose(mine[0, :, -held:], its[0, :, -held:], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}], ids=["", "drafts"])
@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2", "falcon", "opt", "exaone4", "doge"])
def test_rows_that_ended_hold_their_padding(name: str, drafts: dict[str, Any]) -> None:
    """A caller may go on with a mask of ones over it, as transformers' own cache lets them."""
    first = make(name, 0, "eager").generate(IDS, **{**ASKED, **ENDLESS, "max_new_tokens": 1}).sequences[1, -1]
    asked: dict[str, Any] = {**ASKED, "eos_token_id": int(first), "pad_token_id": 0}  # the second row ends at once
    outputs = [
        make(name, 0, "eager").generate(IDS, **asked),
        unspool.generate(make_again(name, 0, "eager"), IDS, **asked, **drafts),
    ]
    assert outputs[0].sequences[1, -1] == 0
    texts = [torch.cat((output.sequences, torch.tensor([[21, 22], [23, 24]])), dim=1) for output in outputs]
    mask = torch.cat((MASK, torch.ones(2, texts[0].shape[1] - MASK.shape[1], dtype=torch.long)), dim=1)
    again = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **ENDLESS}
    theirs = make(name, 0, "eager").generate(texts[0], past_key_values=outputs[0].past_key_values, **again)
    ours = unspool.generate(make_again(name, 0, "eager"), texts[1], past_key_values=outputs[1].past_key_values, **again)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama4", "mistral", "exaone4"])
def test_rows_of_a_contrastive_search_that_ended_hold_their_padding(name: str) -> None:
    """And not the candidates that they would have gone on with."""
    model = make_again(name, 0, "eager")
    method: dict[str, Any] = {"penalty_alpha": 0.4, "top_k": 3, "attention_mask": MASK, "pad_token_id": 0}
    first = unspool.generate(model, IDS, **method, eos_token_id=None, max_new_tokens=2)[1, -1]
    told = {**method, "eos_token_id": int(first), "max_new_tokens": 7, "return_dict_in_generate": True}
    output = unspool.generate(model, IDS, **told)
    assert output.sequences[1, -1] == 0 != output.sequences[0, -1]
    text = torch.cat((output.sequences, torch.tensor([[21, 22], [23, 24]])), dim=1)
    mask = torch.cat((MASK, torch.ones(2, text.shape[1] - MASK.shape[1], dtype=torch.long)), dim=1)
    again = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **ENDLESS}
    found = unspool.generate(model, text, past_key_values=output.past_key_values, **again)
    assert torch.equal(found, unspool.generate(model, text, **again))


def end_second_row(
    theirs: Any, ours: Any, ids: torch.Tensor, columns: slice, *, is_native: bool
) -> tuple[dict[str, Any], Any, Any]:
    """What a pair is asked for if its second row ends first, at a token of `columns`; transformers' answer, and ours,
    which is the same, keys in all columns included."""
    asked: dict[str, Any] = {**ASKED, **ENDLESS, "attention_mask": MASK.flip(1), "max_new_tokens": 7}
    free = theirs.generate(ids, **asked).sequences
    asked["eos_token_id"] = next(token for token in free[1, columns].tolist() if token not in free[0].tolist())
    expected, found = theirs.generate(ids, **asked), unspool.generate(ours, ids, **asked, native=is_native)
    assert torch.equal(expected.sequences, found.sequences) and expected.sequences[1, -1] == 0
    layers = (output.past_key_values.self_attention_cache.layers for output in (expected, found))
    for one, other in zip(*layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=2e-3, rtol=2e-3)
        assert torch.allclose(one.values, other.values, atol=2e-3, rtol=2e-3)
    return asked, expected, found


def go_on_behind(output: Any) -> torch.Tensor:
    """The answer's texts with two tokens of the caller's behind them."""
    return torch.cat((output.sequences, torch.tensor([[21, 22], [23, 24]])), dim=1)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "forward"])
@pytest.mark.parametrize("name", ["t5", "bart", "blenderbot", "mt5", "longt5", "pegasus_x"])
def test_rows_of_a_pair_that_ended_hold_their_padding(name: str, is_native: bool) -> None:
    """Keys are transformers' in every column, and a further turn over them writes what reading all anew does."""
    theirs, ours = make(name, 0, "eager"), make_again(name, 0, "eager")
    ids = IDS.flip(1)
    asked, _, found = end_second_row(theirs, ours, ids, slice(1, 4), is_native=is_native)
    again = {**asked, **ENDLESS, "decoder_input_ids": go_on_behind(found)}
    continued = unspool.generate(ours, ids, past_key_values=found.past_key_values, **again, native=is_native)
    assert torch.equal(continued.sequences, theirs.generate(ids, **again).sequences)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "forward"])
@pytest.mark.parametrize("seed", range(3))
def test_texts_with_tokens_that_have_no_position(seed: int, is_native: bool) -> None:
    """M2M-100 makes positions of the tokens themselves: padding has none, nor does it count in a pass, but in a cache.

    Without a mask transformers' own turn over a cache masks nothing, so it is given one of ones, which means the same.
    """
    theirs, ours = make("m2m_100", seed, "eager"), make_again("m2m_100", seed, "eager")
    ids = IDS.flip(1)
    asked, expected, found = end_second_row(theirs, ours, ids, slice(2, None), is_native=is_native)
    text = go_on_behind(found)
    again = {**asked, **ENDLESS, "decoder_input_ids": text}
    anew = unspool.generate(ours, ids, **again, native=is_native)
    assert torch.equal(anew.sequences, theirs.generate(ids, **again).sequences)
    ones = {"decoder_attention_mask": torch.ones_like(text)}
    continued = theirs.generate(ids, past_key_values=expected.past_key_values, **again, **ones)
    output = unspool.generate(ours, ids, past_key_values=found.past_key_values, **again, native=is_native)
    assert torch.equal(output.sequences, continued.sequences)
    one = unspool.generate(ours, ids[:1], **{**asked, "attention_mask": None}, native=is_native)
    assert (one.stats.path == found.stats.path) != is_native  # one text has no padding behind its end


@pytest.mark.parametrize("ends", [False, True], ids=["all go on", "one ends"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "falcon", "qwen3"])
def test_a_given_cache_holds_no_columns_of_drafts_that_one_row_refused(name: str, seed: int, ends: bool) -> None:
    """Rows take different numbers of drafted tokens, and their keys stand in the columns of their texts."""
    model = make_again(name, 0, "eager")
    ids = torch.randint(5, 8, (2, 8), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([[1] * 8, [0] * 3 + [1] * 5])
    asked: dict[str, Any] = {**ASKED, **ENDLESS, "attention_mask": mask, "max_new_tokens": 12}
    asked["suppress_tokens"] = [token for token in range(97) if not 5 <= token <= 8]  # so that guesses are found
    if ends:
        asked["stopping_criteria"] = [lambda text, scores, **_: torch.tensor([False, text.shape[1] > 12])]
    plain, drafted = (
        unspool.generate(model, ids, past_key_values=transformers.DynamicCache(config=model.config), **asked, **drafts)
        for drafts in ({}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1})
    )
    assert sum(drafted.speculation.drafted) > sum(drafted.speculation.accepted)
    assert torch.equal(plain.sequences, drafted.sequences)
    for one, other in zip(plain.past_key_values.layers, drafted.past_key_values.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        seen = torch.nn.functional.pad(mask, (0, one.keys.shape[2] - 8), value=1).bool()
        for mine, its in ((one.keys, other.keys), (one.values, other.values)):
            assert torch.allclose(mine.transpose(1, 2)[seen], its.transpose(1, 2)[seen], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_neo"])
def test_drafts_of_several_rows_over_a_given_cache_with_windows_are_refused(name: str) -> None:
    """Columns that one row refused would count in its windows."""
    model = make_again(name, 0, "eager")
    past = transformers.DynamicCache(config=model.config)
    with pytest.raises(unspool.SettingError, match="masked ones too, so drafts that one row of several refuses"):
        unspool.generate(model, IDS, **ASKED, past_key_values=past, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_that_fsmt_reads_with_a_cache_see_none_behind_them(seed: int) -> None:
    """Its forward makes a causal mask if it has no cache and reads the source itself: so it is asked by hand."""
    theirs, ours = make("fsmt", seed), make_again("fsmt", seed, "sdpa")
    source = torch.tensor([[9, 9, 66, 5], [7, 8, 11, 12]])
    asked: dict[str, Any] = {**ASKED, "eos_token_id": None, "attention_mask": torch.ones_like(source)}

    @torch.no_grad()
    def write(text: torch.Tensor) -> list[list[int]]:
        for _ in range(asked["max_new_tokens"]):
            logits = theirs(input_ids=source, decoder_input_ids=text, use_cache=False).logits[:, -1]
            text = torch.cat((text, logits.argmax(dim=-1, keepdim=True)), dim=1)
        found: list[list[int]] = text.tolist()
        return found

    first = unspool.generate(ours, source, decoder_input_ids=torch.tensor([[2, 5, 6, 7], [2, 8, 9, 10]]), **asked)
    assert first.sequences.tolist() == write(first.sequences[:, :4])
    text = torch.cat((first.sequences, torch.tensor([[83, 10], [84, 11]])), dim=1)
    again = unspool.generate(ours, source, decoder_input_ids=text, past_key_values=first.past_key_values, **asked)
    assert again.sequences.tolist() == write(text)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["cache", "mask", "states", "chunks"])
def test_tokens_that_fsmt_reads_first_see_none_behind_them(way: str, seed: int) -> None:
    """Over transformers' own cache too, for whatever reason a call needs that one."""
    theirs, ours = make("fsmt", seed), make_again("fsmt", seed, "sdpa")
    source, text = torch.tensor([[9, 9, 66, 5], [7, 8, 11, 12]]), torch.tensor([[2, 5, 6, 7], [2, 8, 9, 10]])
    empty = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    mask = {"decoder_attention_mask": torch.ones_like(text)}
    given: dict[str, dict[str, Any]] = {
        "cache": {"past_key_values": empty},
        "mask": mask,
        "states": {"output_hidden_states": True},
        "chunks": {**mask, "prefill_chunk_size": 2},
    }
    asked = {**ASKED, **ENDLESS, "attention_mask": torch.ones_like(source), "decoder_input_ids": text}
    output = unspool.generate(ours, source, **asked, **given[way])
    assert "over its own cache" in output.stats.path_reason
    with torch.no_grad():
        logits = theirs(input_ids=source, decoder_input_ids=output.sequences, use_cache=False).logits
    assert torch.equal(logits[:, 3:-1].argmax(dim=-1), output.sequences[:, 4:])


def test_a_static_cache_that_fsmt_would_read_as_tokens_is_refused() -> None:
    asked = {**ASKED, **ENDLESS, "attention_mask": torch.ones_like(IDS), "output_hidden_states": True}
    with pytest.raises(unspool.UnspoolError, match="empty columns"):
        unspool.generate(make_again("fsmt", 0, "sdpa"), IDS, **asked, cache_implementation="static")


@pytest.mark.parametrize("method", [{}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_fsmt_writes_the_same_without_a_cache(seed: int, method: dict[str, Any]) -> None:
    """And returns the states of the whole text at every step."""
    model = make_again("fsmt", seed, "eager")
    told = {"output_hidden_states": True, "output_attentions": True, **method}
    asked = {**ASKED, **ENDLESS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, **told}
    plain, found = (unspool.generate(model, IDS, **asked, use_cache=keeps) for keeps in (True, False))
    theirs = make("fsmt", seed, "eager").generate(IDS, **asked, use_cache=False)
    assert torch.equal(found.sequences, plain.sequences) and found.past_key_values is None
    for name in ("decoder_hidden_states", "decoder_attentions", "cross_attentions"):
        shapes = [[[list(layer.shape) for layer in step] for step in one[name]] for one in (found, theirs)]
        assert shapes[0] == shapes[1]
        for step, (one, other) in enumerate(zip(plain[name], found[name], strict=True) if not method else ()):
            for layer, whole in zip(one, other, strict=True):
                torch.testing.assert_close(whole[..., -1:, :], layer[..., -1:, :], msg=f"{name} of step {step}")


@pytest.mark.parametrize("name", ["bart", "marian", "blenderbot", "whisper"])
def test_sizes_of_a_pair_are_its_decoders_own(name: str) -> None:
    """The part that transformers makes of a flat config answers with its class's defaults for what it has lost."""
    model = make(name)
    info = describe(model).info
    assert (info.num_layers, info.num_heads) == (model.config.decoder_layers, model.config.decoder_attention_heads)
    assert info.decoder_start_token_id == model.config.decoder_start_token_id
    assert describe_loosely(model).info.num_layers == model.config.decoder_layers


@pytest.mark.parametrize("kind", ["offloaded", "quantized"])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_caches_of_our_own_kinds_that_a_pair_returned_go_on(name: str, kind: str) -> None:
    model, source = make_again(name, 0, "sdpa"), IDS[:1]
    asked: dict[str, Any] = {**ASKED, **ENDLESS, "attention_mask": None}
    first = unspool.generate(model, source, **asked, cache_implementation=kind)
    text = torch.cat((first.sequences, torch.tensor([[83, 10]])), dim=1)
    again = unspool.generate(model, source, **asked, decoder_input_ids=text, past_key_values=first.past_key_values)
    assert torch.equal(again.sequences, make(name).generate(source, **asked, decoder_input_ids=text).sequences)


def test_drafts_behind_a_returned_state_are_those_of_the_whole_text() -> None:
    """RWKV's state stood twice among its inputs, and one of them did not come back behind a refused draft."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, intermediate_size=64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    ids = torch.tensor([[14, 63, 14, 63, 51, 14, 63]])
    way = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    first = unspool.generate(model, ids, prompt_lookup_num_tokens=3, return_dict_in_generate=True, **way)
    longer = torch.cat((first.sequences, torch.tensor([[14, 63]])), dim=1)
    expected = model.generate(longer, **way)
    made = unspool.generate(model, longer, past_key_values=first.past_key_values, prompt_lookup_num_tokens=3, **way)
    assert torch.equal(made, expected)
