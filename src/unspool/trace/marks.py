"""How marked a text is, token by token, by the detector's own scoring."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unspool.config import BaseWatermarkingConfig
from unspool.errors import UnsupportedError
from unspool.trace.values import shorten
from unspool.watermark import WatermarkDetector


class RunningMark:
    """What a `WatermarkDetector` says of a text that grows: the z score that it gives the tokens so far."""

    def __init__(self, detector: WatermarkDetector) -> None:
        self._scorer = detector.scorer
        self._before: list[int] = []  # the tokens that the next one is scored after
        self._total, self._count = 0.0, 0

    @classmethod
    def of(cls, config: Any, info: Any) -> RunningMark | None:
        """The running score of a watermark's settings; None if there are none, or no detector knows them."""
        config = config[0] if isinstance(config, (list, tuple)) and config else config
        if not isinstance(config, BaseWatermarkingConfig):
            return None
        sizes = {"vocab_size": info.vocab_size, "bos_token_id": None, "decoder_start_token_id": None}
        try:
            return cls(WatermarkDetector(sizes, "cpu", config))
        except UnsupportedError:
            return None

    def add(self, token: int) -> dict[str, Any]:
        """Whether the token is on the marked side (None if too few stand before it), how many were scored, and z."""
        scorer, is_green = self._scorer, None
        if len(self._before) == scorer.num_before:
            context = torch.tensor(self._before, dtype=torch.int64)[None]
            value = float(scorer.value(context, torch.tensor([token]))[0])
            self._total, self._count = self._total + value, self._count + 1
            is_green = value > scorer.threshold
        self._before = [*self._before, token][-scorer.num_before :] if scorer.num_before else []
        z = scorer.standardise(np.array([self._total]), np.array([float(self._count)]))
        return {"green": is_green, "scored": self._count, "z": shorten(float(z[0]))}
