"""The captured steps of Mamba, Falcon-Mamba and Mamba-2 beside the plain pass.

The kernels run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_state_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, needs_gpu, pytestmark

import unspool
from unspool.decoding import choice
from unspool.models.mamba.model import Mamba
from unspool.models.mamba.second import Mamba2
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

__all__ = ["pytestmark"]

HIDDEN, LAYERS, STATES, VOCAB, RANK = 96, 3, 6, 211, 5


def make_model(dtype: torch.dtype = torch.float32, **changes: Any) -> Mamba:
    """A small Mamba of random weights."""
    config: dict[str, Any] = {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "state_size": STATES,
        "conv_kernel": 4,
        "expand": 2,
        "time_step_rank": RANK,
        "intermediate_size": 2 * HIDDEN,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
        **changes,
    }
    generator, inner = torch.Generator().manual_seed(0), 2 * HIDDEN
    bias, conv_bias = config["use_bias"], config["use_conv_bias"]

    def draw(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    weights = {"backbone.embeddings.weight": draw(VOCAB, HIDDEN, scale=1.0), "backbone.norm_f.weight": 1 + draw(HIDDEN)}
    for layer in range(LAYERS):
        start = f"backbone.layers.{layer}."
        weights |= {
            f"{start}norm.weight": 1 + draw(HIDDEN),
            f"{start}mixer.in_proj.weight": draw(2 * inner, HIDDEN),
            f"{start}mixer.conv1d.weight": draw(inner, 1, 4),
            f"{start}mixer.x_proj.weight": draw(RANK + 2 * STATES, inner),
            f"{start}mixer.dt_proj.weight": draw(inner, RANK),
            f"{start}mixer.dt_proj.bias": draw(inner, scale=2.0),
            f"{start}mixer.A_log": draw(inner, STATES),
            f"{start}mixer.D": draw(inner),
            f"{start}mixer.out_proj.weight": draw(HIDDEN, inner),
        }
        if bias:
            weights |= {f"{start}mixer.in_proj.bias": draw(2 * inner), f"{start}mixer.out_proj.bias": draw(HIDDEN)}
        if conv_bias:
            weights[f"{start}mixer.conv1d.bias"] = draw(inner)
    model = build_model(config, MemorySource(weights), is_gguf=False, device=DEVICE, dtype=dtype)
    assert isinstance(model, Mamba)
    return model


def make_second(dtype: torch.dtype = torch.float32, **changes: Any) -> Mamba2:
    """A small Mamba-2 of random weights."""
    heads, groups = changes.get("num_heads", 6), changes.get("n_groups", 2)
    inner = 2 * HIDDEN
    config: dict[str, Any] = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "state_size": STATES,
        "conv_kernel": 4,
        "expand": 2,
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": groups,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        **changes,
    }
    generator = torch.Generator().manual_seed(0)
    channels, bias = inner + 2 * groups * STATES, config["use_bias"]

    def draw(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    weights = {
        "backbone.embeddings.weight": draw(VOCAB, HIDDEN, scale=1.0),
        "backbone.norm_f.weight": 1 + draw(HIDDEN),
        "lm_head.weight": draw(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        start = f"backbone.layers.{layer}."
        weights |= {
            f"{start}norm.weight": 1 + draw(HIDDEN),
            f"{start}mixer.in_proj.weight": draw(inner + channels + heads, HIDDEN),
            f"{start}mixer.conv1d.weight": draw(channels, 1, 4),
            f"{start}mixer.dt_bias": draw(heads, scale=2.0),
            f"{start}mixer.A_log": draw(heads),
            f"{start}mixer.D": draw(heads),
            f"{start}mixer.norm.weight": 1 + draw(inner),
            f"{start}mixer.out_proj.weight": draw(HIDDEN, inner),
        }
        if bias:
            weights |= {
                f"{start}mixer.in_proj.bias": draw(inner + channels + heads),
                f"{start}mixer.out_proj.bias": draw(HIDDEN),
            }
        if config["use_conv_bias"]:
            weights[f"{start}mixer.conv1d.bias"] = draw(channels)
    model = build_model(config, MemorySource(weights), is_gguf=False, device=DEVICE, dtype=dtype)
    assert isinstance(model, Mamba2)
    return model


def make_falcon(dtype: torch.dtype = torch.float32, **changes: Any) -> Mamba:
    """A small Falcon-Mamba of random weights."""
    falcon = {"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"], "mixer_rms_eps": 1e-6}
    return make_model(dtype, **falcon, **changes)


MAKERS: dict[str, Callable[..., Mamba]] = {"mamba": make_model, "falcon": make_falcon, "mamba2": make_second}
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("mamba", {}),
    ("mamba", {"use_bias": True, "use_conv_bias": False}),
    ("mamba", {"residual_in_fp32": False}),
    ("falcon", {}),
    ("mamba2", {}),
    ("mamba2", {"use_bias": True, "use_conv_bias": False, "n_groups": 1}),
    ("mamba2", {"num_heads": 12, "n_groups": 3, "time_step_limit": [0.05, 0.9]}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_step_of_kernels_is_the_plain_pass(name: str, changes: dict[str, Any], rows: int) -> None:
    model = MAKERS[name](**changes)
    cache = model.new_cache(rows=rows)
    model._run(torch.randint(0, VOCAB, (rows, 5), device=DEVICE), cache, None, unspool.protocols.LAST, None)
    tokens = torch.randint(0, VOCAB, (rows, 1), device=DEVICE)
    conv, next_conv, ssm, next_ssm = (one.clone() for one in cache.list_buffers())
    buffers = (conv, next_conv, ssm, next_ssm)
    step = model._captured._make_work(model.spec, model.weights, buffers, torch.float32)
    step.tokens.copy_(tokens[:, 0])
    for _ in range(2):  # running it again changes nothing
        step.launch(buffers)
    states, _ = model._run(tokens, cache, None, unspool.protocols.LAST, None)
    expected = model.weights.head(states[:, 0])
    torch.testing.assert_close(step.logits, expected, atol=2e-4, rtol=1e-3)
    assert torch.equal(step.likeliest, step.logits.argmax(1))
    found_conv, _, found_ssm, _ = cache.list_buffers()  # they have been swapped
    torch.testing.assert_close(next_conv, found_conv, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(next_ssm, found_ssm, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("writes_last", [False, True])
@pytest.mark.parametrize("sizes", [(2, 32, 2, True, 3, 128), (1, 64, 1, False, 1), (4, 256, 4, True, 2)], ids=str)
def test_every_tiling_of_the_projection_gives_the_plain_pass(sizes: tuple[Any, ...], writes_last: bool) -> None:
    """Rows and columns of a program, its warps, when the next kernel starts, columns ahead, and registers."""
    from unspool.kernels.gpu.products.row_product import RowTiling
    from unspool.kernels.gpu.state_projection import ProjectionTiling

    model = make_model()
    cache = model.new_cache(rows=1)
    model._run(torch.randint(0, VOCAB, (1, 5), device=DEVICE), cache, None, unspool.protocols.LAST, None)
    tokens = torch.randint(0, VOCAB, (1, 1), device=DEVICE)
    conv, next_conv, ssm, next_ssm = (one.clone() for one in cache.list_buffers())
    for written in (next_conv, next_ssm):
        written.fill_(torch.nan)  # every number must be written
    buffers = (conv, next_conv, ssm, next_ssm)
    step = model._captured._make_work(model.spec, model.weights, buffers, torch.float32)
    assert step._tiling is not None
    step._tiling = ProjectionTiling(RowTiling(*sizes), writes_last)
    step.tokens.copy_(tokens[:, 0])
    step.launch(buffers)
    states, _ = model._run(tokens, cache, None, unspool.protocols.LAST, None)
    torch.testing.assert_close(step.logits, model.weights.head(states[:, 0]), atol=2e-4, rtol=1e-3)
    found_conv, _, found_ssm, _ = cache.list_buffers()  # they have been swapped
    torch.testing.assert_close(next_conv, found_conv, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(next_ssm, found_ssm, atol=1e-4, rtol=1e-3)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@pytest.mark.parametrize("name", list(MAKERS))
def test_captured_steps_give_the_plain_tokens(
    name: str, dtype: torch.dtype, settings: dict[str, Any], monkeypatch: Any
) -> None:
    model = MAKERS[name](dtype)
    prompt = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    call: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, **settings}
    found = unspool.generate(model, prompt, **call)
    again = unspool.generate(model, prompt, **call)  # other buffers, or the same again
    if not settings:
        assert len(model._captured._steps) >= 2
    assert torch.equal(found, again)
    monkeypatch.setattr(model._captured, "explain_refusal", lambda *_: "for comparison")
    plain = unspool.generate(model, prompt, **call)
    if dtype == torch.float32:
        assert torch.equal(found, plain)


@needs_gpu
@pytest.mark.parametrize("name", list(MAKERS))
def test_steps_run_ahead(name: str, monkeypatch: Any) -> None:
    """Rows end at different steps, and a cache that is given holds what it holds without steps ahead."""
    model = MAKERS[name]()
    prompt = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ends = list(range(0, VOCAB, 11))
    cache, call = model.new_cache(rows=1), {"max_new_tokens": 24, "eos_token_id": ends, "pad_token_id": 0}
    found = unspool.generate(model, prompt, **call)
    one = unspool.generate(model, prompt[:1], **call, past_key_values=cache)
    held, lengths = cache.ssm_states.clone(), list(cache.lengths)
    monkeypatch.setattr(choice, "can_run_ahead", lambda *_, **__: False)
    cache = model.new_cache(rows=1)
    assert torch.equal(found, unspool.generate(model, prompt, **call))
    assert torch.equal(one, unspool.generate(model, prompt[:1], **call, past_key_values=cache))
    assert cache.lengths == lengths == [one.shape[1] - 1]
    assert torch.equal(cache.ssm_states, held)


@needs_gpu
def test_passes_that_are_not_captured_say_why() -> None:
    model = make_model()
    cache = model.new_cache(rows=1)
    tokens = torch.tensor([[5]], device=DEVICE)
    assert "not there yet" in model.forward(tokens, cache).path_reason
    assert model.forward(tokens, cache).path == "captured"
    cache.begin_trial()
    assert "tried" in model.forward(tokens, cache).path_reason
