"""Is this one value possible? Types, finiteness and bounds; how settings go together is `rules`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from unspool.config.parameter import LARGEST_COUNT, Kind, Parameter
from unspool.config.shapes import is_shape
from unspool.errors import SettingError
from unspool.numeric import is_number
from unspool.wording import about

MOST_ROWS = 65_536
MOST_STRINGS = 256
LONGEST_STRING = 4_096
LONGEST_TEXT = 65_536  # of a schema, a regular expression or a grammar
MOST_CHOICES = 4_096
MOST_SEQUENCES = 65_536
MOST_IDS = 1_048_576
MOST_LAYERS = 4_096


def check_value(parameter: Parameter, value: Any) -> None:
    """Raise a SettingError unless `value` may stand for `parameter`; None means unset and always may."""
    if value is None:
        return
    if parameter.holds_rows(value):
        _check_length(parameter, value, MOST_ROWS)
        for one in value:
            if one is not None or parameter.default is not None:  # None: this row has none
                _CHECKS[parameter.kind](parameter, one)
        return
    _CHECKS[parameter.kind](parameter, value)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _refuse(parameter: Parameter, value: Any, wanted: str) -> SettingError:
    text = repr(value)
    shown = text if len(text) <= 80 else text[:77] + "..."
    return SettingError(about(parameter.name, f"must be {wanted}, but is {shown}. {parameter.help}"))


def _check_length(parameter: Parameter, value: Sequence[Any], most: int) -> None:
    if not value:
        raise _refuse(parameter, value, "a list that is not empty (leave it unset instead)")
    if len(value) > most:
        raise SettingError(about(parameter.name, f"has {len(value)} entries; at most {most} are taken."))


def _check_flag(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(parameter, value, "true or false")


def _check_bounds(parameter: Parameter, value: Any) -> None:
    low, high = parameter.at_least, parameter.at_most
    if low is not None and value < low:
        wanted = "greater than 0" if low == 1 else f"at least {low}"
        raise _refuse(parameter, value, wanted)
    if high is not None and value > high:
        raise _refuse(parameter, value, f"at most {high}")


def _check_integer(parameter: Parameter, value: Any) -> None:
    if not _is_integer(value):
        raise _refuse(parameter, value, "a whole number")
    _check_bounds(parameter, value)


def _check_number(parameter: Parameter, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(parameter, value, "a number")
    if not is_number(value):
        raise _refuse(parameter, value, "a finite number")
    _check_bounds(parameter, value)


def _check_text(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, str):
        raise _refuse(parameter, value, "a string")
    if not 0 < len(value) <= LONGEST_STRING:
        raise _refuse(parameter, value, f"a string of 1 to {LONGEST_STRING} characters")


def _check_texts(parameter: Parameter, value: Any) -> None:
    _check_one_or_list(parameter, value, MOST_STRINGS, _check_text)


def _check_choice(parameter: Parameter, value: Any) -> None:
    # Compared with type and value, as 0 == False and unhashable values must be refused rather than fail.
    if not any(type(value) is type(choice) and value == choice for choice in parameter.all_choices):
        if parameter.name == "early_stopping":
            raise _refuse(parameter, value, "a boolean or 'never'")
        raise _refuse(parameter, value, "one of " + ", ".join(map(str, parameter.all_choices)))


def _check_id(parameter: Parameter, value: Any) -> None:
    if not _is_integer(value) or abs(int(value)) > LARGEST_COUNT:
        raise _refuse(parameter, value, "made of token ids")


def _check_ids(parameter: Parameter, value: Any) -> None:
    _check_one_or_list(parameter, value, MOST_IDS, _check_id)


def _check_one_or_list(parameter: Parameter, value: Any, most: int, check: Callable[[Parameter, Any], None]) -> None:
    if isinstance(value, (list, tuple)):
        _check_length(parameter, value, most)
        for one in value:
            check(parameter, one)
    else:
        check(parameter, value)


def _check_id_list(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise _refuse(parameter, value, "a list of token ids")
    if value:  # models ship empty lists here to say "none"
        _check_ids(parameter, value)


def _check_id_lists(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise _refuse(parameter, value, "a list of lists of token ids")
    _check_length(parameter, value, MOST_SEQUENCES)
    for one in value:
        if not isinstance(one, (list, tuple)):
            raise _refuse(parameter, one, "a list of lists of token ids")
        _check_length(parameter, one, MOST_SEQUENCES)
        is_nested_twice = parameter.name == "force_words_ids" and isinstance(one[0], (list, tuple))
        for part in one if is_nested_twice else [one]:
            if not isinstance(part, (list, tuple)):
                raise _refuse(parameter, part, "a list of lists of token ids")
            _check_ids(parameter, part)


def _check_layers(parameter: Parameter, value: Any) -> None:
    if value in ("low", "high"):
        return
    if not isinstance(value, (list, tuple)):
        raise _refuse(parameter, value, "'low', 'high' or a list of layer indices")
    _check_length(parameter, value, MOST_LAYERS)
    for layer in value:
        if not _is_integer(layer) or abs(int(layer)) > LARGEST_COUNT:
            raise _refuse(parameter, layer, "made of layer indices")


def is_one_bias(value: Any) -> bool:
    """Whether a bias is one pair of token ids and a number, outside of a list of them, as documents write it."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and isinstance(value[0], (list, tuple))
        and is_number(value[1], allows_infinity=True)
    )


