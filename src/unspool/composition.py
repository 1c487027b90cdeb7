"""What goes together with DoLa and with guidance: one line for each pair that does not, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unspool.config import GenerationConfig
from unspool.errors import SettingError, UnspoolError, UnsupportedError
from unspool.protocols import ModelInfo


@dataclass(frozen=True)
class Call:
    """What the rules look at."""

    settings: GenerationConfig
    info: ModelInfo
    has_ids: bool = True  # the prompt has token ids, not embeddings alone
    has_embeds: bool = False
    has_cache: bool = False
    has_negative: bool = False  # a negative prompt was given
    asked: frozenset[str] = frozenset()  # settings that the caller set, not the model's file

    @property
    def has_beams(self) -> bool:
        return (self.settings.num_beams or 1) > 1

    @property
    def is_contrastive(self) -> bool:
        return bool(self.settings.penalty_alpha)

    @property
    def is_guided(self) -> bool:
        return self.settings.guidance_scale not in (None, 1)

    @property
    def has_drafts(self) -> bool:
        names = ("prompt_lookup_num_tokens", "assistant_early_exit")
        return any(name in self.asked and getattr(self.settings, name) is not None for name in names)

    @property
    def returns_states(self) -> bool:
        return bool(self.settings.output_hidden_states or self.settings.output_attentions)


Rule = tuple[Callable[[Call], bool], type[UnspoolError], str]

DOLA: tuple[Rule, ...] = (
    (
        lambda call: call.info.is_encoder_decoder,
        UnsupportedError,
        "it is defined for decoder-only models, whose every layer predicts the next token, and this model has an "
        "encoder",
    ),
    (
        lambda call: "early_logits" not in call.info.can,
        UnsupportedError,
        "it reads the logits of earlier layers, and this model can't return them",
    ),
    (
        lambda call: call.has_beams,
        SettingError,
        "its scores are differences between layers, not log-probabilities that beams could add up; leave out "
        "`num_beams`",
    ),
    (
        lambda call: call.is_contrastive,
        SettingError,
        "contrastive search weighs the model's own probabilities; leave out `penalty_alpha`",
    ),
    (
        lambda call: call.is_guided,
        SettingError,
        "guidance weighs the log-probabilities of two prompts, and these are differences between layers; leave out "
        "`guidance_scale`",
    ),
    (
        lambda call: call.has_drafts,
        SettingError,
        "drafts are checked several positions at a time, and earlier layers are read at the last one; leave out the "
        "drafts",
    ),
)
GUIDANCE: tuple[Rule, ...] = (
    (
        lambda call: call.is_contrastive,
        SettingError,
        "contrastive search weighs the probabilities of one prompt, with a look ahead that the other rows don't take; "
        "leave out `penalty_alpha`",
    ),
    (
        lambda call: call.has_drafts,
        SettingError,
        "drafts are checked several positions at a time, and guided rows are compared at the last one; leave out the "
        "drafts",
    ),
    (
        lambda call: call.info.is_encoder_decoder and not call.has_negative,
        SettingError,
        "an encoder must read something in place of the prompt; pass negative_prompt_ids (or negative_prompt)",
    ),
    (
        lambda call: call.info.is_encoder_decoder and call.has_cache,
        SettingError,
        "past_key_values hold the prompt's encoded text and not the negative prompt's; leave them out",
    ),
    (
        lambda call: not call.has_ids and not call.has_negative,
        SettingError,
        "without a negative prompt it starts from the prompt's last token, and inputs_embeds have none; pass "
        "negative_prompt_ids, or input_ids beside the embeddings",
    ),
    (
        lambda call: call.has_embeds and call.returns_states and not call.info.is_encoder_decoder,
        SettingError,
        "embeddings and the other prompt's tokens are read in two passes, and hidden states and attentions are those "
        "of one; leave out `output_hidden_states` and `output_attentions`",
    ),
)


def check_composition(call: Call) -> None:
    """Raise for the first pair of methods or inputs that can't be together."""
    settings = call.settings
    for is_on, name, rules in (
        (settings.dola_layers is not None, "dola_layers", DOLA),
        (call.is_guided, "guidance_scale", GUIDANCE),
    ):
        for is_so, kind, reason in rules if is_on else ():
            if is_so(call):
                raise kind(f"`{name}`={getattr(settings, name)!r} can't be here: {reason}")
