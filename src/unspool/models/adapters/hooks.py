"""Methods of transformers' GenerationMixin that a user has replaced by code of their own.

They are what others change a model's generation by: on the object (PEFT's trained prompts), in a class of their own, or
in transformers' classes. Those that prepare what the model is given are called by the column adapter, which goes
through the object's methods. The others decide what is decoded, so transformers' own loop has to run, which calls them.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from unspool.errors import UnsupportedError

PREPARING: Final = (
    "prepare_inputs_for_generation",
    "_prepare_model_inputs",
    "_maybe_initialize_input_ids_for_generation",
    "_prepare_position_ids_for_generation",
    "_prepare_attention_mask_for_generation",
    "_maybe_prepare_encoder_kwargs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",
    "_prepare_text_encoder_decoder_kwargs_for_generation",
    "_prepare_multimodal_encoder_kwargs_for_generation",
    "_prepare_decoder_input_ids_for_generation",
)
DECIDING: Final = (
    "_sample",
    "_beam_search",
    "_assisted_decoding",
    "_prefill",
    "_get_candidate_generator",
    "_get_logits_processor",
    "_get_stopping_criteria",
    "_merge_criteria_processor_list",
    "_update_model_kwargs_for_generation",
    "_extract_past_from_model_output",
    "_expand_inputs_for_generation",
    "_expand_multimodal_outputs",
    "_reorder_cache",
    "_temporary_reorder_cache",
    "_prepare_cache_for_generation",
    "_prepare_static_cache",
    "_get_static_cache_init_shape",
    "_get_cache",
    "_supports_default_dynamic_cache",
    "_prepare_generation_config",
    "_prepare_generated_length",
    "_prepare_special_tokens",
    "_validate_generated_length",
    "_validate_generation_mode",
    "_validate_model_kwargs",
    "_validate_model_class",
    "_has_unfinished_sequences",
    "_beam_search_has_unfinished_sequences",
    "_check_early_stop_heuristic",
    "_get_top_k_continuations",
    "_get_running_beams_for_next_iteration",
    "_update_finished_beams",
    "_gather_beams",
    "_flatten_beam_dim",
    "_unflatten_beam_dim",
    "_extract_generation_mode_kwargs",
    "_get_initial_cache_position",
    "_optimize_model_for_decode",
    "_valid_auto_compile_criteria",
    "adjust_generation_fn",
    "heal_tokens",
)
_WRAPPERS: Final = ("torch", "functools", "contextlib")  # whose functions stand around others


def find_preparing_hook(model: Any) -> str | None:
    """The first method that prepares a pass and is not transformers' own; None if all are."""
    return next((name for name in PREPARING if _is_replaced(model, name)), None)


def find_deciding_hook(model: Any) -> str | None:
    """The first method that decides what is decoded and is not transformers' own; None if all are."""
    return next((name for name in DECIDING if _is_replaced(model, name)), None)


def check_followed(model: Any, remedy: str) -> None:
    """Raise if what decides about an object's texts is somebody's own, where transformers' own loop can't run."""
    hook = find_deciding_hook(model)
    if hook is not None:
        raise UnsupportedError(
            f"this {type(model).__name__} has a {hook}() that is not transformers' own, which transformers' own loop "
            f"follows and no other; {remedy}"
        )


def _is_replaced(model: Any, name: str) -> bool:
    held = vars(model).get(name, vars(model).get("_modules", {}).get(name))
    usual = inspect.getattr_static(type(model), name, None)
    if held is not None:
        function = getattr(held, "__func__", held)
        is_same = getattr(held, "__self__", None) is model and function is usual  # put back after it was exchanged
        if not is_same:
            return True
    return usual is not None and not is_theirs(usual)


def is_theirs(function: Any) -> bool:
    """Whether a function was written in transformers, whatever stands around it.

    A function's globals are those of the module where it was written; its `__module__` is copied to what wraps it.
    """
    for _ in range(16):
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        elif isinstance(function, property):
            function = function.fget
        package = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
        if package not in ("transformers", "unspool", *_WRAPPERS):
            return False
        if not hasattr(function, "__wrapped__"):
            return package in ("transformers", "unspool")
        function = function.__wrapped__
    return False
