"""The layers that DoLa chooses among."""

from __future__ import annotations

import re

import pytest

from unspool.config.layers import find_candidate_layers
from unspool.errors import SettingError


@pytest.mark.parametrize(
    ("asked", "num_layers", "is_tied", "layers"),
    [
        ("low", 32, False, range(0, 16, 2)),
        ("low", 32, True, range(2, 16, 2)),
        ("high", 32, False, range(16, 32, 2)),
        ("high", 32, True, range(16, 32, 2)),
        ("low", 40, True, range(2, 20, 2)),
        ("low", 41, True, range(2, 20, 2)),
        ("low", 80, False, range(0, 20, 2)),
        ("high", 80, True, range(60, 80, 2)),
        ("high", 41, False, range(21, 41, 2)),
        ("low", 30, True, range(2, 15, 2)),
        ("low", 5, True, [2]),
        ("low", 4, True, [2]),
        ("high", 3, True, [1]),
        ("low", 2, True, [1]),
        ("low", 2, False, [0]),
        ("low", 1, True, [0]),
        ("high", 1, False, [0]),
        ([5, 1, 5], 6, True, [1, 5]),
        ([0], 6, False, [0]),
    ],
)
def test_tables(asked: str | list[int], num_layers: int, is_tied: bool, layers: list[int]) -> None:
    assert find_candidate_layers(asked, num_layers, is_tied=is_tied) == tuple(layers)


@pytest.mark.parametrize(
    ("asked", "is_tied", "told"),
    [
        ("low", True, "`dola_layers`='low' names no layer of this model: it has 3 layers.*'high' work, or a list of"),
        ([1, 3], False, "names layer 3, which is the model's last.*'low' and 'high' work.*from 0 .* to 2"),
        ([3], False, r"from 0 \(the first of the model's hidden states\) to 2"),  # a Mamba's is no embedding
        ([4], False, "names layer 4, and the model has 3 layers"),
        ([-1], True, "names layer -1, and the model has 3 layers"),
    ],
)
def test_what_can_not_be(asked: str | list[int], is_tied: bool, told: str) -> None:
    with pytest.raises(SettingError) as error:
        find_candidate_layers(asked, 3, is_tied=is_tied)
    assert re.search(told, str(error.value))
