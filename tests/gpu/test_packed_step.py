"""A captured step over packed keys beside torch's reference, and whole steps of models beside their operators.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_packed_step.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.attention_checks import find_new, make_rope, tell_addresses
from tests.gpu.kernel_checks import DEVICE, check, pytestmark, random
from tests.gpu.models import make_model

from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.attention import attend
from unspool.kernels.packing import Packed, Scheme, pack, unpack

__all__ = ["pytestmark"]

# Triton's interpreter multiplies bfloat16 as the whole numbers that it stores them in; a GPU does not.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
SHAPES: list[dict[str, Any]] = [
    {},
    {"nbits": 8, "width": 32, "pairs": 8},
    {"nbits": 2, "group": 32},
    {"keys_by_channel": False, "group": 16, "width": 64},
    {"values_by_channel": True, "nbits": 8, "group": 16},
    {"heads": 6, "kv_heads": 1, "pairs": 0},
    {"width": 64, "group": 32, "pairs": 32},  # values in two groups
    {"heads": 3, "kv_heads": 3, "width": 64, "group": 16},  # in four: not by halves
]


def make_packed(scheme: Scheme, rows: int, heads: int, places: int) -> Packed:
    packed = pack(random(rows, heads, places, scheme.width), scheme)
    return Packed(scheme, *(tensor.contiguous() for tensor in packed.tensors()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("manner", ["plain", "window", "softcap and norm", "slopes"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_packed_keys(shape: dict[str, Any], manner: str, dtype: torch.dtype) -> None:
    """Ragged rows from nothing held to many parts, with nothing packed and with all but a few; one is not there."""
    from unspool.kernels.gpu.attention.packed_attention import PackedStepAttention, explain_no_tiles, list_packed
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.turning import find_turns

    told = {"heads": 4, "kv_heads": 2, "width": 32, "pairs": 16, "nbits": 4, "group": 64, **shape}
    heads, kv_heads, width, pairs, group = (told[name] for name in ("heads", "kv_heads", "width", "pairs", "group"))
    schemes = [
        Scheme.of(width, told["nbits"], group, told.get(name, default), torch.float16)
        for name, default in (("keys_by_channel", True), ("values_by_channel", False))
    ]
    assert explain_no_tiles(*schemes) is None
    # The last row's last part begins behind all packed places, where nothing may be read.
    held, num_packed = [0, 63, 64, 300, 448, -1, 500], [0, 0, 64, 128, 384, 0, 448]
    rows, slots, places, window, eps = len(held), 180, 448, 150, 1e-6
    has_norm, softcap = manner == "softcap and norm", 5.0 if manner == "softcap and norm" else None
    layers = [[make_packed(scheme, rows, kv_heads, places) for scheme in schemes] for _ in range(2)]
    recent = [random(rows, slots, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    before = recent[1].clone()
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    norms = (random(width, dtype=dtype), random(width, dtype=dtype)) if has_norm else (None, None)
    slopes = alibi_slopes(heads).to(DEVICE) if manner == "slopes" else None
    scale = width**-0.5
    head_shape = HeadShape(heads, kv_heads, width, scale, softcap, window if manner == "window" else None, eps)
    step = PackedStepAttention(rows, head_shape, (schemes[0], schemes[1]), DEVICE)
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    tensors = [(*keys.tensors(), *values.tensors()) for keys, values in layers]
    table = torch.tensor(
        [*tell_addresses(base, recent), *list_packed(base, tensors, places, num_packed)], device=DEVICE
    )
    lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)
    out = torch.full((rows, heads * width), torch.nan, device=DEVICE, dtype=dtype)
    rope, frequencies = make_rope(width, pairs)
    turns = torch.empty(rows, 2, pairs, device=DEVICE) if pairs else None
    if turns is not None:
        find_turns(lengths, frequencies, 1.0, turns)
    for _ in range(2):  # what is left behind must not matter
        step(
            qkv, out, base, table, lengths, 1, 2,
            turns=turns, is_windowed=manner == "window", q_norm=norms[0], k_norm=norms[1], slopes=slopes,
        )  # fmt: skip
    old = [unpack(packed, torch.float32) for packed in layers[1]]  # (rows, heads, places, width)
    for row, (length, packed) in enumerate(zip(held, num_packed, strict=True)):
        if length < 0:
            assert out[row].isnan().all() and torch.equal(recent[1][row], before[row])
            continue
        new = find_new(qkv[row], head_shape, norms, rope if pairs else None, length)
        first = max(0, length + 1 - window) if manner == "window" else 0
        both = []
        for which in range(2):
            own = before[row, : length - packed, which].float().transpose(0, 1)
            latest = new[0, :, heads + which * kv_heads : heads + (which + 1) * kv_heads].transpose(0, 1)
            both.append(torch.cat((old[which][row, :, :packed], own, latest), 1)[None, :, first:].double())
        mask = None
        if slopes is not None:
            mask = (slopes[:, None] * torch.arange(both[0].shape[2], device=DEVICE))[None, :, None].double()
        read, _ = attend(new[:, :, :heads].transpose(1, 2).double(), *both, scale=scale, mask=mask, softcap=softcap)
        check(out[row], read.reshape(-1), dtype)
        check(recent[1][row, length - packed], new[:, :, heads:].reshape(2, kv_heads, width), dtype)
        rest = [at for at in range(slots) if at != length - packed]
        assert torch.equal(recent[1][row, rest], before[row, rest])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kind", ["quantized", "quantized_static"])
@pytest.mark.parametrize("nbits", [4, 8])
def test_captured_steps_read_what_operators_read(kind: str, nbits: int, window: int | None, dtype: torch.dtype) -> None:
    """Ragged rows over many blocks that are packed between steps; rows move, leave, and roll back."""
    model = make_model(window, dtype)
    tokens = torch.randint(3, 96, (3, 150), generator=torch.Generator().manual_seed(0)).cuda()
    found: dict[bool, list[torch.Tensor]] = {}
    paths = model.paths
    assert model.find_path("captured") is not None
    for is_captured in (True, False):
        model.paths = paths if is_captured else []
        told = {"nbits": nbits, "q_group_size": 16, "residual_length": 24}
        cache = model.new_cache(kind, 3, 300, config=told)
        model.forward(tokens[:, :70], cache, counts=[70, 9, 33])
        found[is_captured] = []
        for number in range(70, 150):
            if number == 90:
                cache.select_rows([2, 0, 1])
            if number == 110:
                cache.truncate([length - 3 for length in cache.lengths])
            if number == 130:
                cache.select_rows([1, 0])
            forward = model.forward(tokens[: len(cache.lengths), number : number + 1], cache)
            assert forward.path == ("captured" if is_captured else "eager")
            found[is_captured].append(forward.logits.float())
        assert min(cache._store.layers[0].num_packed) > 50
    for mine, theirs in zip(found[True], found[False], strict=True):
        assert (mine - theirs).norm() < {torch.float32: 2e-4}.get(dtype, 6e-2) * theirs.norm()
