"""Every error unspool raises on purpose. Each says what was asked, why it can't be, and what to use instead."""

from __future__ import annotations

LONGEST_TEXT = 1_900  # characters; what stands in the middle of a longer text is left out
_TAIL = 500  # of a long text's end is kept: it says what to use instead


class UnspoolError(Exception):
    """The root of unspool's own errors. A text may quote hostile files: it is short, and safe to print."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(make_printable(one) if isinstance(one, str) else one for one in args))


def make_printable(text: str) -> str:
    """A text of bounded length in which what a terminal obeys, and lone surrogates, stand as escapes."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_TEXT - _TAIL - 5]} […] {text[-_TAIL:]}"
    if text.replace("\n", "").isprintable():
        return text
    text = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
    return text if len(text) <= LONGEST_TEXT else make_printable(text)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch says that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class SettingError(UnspoolError, ValueError):
    """A generation setting has a value that can't be, or conflicts with another one."""


class UnsupportedError(UnspoolError, NotImplementedError):
    """What was asked for is known, and this version, model or cache can't do it."""


class InputError(UnspoolError, ValueError):
    """The prompt (text, ids, mask, embeddings) can't be decoded from."""


class NoTokenLeftError(UnspoolError, RuntimeError):
    """A row has no token to choose from: its processors forbade them all, or its scores are NaN."""


class UnfulfilledError(UnspoolError, RuntimeError):
    """A constrained search has ended, and what it found lacks something that was to be written."""


class ResourceError(UnspoolError, OSError):
    """Memory or disk space that a request needs is not there."""


class LoadError(UnspoolError, OSError):
    """A model's files are damaged, incomplete, or of a kind that can't be read."""


class ModelNotFoundError(LoadError, FileNotFoundError):
    """No model is found under the name or path given."""


class MissingExtraError(UnspoolError, ImportError):
    """An optional package is needed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'unspool[{extra}]'"
        )
