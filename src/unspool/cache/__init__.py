"""Caches of keys and values: one contract (`base`), one file a kind."""

from unspool.cache.base import FIXED_SHAPE, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL, Cache, Mask, Span, Stores
from unspool.cache.branching import BranchedKeys, BranchingCache
from unspool.cache.dynamic import DynamicCache
from unspool.cache.encoder_decoder import EncoderDecoderCache
from unspool.cache.static import StaticCache

__all__ = [
    "FIXED_SHAPE",
    "RAGGED",
    "ROLL_BACK",
    "SELECT_ROWS",
    "TRIAL",
    "BranchedKeys",
    "BranchingCache",
    "Cache",
    "DynamicCache",
    "EncoderDecoderCache",
    "Mask",
    "Span",
    "StaticCache",
    "Stores",
]
