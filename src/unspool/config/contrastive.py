"""What contrastive search asks of the other settings."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from unspool.config.values import MOST_ROWS
from unspool.errors import SettingError

if TYPE_CHECKING:
    from unspool.config.generation import GenerationConfig

_NOT_WITH = {
    "guidance_scale": "guidance mixes two distributions, and candidates are read after one of them",
    "dola_layers": "DoLa is a way to choose the token of its own",
    "prompt_lookup_num_tokens": "a draft is checked against greedy search or sampling",
    "assistant_early_exit": "a draft is checked against greedy search or sampling",
}


def find_num_candidates(config: GenerationConfig) -> int:
    """The most candidates a row has in contrastive search; 0 where the settings ask for something else."""
    if (config.num_beams or 1) > 1 or config.do_sample or not config.penalty_alpha:
        return 0
    most = max(_read_top_k(config))
    return most if most > 1 else 0


def check_contrastive(
    config: GenerationConfig,
    asked: Set[str],
    spoken: Mapping[str, str],
    *,
    vocab_size: int,
    num_rows: int,
    cache_is_filled: bool,
) -> None:
    """Raise where contrastive search was asked for and can't be, or its settings would have no effect.

    `asked` are the settings that the caller set, `spoken` says who set each.
    """
    num = find_num_candidates(config)
    if config.penalty_alpha and "penalty_alpha" in asked:
        _check_strategy(config, spoken)
    if not num:
        return
    if num > vocab_size:
        raise SettingError(f"`top_k`={num} candidates were asked for, and the vocabulary has {vocab_size} tokens")
    if num * num_rows > MOST_ROWS:
        raise SettingError(
            f"`top_k`={num} candidates for each of {num_rows} prompts make {num * num_rows} rows; at most {MOST_ROWS} "
            "are read at once"
        )
    if cache_is_filled:
        raise SettingError(
            "`penalty_alpha` compares each candidate with the states of the whole text, and past_key_values hold keys "
            "and values of its first part, not its states; leave past_key_values out, or begin with an empty cache"
        )
    for name, why in _NOT_WITH.items():
        if getattr(config, name) is not None and name in asked:
            raise SettingError(f"`{name}` does not go with `penalty_alpha` (contrastive search): {why}; drop one")


def _check_strategy(config: GenerationConfig, spoken: Mapping[str, str]) -> None:
    for name, is_on, off in (
        ("num_beams", (config.num_beams or 1) > 1, "num_beams=1"),
        ("do_sample", bool(config.do_sample), "do_sample=False"),
    ):
        if is_on:
            raise SettingError(
                f"`penalty_alpha` asks for contrastive search, and `{name}`={getattr(config, name)}, set "
                f"{spoken[name]}, for another way to decode; pass {off}, or leave `penalty_alpha` out"
            )
    if min(_read_top_k(config)) < 2:
        raise SettingError(
            f"`penalty_alpha` chooses among the `top_k` likeliest tokens, and `top_k` is {config.top_k}; "
            "set `top_k` to 2 or more (4 is usual), or leave `penalty_alpha` out"
        )


def _read_top_k(config: GenerationConfig) -> list[int]:
    top_k = config.top_k
    return list(top_k) if isinstance(top_k, (list, tuple)) else [top_k or 0]
