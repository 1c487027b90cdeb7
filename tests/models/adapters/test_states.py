"""Objects of transformers that keep states: whatever is tried and taken back, the text is that of plain steps."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from tests.fuzz.beside import models
from tests.models.adapters.tiny import SIZES
from tests.models.adapters.unlike import FAMILIES as UNLIKE_FAMILIES
from tests.models.adapters.unlike import make_unlike

import unspool

OBJECTS = ("mamba", "mamba2", "recurrent_gemma", "minimax", "jamba", "bamba")
PURE = ("mamba", "mamba2", "recurrent_gemma", "minimax")
UNLIKE = {"jamba": 0.2, "bamba": 0.2, "recurrent_gemma": 0.06}  # so that drafts are partly right
PROMPT = torch.tensor([[7, 8, 9, 7, 8, 9, 7, 8]])
NEW = {"max_new_tokens": 14, "eos_token_id": None, "do_sample": False}


def make(name: str) -> Any:
    return make_unlike(name) if name in UNLIKE_FAMILIES else models.make_again(name, 0, "sdpa")


def shake(model: Any, alpha: float) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=alpha)
    return model


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("name", OBJECTS)
def test_drafts_that_are_partly_right_change_nothing(name: str, is_whole: bool, native: bool) -> None:
    """Accepted tokens are read again after the states went back, together with the next one."""
    model = make(name)
    assistant = shake(deepcopy(model), UNLIKE.get(name, 0.02))
    plain = unspool.generate(model, PROMPT, native=native, **NEW)
    told = {"assistant_model": assistant, "num_assistant_tokens": 3, "return_dict_in_generate": is_whole}
    for num_new in (4, 5, 6, 9, 14):  # a text's last token is read alone
        settings = {**NEW, **told, "max_new_tokens": num_new}
        found = unspool.generate(model, PROMPT, native=native, **settings)
        assert torch.equal(found.sequences if is_whole else found, plain[:, : PROMPT.shape[1] + num_new])
    if is_whole:
        speculation = found.stats.speculation
        assert 0 < sum(speculation.accepted) < sum(speculation.drafted)


def test_a_model_with_states_drafts_for_one_with_keys() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=48)).eval()
    plain = unspool.generate(model, PROMPT, **NEW)
    for native in (True, False):
        found = unspool.generate(model, PROMPT, native=native, assistant_model=make("mamba"), **NEW)
        assert torch.equal(found, plain)


@pytest.mark.parametrize(
    "method",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": [0, 1]},
        {"dola_layers": "high"},
        {"num_beams": 3},
        {"eos_token_id": list(range(10, 97, 4))},  # rows leave
    ],
)
@pytest.mark.parametrize("name", [*PURE, "jamba"])
def test_texts_that_are_read_anew_at_every_step_are_the_same(name: str, method: dict[str, Any]) -> None:
    model = make(name)
    ways = [{"native": native, "use_cache": keeps} for native in (True, False) for keeps in (True, False)]
    prompts = torch.cat((PROMPT, PROMPT.flip(1) + 5))
    first, *others = (unspool.generate(model, prompts, **{**NEW, **method}, **way).tolist() for way in ways)
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_returned_cache_has_states(name: str) -> None:
    settings = {**NEW, "penalty_alpha": 0.6, "top_k": 4}
    output = unspool.generate(make(name), PROMPT, **settings, return_dict_in_generate=True)
    assert output.past_key_values is not None
    assert torch.equal(output.sequences, unspool.generate(make(name), PROMPT, **settings))


def test_states_that_modules_keep_stay_with_their_text() -> None:
    """A text of one token takes nothing over from the text before it, and guidance says what it can't do."""
    model = make("recurrent_gemma")
    alone = unspool.generate(model, PROMPT[:, :1], **NEW)
    unspool.generate(model, PROMPT[:, 1:], **NEW)
    assert torch.equal(unspool.generate(model, PROMPT[:, :1], **NEW), alone)
    with pytest.raises(unspool.UnsupportedError, match="leave guidance out"):
        unspool.generate(model, PROMPT, guidance_scale=1.5, **NEW)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("num_more", [1, 3])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_returned_cache_is_continued(name: str, num_more: int, native: bool) -> None:
    model = make(name)
    first = unspool.generate(model, PROMPT, native=native, **{**NEW, "max_new_tokens": 4}, return_dict_in_generate=True)
    text = torch.cat((first.sequences, torch.tensor([[11, 12, 13]])[:, :num_more]), dim=1)
    past, told = first.past_key_values, {"return_dict_in_generate": True, "output_logits": True}
    expected = unspool.generate(model, text, native=native, **NEW, **told)
    found = unspool.generate(model, text, native=native, past_key_values=past, **NEW, **told)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*OBJECTS[-2:], "nemotron_h", "qwen4_exp", "ctrl"])
