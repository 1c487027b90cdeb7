"""The package of examples/plugin: installed as a package is, found by its entry point, and every part at work."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeModel, pad_left

import unspool
from unspool import GenerationConfig, SettingError, generate, stream
from unspool.cache import make_cache
from unspool.config.parameters import PARAMETERS
from unspool.logits.building import Context
from unspool.logits.pipeline import build_processors
from unspool.registry import register, unregister

PACKAGE = Path(__file__).parents[2] / "examples" / "plugin"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
VOCAB, NEW = 23, 8


def install(folder: Path) -> None:
    """Put the package where Python finds it, with the metadata that an installer writes."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copy(PACKAGE / "unspool_example.py", folder)
    info = folder / f"unspool_example-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def run_python(folder: Path, code: str, **environment: str) -> str:
    path = f"{folder}:{Path(unspool.__file__).parents[1]}:{Path(__file__).parents[2]}"
    command = [sys.executable, "-W", "error", "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": path, **environment})
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_the_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    install(tmp_path)
    code = """
import sys, unspool
assert "unspool_example" not in sys.modules
from tests.fakes import FakeModel
config = unspool.GenerationConfig(typical_search=True, max_repeats=3)
assert "unspool_example" in sys.modules
found = unspool.generate(FakeModel(), [[1, 2, 3]], config, max_new_tokens=5)
print(found[0].tolist())
from unspool.cli.main import main
main(["run", "--help"])
"""
    told = run_python(tmp_path, code)
    for flag in ("--smoothing-factor X", "--max-repeats N", "--[no-]typical-search", "--phrase-book [[ID"):
        assert flag in told
    off = "import unspool; from unspool.config import PARAMETERS; print('typical_search' in PARAMETERS)"
    assert run_python(tmp_path, off, UNSPOOL_PLUGINS="off").strip() == "False"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("unspool_example", PACKAGE / "unspool_example.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    register(*module.list_parts())
    yield module
    unregister(*module.list_parts())


# --- the strategy -----------------------------------------------------------------------------------------------


def search_slowly(model: FakeModel, prompt: list[int], num_new: int, **asked: Any) -> list[int]:
    """Typical search by its definition, token by token, with the processors that the settings switch on."""
    config = GenerationConfig(**asked)
    context = Context(1, VOCAB, len(prompt), len(prompt) + num_new, encoder_input_ids=torch.tensor([prompt]))
    processors = build_processors(config, context)
    ids = list(prompt)
    for _ in range(num_new):
        scores = processors(torch.tensor([ids]), model.score(ids)[None])
        surprise = -scores[0].log_softmax(-1)
        entropy = float((surprise.neg().exp() * surprise.nan_to_num(posinf=0.0)).sum())
        ids.append(int((surprise - entropy).abs().argmin()))
    return ids


def test_the_strategy_is_what_it_says_and_no_greedy_search(example: ModuleType) -> None:
    model = FakeModel()
    found = generate(model, **pad_left(PROMPTS), max_new_tokens=NEW, typical_search=True)
    for row, prompt in enumerate(PROMPTS):
        assert found[row, 5 - len(prompt) :].tolist() == search_slowly(model, prompt, NEW)
    assert found.tolist() != generate(model, **pad_left(PROMPTS), max_new_tokens=NEW).tolist()


CONTROLS: list[dict[str, Any]] = [
    {"sequence_bias": [[[3], 4.0], [[4, 5], 9.0]]},
    {"logit_bias": {3: 5.0, 4: -5.0}},
    {"encoder_repetition_penalty": 2.0},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 1},
    {"bad_words_ids": [[3], [4, 4]]},
    {"suppress_tokens": [1, 2, 3]},
    {"begin_suppress_tokens": [5, 6]},
    {"forced_eos_token_id": 4},
    {"remove_invalid_values": True},
    {"renormalize_logits": True},
]


@pytest.mark.parametrize("asked", CONTROLS, ids=str)
def test_the_strategy_takes_every_processor(example: ModuleType, asked: dict[str, Any]) -> None:
    model = FakeModel()
    for prompt in PROMPTS:
        found = generate(model, [prompt], max_new_tokens=NEW, typical_search=True, **asked)
        assert found[0].tolist() == search_slowly(model, prompt, NEW, **asked)


def test_the_strategy_takes_a_callers_processor_and_stop(example: ModuleType) -> None:
    def forbid(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(12), -torch.inf)

    found = generate(FakeModel(), [[1, 2]], max_new_tokens=NEW, typical_search=True, logits_processor=[forbid])
    assert int(found[0, 2:].min()) >= 12
    stopped = generate(
        FakeModel(),
        [[1, 2]],
        max_new_tokens=NEW,
        typical_search=True,
        stopping_criteria=[lambda ids, scores: ids.shape[1] >= 5],
    )
    assert stopped.shape == (1, 5)


