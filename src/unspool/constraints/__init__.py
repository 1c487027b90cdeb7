"""What an output must contain, and how far a beam has come with it."""

from __future__ import annotations

from unspool.constraints.base import Constraint
from unspool.constraints.disjunctive import DisjunctiveConstraint
from unspool.constraints.forced_words import make_constraints
from unspool.constraints.phrasal import PhrasalConstraint
from unspool.constraints.state import ConstraintListState

__all__ = [
    "Constraint",
    "ConstraintListState",
    "DisjunctiveConstraint",
    "PhrasalConstraint",
    "make_constraints",
]
