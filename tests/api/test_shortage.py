"""Memory and disks that run out: one call ends with a clear error, and everything else goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from unspool import CacheConfig, GenerationConfig, LanguageModel, WatermarkingConfig
from unspool.cache import DynamicCache
from unspool.cache.stores.plain import PlainStore
from unspool.errors import ResourceError, SettingError
from unspool.models.assembly import Assembler
from unspool.shortage import is_out_of_memory

SHORTAGES = [
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


def test_what_says_that_memory_ran_out() -> None:
    assert all(map(is_out_of_memory, SHORTAGES))
    for other in (RuntimeError("shapes differ"), ResourceError("out of memory"), ValueError("out of memory")):
        assert not is_out_of_memory(other)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", [1, 4])
def test_a_pass_without_memory_ends_its_call_alone(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, error: Exception, place: int
) -> None:
    expected, prefix = lm.generate("hello the cat", max_new_tokens=20).token_ids, lm.prefix("hello the")
    ids = torch.tensor([lm.encode("hello the cat")[0]])
    cache = lm.model.new_cache()
    lm.model.forward(ids[:, :-1], cache)
    held, forward, victim, passes = list(cache.lengths), lm.model.forward, threading.get_ident(), []

    def run_short(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == victim:
            passes.append(1)
            if len(passes) == place:
                raise error
        return forward(*arguments, **named)

    others: list[Any] = []
    beside = threading.Thread(
        target=lambda: others.extend(lm.generate("hello the cat", max_new_tokens=20).token_ids for _ in range(3))
    )
    beside.start()
    with monkeypatch.context() as patched:
        patched.setattr(lm.model, "forward", run_short)
        told: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "top_k": 1, "eos_token_id": None}
        told["logits_processor"] = [lambda ids, scores: scores]  # a caller's own: steps are taken one by one
        with pytest.raises(ResourceError, match=r"memory ran out.*1 rows.*20 new tokens.*Give fewer"):
            unspool.generate(lm, ids, past_key_values=cache, **told)
        passes.clear()
        with pytest.raises(ResourceError, match="memory ran out"):
            list(lm.stream("hello", prefix=prefix, **told))
    beside.join()
    assert others == [expected] * 3
    assert cache.lengths == held
    again = unspool.generate(lm, ids, past_key_values=cache, max_new_tokens=20)
    assert (
        again[0, ids.shape[1] :].tolist() == expected[0] == lm.generate("hello the cat", max_new_tokens=20).token_ids[0]
    )


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_cache_that_can_not_grow_stays_what_it_was(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    """Also where memory ends between two layers."""
    ids = torch.tensor([lm.encode("hello the cat")[0] * 4])
    caches = [DynamicCache(capacity=8), DynamicCache(capacity=8)]
    for cache in caches:
        lm.model.forward(ids[:, :8], cache)
    assert max(caches[0].lengths) == 8
    take, taken = PlainStore._take, []

    def take_some(self: Any, *arguments: Any) -> torch.Tensor:
        taken.append(1)
        if len(taken) > num_layers:
            raise SHORTAGES[0]
        return take(self, *arguments)

    room = caches[0]._store.room.positions
    longer = torch.tensor([(lm.encode("hello the cat")[0] * 40)[: room - 4]])
    with monkeypatch.context() as patched:
        patched.setattr(PlainStore, "_take", take_some)
        with pytest.raises(ResourceError, match="memory ran out"):
            unspool.generate(lm, torch.cat((ids[:, :8], longer), dim=1), past_key_values=caches[0], max_new_tokens=4)
    assert len(taken) == num_layers + 1 and caches[0].lengths == [8]
    for extra in (ids[:, 8:12], longer):  # as it is, and grown after all
        made, expected = (lm.model.forward(extra, cache).logits for cache in caches)
        assert torch.allclose(made, expected, atol=1e-5)


def test_working_memory_that_is_not_there_is_not_counted(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lm.generate(["hello the cat"] * 3, max_new_tokens=6).token_ids
    fresh = unspool.load(lm.source, device="cpu")
    fresh.generate("hello", max_new_tokens=2)
    empty = torch.empty

    def run_short(*arguments: Any, **named: Any) -> torch.Tensor:
        if named.get("dtype") == torch.uint8:
            raise SHORTAGES[0]
        return empty(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", run_short)
        with pytest.raises(ResourceError):
            fresh.generate(["hello the cat"] * 3, max_new_tokens=6)
    assert fresh.generate(["hello the cat"] * 3, max_new_tokens=6).token_ids == expected


def test_loading_without_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise SHORTAGES[0]

    monkeypatch.setattr(Assembler, "empty", refuse)
    with pytest.raises(ResourceError, match="needs more memory than cpu has free"):
        unspool.load(folder, device="cpu")


CHILD = """
import resource, sys, torch, unspool
from unspool.errors import ResourceError
torch.set_num_threads(1)
lm = unspool.load(sys.argv[1], device="cpu", threads=1)
expected = lm.generate([5, 6, 7], max_new_tokens=8).token_ids
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (96 << 20), resource.RLIM_INFINITY))
try:
    lm.generate([[5, 6, 7]] * 20000, max_new_tokens=100, eos_token_id=None)
