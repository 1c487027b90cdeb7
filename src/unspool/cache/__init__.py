"""Caches of keys and values: one contract (`base`), one file a kind."""

from unspool.cache.base import Cache
from unspool.cache.config import CacheConfig, StaticCacheConfig
from unspool.cache.contract.capabilities import (
    BRANCH,
    BRANCH_SOURCE,
    DIVIDE,
    FIXED_SHAPE,
    FLAT,
    FORK,
    JOIN,
    LEGACY,
    RAGGED,
    ROLL_BACK,
    SELECT_ROWS,
    TRIAL,
    UNDO,
)
from unspool.cache.contract.row_changes import BEAMS_LEFT
from unspool.cache.dynamic import DynamicCache
from unspool.cache.encoder_decoder import EncoderDecoderCache
from unspool.cache.entry import CacheKindEntry, KeyShape
from unspool.cache.files import SavedCache, load_cache, save_cache
from unspool.cache.kinds import KINDS, find_kind, make_cache, read_options
from unspool.cache.mamba import MambaCache
from unspool.cache.offload.offloaded import OffloadedCache, OffloadedStaticCache
from unspool.cache.paged.cache import PagedCache
from unspool.cache.paged.pool import BlockPool
from unspool.cache.quantized import (
    HQQQuantizedCache,
    QuantizedCache,
    QuantizedHybridCache,
    QuantizedStaticCache,
    QuantoQuantizedCache,
)
from unspool.cache.sink import SinkCache
from unspool.cache.sliding import HybridCache, LayeredCache, SlidingWindowCache
from unspool.cache.span import Mask, Span
from unspool.cache.static import StaticCache
from unspool.cache.stores.quantization import QuantizedCacheConfig
from unspool.cache.views.branching import BranchedKeys, BranchingCache, branch_rows
from unspool.cache.views.forked import ForkedCache

__all__ = [
    "BEAMS_LEFT",
    "BRANCH",
    "BRANCH_SOURCE",
    "DIVIDE",
    "FIXED_SHAPE",
    "FLAT",
    "FORK",
    "JOIN",
    "KINDS",
    "LEGACY",
    "RAGGED",
    "ROLL_BACK",
    "SELECT_ROWS",
    "TRIAL",
    "UNDO",
    "BlockPool",
    "BranchedKeys",
    "BranchingCache",
    "Cache",
    "CacheConfig",
    "CacheKindEntry",
    "DynamicCache",
    "EncoderDecoderCache",
    "ForkedCache",
    "HQQQuantizedCache",
    "HybridCache",
    "KeyShape",
    "LayeredCache",
    "MambaCache",
    "Mask",
    "OffloadedCache",
    "OffloadedStaticCache",
    "PagedCache",
    "QuantizedCache",
    "QuantizedCacheConfig",
    "QuantizedHybridCache",
    "QuantizedStaticCache",
    "QuantoQuantizedCache",
    "SavedCache",
    "SinkCache",
    "SlidingWindowCache",
    "Span",
    "StaticCache",
    "StaticCacheConfig",
    "branch_rows",
    "find_kind",
    "load_cache",
    "make_cache",
    "read_options",
    "save_cache",
]
