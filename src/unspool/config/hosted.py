"""Our settings inside transformers' own generate(), which merges them with the model's and with its defaults.

It copies the config, then calls `update(**the model's settings, defaults_only=True, allow_custom_entries=True)` and
`update(**its defaults, defaults_only=True)`. In a config of its own, None is what nobody set; here it is what is not in
`explicit`, and None too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from unspool.config.named import NamedSettings
from unspool.config.parameters import PARAMETERS
from unspool.errors import SettingError

_DRAFTERS: Final = "give assistant_model, prompt_lookup_num_tokens, assistant_early_exit or speculate='auto'"
FOREIGN: Final[Mapping[str, str]] = {
    "is_assistant": "a draft model is one that is given as assistant_model",
    "use_mtp": f"a model's own heads for further tokens are not drafted from; {_DRAFTERS}",
    "speculation_type": f"the drafter is chosen by the setting that asks for it; {_DRAFTERS}",
    "assistant_ensemble_weight": "drafts are checked so that the model's own distribution is kept; leave it out",
    "continuous_batching_config": "many requests at once are an unspool.Engine's, and its options are its arguments",
}
"""Settings that transformers' code reads and unspool has not, and what to do instead: None, unless they were set."""

COUNTS_DEFAULT: Final = "_counts_default_length"  # attribute: the number of new tokens is the default's


def fill(config: NamedSettings, values: Mapping[str, Any], *, takes_new: bool) -> dict[str, Any]:
    """Set what nobody set in `config`, and return what it has no place for. `takes_new`: unknown names are set too."""
    if takes_new:
        _refuse_unread(config, values)
    unused = {}
    for name, value in values.items():
        if name.startswith("_") or name == "transformers_version":
            continue
        is_known = name in config.__dict__ or name in PARAMETERS
        if not is_known and not takes_new:
            unused[name] = value
        elif not is_known or (value is not None and _is_unset(config, name)):
            setattr(config, name, value)
    if takes_new and not _has_length(config):
        # What nobody set counts new tokens, however long the prompt is.
        config.max_new_tokens = PARAMETERS["max_length"].default
        setattr(config, COUNTS_DEFAULT, True)
    if config.max_new_tokens is not None and "max_length" not in config.explicit:
        config.__dict__["max_length"] = None
    return unused


def is_hosted(config: NamedSettings) -> bool:
    """Whether transformers has merged the config into a call of its own, whose values are not ours to check."""
    return COUNTS_DEFAULT in config.__dict__


def note_length(config: NamedSettings, values: Mapping[str, Any]) -> None:
    """Let a length of the call win over the default one."""
    if config.__dict__.get(COUNTS_DEFAULT) and values.get("max_length") is not None:
        config.max_new_tokens = None


def _is_unset(config: NamedSettings, name: str) -> bool:
    if name == "max_length" and config.max_new_tokens is not None:
        return False
    return name not in config.explicit or getattr(config, name) is None


def _has_length(config: NamedSettings) -> bool:
    config.__dict__.setdefault(COUNTS_DEFAULT, False)
    return any(
        name in config.explicit and getattr(config, name) is not None for name in ("max_length", "max_new_tokens")
    )


def _refuse_unread(config: NamedSettings, known: Mapping[str, Any]) -> None:
    """Raise for a setting of the caller's that transformers does not have, and would pass over."""
    for name in sorted(config.explicit - set(known)):
        parameter = PARAMETERS.get(name)
        if parameter is not None and getattr(config, name) != parameter.default:
            raise SettingError(
                f"`{name}` is a setting of unspool's, and transformers' generate() does not apply it; call "
                "unspool.generate(model, …), or unspool.attach(model) first"
            )
