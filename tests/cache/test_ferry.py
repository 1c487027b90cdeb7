"""The ferry beside a GPU, on a lane that carries as late as it may: nobody reads, or moves, what has not arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.conformance.cases import load_model

import unspool
from unspool.cache import OffloadedCache, OffloadedStaticCache
from unspool.cache.offload.ferry import Copy, Ferry
from unspool.cache.offload.store import AwayStore
from unspool.cache.stores.memory import Room


class LateLane:
    """Copies when it is waited for and not before, as a stream may that has much to do."""

    def __init__(self) -> None:
        self._waiting: list[Copy] = []
        self._num_done = 0
        self.num_carried = 0

    def carry(self, copies: Iterable[Copy]) -> int:
        self._waiting += copies
        self.num_carried += 1
        return self._num_done + len(self._waiting)

    @torch.inference_mode()  # as the passes are that asked for the copies
    def hold_for(self, mark: int) -> None:
        while self._num_done < mark:
            into, source = self._waiting.pop(0)
            into.copy_(source)
            self._num_done += 1

    def finish(self) -> None:
        self.hold_for(self._num_done + len(self._waiting))


class LateStore(AwayStore):
    """A store that behaves as beside a GPU: layers are brought and sent."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.move_to(torch.device("cpu"))

    def move_to(self, device: torch.device) -> None:
        self.device, self.ferry = device, Ferry(device, LateLane())

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)


class LateCache(OffloadedCache):
    def _make_store(self, room: Room) -> LateStore:
        return LateStore(room, *self._wishes)


class LateStaticCache(OffloadedStaticCache):
    def _make_store(self, room: Room) -> LateStore:
        return LateStore(room, *self._wishes[1:])


@pytest.fixture(autouse=True)
def _dirty_memory() -> Iterator[None]:
    """Memory that nothing was written to holds NaN, as a GPU's may once others have used it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "seed": 1, "num_return_sequences": 2},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kind", [LateCache, LateStaticCache])
def test_late_copies_change_no_token(name: str, kind: Any, way: str) -> None:
    model = load_model(name).model
    ids = torch.randint(3, model.info.vocab_size, (3, 22), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :19] = 0, 0
    if way == "drafts":
        ids, mask = ids[2:], mask[2:]
    common = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, **WAYS[way]}
    expected = unspool.generate(model, ids, **common)
    cache = kind() if kind is LateCache else kind(model.key_shape.as_config(), 9, 64, "cpu")
    found = unspool.generate(model, ids, **common, past_key_values=cache, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert cache._store.ferry._lane.num_carried > 20  # it was the ferry that brought and sent


def test_a_layer_is_fetched_again_where_more_is_asked_for_than_was_fetched() -> None:
    ferry = Ferry(torch.device("cpu"), LateLane())
    home = torch.arange(6.0).view(1, 6, 1)
    ferry.fetch_ahead(0, home, 2, 1)
    assert ferry.bring(0, home, 5, 1)[:, :5].tolist() == home[:, :5].tolist()
    assert not ferry.is_under_way


def test_what_no_copy_reached_is_zero() -> None:
    """Places past a short row's end are masked, and masks can't hide a NaN."""
    ferry = Ferry(torch.device("cpu"), LateLane())
    assert ferry.bring(0, torch.ones(2, 4, 1), 1, 2).squeeze(-1).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]


def test_the_host_reads_and_writes_what_has_come_home() -> None:
    kv = torch.randn(2, 5, 2, 1, 4)
    cache = LateCache()
    for _ in range(2):  # the second pass finds the first layer on its way
        cache.begin(2, 5)
        for layer in range(3):
            cache.write(layer, kv + layer)
        cache.end()
    expected = torch.cat((kv, kv), 1)[:, :, 0].transpose(1, 2)
    copied, split = cache.clone(), cache.batch_split(2, 1)
    assert all(torch.equal(each[2][0], expected + 2) for each in (cache, copied, LateCache.from_batch_splits(split)))
    keys = torch.ones(2, 1, 1, 4)
    for layer in range(3):
        cache.update(keys, keys, layer)
    cache.select_rows([1, 1])
    cache.begin(2, 1)
    read = cache.write(0, kv[:, :1])[0]
    assert torch.equal(read, torch.cat((expected[[1, 1]], keys, kv[:, :1, 0].transpose(1, 2)), 2))
