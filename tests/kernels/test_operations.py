"""The models' operations against values written out by hand or by transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.t5.modeling_t5 import T5Attention

from unspool.errors import UnsupportedError
from unspool.kernels.activations import ACTIVATIONS, find_activation
from unspool.kernels.alibi import alibi_bias, alibi_slopes
from unspool.kernels.attention import attend
from unspool.kernels.norms import layer_norm, rms_norm
from unspool.kernels.relative import distance_buckets
from unspool.kernels.rotary import RotaryTable, rotate_


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_the_reference(name: str) -> None:
    x = torch.linspace(-6, 6, 501)
    assert torch.allclose(find_activation(name)(x), ACT2FN[name](x), atol=1e-6)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="mish"):
        find_activation("mish")


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 40, 71])
def test_alibi_equals_the_reference(num_heads: int) -> None:
    mask = torch.ones(1, 300, dtype=torch.int64)
    theirs = bloom_alibi(mask, num_heads, torch.float32).view(num_heads, 300)
    assert torch.allclose(alibi_bias(num_heads, 300), theirs, rtol=1e-5, atol=1e-6)
    rounded = falcon_alibi(mask, num_heads, torch.float32).view(num_heads, 300)
    assert torch.allclose(alibi_bias(num_heads, 300, scale=0.5, is_rounded=True), rounded * 0.5)


def test_alibi_slopes_by_hand() -> None:
    assert alibi_slopes(4).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert torch.allclose(alibi_slopes(6)[4:], torch.tensor([1 / 2, 1 / 8]))


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 16), (16, 50)])
def test_buckets_equal_the_reference(buckets: int, most: int) -> None:
    distances = torch.arange(400)
    theirs = T5Attention._relative_position_bucket(-distances, False, buckets, most)
    assert torch.equal(distance_buckets(400, buckets, most), theirs)


def test_norms_by_hand() -> None:
    x, weight = torch.tensor([[3.0, -4.0]]), torch.tensor([2.0, 0.5])
    root = math.sqrt(12.5 + 1e-6)
    assert torch.allclose(rms_norm(x, weight, 1e-6), torch.tensor([[6 / root, -2 / root]]))
    narrow = rms_norm(x.bfloat16(), weight, 1e-6)
    assert narrow.dtype == torch.bfloat16 and torch.allclose(narrow.float(), rms_norm(x, weight, 1e-6), rtol=1e-2)
    assert torch.allclose(layer_norm(x, weight, None, 0.0), torch.tensor([[2.0, -0.5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotation_turns_neighbouring_pairs(dtype: torch.dtype) -> None:
    table = RotaryTable([0.5, 0.1], gain=2.0, device=torch.device("cpu"))
    heads = torch.tensor([1.0, 0.0, 0.0, 1.0, 7.0], dtype=dtype).repeat(1, 3, 2, 1)[..., :5]
    heads = torch.cat((heads, heads[..., :1]), -1)  # (1, 3, 2, 6): four numbers turn, two stay
    rotate_(heads, table.reserve(3)[None, :3, None])
    for position in range(3):
        a, b = 0.5 * position, 0.1 * position
        turned = [2 * math.cos(a), 2 * math.sin(a), -2 * math.sin(b), 2 * math.cos(b), 7, 1]
        expected = torch.tensor(turned, dtype=dtype)
        assert torch.allclose(heads[0, position, 1], expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_brings_halves_together(dtype: torch.dtype) -> None:
    table = RotaryTable([0.5, 0.1, 0.7], gain=1.5, device=torch.device("cpu"))
    halves = torch.randn(2, 3, 4, 8, dtype=dtype)  # six numbers turn, two stay
    neighbours = halves[..., [0, 3, 1, 4, 2, 5, 6, 7]].clone()
    factors = table.reserve(3)[None, :3, None]
    rotate_(halves, factors, is_halved=True)
    rotate_(neighbours, factors)
    torch.testing.assert_close(halves, neighbours)


def test_a_rotary_table_grows() -> None:
    table = RotaryTable([0.3], gain=1.0, device=torch.device("cpu"))
    before = table.reserve(10).clone()
    grown = table.reserve(5000)
    assert grown.shape[0] >= 5000 and torch.equal(grown[: before.shape[0]], before)
    assert table.width == 2


def plain_attention(q, k, v, scale, mask, softcap):
    """Attention written out, one head at a time."""
    group = q.shape[1] // k.shape[1]
    read = torch.empty_like(q)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = q[row, head] @ k[row, head // group].T * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores + mask[min(row, mask.shape[0] - 1), min(head, mask.shape[1] - 1)]
            read[row, head] = scores.softmax(-1) @ v[row, head // group]
    return read


@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    num_new=st.integers(1, 4),
    past=st.integers(0, 5),
    kind=st.sampled_from(["none", "causal", "boolean", "additive", "by head"]),
    softcap=st.sampled_from([None, 3.0]),
    want_weights=st.booleans(),
)
def test_attention_equals_attention_written_out(
    rows: int, kv_heads: int, group: int, num_new: int, past: int, kind: str, softcap: float | None, want_weights: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + kv_heads * 10 + num_new)
    past = 0 if kind == "causal" else past
    keys, heads = num_new + past, kv_heads * group
    q = torch.randn(rows, heads, num_new, 8, generator=generator)
    k, v = (torch.randn(rows, kv_heads, keys, 8, generator=generator) for _ in range(2))
    visible = torch.rand(rows, 1, num_new, keys, generator=generator) > 0.4
    visible[..., 0] = True
    mask = {
        "none": None,
        "causal": None,
        "boolean": visible,
        "additive": torch.randn(rows, 1, num_new, keys, generator=generator),
        "by head": torch.randn(1, heads, num_new, keys, generator=generator),
    }[kind]
    added = torch.zeros(1, 1, num_new, keys) if mask is None else mask
    if kind == "causal":
        added = torch.full((1, 1, num_new, keys), -math.inf).triu(1)
    elif kind == "boolean":
        added = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, -math.inf)
    read, weights = attend(
        q, k, v, scale=0.3, mask=mask, is_causal=kind == "causal", softcap=softcap, want_weights=want_weights
    )
    assert torch.allclose(read, plain_attention(q, k, v, 0.3, added, softcap), atol=1e-5)
    assert (weights is not None) == want_weights
    if weights is not None:
        assert weights.shape == (rows, heads, num_new, keys)
        assert torch.allclose(weights.sum(-1), torch.ones(rows, heads, num_new), atol=1e-5)
