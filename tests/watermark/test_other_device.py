"""Text that was generated on a GPU is detected here with the z score that it had there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from unspool.config.watermarking import read_watermarking_config
from unspool.watermark import WatermarkDetector

TEXTS = Path(__file__).parent / "data" / "gpu_texts.json"  # python benchmarks/watermark.py --sample-on cuda --out …


@pytest.mark.skipif(not TEXTS.is_file(), reason="no text of a GPU is kept yet")
def test_texts_of_a_gpu_are_found_on_the_cpu() -> None:
    kept = json.loads(TEXTS.read_text())
    assert len(kept["texts"]) == 4
    for text in kept["texts"]:
        config = read_watermarking_config(text["watermark"])
        detector = WatermarkDetector({"vocab_size": 160}, "cpu", config, ignore_repeated_ngrams=True)
        told = detector(torch.tensor([text["tokens"]]), return_dict=True)
        assert told.z_score[0] == pytest.approx(text["z_score"], abs=1e-9)
        assert told.p_value[0] == pytest.approx(text["p_value"])
        assert told.p_value[0] < 1e-3
