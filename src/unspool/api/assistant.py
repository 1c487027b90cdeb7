"""Checking a draft model: whether it is one, how its tokens relate to the model's, and its own drafting settings."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

from unspool.api.core import as_model, find_object
from unspool.config import GenerationConfig
from unspool.decoding.inputs import Inputs, read_drafted
from unspool.decoding.prompts import Prompts
from unspool.decoding.speculative.drafters.vocabulary import Vocabularies, Vocabulary
from unspool.decoding.speculative.sources import can_read
from unspool.errors import InputError, SettingError
from unspool.models.adapters import (
    ColumnModel,
    TextModel,
    adapt_half,
    find_adapter,
    find_owner,
    find_preparing_hook,
    find_twin,
    keeps_states,
)
from unspool.models.native import NativeModel
from unspool.plan import Origin
from unspool.plan.drafting import Relation
from unspool.protocols import Model
from unspool.registry import resolve

MOST_UNKNOWN = 0.05  # of a tokenizer's tokens that its model may lack: some are added after training
_ASKED = ("encode", "get_vocab", "all_special_ids", "convert_ids_to_tokens", "convert_tokens_to_string")
_FOLLOWED = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


_named: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # draft models by name, kept with their model


def load_named(assistant: Any, model: Model) -> Any:
    """A draft model that was given by its name or path, loaded beside the model once; any other as it is."""
    if not isinstance(assistant, str | PathLike):
        return assistant
    known = _named.setdefault(model, {})
    name = os.fsdecode(assistant)
    if name not in known:
        load = resolve("unspool.api.language_model:load")
        known.clear()  # one is kept: another name takes its place
        known[name] = load(assistant, device=model.device)
    return known[name]


@dataclass(frozen=True)
class Assistant:
    """A draft model, and both vocabularies if its tokens are not the model's."""

    model: Model
    vocabularies: Vocabularies | None = None
    owner: Any = None  # has the settings of a transformers object that drafts

    @property
    def relation(self) -> Relation:
        """How its tokens relate to the model's."""
        return "same" if self.vocabularies is None else self.vocabularies.relation

    def check_tokens(self, do_sample: bool) -> None:
        """Raise if drafts are sampled and hardly any tokens are common."""
        if self.vocabularies is not None and (do_sample or self.relation == "renumbered"):
            self.vocabularies.check_common()


def find_drafting(assistant: Any, model: Model) -> Model:
    """The model that drafts, in the form that goes with the model.

    An object of transformers drafts natively for a native model if it can, and always if it keeps states; over its own
    cache if ours can't serve it. A decoder alone that can read an encoder's states, as distilled Whispers are loaded,
    reads those of the model's encoder.
    """
    assistant = load_named(assistant, model)
    theirs = find_object(assistant)
    if theirs is None:
        return as_model(assistant)
    half = adapt_half(theirs) if model.info.is_encoder_decoder else None
    if half is not None:
        return half
    found: Model | None = None
    if isinstance(model, NativeModel) or keeps_states(theirs):
        found = find_twin(theirs)[0]
    if found is None and (find_adapter(theirs) is None or find_preparing_hook(theirs) is not None):
        found = TextModel.open(theirs)
    return as_model(assistant) if found is None else found


def read_assistant(assistant: Any, model: Model, tokenizer: Any, assistant_tokenizer: Any = None) -> Assistant:
    """The draft model, with both vocabularies if they differ; raises if that is unknown or the model can't be used."""
    assistant = load_named(assistant, model)
    core, theirs = find_drafting(assistant, model), find_object(assistant)
    owner = None if theirs is None else find_owner(theirs)
    if core.device != model.device:
        raise SettingError(
            f"`assistant_model` is on {core.device} and the model on {model.device}; load both on one device"
        )
    other = assistant_tokenizer if assistant_tokenizer is not None else getattr(assistant, "tokenizer", None)
    sizes = model.info.vocab_size, core.info.vocab_size
    if tokenizer is None or other is None:
        if assistant_tokenizer is not None or not model.info.is_encoder_decoder:
            _refuse_unnamed(tokenizer, other, assistant_tokenizer is not None, sizes)
        return Assistant(core, owner=owner)
    for name, one in (("tokenizer", tokenizer), ("assistant_tokenizer", other)):
        _check_methods(name, one, ("get_vocab",))
    vocabularies = Vocabularies(Vocabulary(tokenizer, sizes[0]), Vocabulary(other, sizes[1]))
    if vocabularies.relation == "same":
        return Assistant(core, owner=owner)
    for name, vocabulary in (("tokenizer", vocabularies.own), ("assistant_tokenizer", vocabularies.drafts)):
        _check_methods(name, vocabulary.tokenizer, _ASKED)
        _check_size(name, vocabulary)
    if isinstance(core, ColumnModel):
        core = TextModel.of(core)  # the call's inputs are the model's tokens
    return Assistant(core, vocabularies, owner)


