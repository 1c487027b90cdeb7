"""What a config claims is bounded and compared with the file's tensors before memory is taken for it."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.fuzz.tiny import GOLDENS, NATIVE

import unspool
from unspool.errors import LoadError, UnspoolError
from unspool.models.bounds import INTEGERS, NUMBERS

HUGE = (2**31 - 1, 2**31, 2**63, 10**400, -1, 0, "3", [3], True, 1e300)


def load(folder: Path, name: str, native: bool | None = None, **changed: Any) -> Any:
    folder.mkdir(exist_ok=True)
    config = json.loads((GOLDENS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    if not (folder / "model.safetensors").exists():
        (folder / "model.safetensors").symlink_to(GOLDENS / name / "model.safetensors")
    return unspool.load(folder, device="cpu", native=native)


@pytest.mark.parametrize("name", NATIVE)
def test_sizes_that_the_weights_do_not_have(tmp_path: Path, name: str) -> None:
    config = json.loads((GOLDENS / name / "config.json").read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unread = {"max_window_layers", "sliding_window", "decoder_vocab_size"}
    unread |= {"num_hidden_layers"} if "encoder_layers" in config else set()  # which says the same
    keys = [key for key in config if key in INTEGERS and key not in unread]
    assert len(keys) >= 4
    for key in keys:
        for value in HUGE:
            with pytest.raises(LoadError, match="a whole number from"):
                load(tmp_path / name, name, **{key: value})
        try:  # within the bounds, and not what the file has
            load(tmp_path / name, name, **{key: INTEGERS[key][1]})
        except UnspoolError:
            continue
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "memory was taken for a claim"


@pytest.mark.parametrize("value", [10**400, 0, -1.0, 1e300, "1e-5", None])
def test_numbers_that_can_not_be(tmp_path: Path, value: Any) -> None:
    for name, key in (("llama", "rms_norm_eps"), ("llama", "rope_theta"), ("gpt2", "layer_norm_epsilon")):
        if value is None:  # null stands for the default
            load(tmp_path / name, name, **{key: value})
            continue
        with pytest.raises(LoadError, match=key):
            load(tmp_path / name, name, **{key: value})


def test_every_bound_is_a_range() -> None:
    for table in (INTEGERS, NUMBERS):
        assert all(-1 <= least < most for least, most in table.values())
        assert [name for name, (least, _) in table.items() if least < 0] in (
            [],
            ["moe_layer_end_index"],
        )  # -1: the last


@pytest.mark.parametrize("told", [[-1], -1, [], [10**400], "x", 10**6])
def test_t5_with_a_start_that_is_no_token(tmp_path: Path, told: Any) -> None:
    try:
        load(tmp_path / "t5", "t5", decoder_start_token_id=told).generate([[5, 6], [7]], max_new_tokens=2)
    except UnspoolError as error:
        assert str(error)


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": 2**24},
        {"decoder_layers": 2**31 - 1},
        {"encoder_layers": 10**400},
        {"max_position_embeddings": 2**30},
        {"d_model": "wide"},
        {"dropout": {"a": 1}},
        {"_attn_implementation": "someone/kernels"},
    ],
)
def test_folders_that_transformers_would_build(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(UnspoolError):
        load(tmp_path / "bart", "bart", native=False, **changed)
