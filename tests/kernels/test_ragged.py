"""Attention over ragged rows, beside its definition query by query; and what torch's kernel is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.kernels import ragged as module
from unspool.kernels.ragged import Ragged, attend_ragged, find_flash

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3
rows_of = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4)  # held, new


def make_rows(rows: list[tuple[int, int]]) -> Ragged:
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    positions = torch.tensor(starts)[:, None] + torch.arange(max(counts))
    return Ragged(starts, counts, positions)


def make_keys(ragged: Ragged, room: int) -> torch.Tensor:
    """Keys and values (rows, room, 2, heads, width) that are NaN past each row's end: whoever reads there shows it."""
    kv = torch.randn(len(ragged.counts), room, 2, KV_HEADS, WIDTH)
    for row, (start, count) in enumerate(zip(ragged.starts, ragged.counts, strict=True)):
        kv[row, start + count :] = torch.nan
    return kv


def define(
    queries: torch.Tensor, kv: torch.Tensor, ragged: Ragged, window: int | None, softcap: float | None
) -> torch.Tensor:
    """What each query reads, by definition: the keys up to its own, as far back as the window goes."""
    read = []
    for token, (row, position) in enumerate(zip(ragged.rows.tolist(), ragged.positions.tolist(), strict=True)):
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = kv[row, first : position + 1].double().repeat_interleave(HEADS // KV_HEADS, dim=2).unbind(1)
        scores = torch.einsum("hw,khw->hk", queries[token].double(), keys) * SCALE
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        read.append(torch.einsum("hk,khw->hw", scores.softmax(-1), values))
    return torch.stack(read)


@given(rows_of.filter(lambda rows: any(count for _, count in rows)), st.sampled_from([None, 1, 3, 20]), st.booleans())
@settings(max_examples=30)
@pytest.mark.parametrize("block", [3, 1024])
def test_every_query_reads_what_it_may_see(
    block: int, rows: list[tuple[int, int]], window: int | None, is_capped: bool
) -> None:
    torch.manual_seed(0)
    ragged, softcap = make_rows(rows), 2.0 if is_capped else None
    queries, kv = torch.randn(ragged.num_tokens, HEADS, WIDTH), make_keys(ragged, room=21)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        read = attend_ragged(queries, *kv.unbind(2), ragged, scale=SCALE, window=window, softcap=softcap)
    assert read.shape == queries.shape
    torch.testing.assert_close(read.double(), define(queries, kv, ragged, window, softcap), rtol=1e-5, atol=1e-5)


def test_tokens_are_laid_out_and_filled_back() -> None:
    ragged = make_rows([(4, 2), (0, 0), (1, 3)])
    filled = torch.tensor([[1, 2, -1], [-1, -1, -1], [3, 4, 5]])
    assert ragged.take(filled).tolist() == [1, 2, 3, 4, 5]
    assert ragged.rows.tolist() == [0, 0, 2, 2, 2]
    assert ragged.positions.tolist() == [4, 5, 1, 2, 3]
    assert ragged.fill(ragged.take(filled)).tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    assert ragged.take_last(ragged.take(filled))[[0, 2]].tolist() == [2, 5]  # the second row has none


def test_a_mask_is_never_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 4)
    ragged = make_rows([(0, 11), (7, 6)])
    windowed = ragged.cut(3, in_blocks=False)
    assert [(block.row, block.num_queries, block.first, block.stop) for block in windowed.blocks] == [
        *((0, 4, 0, 4), (0, 4, 2, 8), (0, 3, 6, 11)),
        *((1, 4, 5, 11), (1, 2, 9, 13)),
    ]
    assert windowed.mask(windowed.blocks[1], torch.float32).shape == (4, 6)
    # A row that holds nothing needs no mask, so it is not cut.
    assert [block.num_queries for block in ragged.cut(None, in_blocks=False).blocks] == [11, 4, 2]
    assert [block.num_queries for block in ragged.cut(None, in_blocks=True).blocks] == [4, 4, 3, 4, 2]


# --- torch's kernel -------------------------------------------------------------------------------------------


def run_like_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What `varlen_attn` is documented to do: bounds a row, the last query sees the last key, windows by distance."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size[1] == 0
    assert query.dim() == key.dim() == value.dim() == 3
    read = torch.empty_like(query)
    bounds = zip(*(bound.tolist()[i:] for bound in (cu_seq_q, cu_seq_k) for i in (0, 1)), strict=False)
    for first, last, first_key, last_key in bounds:
        assert last - first <= max_q and last_key - first_key <= max_k
        if first == last:
            continue
        distances = torch.arange(last_key - first_key - (last - first), last_key - first_key)[:, None] - torch.arange(
            last_key - first_key
        )
        sees = (distances >= 0) & ((distances <= window_size[0]) | (window_size[0] < 0))
        keys, values = (part[first_key:last_key].repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
        scores = torch.einsum("qhw,khw->hqk", query[first:last], keys) * scale
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        read[first:last] = torch.einsum("hqk,khw->qhw", weights, values)
    return read


@given(rows_of.filter(lambda rows: any(count for _, count in rows)), st.sampled_from([None, 1, 3, 20]))
@settings(max_examples=20)
def test_the_kernel_is_told_the_same_rows(rows: list[tuple[int, int]], window: int | None) -> None:
    torch.manual_seed(1)
    ragged = make_rows(rows)
    queries, kv = torch.randn(ragged.num_tokens, HEADS, WIDTH), make_keys(ragged, room=19)
    expected = attend_ragged(queries, *kv.unbind(2), ragged, scale=SCALE, window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_flash", lambda: run_like_flash)
        patch.setattr(module, "has_flash", lambda *_: True)
        read = attend_ragged(queries, *kv.unbind(2), ragged, scale=SCALE, window=window)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)


def test_a_torch_whose_operator_takes_other_arguments_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    find_flash.cache_clear()
    assert find_flash() is not None
    known = torch.ops.aten._flash_attention_forward.default._schema.arguments
    for arguments in ([one for one in known if one.name != "window_size_left"], known[1:]):
        schema = SimpleNamespace(arguments=arguments)
        operator = SimpleNamespace(default=SimpleNamespace(_schema=schema))
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
        find_flash.cache_clear()
        assert find_flash() is None
    monkeypatch.undo()
    find_flash.cache_clear()
    assert module.has_flash(torch.device("cpu"), torch.bfloat16, 64) is False