def read_source(prompts: Prompts, given: Inputs, assistant: Assistant | None, model: Model) -> Prompts:
    """The prompts, with the states that a draft model's encoder has made if they were given; raises if a draft model
    has nothing to read."""
    source, has_states = prompts.source, given.assistant_encoder_outputs is not None
    if assistant is None or source is None or not assistant.model.info.is_encoder_decoder:
        if has_states:
            raise InputError(
                "assistant_encoder_outputs are what the encoder of an assistant_model has made of the source, and "
                "there is no such model here; leave them out"
            )
        return prompts
    if has_states:
        source = read_drafted(assistant.model, given, source)
        prompts = replace(prompts, source=source)
    if not can_read(assistant.model, model, source):
        read = "input_ids" if model.info.features is None else "input_features"
        raise SettingError(
            f"`assistant_model` reads the source with an encoder of its own, and the model was given other things than "
            f"{read}; pass those, or the draft model's own states as assistant_encoder_outputs, or use "
            "prompt_lookup_num_tokens"
        )
    return prompts


def _refuse_unnamed(tokenizer: Any, other: Any, is_asked: bool, sizes: tuple[int, int]) -> None:
    """Without both tokenizers only the sizes can be compared: equal ones are taken for one vocabulary."""
    if not is_asked and sizes[0] == sizes[1]:
        return
    missing = [name for name, one in (("tokenizer", tokenizer), ("assistant_tokenizer", other)) if one is None]
    why = (
        "`assistant_tokenizer` was given"
        if is_asked
        else f"`assistant_model` has a vocabulary of {sizes[1]} tokens and the model one of {sizes[0]}"
    )
    named = " and ".join(f"`{name}`" for name in missing)
    raise SettingError(
        f"{why}, so drafts are put into other tokens by both tokenizers; pass {named} too, or use a draft model with "
        "the model's own tokenizer"
    )


def _check_methods(name: str, tokenizer: Any, asked: tuple[str, ...]) -> None:
    missing = [each for each in asked if not hasattr(tokenizer, each)]
    if missing:
        raise SettingError(
            f"`{name}` is a {type(tokenizer).__name__} without {', '.join(missing)}, which drafting across tokenizers "
            "asks for; use lm.tokenizer, or one of transformers'"
        )


def _check_size(name: str, vocabulary: Vocabulary) -> None:
    num_known, num_all = len(vocabulary.ids), len(vocabulary.known)
    if num_known < (1 - MOST_UNKNOWN) * num_all:
        whose = "assistant_model" if name == "assistant_tokenizer" else "model"
        raise SettingError(
            f"`{name}` has {num_all} tokens and the {whose} {vocabulary.num_tokens}, so it is not that model's; "
            "pass the tokenizer that the model was trained with"
        )


def follow_assistant(settings: GenerationConfig, origins: dict[str, Origin], assistant: Assistant) -> None:
    """Use the draft model's own drafting settings for those that the call does not set."""
    config = getattr(assistant.owner or assistant.model, "generation_config", None)
    if not isinstance(config, GenerationConfig):
        return
    for name in _FOLLOWED:
        if name in config.explicit and origins[name] not in ("config", "call"):
            setattr(settings, name, getattr(config, name))
            origins[name] = "model"
