"""Models of `transformers` as models of unspool. transformers is imported only here, and only when it is needed."""

from unspool.models.adapters.columns import ColumnModel, TextModel, prepare_call
from unspool.models.adapters.door import (
    MODEL_INPUTS,
    Adapted,
    adapt,
    adapt_half,
    ends_itself,
    find_adapter,
    find_mixin,
    find_owner,
    find_settings,
    has_own_loop,
    is_transformers_model,
    list_inputs,
    open_call,
    runs_natively,
    runs_own_generate,
    set_native,
)
from unspool.models.adapters.hooks import check_followed, find_deciding_hook, find_preparing_hook
from unspool.models.adapters.outputs import dress_output
from unspool.models.adapters.own_loop import run_own_loop, wants_own_loop
from unspool.models.adapters.preparing import KEPT, find_preparing, prepare_with
from unspool.models.adapters.settings import drop_unknown_tokens, fold_settings, list_unread, read_settings
from unspool.models.adapters.their_loop import run_their_loop
from unspool.models.adapters.twin import drop_twin, find_twin, keeps_states, prepare_twin

__all__ = [
    "KEPT",
    "MODEL_INPUTS",
    "Adapted",
    "ColumnModel",
    "TextModel",
    "adapt",
    "adapt_half",
    "check_followed",
    "dress_output",
    "drop_twin",
    "drop_unknown_tokens",
    "ends_itself",
    "find_adapter",
    "find_deciding_hook",
    "find_mixin",
    "find_owner",
    "find_preparing",
    "find_preparing_hook",
    "find_settings",
    "find_twin",
    "fold_settings",
    "has_own_loop",
    "is_transformers_model",
    "keeps_states",
    "list_inputs",
    "list_unread",
    "open_call",
    "prepare_call",
    "prepare_twin",
    "prepare_with",
    "read_settings",
    "run_own_loop",
    "run_their_loop",
    "runs_natively",
    "runs_own_generate",
    "set_native",
    "wants_own_loop",
]
