"""What a caller gives to be called is refused before anything is read, if it can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from tests.fakes import FakeModel
from unspool.errors import SettingError

IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("progress", lambda: unspool.load("no/such-model", progress=3)),
        ("streamer", lambda: unspool.generate(FakeModel(), IDS, streamer=3)),
        ("streamer", lambda: unspool.generate(FakeModel(), IDS, streamer=print)),
    ],
)
def test_what_cannot_be_called_is_named(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(SettingError, match=f"`{name}`=.* give a"):
        call()
