"""What processors are built from: the settings as one call's rows read them, and what the call knows besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.parameters import is_on
from unspool.errors import SettingError
from unspool.logits.alone import Apart
from unspool.logits.base import LogitsProcessor
from unspool.wording import about


@dataclass(frozen=True)
class Context:
    """What processors are built from besides the settings."""

    num_rows: int
    vocab_size: int
    prompt_width: int  # columns of the prompt, padding included
    max_length: int  # columns, prompt included
    hidden_width: int = 0  # positions of the prompt that no column stands for
    eos_token_ids: tuple[int, ...] = ()
    # (rows, length): what is read, the prompt where nothing else is; or what makes it
    encoder_input_ids: torch.Tensor | Callable[[], torch.Tensor] | None = None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], Sequence[int]] | None = None
    custom: tuple[LogitsProcessor, ...] = ()
    apart: Apart | None = None  # the caller's own are shown each prompt's rows by themselves
    asked: frozenset[str] = frozenset()  # settings that the caller set, not the model's file
    tokenizer: Any = None


@dataclass(frozen=True)
class Build:
    """One building of the processors: the settings, read for the call's rows, and the context."""

    settings: GenerationConfig
    context: Context
    setting: str = ""  # the one that switches on what is being made

    @property
    def value(self) -> Any:
        """The setting that switches the processor on, for the call's rows."""
        return self.get(self.setting)

    @property
    def columns(self) -> Any:
        """The same, of a length with the prompt included: the columns that it takes."""
        value, hidden = self.value, self.context.hidden_width
        return [max(0, one - hidden) for one in value] if isinstance(value, list) else max(0, value - hidden)

    @property
    def is_per_row(self) -> bool:
        """Whether that setting has one value for each row."""
        return PARAMETERS[self.setting].holds_rows(getattr(self.settings, self.setting))

    @property
    def first_free_column(self) -> int:
        """The column of the first token that is not forced."""
        width = self.context.prompt_width
        return width + 1 if width <= 1 and self.forces_first else width

    @property
    def forces_first(self) -> bool:
        """Whether a token is forced behind texts of one."""
        return is_on(self.settings, "forced_bos_token_id")

    @property
    def value_ids(self) -> Any:
        """The same, of a setting that names tokens, all of them in the vocabulary."""
        return self.ids(self.setting)

    def get(self, name: str) -> Any:
        """A setting: one value, or a list with one for each row of the call."""
        value = getattr(self.settings, name)
        if not PARAMETERS[name].holds_rows(value):
            return value
        return [item for item in value for _ in range(self.context.num_rows // len(value))]

    def ids(self, name: str) -> Any:
        """A setting that names tokens, all of them in the vocabulary."""
        value = getattr(self.settings, name)
        for token in _flatten(value):
            if not 0 <= token < self.context.vocab_size:
                raise SettingError(
                    about(
                        name,
                        f"names the token {token}, outside the model's vocabulary of "
                        f"{self.context.vocab_size} tokens; use ids from 0 to {self.context.vocab_size - 1}",
                    )
                )
        return value

    @property
    def eos(self) -> list[int]:
        """The end tokens."""
        return [token for token in self.context.eos_token_ids if token >= 0]

    @property
    def read_ids(self) -> torch.Tensor:
        """What the encoder reads, or the prompt."""
        given = self.context.encoder_input_ids
        if given is None:
            raise SettingError("it compares with tokens that were read, and there are none: pass input_ids")
        return given if isinstance(given, torch.Tensor) else given()

    @property
    def fewest(self) -> int:
        """Tokens that no cut goes below: beams need one more than may end them."""
        return len(self.eos or (0,)) + 1 if (self.settings.num_beams or 1) > 1 else 1


def _flatten(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [token for key in value for token in _flatten(int(key) if isinstance(key, str) else key)]
    if isinstance(value, (list, tuple)):
        return [token for part in value for token in _flatten(part)]
    return [int(value)]
