"""Every native decoder family writes on a GPU what it writes on a CPU, in captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from unspool.models.decoder import mixture
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Want

transformers = pytest.importorskip("transformers")

from tests.models.conftest import CASES, make_pair  # noqa: E402 - which imports transformers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = ([5, 9, 17, 3, 44, 61, 8], [7, 8], [90, 12, 12, 31])
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "DoLa": {"dola_layers": [1]},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


def make(name: str, folder: Path) -> Any:
    try:
        return make_pair(CASES[name], folder)
    except AttributeError as error:
        pytest.skip(f"this transformers does not have it: {error}")


@pytest.mark.parametrize("name", list(CASES))
def test_a_family_on_a_gpu(name: str, tmp_path: Path) -> None:
    pair = make(name, tmp_path)
    weights = MemorySource(dict(pair.weights))
    there = build_model(pair.config, weights, device="cuda", dtype=torch.float32)
    rounds = name == "falcon-rw"  # its position biases are rounded key by key, which no kernel does
    for settings in SETTINGS.values():
        told = {"max_new_tokens": 8, "eos_token_id": None, "return_dict_in_generate": True, **settings}
        for row in ROWS:
            ids = torch.tensor([row])
            here = unspool.generate(pair.native, ids, **told)
            made = unspool.generate(there, ids.cuda(), **told)
            assert made.sequences.tolist() == here.sequences.tolist(), settings
            if not settings:
                assert rounds or made.stats.path == "captured"


NEAR = 0.03  # of a score: a tie that rounding the states to bfloat16 may decide another way


@pytest.fixture
def margins(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """By how much the last chosen expert beats the next one, as a share of its score: (tokens,) for each call."""
    found: list[torch.Tensor] = []

    def watch(spec: Any, weights: Any, x: torch.Tensor) -> Any:
        logits = weights.router(x)
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        choice = scores if weights.choice_bias is None else scores + weights.choice_bias
        last, after = choice.sort(-1, descending=True).values[:, spec.num_chosen - 1 : spec.num_chosen + 1].unbind(1)
        found.append((last - after) / last)
        return route(spec, weights, x)

    route = mixture.route
    monkeypatch.setattr(mixture, "route", watch)
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name != "falcon-rw"])
def test_steps_are_as_near_as_torchs(name: str, tmp_path: Path, margins: list[torch.Tensor]) -> None:
    """One, two and three rows run on different kernels: their errors beside those of torch's operators.

    A row whose router is near a tie may run through another expert when its states are rounded: it is left out.
    """
    num_compared = compare_steps(make(name, tmp_path), (1, 2, 3), (torch.float32, torch.bfloat16), margins)
    assert num_compared >= 16  # of 24


def compare_steps(pair: Any, counts: tuple[int, ...], dtypes: tuple[torch.dtype, ...], margins: list[Any]) -> int:
    """Compare the errors of steps of so many rows; how many logits were compared."""
    ids = torch.randint(3, 90, (max(counts), 20), generator=torch.Generator().manual_seed(0)).cuda()

    def read(model: Any, rows: int, path: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (steps, rows, vocab), and which of them are of rows that were never near a tie."""
        cache = model.new_cache()
        model.forward(ids[:rows, :-2], cache)
        found, clear = [], [torch.ones(rows, dtype=torch.bool, device="cuda")]
        for at in (-2, -1):
            margins.clear()
            with model.without_paths(*(["captured"] if path == "eager" else [])):
                forward = model.forward(ids[:rows, at : ids.shape[1] + at + 1], cache)
            assert forward.path == path
            found.append(forward.logits.double())
            clear.append(torch.stack([clear[-1], *(margin > NEAR for margin in margins)]).all(0))
        return torch.stack(found), torch.stack(clear[1:])

    num_compared = 0
    for dtype in dtypes:
        more = 5e-5 if dtype == torch.float32 else 2e-3
        weights = MemorySource({name: tensor.to(dtype) for name, tensor in pair.weights.items()})
        model, wide = (build_model(pair.config, weights, device="cuda", dtype=one) for one in (dtype, torch.float64))
        for rows in counts:
            exact, clear = read(wide, rows, "eager")
            if dtype == torch.float32:
                clear = torch.ones_like(clear)
            num_compared += int(clear.sum())
            captured, eager = (
                float((read(model, rows, path)[0] - exact)[clear].norm() / exact[clear].norm())
                for path in ("captured", "eager")
            )
            assert captured <= 1.5 * eager + more or not clear.any(), (rows, dtype)
    return num_compared


SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
OLDER = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
SMALL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-narrow": ("Llama", {**SMALL, "hidden_size": 192, "num_attention_heads": 6}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 9}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 64}),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 32, "sliding_window": 9}),
    "olmo2": ("Olmo2", SMALL),
    "cohere": ("Cohere", SMALL),
    "phi": ("Phi", SMALL),
    "gpt_neox": ("GPTNeoX", OLDER),
    "opt": ("OPT", {**OLDER, "ffn_dim": 256, "word_embed_proj_dim": 128}),
    "gpt2": ("GPT2", {"vocab_size": 97, "n_embd": 128, "n_layer": 3, "n_head": 4, "initializer_range": 0.1}),
}


@pytest.mark.parametrize("name", list(SMALL_CASES))
def test_small_matrices_and_a_few_rows(name: str, tmp_path: Path, margins: list[torch.Tensor]) -> None:
    """All products of a block by one kernel each, as near as torch's operators; of rows and of drafts."""
    from unspool.models.paths import captured_fused

    kind, settings = SMALL_CASES[name]
    model_class = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    pair = make_pair(lambda: model_class(model_class.config_class(**settings)), tmp_path)
    compare_steps(pair, (2, 4, 5, 8), (torch.bfloat16,), margins)
    weights = MemorySource({name: tensor.bfloat16() for name, tensor in pair.weights.items()})
    both = (torch.bfloat16, torch.float64)
    model, wide = (build_model(pair.config, weights, device="cuda", dtype=dtype) for dtype in both)
    assert captured_fused.are_small(model.weights.layers, 4, model.spec) and captured_fused.can_fuse(model.spec)
    ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0)).cuda()

    def read(model: Any, path: str) -> torch.Tensor:
        cache = model.new_cache()
        model.forward(ids[:, :-5], cache)
        with model.without_paths(*(["captured"] if path == "eager" else [])):
            forward = model.forward(ids[:, -5:], cache, want=Want(logits="all"))
        assert forward.path == path
        logits: torch.Tensor = forward.logits.double()
        return logits

    exact = read(wide, "eager")
    captured, eager = (float((read(model, path) - exact).norm() / exact.norm()) for path in ("captured", "eager"))
    assert captured <= 1.5 * eager + 2e-3
