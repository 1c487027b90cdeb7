"""Which layers DoLa contrasts with the last one: the reference's tables, and what can't be."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.errors import SettingError

DEEP = 40  # layers above which only the 20 lowest or highest are looked at
MOST_LOOKED_AT = 20


def find_candidate_layers(asked: str | Sequence[int], num_layers: int, *, is_tied: bool) -> tuple[int, ...]:
    """The layers that `dola_layers` names for a model, rising.

    They are counted as hidden states are: 0 is the first one, which is the embeddings or a Mamba's first block, and
    `num_layers` the last. With tied embeddings the head reads the embeddings back as the token itself, so layers
    below the second are left out if the model is deep enough.
    """
    if not isinstance(asked, str):
        return _check_named(asked, num_layers, is_tied)
    found = _look_up(asked, num_layers, is_tied)
    if not found:
        raise SettingError(
            f"`dola_layers`={asked!r} names no layer of this model: it has {num_layers} layers and its embeddings are "
            f"tied, so the lower half would begin at layer 2 and end before {num_layers // 2}; "
            f"{_say_what_works(num_layers, is_tied)}"
        )
    return found


def _look_up(word: str, num_layers: int, is_tied: bool) -> tuple[int, ...]:
    half = num_layers // 2
    if word == "high":
        first = half if num_layers <= DEEP else num_layers - MOST_LOOKED_AT
        return tuple(range(first, num_layers, 2))
    first = min(2, num_layers - 1) if is_tied else 0
    if first == half:
        return (first,)
    return tuple(range(first, half if num_layers <= DEEP else MOST_LOOKED_AT, 2))


def _check_named(layers: Sequence[int], num_layers: int, is_tied: bool) -> tuple[int, ...]:
    for layer in layers:
        if layer == num_layers:
            raise SettingError(
                f"`dola_layers` names layer {layer}, which is the model's last: it is what the others are contrasted "
                f"with; {_say_what_works(num_layers, is_tied)}"
            )
        if not 0 <= layer < num_layers:
            raise SettingError(
                f"`dola_layers` names layer {layer}, and the model has {num_layers} layers; "
                f"{_say_what_works(num_layers, is_tied)}"
            )
    return tuple(sorted(set(layers)))


def _say_what_works(num_layers: int, is_tied: bool) -> str:
    words = [repr(word) for word in ("low", "high") if _look_up(word, num_layers, is_tied)]
    listed = f"a list of layers from 0 (the first of the model's hidden states) to {num_layers - 1}"
    return f"{' and '.join(words)} work, or {listed}"
