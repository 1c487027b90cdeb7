"""What a Mamba-2 is, and its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unspool.models.mamba.weights import MambaSpec, MambaWeights, StateSpace
from unspool.models.weights import Linear, Norm


@dataclass(frozen=True, slots=True)
class Mamba2Spec(MambaSpec):
    """A Mamba-2: what a Mamba has (but for the rank of time steps), its heads and their groups."""

    num_heads: int = 1
    num_groups: int = 1
    least_time: float = 0.0  # bounds of a time step
    most_time: float = math.inf

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(slots=True)
class Mamba2Layer:
    """One block's weights."""

    norm: Norm
    project_in: Linear  # the gate, the convolution's inputs, the heads' time steps
    space: StateSpace
    gated_norm: Norm
    out: Linear


Mamba2Weights = MambaWeights[Mamba2Layer]
