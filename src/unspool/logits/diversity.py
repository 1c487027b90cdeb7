"""Diversity between groups of beams (Vijayakumar et al. 2016, arXiv 1610.02424)."""

from __future__ import annotations

import torch

from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import as_finite_float, as_positive_integer
from unspool.wording import about, word


class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Takes a penalty from each token for every earlier group's beam that chose it at this step.

    The one processor whose rows look at one another, which is its point.
    """

    def __init__(self, diversity_penalty: float, num_beams: int, num_beam_groups: int) -> None:
        self.diversity_penalty = as_finite_float("diversity_penalty", diversity_penalty)
        if self.diversity_penalty <= 0:
            raise SettingError(
                about("diversity_penalty", f"should be a float strictly larger than 0, but is {diversity_penalty}.")
            )
        self._num_beams = as_positive_integer("num_beams", num_beams, at_least=2)
        groups = as_positive_integer("num_beam_groups", num_beam_groups, at_least=2)
        if groups > num_beams:
            raise SettingError(
                word(
                    "{num_beam_groups} ({groups}) has to be at most {num_beams} ({given}).",
                    groups=groups,
                    given=num_beams,
                )
            )
        self._num_sub_beams = num_beams // groups

    def __call__(  # type: ignore[override]  # the list passes what a signature asks for
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,  # (batch * beams of one group, vocab)
        current_tokens: torch.Tensor,  # (batch * beams,), what earlier groups chose at this step
        beam_group_idx: int,
    ) -> torch.Tensor:
        """One group's scores, lowered by how often earlier groups of the same batch entry chose each token."""
        if beam_group_idx == 0:
            return scores
        batch = current_tokens.shape[0] // self._num_beams
        group_size = scores.shape[0] // batch
        num_earlier = beam_group_idx * self._num_sub_beams
        earlier = current_tokens.view(batch, self._num_beams)[:, :num_earlier].to(scores.device)  # (batch, earlier)
        counts = torch.zeros(batch, scores.shape[-1], dtype=scores.dtype, device=scores.device)
        counts.scatter_add_(-1, earlier, torch.ones_like(earlier, dtype=scores.dtype))
        lowered = scores.view(batch, group_size, -1) - self.diversity_penalty * counts[:, None]
        return lowered.view_as(scores)
