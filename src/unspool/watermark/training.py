"""Training SynthID-Text's Bayesian detector from g-values of marked and unmarked text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unspool.errors import InputError
from unspool.watermark.bayesian import BayesianDetectorConfig, BayesianDetectorModel

PENALTIES = (0.0, 1e-3, 1e-2)  # of the dependence between rounds; the best on held-out text is kept
NUM_EPOCHS = 120
RATE = 0.02
FEWEST = 8  # texts of each kind


@dataclass(frozen=True)
class Examples:
    """Texts' g-values (texts, length, depth), which tokens count (texts, length), and 1 for marked ones (texts,)."""

    g_values: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    def select(self, index: torch.Tensor) -> Examples:
        """Those at `index`."""
        return Examples(self.g_values[index], self.mask[index], self.labels[index])

    @classmethod
    def join(cls, marked: tuple[torch.Tensor, torch.Tensor], unmarked: tuple[torch.Tensor, torch.Tensor]) -> Examples:
        """Examples of both kinds, from their g-values and masks."""
        labels = torch.cat((torch.ones(len(marked[0])), torch.zeros(len(unmarked[0]))))
        return cls(torch.cat((marked[0], unmarked[0])), torch.cat((marked[1], unmarked[1])), labels)


@dataclass(frozen=True)
class Rates:
    """How a detector fares on held-out text."""

    false_positive_rate: float  # that was asked for
    true_positive_rate: float
    threshold: float  # of the log-odds
    num_marked: int
    num_unmarked: int


def train_detector(
    examples: Examples, *, base_rate: float = 0.5, seed: int = 0, report: Callable[[int, int], None] | None = None
) -> BayesianDetectorModel:
    """Train detectors with several penalties on three quarters of the examples, and keep the one that finds the rest
    likeliest; `report` is called with the epochs done and their total."""
    if min(int(examples.labels.sum()), int((1 - examples.labels).sum())) < FEWEST:
        raise InputError(f"a detector is trained on at least {FEWEST} marked and as many unmarked texts")
    order = torch.randperm(len(examples.labels), generator=torch.Generator().manual_seed(seed))
    num_kept = len(order) // 4
    held, used = examples.select(order[:num_kept]), examples.select(order[num_kept:])
    best: tuple[float, BayesianDetectorModel] | None = None
    for number, penalty in enumerate(PENALTIES):
        model = BayesianDetectorModel(BayesianDetectorConfig(examples.g_values.shape[-1], base_rate))
        optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
        for epoch in range(NUM_EPOCHS):
            optimiser.zero_grad()
            loss = _find_loss(model, used, penalty)
            loss.backward()
            optimiser.step()
            if report is not None:
                report(number * NUM_EPOCHS + epoch + 1, len(PENALTIES) * NUM_EPOCHS)
        with torch.no_grad():
            found = float(_find_loss(model, held, 0.0))
        if best is None or found < best[0]:
            best = (found, model)
    assert best is not None
    return best[1].eval()


def measure(marked: Sequence[float], unmarked: Sequence[float], rate: float = 0.01) -> Rates:
    """The share of marked texts whose score passes what at most `rate` of the unmarked texts pass."""
    ordered = sorted(unmarked, reverse=True)
    threshold = ordered[min(int(rate * len(ordered)), len(ordered) - 1)]
    found = sum(score > threshold for score in marked) / len(marked)
    return Rates(rate, found, threshold, len(marked), len(unmarked))


def _find_loss(model: BayesianDetectorModel, examples: Examples, penalty: float) -> torch.Tensor:
    odds = model.score(examples.g_values, examples.mask)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, examples.labels)
    return loss + penalty * (model.likelihood_model_watermarked.delta**2).sum()