def _check_bias(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, (Mapping, list, tuple)):
        raise _refuse(parameter, value, "a dict of {token ids: bias} or a list of [token ids, bias]")
    pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
    _check_length(parameter, pairs, MOST_SEQUENCES)
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], (list, tuple)):
            raise _refuse(parameter, pair, "made of pairs of token ids and a number")
        _check_ids(parameter, pair[0])
        bias = pair[1]
        # An infinite bias forbids (or forces) a sequence, so only NaN is refused here.
        if not is_number(bias, allows_infinity=True):
            raise _refuse(parameter, bias, "made of pairs of token ids and a number")


def _check_token_bias(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _refuse(parameter, value, "a dict of {token id: bias}")
    _check_length(parameter, list(value), MOST_IDS)
    for token, bias in value.items():
        # A JSON file has no keys but strings.
        _check_id(parameter, int(token) if isinstance(token, str) and token.isdecimal() else token)
        if not is_number(bias, allows_infinity=True):
            raise _refuse(parameter, bias, "a dict of {token id: bias}")


def _check_decay(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise _refuse(parameter, value, "a pair (start, factor)")
    _check_integer(parameter, value[0])
    _check_number(parameter, value[1])


def _check_forced_ids(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise _refuse(parameter, value, "a list of pairs [position, token id]")
    if len(value) > MOST_SEQUENCES:
        raise SettingError(about(parameter.name, f"has {len(value)} entries; at most {MOST_SEQUENCES} are taken."))
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise _refuse(parameter, pair, "a list of pairs [position, token id]")
        for one in pair:
            if one is not None:  # Whisper leaves the language open this way
                _check_id(parameter, one)


def _check_schema(parameter: Parameter, value: Any) -> None:
    if isinstance(value, str):
        _check_long_text(parameter, value)
    elif not isinstance(value, (Mapping, bool)) and not is_shape(value):
        raise _refuse(parameter, value, "a JSON schema: a dict, its text, or a type")


def _check_long_text(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        raise _refuse(parameter, value, f"a string of 1 to {LONGEST_TEXT} characters")


def _check_choices(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise _refuse(parameter, value, "a list of texts that are not empty")
    _check_length(parameter, value, MOST_CHOICES)
    _check_long_text(parameter, "".join(value))


def _check_tags(parameter: Parameter, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _refuse(parameter, value, "a dict with `triggers` and `structures`")


def _accept(_: Parameter, __: Any) -> None:
    """Objects are checked by `rules`."""


_CHECKS: dict[Kind, Callable[[Parameter, Any], None]] = {
    "flag": _check_flag,
    "integer": _check_integer,
    "number": _check_number,
    "text": _check_text,
    "texts": _check_texts,
    "choice": _check_choice,
    "ids": _check_ids,
    "id list": _check_id_list,
    "id lists": _check_id_lists,
    "layers": _check_layers,
    "bias": _check_bias,
    "token bias": _check_token_bias,
    "decay": _check_decay,
    "forced ids": _check_forced_ids,
    "schema": _check_schema,
    "long text": _check_long_text,
    "choices": _check_choices,
    "tags": _check_tags,
    "object": _accept,
}
