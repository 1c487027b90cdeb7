"""Kernels that read rotary pairs as two halves of a head beside those that read neighbours: the same bits.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_halves.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.attention_checks import make_rope, tell_addresses
from tests.gpu.kernel_checks import DEVICE, DTYPES, pytestmark, random
from tests.gpu.test_packed_step import make_packed

from unspool.kernels.packing import Scheme
from unspool.kernels.rotary import RotaryTable, rotate_
from unspool.models.head_order import pair_neighbours_

__all__ = ["pytestmark"]

HEADS, KV_HEADS, WIDTH, LENGTHS, CAPACITY = 4, 2, 32, [0, 1, 70, -1], 96


def pair_up(qkv: torch.Tensor, pairs: int) -> torch.Tensor:
    """The same queries and keys with the pairs of their halves as neighbours."""
    turned = (HEADS + KV_HEADS) * WIDTH
    rows = qkv.t().contiguous()
    pair_neighbours_(rows[:turned], WIDTH, 2 * pairs)
    return rows.t().contiguous()


def pair_up_norm(weight: torch.Tensor, pairs: int) -> torch.Tensor:
    made = weight.clone()
    pair_neighbours_(made, WIDTH, 2 * pairs)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("pairs", "has_norm"), [(16, False), (6, True)])
@pytest.mark.parametrize("kind", ["step", "wide", "packed"])
def test_attention_of_halves(kind: str, pairs: int, has_norm: bool, dtype: torch.dtype) -> None:
    from unspool.kernels.gpu.attention.packed_attention import PackedStepAttention, list_packed
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.gpu.attention.turning import find_turns
    from unspool.kernels.gpu.attention.wide_attention import WideAttention

    rows, new = len(LENGTHS), 3 if kind == "wide" else 1
    shape = HeadShape(HEADS, KV_HEADS, WIDTH, WIDTH**-0.5, eps=1e-6)
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    held = random(rows, CAPACITY, 2, KV_HEADS, WIDTH, dtype=dtype)
    lengths = torch.tensor(LENGTHS, device=DEVICE, dtype=torch.int32)
    turns = torch.empty(rows * new, 2, pairs, device=DEVICE)
    find_turns(lengths, make_rope(WIDTH, pairs)[1], 1.0, turns)
    halves = random(rows * new, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=dtype)
    norms = (random(WIDTH, dtype=dtype), random(WIDTH, dtype=dtype)) if has_norm else None
    scheme = Scheme.of(WIDTH, 4, 16, True, torch.float16)
    packed = [make_packed(scheme, rows, KV_HEADS, 64).tensors() for _ in range(2)]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for is_halved in (True, False):
        buffer = held.clone()
        told: list[int] = tell_addresses(base, [buffer])
        step: Any = StepAttention(rows, shape, DEVICE)
        if kind == "wide":
            step = WideAttention(rows, new, shape, DEVICE, is_forked=False)
        elif kind == "packed":
            step = PackedStepAttention(rows, shape, (scheme, scheme), DEVICE)
            told += list_packed(base, [(*packed[0], *packed[1])], 64, [0, 0, 64, 0])
        own = None if norms is None else tuple(one if is_halved else pair_up_norm(one, pairs) for one in norms)
        out = torch.full((rows * new, HEADS * WIDTH), torch.nan, device=DEVICE, dtype=dtype)
        step(
            halves if is_halved else pair_up(halves, pairs), out, base, torch.tensor(told, device=DEVICE), lengths,
            0, 1, turns=turns, q_norm=None if own is None else own[0], k_norm=None if own is None else own[1],
            is_halved=is_halved,
        )  # fmt: skip
        found.append((out, buffer))
    # Norms and products of float32 add up the same numbers in another order.
    bounds = {"rtol": 0.0, "atol": 1e-5 if dtype == torch.float32 else 0.0}
    torch.testing.assert_close(found[0][1], found[1][1], **bounds)
    assert not torch.equal(found[0][1], held)
    torch.testing.assert_close(found[0][0], found[1][0], **bounds, equal_nan=True)
    assert found[0][0][: 3 * new].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairs", [16, 12])
def test_heads_of_halves_are_rotated(pairs: int, dtype: torch.dtype) -> None:
    from unspool.kernels.gpu.attention.rotating import rotate_heads_

    rows, new = 3, 40
    halves = random(rows * new, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=dtype)
    neighbours = pair_up(halves, pairs).view(rows, new, -1, WIDTH)
    table = RotaryTable([0.7**place for place in range(pairs)], 1.5, DEVICE).reserve(64)
    factors = table[torch.randint(0, 64, (rows, new), device=DEVICE)].unsqueeze(2)
    by_kernel, plain = halves.view(rows, new, -1, WIDTH).clone(), halves.view(rows, new, -1, WIDTH).clone()
    turned = HEADS + KV_HEADS
    rotate_heads_(by_kernel[:, :, :turned], factors, is_halved=True)
    rotate_heads_(neighbours[:, :, :turned], factors)
    assert torch.equal(by_kernel, neighbours)
    rotate_(plain[:, :, :turned], factors, is_halved=True)
    torch.testing.assert_close(by_kernel, plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_an_object_answers_as_the_native_model(name: str, settings: dict[str, Any]) -> None:
    """Captured steps, drafts and prompts over an object's own matrices, beside a model with matrices of its own."""
    transformers = pytest.importorskip("transformers")

    import unspool
    from unspool.models.registry import build_model
    from unspool.models.weights import MemorySource

    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256, "eos_token_id": None,
    }  # fmt: skip
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", {}),
        "qwen3": ("Qwen3Config", {"head_dim": 64}),
        "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "sliding_window": 16}),
        "phi": ("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    }
    kind, more = kinds[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(sizes | more), bos_token_id=1, pad_token_id=0, initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().cuda()
    held = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    told = config.to_dict() | {"architectures": [type(model).__name__]}
    native = build_model(told, MemorySource(held), device=torch.device("cuda:0"), dtype=torch.float32)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1)).cuda()
    call = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **settings}
    output = unspool.generate(model, ids, **call, return_dict_in_generate=True)
    assert "own forward" not in output.stats.path_reason
    assert torch.equal(output.sequences, unspool.generate(native, ids, **call))
