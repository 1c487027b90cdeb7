"""Second turns: a text goes on behind an answer and tokens of the caller's, with the cache that came with it."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from tests.fuzz import texts
from tests.fuzz.beside import models

if TYPE_CHECKING:
    from tests.fuzz.beside.calls import Call

DRAFTED = ("lookup", "assisted")
DRAFTS = (
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
)
# What makes a call other than greedy; a second turn of "greedy" has none of it.
METHODS = (
    *(
        "do_sample",
        "seed",
        "top_k",
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "top_h",
    ),
    *("num_beams", "num_return_sequences", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
    *("force_words_ids", "constraints", "penalty_alpha", "dola_layers", "guidance_scale", "negative_prompt_ids"),
    *("negative_prompt_attention_mask", "watermarking_config", "assistant_model", "assistant_tokenizer", *DRAFTS),
)


def draw_turn(
    rng: Random, strategy: str, num_rows: int, settings: dict[str, Any], extras: dict[str, Any], *, is_pair: bool
) -> None:
    """A second turn, if one goes with the call.

    It is written by the same method or greedily, and its mask may leave out the padding of rows that had ended. An
    encoder-decoder may be given the states of its encoder, and both kinds a cache with room for all of the text.
    """
    keeps = settings.get("use_cache", True) and "static" not in settings.get("cache_implementation", "")
    has_room = "max_new_tokens" in settings and "max_length" not in settings
    if not (has_room and keeps) or "streamer" in extras or (strategy in DRAFTED and num_rows > 1):
        return
    is_refused = settings.get("num_beams", 1) > 1
    if rng.random() > (0.05 if is_refused else 0.4):
        return
    settings["return_dict_in_generate"] = True
    extras["again"] = [rng.randrange(3, models.VOCAB) for _ in range(rng.randint(1, 3))]
    if strategy not in ("greedy", *DRAFTED):
        extras["then"] = "greedy"
        extras.pop("config", None)
    if rng.random() < 0.4:
        extras["leaves out"] = "padding"
    if is_pair and rng.random() < 0.3:
        extras["states"] = True
    if strategy == "greedy" and "cache_implementation" not in settings and rng.random() < 0.4:
        extras["room"] = 64


def continue_text(call: Call, given: dict[str, Any], output: Any) -> dict[str, Any]:
    """The arguments of the call that goes on behind an answer and the caller's next tokens, with the answer's cache."""
    more = torch.tensor([call.extras["again"]], device=models.DEVICE).expand(len(output.sequences), -1)
    ids = torch.cat((output.sequences, more), dim=1)
    given = {name: value for name, value in given.items() if not name.startswith("cache_")}
    if "then" in call.extras:
        given = {name: value for name, value in given.items() if name not in METHODS} | {"do_sample": False}
    if call.is_pair:
        source = {name: repeat(given[name], len(ids)) for name in SOURCES if name in given}
        return {**given, **source, "decoder_input_ids": ids, "past_key_values": output.past_key_values}
    width = len(call.ids[0]) + ids.shape[1] - call.num_read
    seen = torch.ones(len(ids), width, dtype=torch.long, device=models.DEVICE)
    if call.seen is not None:
        seen[:, : len(call.seen[0])] = repeat(torch.tensor(call.seen), len(ids))
    if "leaves out" in call.extras:
        answers = mark_answers(call, output.sequences).long()
        seen[:, len(call.ids[0]) : len(call.ids[0]) + answers.shape[1]] = answers
    told = {**given, "attention_mask": seen, "past_key_values": output.past_key_values}
    if call.embeds == "none":
        return {name: value for name, value in told.items() if name != "inputs"} | {"input_ids": ids}
    first = repeat(given["inputs_embeds"], len(ids))
    table = models.make(call.model, call.seed).get_input_embeddings()
    told["inputs_embeds"] = torch.cat((first, table(ids[:, call.num_read :]).detach()), dim=1)
    return told if call.embeds == "alone" else {**told, "input_ids": ids}


SOURCES = ("input_ids", "inputs", "attention_mask", "inputs_embeds", "encoder_outputs")


def repeat(value: Any, num_rows: int) -> Any:
    """What belongs to each row of the first turn, for so many texts."""
    if isinstance(value, torch.Tensor):
        return value.repeat_interleave(num_rows // len(value), dim=0)
    return BaseModelOutput(repeat(value[0], num_rows))


def stop_at_strings(strings: list[str]) -> Any:
    """Stop strings as a criterion."""

    def criterion(input_ids: torch.Tensor, scores: Any = None, **kwargs: Any) -> torch.Tensor:
        found = [texts.ends_at(row, strings, models.VOCAB) for row in input_ids.tolist()]
        return torch.tensor(found, device=input_ids.device)

    return criterion


def mark_answers(call: Call, sequences: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """For every column of the answers, the rows that had not ended before it: (rows, columns).

    The answers begin after `width` columns, or after the prompts.
    """
    width = call.num_read if width is None else width
    ends = torch.tensor(call.ends, device=sequences.device)
    stops = stop_at_strings(call.settings.get("stop_strings", []))
    live = torch.ones(len(sequences), dtype=torch.bool, device=sequences.device)
    columns = []
    for column in range(width, sequences.shape[1]):
        columns.append(live)
        live = live & ~torch.isin(sequences[:, column], ends) & ~stops(sequences[:, : column + 1])
    return torch.stack(columns, dim=1) if columns else torch.ones(len(sequences), 0, dtype=torch.bool)
