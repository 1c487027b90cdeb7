"""Recipes: found, checked, trusted, run; and the seven that come with unspool."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cli.conftest import build_tokenizer

import unspool
from unspool.cli.main import main
from unspool.errors import LoadError, ModelNotFoundError, SettingError
from unspool.recipes.finding import list_shipped
from unspool.recipes.requirements import check_requirements

LLAMA = Path(__file__).parents[1] / "conformance" / "goldens" / "models" / "llama"
IDS = torch.tensor([[5, 6, 7], [9, 10, 11]])
GREEDY = """
import torch

def generate(model, input_ids, generation_config, left_padding=None, **kwargs):
    generation_config = generation_config or model.generation_config
    cur_length = input_ids.shape[1]
    max_length = generation_config.max_length or cur_length + generation_config.max_new_tokens
    if left_padding is not None:
        pad_tensor = torch.full(size=(input_ids.shape[0], left_padding), fill_value=model.config.pad_token_id)
        input_ids = torch.cat((pad_tensor, input_ids), dim=1)
        cur_length = input_ids.shape[1]
    while cur_length < max_length:
        next_tokens = torch.argmax(model(input_ids).logits[:, -1, :], dim=-1)
        input_ids = torch.cat((input_ids, next_tokens[:, None]), dim=-1)
        cur_length += 1
    return input_ids
