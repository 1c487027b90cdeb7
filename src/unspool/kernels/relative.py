"""Relative position buckets (Raffel et al., 2020): one per near distance, logarithmic ones for far distances."""

from __future__ import annotations

import math

import torch


def distance_buckets(num_distances: int, num_buckets: int, max_distance: int) -> torch.Tensor:
    """The bucket of every distance from 0: half of the buckets are exact, the rest grow logarithmically."""
    distances = torch.arange(num_distances)
    num_exact = num_buckets // 2
    # Float32 as in training: the edges between buckets depend on its rounding.
    growth = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    far = (num_exact + growth * (num_buckets - num_exact)).clamp(0, num_buckets - 1).long()
    return torch.where(distances < num_exact, distances, far)  # (distances,)
