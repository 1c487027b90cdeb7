"""Token healing: the prompt's last token is chosen again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tests.conformance.cases import load_model
from tests.fakes import FakeModel
from tokenizers import decoders, models, pre_tokenizers

from unspool import SettingError, Tokenizer, generate
from unspool.text.healing import Tail, find_added_text, find_tail

GOLDENS = Path(__file__).parents[1] / "conformance" / "goldens"
WORDS = ["ht", "htt", "http", "https", "://", ":/", "Ġli", "Ġlink", "Ġlinks", "li", "Ġis", "Ġi", "ĠĠ"]


def make_backend() -> tokenizers.Tokenizer:
    letters = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:94], "Ġ", "Ċ"]
    letters = list(dict.fromkeys(letters))
    vocabulary = {token: number for number, token in enumerate(letters + WORDS)}
    merges = [("h", "t"), ("ht", "t"), ("htt", "p"), (":", "/"), (":/", "/"), ("Ġ", "i"), ("Ġi", "s"), ("l", "i")]
    merges += [("http", "s"), ("Ġ", "li"), ("Ġ", "Ġ")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return backend


SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_backend(), special_tokens=SPECIAL)


def test_the_tail_is_the_last_token_that_says_something(tokenizer: Tokenizer) -> None:
    ids = tokenizer.convert_tokens_to_ids
    text = tokenizer.encode("a link http:")
    assert tokenizer.convert_ids_to_tokens(text[-1]) == ":"
    tail = find_tail(tokenizer, text, 160)
    assert tail == Tail(tuple(text[:-1]), text[-1], tuple(sorted([ids(":"), ids(":/"), ids("://")])))
    spaced = find_tail(tokenizer, tokenizer.encode("a link http:  \n"), 160)
    assert spaced == tail
    assert find_tail(tokenizer, tokenizer.encode("a z"), 160) is None  # no longer token begins with z
    assert find_tail(tokenizer, tokenizer.encode("  "), 160) is None
    assert find_tail(tokenizer, [*text, tokenizer.eos_token_id], 160) is None  # a special token is meant as it is
    assert find_tail(tokenizer, [text[-1]], 160) == Tail((1,), text[-1], tail.choices)  # from the start token
    assert find_tail(tokenizer, text, ids("://")) is None  # those outside the model's vocabulary do not count


def test_added_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.convert_tokens_to_ids
    tail = Tail(tuple(tokenizer.encode("a link http")), ids(":"), ())
    assert find_added_text(tokenizer, tail, ids("://")) == "//"
    assert find_added_text(tokenizer, tail, ids(":")) == ""


@pytest.mark.parametrize(
    "prompts", [["a link http:"], ["12ht", "a link ht"], ["http", "1:", "q"], ["no longer z"]], ids=str
)
def test_prompts_are_healed_as_by_the_reference(tokenizer: Tokenizer, prompts: list[str]) -> None:
    lm = load_model("gpt2")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=make_backend(), **SPECIAL, padding_side="left")
    model = transformers.GPT2LMHeadModel.from_pretrained(GOLDENS / "models" / "gpt2")
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    expected = model.heal_tokens(given.input_ids, theirs)
    found = generate(lm.model, **given, tokenizer=tokenizer, token_healing=True, max_new_tokens=3, eos_token_id=None)
    width = given.input_ids.shape[1]
    assert found.shape == (len(prompts), width + 3)
    for row, (mine, other) in enumerate(zip(found[:, :width].tolist(), expected.tolist(), strict=True)):
        if len(tokenizer.encode(prompts[row])) == 1 and width == 1:
            continue  # the reference leaves a lone token alone when it stands in no padding
        before = tokenizer.decode(given.input_ids[row], skip_special_tokens=True)
        if tokenizer.decode(other, skip_special_tokens=True).startswith(before):
            assert mine == other
        else:  # the reference's bias is a wish, and here it was overruled: the prompt must stay what it was
            assert tokenizer.decode(mine, skip_special_tokens=True).startswith(before)


def test_a_healed_prompt_is_continued_as_if_it_had_been_given(tokenizer: Tokenizer) -> None:
    model = FakeModel(110, seed=2)
    model.table[:, tokenizer.convert_tokens_to_ids("://")] += 50
    ids = [tokenizer.encode("a link http:"), tokenizer.encode("bbb aaa ccc z")]
    width = max(map(len, ids))
    filled = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    arguments = {"attention_mask": mask, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    healed = generate(model, filled, token_healing=True, tokenizer=tokenizer, **arguments)
    expected = filled.clone()
    expected[0, -1] = tokenizer.convert_tokens_to_ids("://")
    assert torch.equal(healed, generate(model, expected, **arguments))


def test_the_short_way_gives_the_text_that_was_added() -> None:
    from unspool import LanguageModel
    from unspool.config import GenerationConfig
    from unspool.loading.model import LoadedParts

    tokenizer = Tokenizer(make_backend(), special_tokens=SPECIAL)
    model = FakeModel(110, seed=2)
    model.table[:, tokenizer.convert_tokens_to_ids("://")] += 50
    fields: dict[str, Any] = dict.fromkeys(LoadedParts.__dataclass_fields__)
    fields |= {"name": "fake", "model": model, "tokenizer": tokenizer, "generation_config": GenerationConfig()}
    lm = LanguageModel(LoadedParts(**fields))
    options = {"max_new_tokens": 2, "eos_token_id": None, "suppress_tokens": list(range(3))}
    plain = lm.generate("a link http://", **options)
    healed = lm.generate("a link http:", token_healing=True, **options)
    assert healed.text == "//" + plain.text
    assert "".join(lm.stream("a link http:", token_healing=True, **options)) == healed.text


def test_what_cannot_be_healed_is_refused(tokenizer: Tokenizer) -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match="pass the model's `tokenizer`"):
        generate(model, [[1, 2]], token_healing=True)
    with pytest.raises(SettingError, match="rewrites a decoder's prompt of tokens"):
        embeds = model.embed(torch.tensor([[1, 2]]))
        generate(model, inputs_embeds=embeds, token_healing=True, tokenizer=tokenizer)
    with pytest.raises(SettingError, match="forces the token behind the first"):
        generate(model, [[5]], token_healing=True, tokenizer=tokenizer, forced_bos_token_id=3)
    assert model.num_passes == 0