"""


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return unspool.load(LLAMA)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(LLAMA).eval()


def write_recipe(folder: Path, source: str = GREEDY, **files: str) -> Path:
    (folder / "custom_generate").mkdir(parents=True)
    (folder / "custom_generate" / "generate.py").write_text(source)
    for name, text in files.items():
        (folder / name.replace("_txt", ".txt")).write_text(text)
    return folder


def test_a_folder_in_the_references_manner(lm: Any, theirs: Any, tmp_path: Path) -> None:
    folder = write_recipe(tmp_path / "recipe", README_txt="")
    expected = unspool.generate(lm, IDS, eos_token_id=-1)
    for model in (lm, theirs, unspool.AutoModelForCausalLM.from_pretrained(LLAMA)):
        found = unspool.generate(model, IDS, custom_generate=str(folder), trust_remote_code=True)
        assert found.shape == expected.shape == (2, 23)
        assert found[:, :5].tolist() == expected[:, :5].tolist()
    padded = unspool.generate(lm, IDS, recipe=folder, trust_remote_code=True, left_padding=2, max_length=9)
    assert padded[:, :2].tolist() == [[0, 0], [0, 0]] and padded.shape == (2, 9)
    (folder / "generate.py").write_text(GREEDY.replace("argmax", "argmin"))  # the older layout is second
    (folder / "custom_generate" / "generate.py").unlink()
    other = unspool.generate(lm, IDS, custom_generate=str(folder), trust_remote_code=True)
    assert not torch.equal(other, found)


def test_functions_get_the_calls_settings(lm: Any) -> None:
    def method(model: Any, input_ids: Any, generation_config: Any, stopping_criteria: Any, **kwargs: Any) -> Any:
        return input_ids.shape, generation_config.top_k, generation_config.max_new_tokens, stopping_criteria, kwargs

    config = unspool.GenerationConfig(top_k=7, max_length=30)
    mask = torch.ones_like(IDS)
    shape, top_k, new, criteria, rest = unspool.generate(
        lm, IDS, config, custom_generate=method, max_new_tokens=3, attention_mask=mask, colour="blue"
    )
    assert (shape, top_k, new, criteria) == (IDS.shape, 7, 3, None)
    assert set(rest) == {"attention_mask", "colour"}
    with pytest.raises(SettingError, match="two names"):
        unspool.generate(lm, IDS, custom_generate=method, recipe=method)
    with pytest.raises(SettingError, match="replaces the whole loop"):
        lm.generate([5, 6], custom_generate=method)


def test_functions_get_what_transformers_prepares(theirs: Any) -> None:
    def method(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **kwargs: Any) -> Any:
        scores = logits_processor(
            input_ids, model(input_ids, attention_mask=kwargs.get("attention_mask")).logits[:, -1]
        )
        return scores, stopping_criteria(input_ids, scores), kwargs.get("attention_mask")

    padded = torch.tensor([[0, 5, 6, 7], [9, 10, 11, 12]])
    settings: dict[str, Any] = {"pad_token_id": 0, "repetition_penalty": 1.7, "max_new_tokens": 3, "do_sample": False}
    for ids in (padded, padded[1:]):
        found = unspool.generate(theirs, ids, custom_generate=method, **settings)
        expected = theirs.generate(ids, custom_generate=method, **settings)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_code_needs_trust(lm: Any, tmp_path: Path) -> None:
    folder = write_recipe(tmp_path / "recipe", f"raise SystemExit\n{GREEDY}")
    with pytest.raises(SettingError, match="trust_remote_code=True only") as caught:
        unspool.generate(lm, IDS, custom_generate=str(folder))
    assert str(folder / "custom_generate" / "generate.py") in str(caught.value)
    assert "raise SystemExit" in str(caught.value)  # what would run is shown


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda f: f.mkdir(), LoadError, "is no recipe"),
        (lambda f: write_recipe(f, "def make(model): pass"), LoadError, "no function `generate`"),
        (lambda f: write_recipe(f, "def generate(model:\n"), LoadError, r"not Python.*line 1"),
        (lambda f: write_recipe(f, "def generate(other): pass"), LoadError, "must be `model`"),
        (lambda f: write_recipe(f, "generate = 3"), LoadError, "not a function"),
        (lambda f: write_recipe(f, "import nosuch_package\ndef generate(model): pass"), LoadError, "nosuch_package"),
        (lambda f: write_recipe(f, requirements_txt="--index-url x\n"), LoadError, "names with versions"),
        (lambda f: write_recipe(f, requirements_txt="a b c\n"), LoadError, "not a package"),
    ],
)
def test_damaged_recipes(lm: Any, tmp_path: Path, make: Callable[[Path], Any], error: Any, words: str) -> None:
    make(tmp_path / "recipe")
    with pytest.raises(error, match=words):
        unspool.generate(lm, IDS, custom_generate=str(tmp_path / "recipe"), trust_remote_code=True)


def test_a_recipe_stays_in_its_folder(lm: Any, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(GREEDY)
    (tmp_path / "recipe" / "custom_generate").mkdir(parents=True)
    (tmp_path / "recipe" / "custom_generate" / "generate.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(LoadError, match="leads out"):
        unspool.generate(lm, IDS, custom_generate=str(tmp_path / "recipe"), trust_remote_code=True)
    for wrong, error in (("nosuch", ModelNotFoundError), (3, SettingError), ("", ModelNotFoundError)):
        with pytest.raises(error, match="recipe"):
            unspool.generate(lm, IDS, custom_generate=wrong)


def test_requirements(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(
        "foo\nbar==0.0.0\ntorch>=99.0  # impossible\nnumpy\nnumpy>=1.0,<99\ntorch!=1.0\ntorch~=2.0\ntorch==2.*\n"
    )
    with pytest.raises(ValueError, match="Missing requirements for owner/name") as caught:
        check_requirements(file, "owner/name")
    assert str(caught.value).splitlines()[1:] == [
        "foo (installed: None)",
        "bar==0.0.0 (installed: None)",
        f"torch>=99.0 (installed: {version('torch')})",
    ]
    file.write_text("\n# nothing\ntorch\n")
    check_requirements(file, "owner/name")


# --- those that come with unspool --------------------------------------------------------------------------


def test_left_padding_greedy(lm: Any) -> None:
    found = unspool.generate(lm, IDS, custom_generate="left_padding_greedy", left_padding=2, max_new_tokens=4)
    expected = unspool.generate(
        lm, torch.cat((torch.zeros(2, 2, dtype=torch.long), IDS), dim=1), attention_mask=torch.ones(2, 5),
        max_new_tokens=4, eos_token_id=-1,
    )  # fmt: skip
    assert torch.equal(found, expected)


def test_best_of_n(lm: Any) -> None:
    call = {"custom_generate": "best_of_n", "n": 6, "seed": 3, "max_new_tokens": 5}
    drawn = unspool.generate(lm, IDS, do_sample=True, num_return_sequences=6, seed=3, max_new_tokens=5)
    found = unspool.generate(lm, IDS, scorer=lambda ids: -sum(ids), **call)
    for row, rows in zip(found, drawn.view(2, 6, -1), strict=True):
        best = min(rows, key=lambda each: int(each[3:].sum()))
        assert row.tolist() == best.tolist()
    likely = unspool.generate(lm, IDS, **call)
    assert likely.shape == found.shape and all(row.tolist() in drawn.tolist() for row in likely)


def test_keep_thinking(lm: Any) -> None:
    ends = list(range(100))  # most tokens end a text, so that it ends soon
    plain = unspool.generate(lm, IDS, eos_token_id=ends, pad_token_id=0, max_new_tokens=12)
    held = unspool.generate(
        lm, IDS, custom_generate="keep_thinking", entropy=0.0, eos_token_id=ends, pad_token_id=0, max_new_tokens=12
    )
    assert held.shape[1] == 15 and not torch.isin(held[:, 3:], torch.tensor(ends)).any()
    free = unspool.generate(
        lm, IDS, custom_generate="keep_thinking", entropy=99.0, eos_token_id=ends, pad_token_id=0, max_new_tokens=12
    )
    assert torch.equal(free, plain)
    short = unspool.generate(
        lm, IDS, custom_generate="keep_thinking", entropy=0.0, think_at_most=2, eos_token_id=ends, pad_token_id=0,
        max_new_tokens=12,
    )  # fmt: skip
    assert short.shape[1] < 15


def test_roll_back(lm: Any) -> None:
    bias = {(20,): 1e4}  # the model would write one token for ever
    found = unspool.generate(
        lm, IDS, custom_generate="roll_back", repeats=3, sequence_bias=bias, max_new_tokens=10, eos_token_id=-1
    )
    assert found.shape == (2, 13)
    for row in found[:, 3:].tolist():
        assert not any(row[at : at + 3] == [20, 20, 20] for at in range(8))


def test_special_tokens_are_answered(lm: Any) -> None:
    plain = unspool.generate(lm, IDS, eos_token_id=-1, max_new_tokens=10)
    special = int(plain[0, 5])  # the third token that the first row writes
    seen: list[list[int]] = []

    def answer(tokens: list[int]) -> list[int]:
        seen.append(tokens)
        return [3, 4]

    call = {"custom_generate": "special_tokens", "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 10}
    found = unspool.generate(lm, IDS, answers={special: answer}, most=1, **call)
    at = int((plain[0, 3:] == special).nonzero()[0]) + 4
    begun = torch.cat((plain[:1, :at], torch.tensor([[3, 4]])), dim=1)
    expected = unspool.generate(lm, begun, eos_token_id=-1, max_new_tokens=13 - begun.shape[1])
    assert found[0].tolist() == expected[0].tolist()
    assert seen[0] == plain[0, :at].tolist() and len(seen) <= 2
    assert torch.equal(unspool.generate(lm, IDS, answers={str(special): [3, 4]}, most=1, **call), found)
    assert torch.equal(unspool.generate(lm, IDS, answers={special: []}, most=0, **call), plain)
    padded = torch.tensor([[0, 0, 5, 6, 7]])
    mask = (padded > 0).long()
    again = unspool.generate(lm, padded, attention_mask=mask, answers={special: [3, 4]}, most=1, **call)
    assert again[0, 2:].tolist() == found[0].tolist()
    with pytest.raises(ValueError, match="answers="):
        unspool.generate(lm, IDS, answers={}, **call)


def test_prompts_are_fitted_to_the_context(lm: Any) -> None:
    call: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0}
    long = torch.tensor([[*range(10, 30)], [0] * 15 + [*range(40, 45)]])
    mask = torch.tensor([[1] * 20, [0] * 15 + [1] * 5])
    found = unspool.generate(
        lm, long, attention_mask=mask, custom_generate="fit_context", before=[7], context=15, num_beams=2, **call
    )
    rows = [[7, 10, 11, *range(24, 30)], [7, *range(40, 45)]]  # 8 of 20 tokens stay, 2 of them at the beginning
    for row, prompt in zip(found, rows, strict=True):
        alone = unspool.generate(lm, [prompt], num_beams=2, **call)
        assert row[9 - len(prompt) :].tolist() == alone[0].tolist()
    as_given = unspool.generate(lm, IDS, custom_generate="fit_context", **call)
    assert torch.equal(as_given, unspool.generate(lm, IDS, **call))
    with pytest.raises(ValueError, match="no room"):
        unspool.generate(lm, IDS, custom_generate="fit_context", context=6, **call)


def test_self_consistency(lm: Any) -> None:
    class Numbers:
        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            return [f"the answer is {int(row[0]) % 3}" for row in rows]

    call = {"max_new_tokens": 4, "seed": 5}
    drawn = unspool.generate(lm, IDS, do_sample=True, num_return_sequences=9, **call)
    found = unspool.generate(lm, IDS, custom_generate="self_consistency", n=9, tokenizer=Numbers(), **call)
    for row, rows in zip(found, drawn.view(2, 9, -1), strict=True):
        votes = [int(each[3]) % 3 for each in rows]
        assert votes.count(int(row[3]) % 3) == max(map(votes.count, votes))
    with pytest.raises(ValueError, match="tokenizer"):
        unspool.generate(lm, IDS, custom_generate="self_consistency")


def test_the_program(lm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    assert main(["recipe", "list"]) == 0
    assert capsys.readouterr().out.split() == list_shipped() and len(list_shipped()) == 7
    assert main(["recipe", "new", str(folder)]) == 0
    assert main(["recipe", "new", str(folder)]) == 2
    assert main(["recipe", "check", str(folder)]) == 0
    assert "is a recipe" in capsys.readouterr().out
    expected = unspool.generate(lm, IDS, max_new_tokens=4)
    found = unspool.generate(lm, IDS, custom_generate=str(folder), trust_remote_code=True, max_new_tokens=4)
    assert torch.equal(found, expected)
    assert main(["recipe", "run", str(folder), "x", "-m", str(LLAMA)]) == 2
    assert "trust_remote_code=True only" in capsys.readouterr().err
    assert main(["recipe", "rnu", str(folder)]) == 2
    assert "did you mean run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    raise KeyError('a')", "has failed: KeyError: 'a'"),
        ("    return 'text'", "has returned a str"),
    ],
)
def test_a_recipe_that_fails_is_no_bug_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, words: str
) -> None:
    (tmp_path / "generate.py").write_text(f"def generate(model, input_ids, **kwargs):\n{body}\n")
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    assert main(["recipe", "run", str(tmp_path), "x", "-m", str(folder), "--trust-remote-code"]) == 2
    assert words in capsys.readouterr().err
