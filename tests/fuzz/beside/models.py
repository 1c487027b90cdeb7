"""The tiny models of the calls: as transformers objects, and loaded natively where there is such a form."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from packaging.version import Version

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers

import unspool
from tests.fuzz.beside.families import DECODERS, HEADS, PAIRS, SPEECH
from tests.fuzz.beside.newer import MIXED, NEWER, TEXTS
from tests.speech.models import make_whisper

transformers.logging.set_verbosity_error()

VOCAB = 97  # of every model
PAD, EOS = 0, 2
WINDOW = 70  # frames of sound
DEVICE = "cpu"  # see `on`
WRITTEN_FOR = Version("5.22")  # the release of transformers whose newer families are listed


@contextmanager
def on(device: str) -> Iterator[None]:
    """Inside it, models and inputs are made on another device."""
    global DEVICE
    before, DEVICE = DEVICE, device
    try:
        yield
    finally:
        DEVICE = before


def make(name: str, seed: int = 0, attention: str = "sdpa") -> Any:
    """A model with random weights, as transformers has it."""
    return _make(name, seed, attention, DEVICE)


def make_again(name: str, seed: int, attention: str) -> Any:
    """The same model as another object, for calls of ours: these may lay its parameters out anew."""
    return _make_again(name, seed, attention, DEVICE)


def make_shaken(name: str, seed: int, number: int, attention: str) -> Any:
    """The same model with weights that are rounded otherwise: where its answer is another, there was a tie."""
    return _make_shaken(name, seed, number, attention, DEVICE)


def load(name: str, seed: int) -> Any | None:
    """The same model loaded natively; None where there is no native form, or no such family in this transformers."""
    return _load(name, seed, DEVICE)


@cache
def _make(name: str, seed: int, attention: str, device: str) -> Any:
    if name in SPEECH:
        return _make_speech(name, seed, attention).to(device)
    kind, settings = (DECODERS | PAIRS)[name]
    config_class = getattr(transformers, f"{kind}TextConfig" if kind in TEXTS else f"{kind}Config")
    usual = f"{kind}ForCausalLM" if name in DECODERS else f"{kind}ForConditionalGeneration"
    model_class = getattr(transformers, HEADS.get(kind, usual))
    told = {"attn_implementation": attention} if attention == "eager" or model_class._supports_sdpa else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class._from_config(config_class(**settings), **told)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    continue  # sines of positions, which a folder does not hold
                parameter.add_(torch.randn(parameter.shape), alpha=0.25)
    return model.eval().to(device)


def _make_speech(name: str, seed: int, attention: str) -> Any:
    with torch.random.fork_rng():
        model = deepcopy(make_whisper(seed, vocab_size=VOCAB, max_source_positions=WINDOW // 2))
    for setting, value in SPEECH[name].items():
        if value is None:
            delattr(model.generation_config, setting)
        else:
            setattr(model.generation_config, setting, value)
    model.set_attn_implementation(attention)
    return model


@cache
def _make_again(name: str, seed: int, attention: str, device: str) -> Any:
    return deepcopy(_make(name, seed, attention, device))


@cache
def _make_shaken(name: str, seed: int, number: int, attention: str, device: str) -> Any:
    model = deepcopy(_make(name, seed, attention, device))
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 2e-6 * torch.randn(parameter.shape, generator=generator).to(device))
    return model


@cache
def _load(name: str, seed: int, device: str) -> Any | None:
    try:
        made = _make(name, seed, "sdpa", "cpu")
    except Exception:
        if name in NEWER | MIXED and Version(transformers.__version__) < WRITTEN_FOR:
            return None
        raise
    folder = Path(mkdtemp(prefix=f"unspool-tiny-{name}-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    transformers.utils.logging.disable_progress_bar()
    made.save_pretrained(folder)
    try:
        return unspool.load(folder, device=device, native=True).model
    except unspool.UnsupportedError:
        return None
    except unspool.LoadError:
        return None
