"""Our engine: the same model once for every quantisation that is asked for."""

from __future__ import annotations

from typing import Any

import torch

from unspool._version import __version__
from unspool.api import LanguageModel, generate, load
from unspool.bench.benchmark import WORKS, Benchmark
from unspool.bench.engine import Clock, Prompts, Timing


class NativeEngine:
    """unspool with one quantisation of the weights."""

    can = frozenset(WORKS)
    reads_sources = True

    def __init__(self, benchmark: Benchmark, quantize: str) -> None:
        self.name = "unspool" if quantize == "auto" else f"unspool {'plain' if quantize == 'none' else quantize}"
        self._benchmark, self._quantize = benchmark, None if quantize == "none" else quantize
        self._lm: LanguageModel | None = None
        self._path = ""

    @property
    def lm(self) -> LanguageModel:
        """The loaded model."""
        assert self._lm is not None, "load() comes first"
        return self._lm

    def load(self) -> None:
        """Read the model."""
        benchmark = self._benchmark
        self._lm = load(benchmark.location, device=benchmark.device, threads=benchmark.threads, quantize=self._quantize)

    def describe(self) -> str:
        """The version, the numbers, and the path that steps took."""
        model = self.lm.model
        path = f", {self._path}" if self._path else ""
        return (
            f"unspool {__version__}, {model.weights_format}, {model.weights_bytes / 1e6:.0f} MB on {model.device}{path}"
        )

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Decode greedily, or by beams."""
        model = self.lm.model
        ids = torch.tensor([list(row) for row in prompts], device=model.device)
        asked: dict[str, Any] = {"num_beams": num_beams} if num_beams > 1 else {}
        if model.info.is_encoder_decoder:
            asked["decoder_start_token_id"] = self.lm.generation_config.decoder_start_token_id
        timing = Timing.begin()
        output = generate(
            model,
            ids,
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            use_model_defaults=False,
            return_dict_in_generate=num_beams == 1 and len(prompts) == 1,
            streamer=Clock(timing) if num_beams == 1 else None,
            **asked,
        )
        if not isinstance(output, torch.Tensor):
            assert output.stats is not None
            if num_new > 1:  # how steps run; a prompt alone may take another way
                self._path = output.stats.path
            output = output["sequences"]
        timing.tokens = output[:, -num_new:].tolist()
        if num_beams > 1:
            timing.note_step()
        return timing


def make_native_engines(benchmark: Benchmark) -> list[NativeEngine]:
    """Our engines, one per quantisation, in the order given."""
    return [NativeEngine(benchmark, quantize) for quantize in benchmark.quantize]
