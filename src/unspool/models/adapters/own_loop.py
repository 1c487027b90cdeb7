"""Decoding loops of transformers' that no strategy of unspool's can take the place of.

Some models have one in their class, which chooses several tokens a step (CSM, Higgs Audio v2). `use_mtp=True` drafts by
heads for several tokens, which transformers alone reads from a checkpoint's further weights. The loop is run as it is,
over what the methods of the model's class prepare.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from unspool.config import PARAMETERS
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.models.adapters.adapted import set_evaluating
from unspool.models.adapters.columns.preparation import call_known
from unspool.models.adapters.door import has_own_loop


def wants_own_loop(model: Any, config: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call is for a loop of transformers': the model's class has one, or `use_mtp` is on."""
    return has_own_loop(model) or bool(given.get("use_mtp", getattr(config, "use_mtp", None)))


@torch.no_grad()
def run_own_loop(model: Any, inputs: Any, arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Decode by a model's own loop.

    `arguments` are those of generate() that have a name of their own, `given` its settings and the model's inputs.
    """
    _refuse(type(model).__name__, arguments)
    config, kwargs = model._prepare_generation_config(arguments.get("generation_config"), **given)
    mode = _check_config(model, config, kwargs)
    ids, value, name, kwargs = _prepare_inputs(model, inputs, config, kwargs)
    device = value.device
    streamer = arguments.get("streamer")
    if streamer is not None:
        streamer.put(ids.cpu())
    room = _set_length(model, config, arguments.get("generation_config"), given, ids, value, name)
    kwargs["use_cache"] = config.use_cache
    call_known(
        model._prepare_cache_for_generation,
        generation_config=config,
        model_kwargs=kwargs,
        generation_mode=mode,
        assistant_model=None,
        batch_size=ids.shape[0],
        max_cache_length=room,
        device=device,
    )
    processors = call_known(
        model._get_logits_processor,
        generation_config=config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=value,
        prefix_allowed_tokens_fn=arguments.get("prefix_allowed_tokens_fn"),
        logits_processor=_as_list(arguments.get("logits_processor"), "LogitsProcessorList"),
        device=device,
        model_kwargs=kwargs,
    )
    criteria = call_known(
        model._get_stopping_criteria,
        generation_config=config,
        stopping_criteria=_as_list(arguments.get("stopping_criteria"), "StoppingCriteriaList"),
        tokenizer=None,
    )
    loop = model._sample
    if mode == "assisted_generation":  # by the heads
        loop, kwargs["inputs_tensor"] = model._assisted_decoding, value
    with set_evaluating(model):
        return loop(
            ids,
            logits_processor=processors,
            stopping_criteria=criteria,
            generation_config=config,
            synced_gpus=False,
            streamer=streamer,
            **kwargs,
        )


def _refuse(kind: str, arguments: Mapping[str, Any]) -> None:
    for name in ("assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "synced_gpus"):
        if arguments.get(name) is not None and arguments[name] is not False:
            raise SettingError(f"`{name}` is not read by {kind}, which has a decoding loop of its own; leave it out")
    if arguments.get("use_model_defaults") is False:
        raise SettingError(
            f"the decoding loop of {kind} needs the model's own settings; leave `use_model_defaults` out"
        )


def _check_config(model: Any, config: Any, kwargs: Mapping[str, Any]) -> str:
    """The way to decode that the settings ask for; raises for one that the loop does not have."""
    kind = type(model).__name__
    for name in kwargs:
        if name in PARAMETERS and name not in ("output_attentions", "output_hidden_states"):
            raise SettingError(f"`{name}` is not applied by the decoding loop of {kind}; leave it out")
    mode: str = config.get_generation_mode()
    has_heads = bool(getattr(config, "use_mtp", None))
    if mode not in (("assisted_generation",) if has_heads else ("greedy_search", "sample")):
        why = "`use_mtp` drafts" if has_heads else f"{kind} has a decoding loop of its own"
        raise UnsupportedError(f"{why}, for greedy search and sampling alone; leave the settings of {mode} out")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"`use_mtp` is for decoders, and {kind} has an encoder; leave it out")
    model._validate_model_kwargs(dict(kwargs))
    return mode


def _prepare_inputs(
    model: Any, inputs: Any, config: Any, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, str, dict[str, Any]]:
    """The ids to decode from; the model's main input and its name; the other inputs of its forward."""
    has_mask = kwargs.get("attention_mask") is not None
    value, name, kwargs = model._prepare_model_inputs(inputs, config.bos_token_id, kwargs)
    call_known(model._prepare_special_tokens, config, has_mask, device=value.device, batch_size=value.shape[0])
    taken = set(inspect.signature(model.forward).parameters)
    if name == "inputs_embeds":
        config.use_cache = True
    if not has_mask and "attention_mask" in taken:
        kwargs["attention_mask"] = model._prepare_attention_mask_for_generation(value, config, kwargs)
    if kwargs.get("position_ids") is None and "position_ids" in taken:
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(value, kwargs)
    ids = value if name == "input_ids" else kwargs.pop("input_ids", None)
    if ids is None:
        raise InputError(f"{type(model).__name__} was given no input_ids")
    ids, kwargs = model._expand_inputs_for_generation(
        input_ids=ids, expand_size=config.num_return_sequences or 1, is_encoder_decoder=False, **kwargs
    )
    return ids, value, name, kwargs


def _set_length(
    model: Any, config: Any, passed: Any, given: Mapping[str, Any], ids: torch.Tensor, value: torch.Tensor, name: str
) -> int:
    """Let the config end at the length that was asked for; return the positions that a cache must hold."""

    def is_unset(each: str) -> bool:
        configs = (passed, model.generation_config)
        return given.get(each) is None and all(getattr(one, each, None) is None for one in configs)

    call_known(
        model._prepare_generated_length,
        generation_config=config,
        has_default_max_length=is_unset("max_length"),
        has_default_min_length=is_unset("min_length"),
        model_input_name=name,
        inputs_tensor=value,
        input_ids_length=ids.shape[1],
    )
    hidden = value.shape[1] if name == "inputs_embeds" and value.shape[1] != ids.shape[1] else 0
    return int(config.max_length) - 1 + hidden


def _as_list(given: Any, name: str) -> Any:
    """Processors or criteria in the list that transformers' methods take."""
    import transformers.generation as theirs

    kind = getattr(theirs, name)
    return kind() if given is None else kind(given if isinstance(given, list | tuple) else [given])
