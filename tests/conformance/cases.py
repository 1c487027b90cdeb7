"""The reference outputs as a table: which cases run, and which are still to come and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import unspool
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

GOLDENS = Path(__file__).parent / "goldens"
CORRECTIONS = Path(__file__).parent / "corrections"  # where the reference is wrong: differences.md says why

# What is not built yet, by the setting or the model that needs it. An entry is taken out with the issue that
# builds it: test_cases_to_come_are_refused fails for a case that could run.
SETTINGS_TO_COME: dict[str, str] = {}
MODELS_TO_COME: dict[str, str] = {}
# Cases whose recorded sequence runs past `max_new_tokens`, which is the reference's mistake: see differences.md.
TOO_LONG = ("gpt_neox-lookup",)
# Cases in which two beams of the reference lie within rounding of each other and may change places: likewise.
NEAR_TIES = ("marian-beam4_ret3", "marian-beam4_rep_norepeat", "marian-beam4_eos")
# Cases in which a search goes on from one of two beams within rounding of each other: exact arithmetic from the other.
FORKS = ("marian-diverse4_ret4",)


@dataclass(frozen=True)
class Case:
    """One reference output: the settings it was made with, and what came out."""

    model: str
    name: str
    settings: dict[str, Any]
    expected: dict[str, Any]
    inputs: dict[str, Any]
    max_new_tokens: int

    def __str__(self) -> str:
        return f"{self.model}-{self.name}"

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens expected, without those past `max_new_tokens`."""
        longest = len(self.inputs["input_ids"][0]) + self.max_new_tokens if str(self) in TOO_LONG else None
        return [row[:longest] for row in self.expected["sequences"]]

    @property
    def to_come(self) -> str | None:
        """What must be built before this case can run; None for a case that runs."""
        if self.model in MODELS_TO_COME:
            return MODELS_TO_COME[self.model]
        return next((why for name, why in SETTINGS_TO_COME.items() if name in self.settings), None)


def read_cases() -> Iterator[Case]:
    """All reference outputs, in the order of their files."""
    for path in sorted((GOLDENS / "cases").glob("*.json")):
        content = json.loads(path.read_text())
        for name, case in content["cases"].items():
            expected = {key: value for key, value in case.items() if key != "settings"}
            expected |= read_corrections(path.stem).get(name, {})
            yield Case(path.stem, name, case["settings"], expected, content["inputs"], content["max_new_tokens"])


@lru_cache
def read_corrections(model: str) -> dict[str, Any]:
    """What the reference answers for a model where the fault is switched off, by the name of the case."""
    path = CORRECTIONS / f"{model}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@lru_cache(maxsize=32)
def load_model(name: str) -> unspool.LanguageModel:
    """A reference model in its native form, loaded once."""
    return unspool.load(GOLDENS / "models" / name, native=True)


@lru_cache(maxsize=32)
def load_adapted(name: str) -> Any:
    """A reference model as transformers loads it; `generate` runs it through the adapter, not natively."""
    import transformers

    from unspool.models.adapters import set_native

    config = json.loads((GOLDENS / "models" / name / "config.json").read_text())
    auto = transformers.AutoModelForCausalLM
    if config.get("is_encoder_decoder"):
        reads_sound = "num_mel_bins" in config
        auto = transformers.AutoModelForSpeechSeq2Seq if reads_sound else transformers.AutoModelForSeq2SeqLM
    model = auto.from_pretrained(GOLDENS / "models" / name).eval()
    set_native(model, False)
    return model


@lru_cache(maxsize=1)
def load_exact_model(name: str) -> Any:
    """A reference model in float64, on torch's operators."""
    folder = GOLDENS / "models" / name
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    model = build_model(config, MemorySource(weights), device=torch.device("cpu"), dtype=torch.float64)
    model.generation_config = load_model(name).model.generation_config
    return model


def run_case(case: Case, model: Any = None) -> Any:
    """Generate with a case's settings; the output object. The model is the one that unspool loads, or the one given."""
    settings = dict(case.settings)
    inputs = {name: torch.tensor(value) for name, value in case.inputs.items()}
    if settings.pop("single", False):
        inputs = {name: value[2:3] for name, value in inputs.items()}
    settings.setdefault("max_new_tokens", case.max_new_tokens)
    if "sequence_bias" in settings:
        settings["sequence_bias"] = [tuple(pair) for pair in settings["sequence_bias"]]
    if "watermark" in settings:
        settings["watermarking_config"] = unspool.WatermarkingConfig(**settings.pop("watermark"))
    if "synthid" in settings:
        settings["watermarking_config"] = unspool.SynthIDTextWatermarkingConfig(**settings.pop("synthid"))
    if "negative_prompt_ids" in settings:
        negative = torch.tensor(settings["negative_prompt_ids"])
        settings |= {"negative_prompt_ids": negative, "negative_prompt_attention_mask": torch.ones_like(negative)}
    wants_scores = bool({"scores_step3_row0", "first_step_scores", "sequences_scores"} & set(case.expected))
    return unspool.generate(
        load_model(case.model).model if model is None else model,
        **inputs,
        return_dict_in_generate=True,
        output_scores=wants_scores,
        **settings,
    )


def as_scores(values: list[Any]) -> torch.Tensor:
    """Reference scores as a tensor; "-inf" is written as text in the files."""
    return torch.tensor([float(value) for value in values])
