"""Every native decoder family writes on a GPU what it writes on a CPU, in captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.models.conftest import CASES, make_pair  # noqa: E402

import unspool  # noqa: E402
from unspool.models.registry import build_model  # noqa: E402
from unspool.models.weights import MemorySource  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = ([5, 9, 17, 3, 44, 61, 8], [7, 8], [90, 12, 12, 31])
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "DoLa": {"dola_layers": [1]},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_family_on_a_gpu(name: str, tmp_path: Path) -> None:
    try:
        pair = make_pair(CASES[name], tmp_path)
    except AttributeError as error:
        pytest.skip(f"this transformers does not have it: {error}")
    weights = MemorySource(dict(pair.weights))
    there = build_model(pair.config, weights, device="cuda", dtype=torch.float32)
    rounds = name == "falcon-rw"  # its position biases are rounded key by key, which no kernel does
    for settings in SETTINGS.values():
        told = {"max_new_tokens": 8, "eos_token_id": None, "return_dict_in_generate": True, **settings}
        for row in ROWS:
            ids = torch.tensor([row])
            here = unspool.generate(pair.native, ids, **told)
            made = unspool.generate(there, ids.cuda(), **told)
            assert made.sequences.tolist() == here.sequences.tolist(), settings
            if not settings:
                assert rounds or made.stats.path == "captured"