def test_a_longer_negative_prompt_leaves_no_columns_in_a_returned_cache(name: str, kind: str, rows: int) -> None:
    """Of the columns before the prompts, which no row has, a further turn knows nothing."""
    model, told = make(name), {**NEW, "return_dict_in_generate": True, "output_logits": True}
    prompts = torch.cat((PROMPT[:, :3], PROMPT[:, :3] + 20))[:rows]
    asked: dict[str, Any] = {**told, "cache_implementation": kind, "guidance_scale": 1.5, "max_new_tokens": None}
    asked |= {"max_length": 8, "cache_config": {"max_cache_len": 40}} if kind == "static" else {"max_length": 8}
    first = unspool.generate(model, prompts, negative_prompt_ids=PROMPT.expand(rows, -1) + 5, **asked)
    past = first.past_key_values
    text = torch.cat((first.sequences, torch.tensor([[11, 12, 13]]).expand(rows, -1)), dim=1)
    for layer in past.layers:
        assert not isinstance(keys := getattr(layer, "keys", None), torch.Tensor) or keys.shape[-2] in (7, 40)
    told |= {
        "max_new_tokens": 1,
        "attention_mask": torch.ones_like(text),
    }  # a token that was written may be a pad token
    expected = unspool.generate(model, text, **told)
    found = unspool.generate(model, text, past_key_values=past, **told)
    torch.testing.assert_close(found.logits[0], expected.logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("num_more", [0, 3])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "deepseek_v32", "hy_v4", "granitemoehybrid", "qwen3_next"])
