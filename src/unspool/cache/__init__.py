"""Caches of keys and values: one contract (`base`), one file a kind."""

from unspool.cache.base import FIXED_SHAPE, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL, Cache, Mask, Span
from unspool.cache.branching import BranchedKeys, BranchingCache
from unspool.cache.config import CacheConfig, StaticCacheConfig
from unspool.cache.dynamic import DynamicCache
from unspool.cache.encoder_decoder import EncoderDecoderCache
from unspool.cache.files import SavedCache, load_cache, save_cache
from unspool.cache.kinds import KINDS, CacheKind, KeyShape, find_kind, make_cache, read_options
from unspool.cache.layered import LayeredCache
from unspool.cache.offloaded import OffloadedCache, OffloadedStaticCache
from unspool.cache.sink import SinkCache
from unspool.cache.sliding import HybridCache, SlidingWindowCache
from unspool.cache.static import StaticCache

__all__ = [
    "FIXED_SHAPE",
    "KINDS",
    "RAGGED",
    "ROLL_BACK",
    "SELECT_ROWS",
    "TRIAL",
    "BranchedKeys",
    "BranchingCache",
    "Cache",
    "CacheConfig",
    "CacheKind",
    "DynamicCache",
    "EncoderDecoderCache",
    "HybridCache",
    "KeyShape",
    "LayeredCache",
    "Mask",
    "OffloadedCache",
    "OffloadedStaticCache",
    "SavedCache",
    "SinkCache",
    "SlidingWindowCache",
    "Span",
    "StaticCache",
    "StaticCacheConfig",
    "find_kind",
    "load_cache",
    "make_cache",
    "read_options",
    "save_cache",
]
