"""Attention over packed keys: block by block as all at once, whatever the queries may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.kernels.packed import attend_in_blocks, attend_packed, attend_plainly
from unspool.kernels.packed_keys import PackedKeys, PackedView
from unspool.kernels.packing import Scheme, pack


@dataclass
class Case:
    """Queries over rows of which each has its own number of packed positions."""

    counts: list[int]
    num_new: int = 1
    num_recent: int = 20
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    nbits: int = 4
    block: int = 16
    keys_by_channel: bool = True
    values_by_channel: bool = False
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def make(self) -> tuple[torch.Tensor, PackedKeys, PackedKeys]:
        torch.manual_seed(self.seed)
        rows, places = len(self.counts), max(self.counts) + self.block
        both = []
        for by_channel in (self.keys_by_channel, self.values_by_channel):
            scheme = Scheme.of(self.width, self.nbits, self.block, by_channel, torch.float16)
            both.append(pack(torch.randn(rows, self.kv_heads, places, self.width, device=self.device), scheme))
        slack = torch.randint(0, self.num_recent - self.num_new + 1, (rows,))
        starts = torch.tensor(self.counts) + slack
        positions = (starts[:, None] + torch.arange(self.num_new)).to(self.device)
        counts = torch.tensor(self.counts, dtype=torch.int32, device=self.device)
        view = PackedView(self.counts, counts, positions, max(self.counts))
        recent = torch.randn(rows, self.num_recent, 2, self.kv_heads, self.width, device=self.device, dtype=self.dtype)
        keys, values = (part.transpose(1, 2) for part in recent.unbind(2))
        queries = torch.randn(rows, self.num_new, self.heads, self.width, device=self.device, dtype=self.dtype)
        return queries.transpose(1, 2), PackedKeys(both[0], keys, view), PackedKeys(both[1], values, view)


def mask_of(positions: torch.Tensor, heads: int, window: int | None) -> torch.Tensor:
    """A bias a head and key, with what may not be seen at minus infinity: (rows, heads, new, stop)."""
    columns = torch.arange(int(positions.max()) + 1, device=positions.device)
    asked = positions[:, None, :, None]
    visible = columns <= asked
    if window is not None:
        visible = visible & (columns > asked - window)
    bias = torch.randn(1, heads, 1, columns.numel(), device=positions.device)
    return torch.where(visible, bias, -torch.inf)


@settings(max_examples=40)
@given(
    counts=st.lists(st.sampled_from([0, 16, 32, 160]), min_size=1, max_size=3),
    num_new=st.integers(1, 5),
    share=st.integers(1, 3),
    nbits=st.sampled_from([2, 4, 8]),
    axes=st.tuples(st.booleans(), st.booleans()),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.just(3.0),
    is_masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_blocks_read_what_the_whole_reads(
    counts: list[int],
    num_new: int,
    share: int,
    nbits: int,
    axes: tuple[bool, bool],
    window: int | None,
    softcap: float | None,
    is_masked: bool,
    seed: int,
) -> None:
    case = Case(counts, num_new, heads=2 * share, nbits=nbits, seed=seed)
    case.keys_by_channel, case.values_by_channel = axes
    queries, keys, values = case.make()
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "window": window}
    if is_masked:
        options |= {"mask": mask_of(keys.view.positions, case.heads, window), "window": None}
    expected, _ = attend_plainly(queries, keys, values, **options)
    for block_numbers in (1, 3000, 1 << 20):  # a block at a time, some, all
        read = attend_in_blocks(queries, keys, values, **options, block_numbers=block_numbers)
        torch.testing.assert_close(read, expected, atol=1e-5, rtol=1e-5)


def test_the_reference_is_attention_over_what_was_unpacked() -> None:
    """By hand: one row, one head, the numbers as they stand after packing."""
    queries, keys, values = Case([16], heads=1, kv_heads=1, num_recent=3).make()
    stop = int(keys.view.positions[0, 0]) + 1
    k, v = keys.unpack(stop)[0, 0], values.unpack(stop)[0, 0]
    assert torch.equal(k[16:], keys.recent[0, 0, : stop - 16])
    weights = torch.softmax(queries[0, 0] @ k.T * 0.5, dim=-1)
    read, told = attend_packed(queries, keys, values, scale=0.5, want_weights=True)
    torch.testing.assert_close(read[0, 0], weights @ v)
    torch.testing.assert_close(told[0, 0], weights)


def test_a_row_alone_reads_what_it_reads_in_a_batch() -> None:
    queries, keys, values = Case([0, 48, 16]).make()
    together = attend_in_blocks(queries, keys, values, scale=0.3)
    for row in range(3):
        view = keys.view
        alone = PackedView(
            [view.num_packed[row]], view.counts[row : row + 1], view.positions[row : row + 1], view.num_packed[row]
        )
        parts = [
            PackedKeys(each.packed.rows(slice(row, row + 1)), each.recent[row : row + 1], alone)
            for each in (keys, values)
        ]
        read = attend_in_blocks(queries[row : row + 1], *parts, scale=0.3)
        torch.testing.assert_close(read[0], together[row], atol=1e-6, rtol=1e-5)


def test_no_temporary_grows_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.kernels import packed as module

    queries, keys, values = Case([640], heads=2, kv_heads=2).make()
    largest = 0
    real = module.unpack

    def watch(packed: Any, dtype: torch.dtype) -> torch.Tensor:
        nonlocal largest
        made = real(packed, dtype)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(module, "unpack", watch)
    attend_in_blocks(queries, keys, values, scale=0.3, block_numbers=2048)
    assert largest == 2048
