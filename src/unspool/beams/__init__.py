"""Which beams live on, which are finished, and which of the finished are the best."""

from __future__ import annotations

from unspool.beams.constrained import ConstrainedBeamSearchScorer
from unspool.beams.hypotheses import BeamHypotheses
from unspool.beams.scorer import BeamScorer, BeamSearchScorer

__all__ = ["BeamHypotheses", "BeamScorer", "BeamSearchScorer", "ConstrainedBeamSearchScorer"]