@settings(max_examples=15)
@given(
    prompts=st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=6), min_size=2, max_size=4),
    asked=st.sampled_from([{}, {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"eos_token_id": [5, 7, 11]}]),
)
def test_a_row_is_the_same_alone_in_a_batch_and_streamed(
    example: ModuleType, prompts: list[list[int]], asked: dict[str, Any]
) -> None:
    model = FakeModel()
    common = {"max_new_tokens": 6, "typical_search": True, "pad_token_id": 0, **asked}
    alone = [generate(model, [prompt], **common)[0, len(prompt) :].tolist() for prompt in prompts]
    for is_hidden in (True, False):  # in the reference's manner, padding counts as tokens
        streamed: dict[int, list[int]] = {row: [] for row in range(len(prompts))}
        for emitted in stream(model, **pad_left(prompts), **common, hides_padding=is_hidden):
            for row, tokens in emitted.tokens.items():
                streamed[row] += tokens
        if is_hidden:
            assert list(streamed.values()) == alone
    batch = generate(model, **pad_left(prompts), **common)[:, max(map(len, prompts)) :].tolist()
    assert [row[: len(streamed[place])] for place, row in enumerate(batch)] == list(streamed.values())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"do_sample": True}, "`typical_search` asks for the strategy 'typical_search', and `do_sample`=True"),
        ({"num_beams": 2}, "use `num_beams=1`"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "leave `penalty_alpha` out"),
        ({"prompt_lookup_num_tokens": 3}, "`typical_search`=True does not go with a drafter"),
        ({"phrase_book": [[1, 2]]}, "`typical_search`=True does not go with a drafter"),
    ],
    ids=str,
)
def test_what_the_strategy_can_not_stand_beside(example: ModuleType, asked: dict[str, Any], told: str) -> None:
    model = FakeModel()
    with pytest.raises(SettingError, match=told):
        generate(model, [[1, 2]], max_new_tokens=3, typical_search=True, **asked)
    assert model.num_passes == 0


# --- the other parts ----------------------------------------------------------------------------------------------


def test_the_processor_smooths_row_by_row(example: ModuleType) -> None:
    scores = torch.tensor([[1.0, 0.0, -2.0], [3.0, 1.0, 2.0]])
    found = example.QuadraticSmoothing([0.5, 0.0])(torch.zeros(2, 1), scores)
    assert found.tolist() == [[1.0, 0.5, -3.5], [3.0, 1.0, 2.0]]
    common = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "seed": [3, 4, 5]}
    factors = [0.2, 0.0, 1.5]
    batch = generate(FakeModel(), **pad_left(PROMPTS), smoothing_factor=factors, **common)
    for row, prompt in enumerate(PROMPTS):
        own = {**common, "seed": common["seed"][row]}
        alone = generate(FakeModel(), [prompt], smoothing_factor=factors[row], **own)
        assert batch[row, 5:].tolist() == alone[0, len(prompt) :].tolist()
    with pytest.raises(SettingError, match="only read when sampling"):
        generate(FakeModel(), [[1]], max_new_tokens=3, smoothing_factor=0.5)
    with pytest.raises(SettingError, match="`smoothing_factor` must be at least 0"):
        GenerationConfig(smoothing_factor=-1.0)


def test_the_stop_gives_its_reason(example: ModuleType) -> None:
    model = FakeModel()
    model.table += torch.eye(VOCAB) * 40  # it writes one token for ever
    reasons = {}
    for emitted in stream(model, [[1, 2], [3, 4]], max_new_tokens=9, max_repeats=3):
        reasons |= emitted.finished
    assert reasons == {0: "repeats", 1: "repeats"}


@pytest.mark.parametrize("asked", [{}, {"do_sample": True, "top_k": 0, "seed": 5}], ids=str)
def test_the_drafter_changes_how_fast_tokens_come_and_not_which(example: ModuleType, asked: dict[str, Any]) -> None:
    model = FakeModel()
    plain = generate(model, **pad_left(PROMPTS), max_new_tokens=NEW, **asked)
    phrases = [[1, 2, 3, *plain[0, 5:].tolist()], plain[1].tolist(), [7, 7, 7]]
    found = generate(
        model, **pad_left(PROMPTS), max_new_tokens=NEW, phrase_book=phrases, return_dict_in_generate=True, **asked
    )
    assert found.sequences.tolist() == plain.tolist()
    assert sum(found.speculation.accepted) > 0
    with pytest.raises(SettingError, match=r"`num_beams`=2 does not go with a drafter \(`phrase_book`\)"):
        generate(model, [[1]], max_new_tokens=3, phrase_book=phrases, num_beams=2)


def test_the_cache_kind_and_the_family_run_a_model(example: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3}
    theirs = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**sizes, max_position_embeddings=64)).eval()
    for name, parameter in theirs.named_parameters():  # biases begin as zeros
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    mine = unspool.load(tmp_path, native=True).model
    ids = torch.tensor([[5, 9, 14, 3]])
    common = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(ids, **common)
    assert generate(mine, ids, **common).tolist() == expected.tolist()
    bucketed = generate(mine, ids, cache_implementation="bucketed", return_dict_in_generate=True, **common)
    assert bucketed.sequences.tolist() == expected.tolist()
    assert bucketed.past_key_values.room == 128
    assert make_cache("bucketed", mine.key_shape, 1, 200).room == 256
    with pytest.raises(SettingError, match="bucketed"):
        GenerationConfig(cache_implementation="basket")


def test_every_setting_of_the_package_is_known(example: ModuleType) -> None:
    assert {"smoothing_factor", "max_repeats", "typical_search", "phrase_book"} <= set(PARAMETERS)