except ResourceError as error:
    print("refused", str(error)[:44])
print(lm.generate([5, 6, 7], max_new_tokens=8).token_ids == expected)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how large a process is")
def test_a_process_whose_memory_is_limited(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, timeout=240)
    assert done.stdout == "refused memory ran out in this call, which has 20000\nTrue\n", done.stderr[-2000:]


@contextmanager
def limit_files(num_bytes: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file."""
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_saving_where_nothing_can_be_written(lm: LanguageModel, tmp_path: Path) -> None:
    prefix, config = lm.prefix("hello the cat"), GenerationConfig(top_k=3, do_sample=True)
    assert lm.tokenizer is not None
    (tmp_path / "file").write_text("x")
    saves: dict[str, Any] = {
        "prefix": lambda folder: prefix.save(folder / "x"),
        "cache": lambda folder: prefix.cache.save(folder / "x"),
        "config": lambda folder: config.to_json_file(folder / "x"),
        "watermark": lambda folder: WatermarkingConfig().to_json_file(folder / "x"),
        "cache config": lambda folder: CacheConfig("static").to_json_file(folder / "x"),
    }
    makes: dict[str, Any] = {"settings": config.save_pretrained, "tokenizer": lm.tokenizer.save}
    for save in (saves | makes).values():
        for wrong in (tmp_path / "file" / "below", Path("/dev/null/x"), Path("a\0b")):
            with pytest.raises(ResourceError, match="can't be written"):
                save(wrong)
        with limit_files(8), pytest.raises(ResourceError, match=r"can't be written.*(large|full)"):
            save(tmp_path)
    for save in saves.values():
        with pytest.raises(ResourceError, match="there is no folder"):
            save(tmp_path / "missing")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        for save in (saves | makes).values():
            with pytest.raises(ResourceError, match=r"[Pp]ermission"):
                save(tmp_path / "closed")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "closed") == ["file"]  # nothing half-written
    prefix.save(tmp_path / "x")
    assert lm.load_prefix(tmp_path / "x").token_ids == prefix.token_ids


@pytest.mark.parametrize(
    "asked",
    [{"num_beams": 65536}, {"num_return_sequences": 300, "do_sample": True}],
)
def test_what_a_models_file_may_ask_for(folder: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(asked))
    lm = unspool.load(tmp_path / "model", device="cpu")
    name = next(name for name, value in asked.items() if value in (65536, 300))
    with pytest.raises(SettingError, match=rf"`{name}`=\d+, set by the model's .* in the call"):
        lm.generate("hello", max_new_tokens=2)
    assert lm.generate("hello", max_new_tokens=2, **{name: 2}).texts


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_memory_that_ends_outside_a_generation(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Reading a prefix, lending it, a pass by hand, and the output object."""

    def run_short(*arguments: Any, **named: Any) -> Any:
        raise error

    prefix, ids = lm.prefix("hello the"), torch.tensor([lm.encode("hello the cat")[0]])
    with monkeypatch.context() as patched:
        patched.setattr(PlainStore, "_take", run_short)
        with pytest.raises(ResourceError, match="memory ran out while a prefix was read"):
            lm.prefix("hello the cat")
        with pytest.raises(ResourceError, match="memory ran out while a model read tokens"):
            lm.model.forward(ids, lm.model.new_cache())
        with pytest.raises(ResourceError, match="memory ran out in this call"):
            lm.generate("hello the cat", max_new_tokens=3)
    with monkeypatch.context() as patched:
        patched.setattr(DynamicCache, "clone", run_short)
        with pytest.raises(ResourceError, match="memory ran out while a prefix was copied"):
            lm.generate("hello", prefix=prefix, max_new_tokens=3)
    with monkeypatch.context() as patched:
        patched.setattr("unspool.decoding.run.build_output", run_short)
        with pytest.raises(ResourceError, match="memory ran out while the output object was built"):
            lm.generate("hello", max_new_tokens=3, return_dict_in_generate=True)
    assert [len(row) for row in lm.generate("hello", prefix=prefix, max_new_tokens=3).token_ids] == [3]


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_cache_that_can_not_have_more_rows_stays_what_it_was(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    ids = torch.tensor([lm.encode("hello the cat")[0] * 2])
    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        lm.model.forward(ids[:, :-1], cache)
    take, taken = PlainStore._take, []

    def take_some(self: Any, *arguments: Any) -> torch.Tensor:
        taken.append(1)
        if len(taken) > num_layers:
            raise SHORTAGES[0]
        return take(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PlainStore, "_take", take_some)
        told: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
        with pytest.raises(ResourceError, match="memory ran out"):
            unspool.generate(lm, ids, past_key_values=caches[0], **told)
    assert len(taken) == num_layers + 1
    assert caches[0].lengths == caches[1].lengths
    made, expected = (lm.model.forward(ids[:, -1:], cache).logits for cache in caches)
    assert torch.equal(made, expected)
