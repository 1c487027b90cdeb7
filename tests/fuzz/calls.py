"""Random calls of tiny models: prompts, a strategy, processors, stops and outputs that may or may not go together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

VOCAB = 160  # of every model of the goldens
PER_ROW = ("seed", "temperature", "top_p", "repetition_penalty", "negative_prompt")  # may be lists, one value per row


@dataclass(frozen=True)
class Call:
    """One call of the short way: a model of the goldens, rows of token ids, settings."""

    model: str
    rows: list[list[int]]
    settings: dict[str, Any] = field(default_factory=dict)

    def set(self, **settings: Any) -> Call:
        """The same call with other settings; None removes one."""
        told = {**self.settings, **settings}
        return replace(self, settings={name: value for name, value in told.items() if value is not None})

    def pick(self, rows: list[int]) -> Call:
        """The same call with some of its rows, in the given order."""
        told = dict(self.settings)
        for name in PER_ROW:
            if isinstance(told.get(name), list):
                told[name] = [told[name][row] for row in rows]
        return Call(self.model, [self.rows[row] for row in rows], told)

    @property
    def copies(self) -> int:
        """Sequences for each row."""
        return int(self.settings.get("num_return_sequences", 1))


def draw_ids(rng: random.Random, longest: int, shortest: int = 1) -> list[int]:
    """Token ids; some repeat, so that n-gram rules and lookups find something."""
    few = [rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 4, 100]))]
    return [rng.choice(few) for _ in range(rng.randint(shortest, longest))]


def draw_call(rng: random.Random, models: list[str], strategies: list[str], *, shortest: int = 1) -> Call:
    """A call with one of the given strategies; now and then with settings of a second one."""
    rows = [draw_ids(rng, rng.choice([3, 12, 24]), shortest) for _ in range(rng.choice([1, 2, 3, 4]))]
    settings: dict[str, Any] = {"max_new_tokens": rng.randint(1, 7)}
    chosen = [rng.choice(strategies)] + ([rng.choice(strategies)] if rng.random() < 0.1 else [])
    for strategy in chosen:
        settings |= draw_strategy(rng, strategy, rows)
    for name in rng.sample(sorted(PROCESSORS), rng.choice([0, 0, 1, 2, 4])):
        settings |= PROCESSORS[name](rng)
    if rng.random() < 0.8:
        settings["eos_token_id"] = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 10, 30]))]
    if settings.get("num_beams", 1) == 1 and rng.random() < 0.5:
        settings["logprobs"] = rng.choice([0, 2])
    return Call(rng.choice(models), rows, settings)


def draw_strategy(rng: random.Random, strategy: str, rows: list[list[int]]) -> dict[str, Any]:
    """The settings of a strategy."""
    seeds = [rng.randrange(2**40) for _ in rows]
    sampling: dict[str, Any] = {"do_sample": True, "seed": seeds}
    for name in rng.sample(sorted(SAMPLING), rng.choice([0, 1, 2, 3])):
        sampling |= SAMPLING[name](rng, len(rows))
    beams = {"num_beams": rng.randint(2, 4)}
    beams |= {"low_memory": True} if rng.random() < 0.2 else {}
    beams |= {"early_stopping": rng.choice([True, False, "never"])} if rng.random() < 0.5 else {}
    beams |= {"length_penalty": rng.choice([-1.0, 0.0, 0.5, 2.0])} if rng.random() < 0.4 else {}
    beams |= {"num_return_sequences": 2} if rng.random() < 0.3 else {}
    if strategy == "greedy":
        return {}
    if strategy == "sampling":
        return sampling | ({"num_return_sequences": rng.randint(2, 3)} if rng.random() < 0.25 else {})
    if strategy == "beams":
        return beams
    if strategy == "beam sampling":
        return beams | sampling
    if strategy == "groups":
        return beams | {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": rng.choice([0.5, 2.0])}
    if strategy == "forced words":
        return beams | {"force_words_ids": [draw_ids(rng, 2)]}
    if strategy == "contrastive":
        told: dict[str, Any] = {"penalty_alpha": rng.choice([0.3, 0.6, 0.9]), "top_k": rng.randint(2, 5)}
        return told | ({"low_memory": True} if rng.random() < 0.3 else {})
    if strategy == "dola":
        return {"dola_layers": rng.choice(["low", "high", [1], [0, 2]])} | (sampling if rng.random() < 0.3 else {})
    if strategy == "guidance":
        guided: dict[str, Any] = {"guidance_scale": rng.choice([0.5, 1.5, 3.0])}
        if rng.random() < 0.7:
            guided["negative_prompt"] = [draw_ids(rng, 12) for _ in rows]
        return guided | rng.choice([{}, sampling, {"num_beams": 2}])
    assert strategy == "lookup", strategy
    told = {"prompt_lookup_num_tokens": rng.randint(1, 5), "max_matching_ngram_size": rng.randint(1, 3)}
    return told | (sampling if rng.random() < 0.4 else {})


PROCESSORS: dict[str, Any] = {
    "repetition": lambda rng: {"repetition_penalty": rng.choice([0.7, 1.2, 2.0])},
    "own repetition": lambda rng: {"repetition_penalty": 1.4, "repetition_penalty_ignores_prompt": True},
    "encoder repetition": lambda rng: {"encoder_repetition_penalty": rng.choice([0.8, 1.5])},
    "presence": lambda rng: {"presence_penalty": rng.choice([-1.0, 0.7])},
    "frequency": lambda rng: {"frequency_penalty": rng.choice([-0.5, 0.9])},
    "n-grams": lambda rng: {"no_repeat_ngram_size": rng.randint(1, 3)},
    "encoder n-grams": lambda rng: {"encoder_no_repeat_ngram_size": rng.randint(1, 3)},
    "bad words": lambda rng: {"bad_words_ids": [draw_ids(rng, 3) for _ in range(rng.choice([1, 30]))]},
    "suppressed": lambda rng: {"suppress_tokens": sorted({*draw_ids(rng, 60)})},
    "suppressed first": lambda rng: {"begin_suppress_tokens": sorted({*draw_ids(rng, 60)})},
    "forced end": lambda rng: {"forced_eos_token_id": rng.randrange(VOCAB)},
    "forced first": lambda rng: {"forced_bos_token_id": rng.randrange(VOCAB)},
    "fewest": lambda rng: {"min_new_tokens": rng.randint(1, 6)},
    "shortest": lambda rng: {"min_length": rng.randint(1, 16)},
    "decay": lambda rng: {"exponential_decay_length_penalty": (rng.randint(0, 3), rng.choice([0.9, 1.5]))},
    "bias": lambda rng: {"sequence_bias": [[draw_ids(rng, 2), rng.choice([-5.0, 4.0])]]},
    "token bias": lambda rng: {"logit_bias": {rng.randrange(VOCAB): rng.choice([-5.0, 4.0, 9.0])}},
    "dry": lambda rng: {"dry_multiplier": 0.8, "dry_allowed_length": rng.randint(1, 3)},
    "renormalised": lambda rng: {"renormalize_logits": True},
    "cleaned": lambda rng: {"remove_invalid_values": True},
}
SAMPLING: dict[str, Any] = {
    "temperature": lambda rng, rows: {"temperature": rng.choice([0.5, 1.7, [0.6 + 0.2 * n for n in range(rows)]])},
    "top_k": lambda rng, rows: {"top_k": rng.choice([0, 1, 5, 40])},
    "top_p": lambda rng, rows: {"top_p": rng.choice([0.3, 0.9, [0.5 + 0.1 * n for n in range(rows)]])},
    "min_p": lambda rng, rows: {"min_p": rng.choice([0.02, 0.3])},
    "typical_p": lambda rng, rows: {"typical_p": rng.choice([0.2, 0.8])},
    "epsilon": lambda rng, rows: {"epsilon_cutoff": rng.choice([0.001, 0.02])},
    "eta": lambda rng, rows: {"eta_cutoff": rng.choice([0.001, 0.02])},
    "top_h": lambda rng, rows: {"top_h": rng.choice([0.3, 0.7])},
    "sigma": lambda rng, rows: {"top_n_sigma": rng.choice([0.5, 1.5])},
    "top_a": lambda rng, rows: {"top_a": rng.choice([0.1, 0.5])},
    "xtc": lambda rng, rows: {"xtc_probability": 0.5, "xtc_threshold": rng.choice([0.02, 0.2])},
    "mirostat": lambda rng, rows: {"mirostat_tau": rng.choice([2.0, 5.0])},
    "dynamic temperature": lambda rng, rows: {"dynatemp_range": 0.4, "temperature": 1.1},
}
