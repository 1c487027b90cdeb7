"""XTC: leaving out the obvious now and then."""

from __future__ import annotations

import torch

from unspool.kernels.presence import takes_kernels
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowValues, in_range

INF = float("inf")


class XTCLogitsWarper(LogitsProcessor):
    """Exclude Top Choices: with a probability, drops all likely tokens but the least likely of them.

    Origin: p-e-w, text-generation-webui pull request 6335 (2024). "Likely" is a probability of at least `threshold`.
    Whether a row is cut is decided by `uniforms`, a number in [0, 1) a row, which decoding draws from the row's seed.
    """

    counts_columns = False

    def __init__(self, probability: Numbers, threshold: Numbers = 0.1, filter_value: float = -INF) -> None:
        self.filter_value = filter_value
        self._probability = RowValues.read("xtc_probability", probability, in_range("xtc_probability", 0, 1))
        self._threshold = RowValues.read("xtc_threshold", threshold, in_range("xtc_threshold", 0, 1, with_low=False))

    def __call__(  # type: ignore[override]  # the list passes what a signature asks for
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        uniforms: torch.Tensor,  # (rows,)
    ) -> torch.Tensor:
        """The scores, without the top choices of the rows whose number falls below the probability."""
        if takes_kernels(scores):
            from unspool.kernels.gpu.sampling.cuts import exclude_top  # Triton is imported where a GPU is used

            probability = self._probability.column(scores, torch.float64)
            return exclude_top(scores, self._threshold.column(scores), probability, uniforms, self.filter_value)
        probabilities = scores.softmax(dim=-1)
        is_top = probabilities >= self._threshold.column(scores)  # (rows, vocab)
        least = probabilities.masked_fill(~is_top, INF).argmin(dim=-1, keepdim=True)  # (rows, 1)
        is_cut = uniforms[:, None] < self._probability.column(scores, torch.float64)  # (rows, 1)
        is_dropped = is_top.scatter(-1, least, False) & is_cut
        return scores.masked_fill(is_dropped, self.filter_value)
