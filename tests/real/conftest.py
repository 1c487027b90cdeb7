"""Trained models. Those that are not installed are skipped; `make real` fetches them (350 MB) and runs this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import unspool
from unspool.errors import LoadError
from unspool.loading.catalogue import find_model, pull


def find_or_skip(name: str) -> Path:
    """The place of a model of the catalogue; the test is skipped if it is not here and must or can not be fetched."""
    found = find_model(name)
    if found is not None:
        return found
    if not os.environ.get("UNSPOOL_REAL_MODELS"):
        pytest.skip(f"{name} is not installed: unspool pull {name}, or make real")
    try:
        return pull(name)
    except LoadError as error:
        pytest.skip(f"{name} can't be fetched: {error}")


@pytest.fixture(scope="session")
def whisper() -> unspool.LanguageModel:
    """Whisper tiny.en."""
    find_or_skip("whisper-tiny.en")
    return unspool.load("whisper-tiny.en")


@pytest.fixture(scope="session")
def marian_folder() -> Path:
    """OPUS-MT, Chinese to English."""
    return find_or_skip("opus-mt-zh-en")


@pytest.fixture(scope="session")
def t5_folder() -> Path:
    """Flan-T5 small, trained on titles."""
    return find_or_skip("flan-t5-small-titles")


@pytest.fixture(scope="session")
def bart_folder() -> Path:
    """A BART of 750,000 parameters that writes how English words sound."""
    return find_or_skip("bart-g2p-en")
