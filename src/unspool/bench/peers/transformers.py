"""transformers' own `generate`, eager, as most people call it."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from unspool.bench.benchmark import WORKS, Benchmark
from unspool.bench.engine import Clock, Prompts, Timing
from unspool.bench.peers.packages import import_package, refuse_path


class TransformersPeer:
    """Its model with or without an encoder: float32 on a CPU, what the file holds on a GPU."""

    name = "transformers"
    can = frozenset(WORKS)
    reads_sources = True

    def __init__(self, benchmark: Benchmark, path: Path | None) -> None:
        self._transformers = import_package("transformers", self.name, "pip install 'unspool[bench]'")
        refuse_path(path, self.name)
        if benchmark.kind == "gguf":  # it reads those through two more packages
            for package in ("gguf", "accelerate"):
                import_package(package, self.name, "pip install 'unspool[bench]'")
        self._benchmark = benchmark
        where = benchmark.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._device = torch.device(where)
        self._model: Any = None

    def load(self) -> None:
        """Load the model with transformers."""
        benchmark, library = self._benchmark, self._transformers
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        if benchmark.threads is not None:
            torch.set_num_threads(benchmark.threads)
        folder, how = benchmark.location, {}
        if benchmark.kind == "gguf":
            folder, how = benchmark.location.parent, {"gguf_file": benchmark.location.name}
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16 if how else "auto"
        with redirect_stderr(StringIO()):  # it draws bars of its own
            is_pair = library.AutoConfig.from_pretrained(folder, local_files_only=True, **how).is_encoder_decoder
            kind = library.AutoModelForSeq2SeqLM if is_pair else library.AutoModelForCausalLM
            model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, **how)
        self._model = model.to(self._device).eval()
        config = self._model.generation_config
        start = config.decoder_start_token_id
        self._model.generation_config = self._transformers.GenerationConfig(
            pad_token_id=0, decoder_start_token_id=start, bos_token_id=config.bos_token_id
        )

    def describe(self) -> str:
        """Its version and dtype."""
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"transformers {self._transformers.__version__}, {dtype}, eager on {self._device}"

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Decode greedily, or by beams."""
        ids = torch.tensor([list(row) for row in prompts], device=self._device)
        timing = Timing.begin()
        sequences = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            num_beams=num_beams,
            streamer=Clock(timing) if num_beams == 1 else None,
        )
        timing.tokens = sequences[:, -num_new:].tolist()
        if num_beams > 1:
            timing.note_step()
        return timing
