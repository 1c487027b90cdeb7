"""Prompts with pictures as embeddings, for a native language part: what the vision part of a transformers object makes
of the pictures stands where the prompt has their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from unspool.config import GenerationConfig
from unspool.errors import InputError
from unspool.kernels.seats import ALONE, NUM_AXES, Seats
from unspool.models.adapters.adapted import name_failures
from unspool.models.adapters.twin import find_twin
from unspool.models.families.pictures import PictureFamily
from unspool.models.native import NativeModel
from unspool.models.registry import find_family

PIXELS: Final = "pixel_values"
_OF_PICTURES: Final = (PIXELS, "pixel_attention_mask", "image_grid_thw", "image_sizes")
_OF_TOKENS: Final = ("token_type_ids", "mm_token_type_ids")
PICTURE_INPUTS: Final = (*_OF_PICTURES, *_OF_TOKENS)
"""What processors make of pictures beside token ids."""


@dataclass(frozen=True)
class EmbeddedPrompts:
    """Prompts whose pictures were read."""

    ids: torch.Tensor  # (rows, width), with the tokens that stand for pictures
    mask: torch.Tensor | None
    embeds: torch.Tensor  # (rows, width, hidden)
    seats: Seats | None


def embed_call(
    model: Any, inputs: Any, given: Mapping[str, Any], settings: GenerationConfig
) -> tuple[NativeModel, EmbeddedPrompts] | None:
    """The native model of an object's language part, and the call's prompts as it reads them; None if the object's own
    forward must run."""
    family = find_family({"architectures": [type(model).__name__]})
    named = {name: value for name, value in given.items() if value is not None}
    if not isinstance(family, PictureFamily) or PIXELS not in named:
        return None
    ids = named.pop("input_ids", None) if inputs is None else inputs
    mask = named.pop("attention_mask", None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or set(named) - {*PICTURE_INPUTS, "logits_to_keep"}:
        return None
    # A cache that is returned must have keys where the object's own forward would go on from them.
    if settings.return_dict_in_generate or settings.compile_config is not None or settings.compile:
        return None
    native, _ = find_twin(model)
    if native is None:
        return None
    return native, embed_prompts(family, model, native, {**named, "input_ids": ids, "attention_mask": mask})


@torch.no_grad()
def embed_prompts(family: PictureFamily, vision: Any, native: NativeModel, given: Mapping[str, Any]) -> EmbeddedPrompts:
    """Read the pictures once: their embeddings among those of the tokens, and the tokens' places."""
    device = native.device
    ids, mask = given["input_ids"].to(device), given.get("attention_mask")
    config = vision.config
    token = getattr(config, "image_token_id", None)
    token = getattr(config, "image_token_index", None) if token is None else token
    is_picture = ids == token
    with name_failures(vision):
        read = _read_pictures(vision, {name: given[name] for name in _OF_PICTURES if given.get(name) is not None})
    count, found = int(is_picture.sum()), read.shape[0]
    if count != found:
        raise InputError(
            f"the prompts have {count} places for what pictures are made into, and the pictures are made into {found} "
            "embeddings; give the input_ids and pixel_values that one call of the model's processor returned"
        )
    embeds = native.get_input_embeddings()(ids.masked_fill(is_picture, 0))
    embeds = embeds.masked_scatter(is_picture[..., None], read.to(device, embeds.dtype))
    return EmbeddedPrompts(ids, mask, embeds, _find_seats(family, vision, ids, mask, given))


def _read_pictures(vision: Any, pictures: Mapping[str, Any]) -> torch.Tensor:
    """The embeddings of all pictures, one after the other: (tokens, hidden)."""
    own = next(part for part in vision.parameters() if part.is_floating_point())
    moved = {}
    for name, value in pictures.items():
        if not isinstance(value, torch.Tensor):
            raise InputError(f"`{name}` must be a tensor, as the model's processor returns it")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(f"`{name}` holds NaN or infinite values")
        moved[name] = value.to(own.device, own.dtype) if value.is_floating_point() else value.to(own.device)
    body = vision.model
    made = body.get_image_features(**_choose(body.get_image_features, moved, is_strict=False))
    made = getattr(made, "pooler_output", made)
    parts = list(made) if isinstance(made, list | tuple) else [made]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _choose(function: Any, named: Mapping[str, Any], *, is_strict: bool = True) -> dict[str, Any]:
    """The arguments that a function of this release of transformers takes."""
    known = inspect.signature(function).parameters
    takes_more = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    return {name: value for name, value in named.items() if name in known or (takes_more and not is_strict)}


def _find_seats(
    family: PictureFamily, vision: Any, ids: torch.Tensor, mask: Any, given: Mapping[str, Any]
) -> Seats | None:
    """The places of tokens; None if they stand one after the other, and see what is before them."""
    real = torch.ones_like(ids) if mask is None else torch.as_tensor(mask).to(ids)
    turns = (real.cumsum(-1) - 1).clamp(min=0)[..., None].expand(-1, -1, NUM_AXES)
    groups = torch.full_like(ids, ALONE)
    kinds = given.get("token_type_ids")
    if family.has_axes:
        turns = _find_turns(vision, ids, real, given)
    elif family.has_groups and kinds is not None:
        groups = _number_groups(torch.as_tensor(kinds).to(ids) == 1)
    else:
        return None
    return Seats(turns, groups)


def _find_turns(vision: Any, ids: torch.Tensor, real: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """The three positions of every token (rows, width, 3), of which the last text's are its index.

    Rotations count differences alone, so all positions of a row may be moved by one number: what is written after the
    prompt then stands at its index too.
    """
    kinds = given.get("mm_token_type_ids")
    kinds = (ids == vision.config.image_token_id).long() if kinds is None else kinds.to(ids)
    named = {
        "input_ids": ids,
        "mm_token_type_ids": kinds,
        "image_grid_thw": None if given.get("image_grid_thw") is None else given["image_grid_thw"].to(ids.device),
        "attention_mask": real,
    }
    find = vision.model.get_rope_index
    positions, behind = find(**_choose(find, named))  # (3, rows, width), (rows, 1)
    turns: torch.Tensor = (positions - behind.reshape(1, -1, 1)).permute(1, 2, 0)
    return turns


def _number_groups(is_inside: torch.Tensor) -> torch.Tensor:
    """The number of the picture that each token is of; `ALONE` for those of none."""
    before = torch.nn.functional.pad(is_inside, (1, 0))[:, :-1]
    return torch.where(is_inside, (is_inside & ~before).long().cumsum(-1), ALONE)
