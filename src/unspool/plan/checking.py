"""What a GenerationConfig asks of the plan's rules: whether its settings go together, and how they decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unspool.config.modes import GenerationMode
from unspool.errors import SettingError
from unspool.plan.contrastive import find_num_candidates
from unspool.plan.pairs import Facts, check_methods
from unspool.plan.tables import OF_CONFIG

if TYPE_CHECKING:
    from unspool.config.generation import GenerationConfig


def check_config(config: GenerationConfig) -> None:
    """Raise a SettingError for settings of a config that can't stand together, whatever the model."""
    check_methods(Facts(config), *OF_CONFIG)


def choose_mode(config: GenerationConfig, has_assistant: bool) -> GenerationMode:
    """The way to decode that `config` asks for; a drafter or DoLa extends greedy search and sampling only."""
    mode = _choose_base_mode(config)
    extensions = {
        GenerationMode.ASSISTED_GENERATION: (
            has_assistant or config.prompt_lookup_num_tokens is not None or config.assistant_early_exit is not None
        ),
        GenerationMode.DOLA_GENERATION: config.dola_layers is not None,
    }
    for extension, is_asked_for in extensions.items():
        if not is_asked_for:
            continue
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise SettingError(
                f"{extension.value} goes with greedy search and sampling only, but the other settings ask "
                f"for {mode.value}. Unset those, or take the drafter and `dola_layers` away."
            )
        mode = extension
    return mode


def _choose_base_mode(config: GenerationConfig) -> GenerationMode:
    if config.constraints is not None or config.force_words_ids is not None:
        return GenerationMode.CONSTRAINED_BEAM_SEARCH
    if (config.num_beams or 1) == 1:
        if config.do_sample:
            return GenerationMode.SAMPLE
        if find_num_candidates(config):
            return GenerationMode.CONTRASTIVE_SEARCH
        return GenerationMode.GREEDY_SEARCH
    if (config.num_beam_groups or 1) > 1:
        return GenerationMode.GROUP_BEAM_SEARCH
    return GenerationMode.BEAM_SAMPLE if config.do_sample else GenerationMode.BEAM_SEARCH
