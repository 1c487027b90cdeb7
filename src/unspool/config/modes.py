"""The ways to decode, and which of them a config asks for."""

from __future__ import annotations

from enum import StrEnum

from unspool.config.named import NamedSettings
from unspool.errors import SettingError


class GenerationMode(StrEnum):
    """A way to decode."""

    CONTRASTIVE_SEARCH = "contrastive_search"
    GREEDY_SEARCH = "greedy_search"
    SAMPLE = "sample"
    ASSISTED_GENERATION = "assisted_generation"
    DOLA_GENERATION = "dola_generation"
    BEAM_SEARCH = "beam_search"
    BEAM_SAMPLE = "beam_sample"
    CONSTRAINED_BEAM_SEARCH = "constrained_beam_search"
    GROUP_BEAM_SEARCH = "group_beam_search"


def choose_mode(config: NamedSettings, has_assistant: bool) -> GenerationMode:
    """The way to decode that `config` asks for; a drafter or DoLa extends greedy search and sampling only."""
    mode = _choose_base_mode(config)
    extensions = {
        GenerationMode.ASSISTED_GENERATION: (
            has_assistant
            or config.prompt_lookup_num_tokens is not None
            or config.assistant_early_exit is not None
            or bool(config.use_mtp)  # of transformers', inside its own generate()
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


def _choose_base_mode(config: NamedSettings) -> GenerationMode:
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


def find_num_candidates(config: NamedSettings) -> int:
    """The most candidates that a row has in contrastive search; 0 if the settings ask for something else."""
    if (config.num_beams or 1) > 1 or config.do_sample or not config.penalty_alpha:
        return 0
    most = max(read_top_k(config))
    return most if most > 1 else 0


def read_top_k(config: NamedSettings) -> list[int]:
    """`top_k`, one per row or one for all."""
    top_k = config.top_k
    return list(top_k) if isinstance(top_k, (list, tuple)) else [top_k or 0]
