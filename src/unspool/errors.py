"""Every error unspool raises on purpose. Each says what was asked, why it can't be, and what to use instead."""

from __future__ import annotations

from unspool.wording import Wording

MAX_MESSAGE = 2000  # characters of an error's text
_MAX_TAIL = 600  # characters of its end that are kept, which say what to do instead

# Characters that could move a terminal's cursor, recolour or retitle it, or turn the direction of what follows; and
# lone surrogates, which can't be printed. Messages spell them out.
_UNPRINTABLE = {
    code: (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
    for code in (
        *(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"),
        *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)),
    )
}


def spell_controls(text: str) -> str:
    """The text with control characters spelled out, so that it is safe to print."""
    return text.translate(_UNPRINTABLE)


def excerpt(text: object, longest: int = 80) -> str:
    """Outside text as a message quotes it: the `repr` of its beginning, on one line and safe to print."""
    if isinstance(text, int) and text.bit_length() > 256:
        return f"a number of {text.bit_length()} bits"
    whole = text if isinstance(text, str) else repr(text)
    start = whole[:longest]
    shown = spell_controls(repr(start) if isinstance(text, str) else start)
    return shown if len(whole) <= longest else f"{shown}… ({len(whole)} characters)"


class UnspoolError(Exception):
    """The root of unspool's own errors.

    Messages quote files and templates that come from anyone: control characters in them are spelled out, and a long
    message loses its middle.
    """

    wording: Wording | None = None  # the message with its settings apart, if it was made so

    def __init__(self, *args: object) -> None:
        if args and isinstance(args[0], Wording):
            self.wording = args[0]
        super().__init__(*(_make_presentable(str(arg)) if isinstance(arg, str | Wording) else arg for arg in args))


def _make_presentable(message: str) -> str:
    return _cut(spell_controls(_cut(message)))  # spelled out it may be longer


def _cut(message: str) -> str:
    if len(message) <= MAX_MESSAGE:
        return message
    return f"{message[: MAX_MESSAGE - _MAX_TAIL - 5]} […] {message[-_MAX_TAIL:]}"


class SettingError(UnspoolError, ValueError):
    """A generation setting has an invalid value, or conflicts with another one."""


class UnsupportedError(UnspoolError, NotImplementedError):
    """What was asked for is known, and this version, model or cache can't do it."""


class PluginError(UnspoolError, ValueError):
    """A part that was registered from outside can't be added: its entry is wrong, or its name is taken."""


class InputError(UnspoolError, ValueError):
    """The prompt (text, ids, mask, embeddings) can't be decoded from."""


class ContextError(InputError, SettingError):
    """A prompt, or what is to be written after it, goes beyond the model's context."""


class NoTokenLeftError(UnspoolError, RuntimeError):
    """A row has no token to choose from: its processors forbade them all, or its scores are NaN."""


class UnfulfilledError(UnspoolError, RuntimeError):
    """A constrained search has ended, and what it found lacks something that was to be written."""


class ResourceError(UnspoolError, OSError):
    """A request needs more memory or disk space than there is."""


class EngineError(UnspoolError, RuntimeError):
    """A batch engine is closed, or its driving thread has ended."""


class LoadError(UnspoolError, OSError):
    """A model's files are damaged, incomplete, or of a kind that can't be read."""


class ModelNotFoundError(LoadError, FileNotFoundError):
    """No model is found under the name or path given."""


def name_row(error: InputError, row: int) -> InputError:
    """The error about one prompt of several, with its number."""
    return type(error)(f"prompt {row}: {error}")


class MissingExtraError(UnspoolError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'unspool[{extra}]'"
        )
