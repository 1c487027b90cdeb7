"""GenerationConfig: every setting of a generation, and who set it."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import is_dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, Self, overload

from unspool.config.files import HUB_OPTIONS, find_config_file, push_saved, read_push_options
from unspool.config.hosted import COUNTS_DEFAULT, FOREIGN, fill, is_hosted, note_length
from unspool.config.modes import GenerationMode, choose_mode
from unspool.config.parameters import PARAMETERS
from unspool.config.rules import EXTRA_OUTPUTS, check_settings, find_unused
from unspool.config.shapes import is_shape, make_schema
from unspool.config.speech import SPEECH_FIELDS
from unspool.config.theirs import convert_value
from unspool.config.values import is_one_bias
from unspool.config.watermarking import BaseWatermarkingConfig, read_watermarking_config
from unspool.errors import InputError, SettingError
from unspool.numeric import to_plain
from unspool.small_files import make_folder, read_json_object, write_text
from unspool.wording import suggest

FILE_NAME = "generation_config.json"
METADATA = (
    "_from_model_config",
    "_commit_hash",
    "_original_object_hash",
    "_explicit",
    "transformers_version",
    COUNTS_DEFAULT,
    "_kept",
)
_UNWRITTEN = ("_commit_hash", "_original_object_hash", "_explicit", COUNTS_DEFAULT, "_kept")
_MOST_NAMES = 4096  # that a dict may say were set
MISSPELT = 0.75  # likeness to a setting of names that are taken for it: others may be somebody's own
_TEXT_PARTS = ("decoder", "generator", "text_config")

logger = logging.getLogger("unspool.config")


class GenerationConfig:
    """Every setting of a generation, by name; `PARAMETERS` lists them.

    `explicit` holds the names that were set by whoever made this config, even if they set the default. Other names are
    kept if a model's file has them; one that looks like a setting's is refused here, any other by the call.
    """

    extra_output_flags = EXTRA_OUTPUTS

    def __init__(self, **kwargs: Any) -> None:
        state = self.__dict__
        state.update({name: parameter.copy_default() for name, parameter in PARAMETERS.items()})
        is_from_model = bool(kwargs.pop("_from_model_config", False))
        state["_from_model_config"] = is_from_model
        state["_commit_hash"] = kwargs.pop("_commit_hash", None)
        state["transformers_version"] = kwargs.pop("transformers_version", None)
        state["_explicit"] = frozenset()
        named, kept = kwargs.pop("_explicit", None), kwargs.pop("_kept", None)
        state["_kept"] = frozenset() if kept is None else _read_names(kept, "_kept")
        for name, value in kwargs.items():
            # A model's config.json holds much that is no generation setting.
            if name in PARAMETERS or not is_from_model:
                if name not in state["_kept"]:
                    _refuse_misspelt(name)
                setattr(self, name, value)
        if is_from_model and kwargs.get("force_bos_token_to_be_generated"):  # how BART once spelled it
            self.forced_bos_token_id = self.bos_token_id
        if named is not None:
            state["_explicit"] = self._read_explicit(named)
        if kwargs:  # the table's defaults go together
            self.validate()

    def _read_explicit(self, names: Any) -> frozenset[str]:
        """What was set by whoever made a whole dict of settings: what it says, and what differs from the defaults."""
        listed = _read_names(names, "_explicit")
        return frozenset(name for name in self.explicit if name in listed or self._differs(name, self.__dict__[name]))

    def __getattr__(self, name: str) -> Any:
        # The attributes are those of PARAMETERS. One that is missing here was registered after this config was made.
        if name in FOREIGN:
            return None
        if name.startswith("_") or name not in PARAMETERS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return PARAMETERS[name].copy_default()

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name) and not (callable(value) and is_hosted(self)):  # its code may exchange a method
            raise SettingError(f"`{name}` can't be a setting: GenerationConfig has a method of that name.")
        if name in ("watermarking_config", "compile_config"):
            value = convert_value(value)
        if name == "watermarking_config":
            value = _read_watermarks(value)
        elif name == "sequence_bias" and is_one_bias(value):
            value = [value]
        elif name in PARAMETERS:
            value = to_plain(value)
        self.__dict__[name] = value
        if not name.startswith("_") and name not in METADATA:
            # Replaced, never changed in place: copies share it.
            self.__dict__["_explicit"] = self._explicit | {name}

    @property
    def explicit(self) -> frozenset[str]:
        """The names that were set, by constructor, assignment, file or update, whatever the value."""
        names: frozenset[str] = self.__dict__["_explicit"]
        return names

    @property
    def unread(self) -> list[str]:
        """The names that were set and are no settings, without those of a model's file."""
        kept = self.__dict__.get("_kept", ())
        names = [name for name in self.explicit if name not in PARAMETERS and name not in kept]
        return sorted(
            name
            for name in names
            if name not in SPEECH_FIELDS and not (name in FOREIGN and self.__dict__[name] in (None, False))
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        # What was set is part of it: a None that was set keeps a model's own value out, one by default does not.
        mine, theirs = (config.to_json_string(use_diff=False, ignore_metadata=True) for config in (self, other))
        return self.explicit == other.explicit and mine == theirs

    def __hash__(self) -> int:
        return hash(self.to_json_string(ignore_metadata=True))

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.to_diff_dict().items() if name not in METADATA}
        shown = {name: value for name, value in shown.items() if value is None or self._differs(name, value)}
        return f"{type(self).__name__} {_to_json(_hide_keys(shown), default=repr)}"

    # What it asks for

    def get_generation_mode(self, assistant_model: Any = None) -> GenerationMode:
        """The way to decode that these settings ask for."""
        return choose_mode(self, assistant_model is not None)

    def validate(self, strict: bool = False) -> None:
        """Raise for invalid settings; log settings without effect, or raise for them too if `strict`."""
        check_settings(self)
        unused = find_unused(self)
        if not unused:
            return
        details = "\n".join(f"- `{name}`: {reason}" for name, reason in unused.items())
        if strict:
            raise SettingError(f"GenerationConfig is invalid:\n{details}")
        hint = "" if logger.isEnabledFor(logging.INFO) else " Log unspool.config at INFO for the reasons."
        logger.warning("These generation settings have no effect: %s.%s", list(unused), hint)
        logger.info(
            "%s\nA model's generation_config.json may have set some of these; a value of None unsets one.",
            details,
        )

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Set the settings that this config has, all or none of them, and return the others.

        With `defaults_only`, what was set stays; with `allow_custom_entries`, unknown names are set too, as
        transformers' generate() has it.
        """
        if defaults_only:
            return fill(self, kwargs, takes_new=allow_custom_entries)
        before = dict(self.__dict__)
        unused = {name: value for name, value in kwargs.items() if name not in before and name not in PARAMETERS}
        if allow_custom_entries:
            unused = {}
        try:
            note_length(self, kwargs)
            for name, value in kwargs.items():
                if name not in unused:
                    setattr(self, name, value)
            if not is_hosted(self):
                self.validate()
        except SettingError:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return unused

    # From elsewhere

    @overload
    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], *, return_unused_kwargs: Literal[True], **kwargs: Any
    ) -> tuple[Self, dict[str, Any]]: ...

    @overload
    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], *, return_unused_kwargs: Literal[False] = False, **kwargs: Any
    ) -> Self: ...

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], *, return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Build a config from a dict; keyword arguments win over it.

        With `return_unused_kwargs`, keyword arguments that are no settings come back beside the config
        instead of being kept in it.
        """
        if isinstance(names := config_dict.get("_explicit"), list):
            config_dict = {**config_dict, "_explicit": [*names, *kwargs]}
        if not return_unused_kwargs:
            return cls(**{**config_dict, **kwargs})
        known = {**PARAMETERS, **config_dict, **dict.fromkeys(METADATA)}
        unused = {name: value for name, value in kwargs.items() if name not in known}
        return cls(**{**config_dict, **{name: kwargs[name] for name in kwargs if name in known}}), unused

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | PathLike[str],
        config_file_name: str | PathLike[str] | None = None,
        *,
        config_name: str | None = None,
        return_unused_kwargs: bool = False,
        **kwargs: Any,
    ) -> Any:  # Self, or (Self, dict) with return_unused_kwargs
        """Read the config of a folder, a file, or a model on the hub; keyword arguments win over the file's.

        The hub's own arguments (`revision`, `cache_dir`, `token`, `subfolder`, `local_files_only`, …) are
        passed on to it.
        """
        options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        file_name = str(config_file_name or config_name or FILE_NAME)
        path = find_config_file(pretrained_model_name, file_name, options)
        settings = read_json_object(path, is_strict=False)  # a bias may be -Infinity; every value is checked below
        settings = keep_unknown(settings)
        if return_unused_kwargs:
            return cls.from_dict(settings, return_unused_kwargs=True, **kwargs)
        return cls.from_dict(settings, **kwargs)

    @classmethod
    def from_model_config(cls, model_config: Any) -> Self:
        """Take the generation settings out of a model's config (a dict, or an object with `to_dict`)."""
        settings = dict(model_config if isinstance(model_config, Mapping) else model_config.to_dict())
        # None says nothing in a model's config, and must not hide the defaults.
        # Our own names may mean something else in there.
        names = [name for name, parameter in PARAMETERS.items() if not parameter.is_ours]
        found = {name: settings[name] for name in names if settings.get(name) is not None}
        # An encoder-decoder's or a multimodal model's settings may sit in the part that writes text.
        inner = next((part for key in _TEXT_PARTS if isinstance(part := settings.get(key), Mapping)), {})
        for name in names:
            default = PARAMETERS[name].default
            if inner.get(name) is not None and found.get(name, default) == default:
                found[name] = inner[name]
        if any(found.get(name) for name in EXTRA_OUTPUTS):
            found["return_dict_in_generate"] = True
        if settings.get("force_bos_token_to_be_generated"):
            found["force_bos_token_to_be_generated"] = True
        return cls(**found, _from_model_config=True)

    # To elsewhere

    def to_dict(self) -> dict[str, Any]:
        """Every setting, the defaults included; `_explicit` lists those that were set, which from_dict() reads."""
        output = {name: copy.deepcopy(value) for name, value in self.__dict__.items() if name not in _UNWRITTEN}
        self.dict_torch_dtype_to_str(output)
        output["_explicit"] = sorted(self.explicit)
        if self.__dict__.get("_kept"):
            output["_kept"] = sorted(self.__dict__["_kept"])
        return output

    def to_diff_dict(self) -> dict[str, Any]:
        """The settings that differ from the defaults, or that were set to them: a None that was set is among these."""
        explicit, settings = self.explicit, self.to_dict()
        settings = {name: value for name, value in settings.items() if name not in ("_explicit", "_kept")}
        return {name: value for name, value in settings.items() if name in explicit or self._differs(name, value)}

    @staticmethod
    def _differs(name: str, value: Any) -> bool:
        """Whether a value is another than the one that a setting has if nobody sets it."""
        if name in PARAMETERS:
            return bool(value != PARAMETERS[name].default)
        return name not in ("_from_model_config", "transformers_version") or bool(value)

    @staticmethod
    def _get_default_generation_params() -> dict[str, Any]:
        """What transformers' generate() asks of a model's settings: the values that count if nobody sets others."""
        return {name: parameter.copy_default() for name, parameter in PARAMETERS.items() if not parameter.is_ours}

    def dict_torch_dtype_to_str(self, d: dict[str, Any]) -> None:
        """Replace torch dtypes in `d`, and in dicts inside it, by their names, in place."""
        for name, value in d.items():
            if name in ("torch_dtype", "dtype") and value is not None and not isinstance(value, str):
                d[name] = str(value).split(".")[-1]
            elif isinstance(value, dict):
                self.dict_torch_dtype_to_str(value)

    def to_json_string(self, use_diff: bool = True, ignore_metadata: bool = False) -> str:
        """The settings as JSON; objects that have no JSON form are shown by their repr."""
        settings = self.to_diff_dict() if use_diff else self.to_dict()
        if ignore_metadata:
            settings = {name: value for name, value in settings.items() if name not in METADATA}
        return _to_json(settings, default=repr)

    def to_json_file(self, json_file_path: str | PathLike[str], use_diff: bool = True) -> None:
        """Write the settings to a JSON file, whole or not at all."""
        settings = self.to_diff_dict() if use_diff else self.to_dict()
        for name in ("compile_config", "compile"):  # about this machine, not about the text; that it is off may be said
            if settings.get(name) is not None or not use_diff:
                settings.pop(name, None)

        def refuse(value: Any) -> Any:
            names = [name for name, held in settings.items() if _holds(held, value)]
            raise SettingError(
                f"{names or 'A setting'} holds a {type(value).__name__}, which a JSON file can't. "
                "Unset it before saving, and pass it to generate() instead."
            )

        write_text(Path(json_file_path), _to_json(settings, default=refuse))

    def save_pretrained(
        self,
        save_directory: str | PathLike[str],
        config_file_name: str | PathLike[str] | None = None,
        push_to_hub: bool = False,
        *,
        config_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Write what differs from the defaults to a file in a folder; a config with any issue is refused.

        `push_to_hub` uploads the file to `repo_id` too, by default the folder's own name; `token`, `private`,
        `commit_message`, `revision` and `create_pr` are for the hub.
        """
        options = read_push_options(kwargs, is_pushed=push_to_hub, caller="save_pretrained()")
        try:
            self.validate(strict=True)
        except SettingError as error:
            raise SettingError(f"{error}\n\nFix these issues to save the configuration.") from error
        folder = Path(save_directory)
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; a configuration is saved into a folder.")
        make_folder(folder)
        name = str(config_file_name or config_name or FILE_NAME)
        self.to_json_file(folder / name)
        if push_to_hub:
            push_saved(save_directory, [name], options)

    def push_to_hub(self, repo_id: str, config_file_name: str | None = None, **options: Any) -> Any:
        """Upload what differs from the defaults to a repository of the hub, and return its client's answer.

        `token`, `private`, `commit_message`, `revision` and `create_pr` are for the hub.
        """
        given = {**read_push_options(options, is_pushed=True, caller="push_to_hub()"), "repo_id": repo_id}
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder, config_file_name)
            return push_saved(folder, [config_file_name or FILE_NAME], given)


def keep_unknown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's file says, with the mark that its names that are no settings are to be kept."""
    return {**settings, "_kept": [name for name in settings if name not in PARAMETERS and name not in METADATA]}


def _read_names(names: Any, mark: str) -> frozenset[str]:
    """The names in a mark that to_dict() writes."""
    if (
        not isinstance(names, (list, tuple, set, frozenset))
        or len(names) > _MOST_NAMES
        or not all(isinstance(name, str) for name in names)
    ):
        raise SettingError(f"`{mark}` is a list of the names of settings, as to_dict() writes it; leave it out")
    return frozenset(names)


_WRITTEN: Final = frozenset({"pad_token"})  # names that examples of the reference give to a config, which keeps them


def _refuse_misspelt(name: str) -> None:
    """Raise for a name that is no setting and looks like one: nothing would read it."""
    if name in PARAMETERS or name in FOREIGN or name in SPEECH_FIELDS or name in _WRITTEN or name.startswith("_"):
        return
    hint = suggest(name, PARAMETERS, nearness=MISSPELT)
    if hint:
        raise SettingError(f"GenerationConfig has no setting {name!r:.80}{hint}")


def _read_watermarks(value: Any) -> Any:
    """A watermark's settings, or one for each row, from their dicts."""
    if isinstance(value, (list, tuple)):
        return [_read_watermarks(one) for one in value]
    return read_watermarking_config(value) if isinstance(value, Mapping) else value


def _hide_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without the watermarks' keys, as they may be shown."""
    marks = settings.get("watermarking_config")
    if isinstance(marks, BaseWatermarkingConfig):
        return {**settings, "watermarking_config": marks.without_key()}
    if isinstance(marks, list):
        hidden = [one.without_key() if isinstance(one, BaseWatermarkingConfig) else one for one in marks]
        return {**settings, "watermarking_config": hidden}
    return settings


def _holds(value: Any, part: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds(one, part) for one in value)
    if isinstance(value, dict):
        return any(_holds(one, part) for one in value.values())
    return value is part


def _to_json(settings: dict[str, Any], default: Any) -> str:
    bias = settings.get("sequence_bias")
    if isinstance(bias, Mapping):  # JSON has no keys that are sequences; the list form says the same
        settings = {**settings, "sequence_bias": [[list(tokens), value] for tokens, value in bias.items()]}

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): convert(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(one) for one in value]
        if is_shape(value):  # of a json_schema
            return make_schema(value)
        if hasattr(value, "to_dict") and not isinstance(value, type):
            return convert(value.to_dict())
        if is_dataclass(value) and not isinstance(value, type):
            return convert(vars(value))
        if hasattr(value, "tolist"):  # numpy and torch values
            return convert(value.tolist())
        return value

    return json.dumps(convert(settings), indent=2, sort_keys=True, default=default) + "\n"
