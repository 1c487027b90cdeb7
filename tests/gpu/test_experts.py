"""The kernels of experts against torch's operators."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from unspool.kernels.activations import find_activation
from unspool.kernels.mx import arrange
from unspool.models.decoder.mixture import Mixture, feed_experts, route
from unspool.models.decoder.spec import DecoderSpec, MixtureSpec, NormSpec
from unspool.models.weights import AnyLinear, Linear, MxLinear, Norm

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs a CUDA device"),
]
HIDDEN = 96
MIXTURES = {
    "few": MixtureSpec(4, 2, 40),
    "many": MixtureSpec(37, 8, 24, is_normalised=False, has_router_bias=True),
    "sigmoid": MixtureSpec(16, 3, 33, scoring="sigmoid", has_choice_bias=True, weight_scale=1.7),
    "clamped": MixtureSpec(8, 4, 64, gate_limit=0.6, has_router_bias=True),
}


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(DEVICE)


def make_spec(mixture: MixtureSpec) -> DecoderSpec:
    sizes = {"vocab_size": 9, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 48, "max_context": 9}
    norm = NormSpec("rms", 1e-5)
    return DecoderSpec(family="any", hidden_size=HIDDEN, ffn_size=1, norm=norm, mixture=mixture, **sizes)


def make_layer(mixture: MixtureSpec, dtype: torch.dtype, *, has_bias: bool, is_mx: bool = False):
    from unspool.models.decoder.layers import Layer

    experts, inner = mixture.num_experts, mixture.ffn_size

    def stacked(rows: int, columns: int) -> AnyLinear:
        bias = random(experts * rows, scale=0.3).to(dtype) if has_bias else None
        if not is_mx:
            return Linear(random(experts * rows, columns, scale=columns**-0.5).to(dtype), bias)
        generator = torch.Generator().manual_seed(rows)
        blocks = torch.randint(0, 256, (experts * rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts * rows, columns // 32), generator=generator, dtype=torch.uint8)
        words = arrange(blocks.to(DEVICE), scales.to(DEVICE))
        return MxLinear(words.words, words.scales, dtype, bias)

    made = Mixture(
        router=Linear(
            random(experts, HIDDEN, scale=0.2).to(dtype), random(experts).to(dtype) if mixture.has_router_bias else None
        ),
        choice_bias=random(experts) if mixture.has_choice_bias else None,
        shared_up=None,
        shared_down=None,
        shared_gate=None,
    )
    nothing = Linear(torch.zeros(1, 1))
    return Layer(None, nothing, nothing, None, stacked(2 * inner, HIDDEN), stacked(HIDDEN, inner), *(None,) * 4, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 21])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_step_equals_the_reference(name: str, rows: int, dtype: torch.dtype) -> None:
    from unspool.models.paths.captured_mixture import MixtureStep

    if IS_INTERPRETED and dtype != torch.float32:
        pytest.skip("the interpreter computes in float32")
    mixture = MIXTURES[name]
    for is_mx in (False, True):
        if is_mx and mixture.ffn_size % 32:
            continue
        layer = make_layer(mixture, dtype, has_bias=name == "clamped", is_mx=is_mx)
        norm = Norm(random(HIDDEN).to(dtype) + 1, None, 1e-5, False)
        x = random(rows, HIDDEN, scale=2.0).to(dtype)
        lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        lengths[-1] = -1 if rows > 2 else 0
        out = x.clone()
        step = MixtureStep(make_spec(mixture), rows, DEVICE, dtype, has_fours=is_mx and rows < 9)
        step.feed(layer, x, out, lengths, norm=norm, adds=True)
        normed = norm(x)
        expected = feed_experts(mixture, layer.mixture, layer.up, layer.down, normed, find_activation("silu")) + x
        real = lengths >= 0
        chosen, shares = route(mixture, layer.mixture, normed)
        found = step._routes.chosen.long()[real].sort(-1)  # equal scores may stand in another order
        assert found.values.tolist() == chosen[real].sort(-1).values.tolist()
        scores = step._routes.shares[real]
        made = scores / scores.sum(-1, keepdim=True) if mixture.is_normalised else scores
        off = 1e-3 if dtype == torch.float32 else 0.06  # a logit's last bit
        torch.testing.assert_close(made * mixture.weight_scale, shares[real], atol=off, rtol=off)
        size = float(expected[real].float().abs().max())
        most = (0.02 if dtype == torch.bfloat16 else 2e-3 if is_mx else 1e-5) * size
        assert float((out[real] - expected[real]).float().abs().max()) <= most
        again = x.clone()
        step.feed(layer, x, again, lengths, norm=norm, adds=True)
        assert torch.equal(again[real], out[real])


def test_mixtures_of_one_shape_may_have_no_norm() -> None:
    from unspool.models.paths.captured_mixture import MixtureStep

    mixture = replace(MIXTURES["few"], is_normalised=False)
    layer = make_layer(mixture, torch.float32, has_bias=False)
    x, out = random(5, HIDDEN), torch.zeros(5, HIDDEN, device=DEVICE)
    MixtureStep(make_spec(mixture), 5, DEVICE, torch.float32).feed(
        layer, x, out, torch.zeros(5, dtype=torch.int32, device=DEVICE)
    )
    expected = feed_experts(mixture, layer.mixture, layer.up, layer.down, x, find_activation("silu"))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