def test_embeddings_behind_a_returned_cache_are_read(name: str, num_more: int, rows: int) -> None:
    """They are no token's, and there are no tokens beside them."""
    model = make(name)
    embed, told = model.get_input_embeddings(), {**NEW, "return_dict_in_generate": True}
    noise = 0.1 * torch.randn(rows, 11, 32, generator=torch.Generator().manual_seed(1))
    embeds = embed(torch.cat((PROMPT, torch.tensor([[11, 12, 13]])), dim=1)) + noise
    whole = unspool.generate(model, inputs_embeds=embeds[:, : 8 + num_more], **NEW)
    first = unspool.generate(model, inputs_embeds=embeds[:, :8], **{**told, "max_new_tokens": 4 if not num_more else 1})
    past = first.past_key_values
    if num_more:  # the caller goes on with something else than the one token that was written and is not yet read
        ahead, expected = embeds[:, :11], whole
    else:
        ahead, expected = torch.cat((embeds[:, :8], embed(first.sequences)), dim=1), whole[:, 4:]
    found = unspool.generate(model, inputs_embeds=ahead, past_key_values=past, **NEW)
    assert torch.equal(found[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"])
def test_keys_that_an_index_finds_are_read_together(name: str, seed: int) -> None:
    """As transformers reads them behind a cache: such a model finds other keys for tokens that come one by one."""
    model, asked = models.make_again(name, seed, "eager"), {**NEW, "return_dict_in_generate": True}
    generates = (model.generate, lambda *args, **kwargs: unspool.generate(model, *args, **kwargs))
    texts = []
    for generate in generates:
        first = generate(PROMPT, **asked)
        text = torch.cat((first.sequences, torch.tensor([[11, 12, 13, 14]])), dim=1)
        texts.append(generate(text, past_key_values=first.past_key_values, **asked).sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_cache_of_the_callers_goes_on_from_call_to_call(name: str) -> None:
    """It is filled in place, so nothing has to be returned."""
    model, text = make(name), PROMPT
    first = unspool.generate(model, text, native=False, **{**NEW, "max_new_tokens": 2}, return_dict_in_generate=True)
    text, past = first.sequences, first.past_key_values
    for _ in range(3):
        expected = unspool.generate(model, text, native=False, **{**NEW, "max_new_tokens": 3})
        text = unspool.generate(model, text, native=False, past_key_values=past, **{**NEW, "max_new_tokens": 3})
        assert torch.equal(text, expected)


def test_states_of_unknown_length_are_refused() -> None:
    first = make("mamba").generate(PROMPT, **{**NEW, "max_new_tokens": 4}, return_dict_in_generate=True)
    with pytest.raises(unspool.UnsupportedError, match="do not say how many tokens they have read"):
        unspool.generate(make("mamba"), first.sequences, cache_params=first.past_key_values, **NEW)


@torch.no_grad()
def read_on(model: Any, past: Any, text: torch.Tensor, num_read: int) -> None:
    """Let transformers' own forward read the rest of a text into a cache, token by token."""
    arguments = set(inspect.signature(model.forward).parameters)
    name = "cache_params" if "cache_params" in arguments else "past_key_values"
    for place in range(num_read, text.shape[1]):
        known = {"position_ids": torch.tensor([[place]]), "attention_mask": torch.ones_like(text[:, : place + 1])}
        given = {key: value for key, value in known.items() if key in arguments}
        model(text[:, place : place + 1], **{name: past}, use_cache=True, **given)


@pytest.mark.parametrize("method", [{}, {"penalty_alpha": 0.6, "top_k": 4}])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_copy_of_a_returned_cache_is_continued(name: str, method: dict[str, Any]) -> None:
    model, told = make(name), {"return_dict_in_generate": True}
    first = unspool.generate(model, PROMPT, native=False, **{**NEW, "max_new_tokens": 4}, **method, **told)
    text = torch.cat((first.sequences, torch.tensor([[11, 12]])), dim=1)
    again = {**NEW, "native": False, "attention_mask": torch.ones_like(text)}
    expected = unspool.generate(model, text, **again)
    for past in (deepcopy(first.past_key_values), first.past_key_values):
        assert torch.equal(unspool.generate(model, text, past_key_values=past, **again), expected)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_cache_that_transformers_has_moved_on(name: str) -> None:
    """It is continued where a layer counts what was read, and refused where none does."""
    model, short = make(name), {**NEW, "max_new_tokens": 4, "return_dict_in_generate": True}
    first = unspool.generate(model, PROMPT, native=False, **short)
    text = torch.cat((first.sequences, torch.tensor([[11, 12, 13]])), dim=1)
    again = {**NEW, "native": False, "attention_mask": torch.ones_like(text)}
    expected = unspool.generate(model, text, **again)
    past = unspool.generate(model, PROMPT, native=False, **short).past_key_values  # modules keep this call's states
    read_on(model, past, text[:, :-1], PROMPT.shape[1] + 3)
    if name in ("mamba", "mamba2"):
        with pytest.raises(unspool.UnsupportedError, match="since other code has read on with it"):
            unspool.generate(model, text, past_key_values=past, **again)
    else:
        assert torch.equal(unspool.generate(model, text, past_key_values=past, **again), expected)
