"""Random calls: a model, prompts with padding and holes, a strategy, processors, stops, caches and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from tests.fuzz import texts
from tests.fuzz.beside import models, sounds, turns
from tests.fuzz.beside.families import PAIRS, RARE, RARE_PAIRS, SPEECH, STATES, USUAL, USUAL_PAIRS, WINDOWS
from tests.fuzz.beside.models import PAD, VOCAB
from tests.fuzz.beside.newer import MIXED, NEWER

LONGEST = 9  # columns of a prompt
SAMPLING = "sampling"
BEAM_SAMPLING = "beam sampling"
LISTENING = "speech"
OUR_KINDS = ("offloaded", "offloaded_static", "quantized")  # which transformers has beside CUDA or other packages alone
CALLED = ("max_new_tokens", "repetition_penalty", "top_k", "eos_token_id")  # set in the call over a config's value
OWN = ("groups", "forced words", "contrastive", "dola")  # methods that the installed transformers no longer has


@dataclass(frozen=True)
class Call:
    """One call of `generate`."""

    model: str
    seed: int
    strategy: str
    ids: list[list[int]]
    mask: list[list[int]] | None = None
    embeds: str = "none"  # or "alone", "with ids"
    settings: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)  # what is made for the call: an assistant, a streamer …
    attention: str = "sdpa"
    sounds: list[int] = field(default_factory=list)  # the frames of each, of a model of speech

    @property
    def is_pair(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.model in PAIRS or self.model in SPEECH

    @property
    def is_static(self) -> bool:
        """Whether the cache is transformers' static one."""
        return "static" in str(self.settings.get("cache_implementation")) or "room" in self.extras

    @property
    def is_packed(self) -> bool:
        """Whether keys are rounded to a few bits."""
        return "cache_config" in self.settings

    @property
    def has_padding(self) -> bool:
        """Whether some columns of a row are masked."""
        return self.seen is not None and not all(map(all, self.seen))

    @property
    def has_hidden_holes(self) -> bool:
        """Whether there is no mask, and pad tokens, which stand for one, are not all at the start of their row."""
        return self.mask is None and any(row != sorted(row) for row in self.seen or ())

    @property
    def has_empty_rows(self) -> bool:
        """Whether there is no mask, and a row of pad tokens alone."""
        return self.mask is None and any(not any(row) for row in self.seen or ())

    @property
    def returns_dict(self) -> bool:
        """Whether an output object is asked for."""
        return bool(self.settings.get("return_dict_in_generate"))

    @property
    def has_beams(self) -> bool:
        """Whether several texts of a row are followed."""
        return bool(self.settings.get("num_beams", 1) > 1)

    @property
    def copies(self) -> int:
        """Sequences for each row."""
        return int(self.settings.get("num_return_sequences", 1))

    @property
    def num_read(self) -> int:
        """The columns of the sequences that are no answer."""
        if self.is_pair:
            return len(self.extras["begun"][0]) if "begun" in self.extras else 1
        return 0 if self.embeds == "alone" else len(self.ids[0])

    @property
    def ends(self) -> list[int]:
        """The tokens that end a row: end tokens, and those of a criterion."""
        told = self.settings.get("eos_token_id", models.make(self.model, self.seed).config.eos_token_id)
        return [*(told if isinstance(told, list | tuple) else [told]), *self.extras.get("criterion", [])]

    @property
    def is_right_padded(self) -> bool:
        """Whether a decoder's row ends in masked columns, after which transformers goes on from padding."""
        return not self.is_pair and self.seen is not None and any(row[-1] == 0 for row in self.seen)

    @property
    def seen(self) -> list[list[int]] | None:
        """The mask: what was given, or what pad tokens in prompts without one stand for; None if there is neither."""
        pad, ends = self.settings.get("pad_token_id", PAD), self.settings.get("eos_token_id", models.EOS)
        is_end = pad in ends if isinstance(ends, list) else pad == ends
        if self.mask is not None or self.embeds == "alone" or is_end or not any(pad in row for row in self.ids):
            return self.mask
        return [[int(token != pad) for token in row] for row in self.ids]

    def change(self, **changes: Any) -> Call:
        """The call with other parts."""
        return replace(self, **changes)


def draw(rng: Random) -> Call:
    """A call whose parts go together."""
    if rng.random() < 0.12:
        return draw_speech(rng)
    common, rare = [*USUAL, *USUAL_PAIRS, "llama", "gpt2", "t5", "bart"], [*RARE, *RARE_PAIRS, *NEWER, *MIXED]
    name = rng.choice(common if rng.random() < 0.4 else rare)
    usual = ["greedy", "greedy", "greedy", SAMPLING, SAMPLING, "beams", "beams", "beams", BEAM_SAMPLING]
    strategy = rng.choice([*usual, "lookup", "assisted", "guidance", rng.choice(OWN)])
    if strategy == "dola" and name in PAIRS:
        strategy = "greedy"
    ids, mask = _draw_prompts(rng, name, strategy)
    num_rows = len(ids)
    settings: dict[str, Any] = rng.choice(
        [{"max_new_tokens": rng.randint(1, 8)}] * 6 + [{"max_length": len(ids[0]) + rng.randint(2, 6)}, {}]
    )
    if name in PAIRS and "max_length" in settings:
        settings = {"max_length": rng.randint(3, 9)}
    if "max_length" in settings and rng.random() < 0.3:
        settings |= {"max_new_tokens": rng.randint(1, 8)}
    settings |= {"do_sample": False}
    extras: dict[str, Any] = {}
    _draw_strategy(rng, strategy, num_rows, settings, extras)
    if name in PAIRS and extras.get("assistant") == "another's text":
        extras["assistant"] = "another"
        settings = {key: value for key, value in settings.items() if not key.endswith("lookbehind")}
    for processor in rng.sample(sorted(PROCESSORS), rng.choice([0, 0, 1, 1, 2, 3])):
        settings |= PROCESSORS[processor](rng)
    if rng.random() < 0.7:
        settings["eos_token_id"] = rng.choice([_draw_end(rng), _draw_ends(rng)])
    if rng.random() < 0.15:
        settings["pad_token_id"] = rng.randrange(VOCAB)
    _draw_cache(rng, name, strategy, settings)
    _draw_outputs(rng, settings)
    _draw_extras(rng, strategy, num_rows, settings, extras)
    if rng.random() < 0.15 and not {"max_length", "max_new_tokens"} <= settings.keys():  # theirs says one length
        extras["config"] = [name for name in CALLED if name in settings and rng.random() < 0.5]
    embeds = "none"
    if rng.random() < 0.15 and strategy != "assisted":
        embeds = rng.choice(["alone", "with ids"]) if name not in PAIRS else "alone"
    if embeds != "none" and name not in PAIRS:
        for unlike in ("use_cache", "prefill_chunk_size"):  # transformers keeps a cache, and reads ids in chunks
            settings.pop(unlike, None)
        if "max_length" in settings:
            del settings["max_length"]  # transformers counts the columns of embeddings in a way of its own
            settings["max_new_tokens"] = 4
    if name in PAIRS and rng.random() < 0.2 and strategy != "guidance":
        start = models.make(name, 0).config.decoder_start_token_id
        width = rng.randint(1, 3)
        extras["begun"] = [[start, *_draw_ids(rng, width)] for _ in ids]
        if "max_length" in settings:
            settings["max_length"] += width
    hides_draws = embeds == "alone" and settings["do_sample"]  # a second turn's sequences are without them
    if embeds == "none" or not (name in PAIRS or hides_draws):
        turns.draw_turn(rng, strategy, num_rows, settings, extras, is_pair=name in PAIRS)
    if name in STATES:
        extras.pop("leaves out", None)  # a state passes over masked columns in a way of its own
        extras.pop("room", None)
    if embeds != "none":
        extras.pop("room", None)  # a static cache of theirs has room for columns that were tokens
    elif name not in PAIRS and "again" not in extras and rng.random() < 0.05:
        ids, mask = [[ids[0][0]]], None
        settings["bos_token_id"] = ids[0][0]
        extras["from nothing"] = True
        if len(extras.get("negative", ())) > 1:
            del extras["negative"][1:]
    attention = "eager" if settings.get("output_attentions") or rng.random() < 0.2 else "sdpa"
    if name in STATES:
        settings.pop("output_attentions", None)
    if name == "falcon_alibi":  # transformers' eager attention adds the biases twice
        settings.pop("output_attentions", None)
        attention = "sdpa"
    return Call(name, rng.randrange(3), strategy, ids, mask, embeds, settings, extras, attention)


def draw_speech(rng: Random) -> Call:
    """A call of a model of speech."""
    name = rng.choice(["whisper", *SPEECH])
    frames, is_masked = sounds.draw_sounds(rng)
    extras: dict[str, Any] = {"progress": True}
    if is_masked:
        extras["masked"] = True
    if rng.random() < 0.1:
        extras["processor"] = rng.randrange(50)
    if rng.random() < 0.1:
        extras["criterion"] = sorted(rng.sample(range(50), 5))
    settings = sounds.draw_settings(rng, name, frames)
    needs_weights = settings.get("output_attentions") or settings.get("return_token_timestamps")
    attention = "eager" if needs_weights or rng.random() < 0.2 else "sdpa"
    return Call(name, rng.randrange(4), LISTENING, [], None, "none", settings, extras, attention, frames)


def _draw_end(rng: Random) -> Any:
    return rng.choice([models.EOS, [models.EOS, rng.randrange(3, VOCAB)]])


def _draw_ends(rng: Random) -> Any:
    return sorted(rng.sample(range(1, VOCAB), 25))


def _draw_ids(rng: Random, num: int) -> list[int]:
    few = [rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 4, 90]))]
    return [rng.choice(few) for _ in range(num)]


def _draw_prompts(rng: Random, name: str, strategy: str) -> tuple[list[list[int]], list[list[int]] | None]:
    num_rows = 1 if strategy in ("lookup", "assisted") and rng.random() < 0.8 else rng.choice([1, 1, 2, 3])
    width = rng.randint(1, LONGEST)
    layout = rng.choice(["plain", "plain", "left", "left", "right", "holes", "no mask", "left, no mask"])
    if name in PAIRS and (layout.startswith("left") or layout == "holes"):
        layout = "right"  # an encoder of transformers counts masked columns as positions
    if name == "mpt" and layout == "holes":
        layout = "left"  # its biases count masked columns
    if name in STATES and layout in ("right", "holes"):
        layout = "left"  # a state passes over masked columns in a way of its own
    if name in WINDOWS and layout in ("holes", "right"):
        layout = "left"  # transformers' windows count masked columns too
    ids, mask = [], []
    for row in range(num_rows):
        length = width if row == 0 else rng.randint(1, width)
        if layout in ("left", "left, no mask"):
            seen = [0] * (width - length) + [1] * length
        elif layout == "right":
            seen = [1] * length + [0] * (width - length)
        elif layout == "holes":
            seen = [int(rng.random() < 0.7) for _ in range(width)]
            seen[-1] = 1
        else:
            seen = [1] * width
        tokens = _draw_ids(rng, width)
        ids.append([token if kept else PAD for token, kept in zip(tokens, seen, strict=True)])
        mask.append(seen)
    return ids, None if layout.endswith("no mask") else mask


def _draw_strategy(rng: Random, strategy: str, num_rows: int, settings: dict[str, Any], extras: dict[str, Any]) -> None:
    if strategy in (SAMPLING, BEAM_SAMPLING):
        settings |= {"do_sample": True, "top_k": rng.choice([0, 1, 5, 40])}
        for name in rng.sample(sorted(CUTS), rng.choice([0, 1, 2])):
            settings |= CUTS[name](rng)
    if strategy in ("beams", BEAM_SAMPLING, "forced words"):
        settings["num_beams"] = rng.randint(2, 4)
    if strategy in ("beams", BEAM_SAMPLING, "groups"):
        if rng.random() < 0.5:
            settings["early_stopping"] = rng.choice([True, False, "never"])
        if rng.random() < 0.5:
            settings["length_penalty"] = rng.choice([-1.0, 0.0, 0.5, 2.0])
    if strategy in ("beams", BEAM_SAMPLING, SAMPLING) and rng.random() < 0.4:
        settings["num_return_sequences"] = rng.randint(2, settings.get("num_beams", 3))
    if strategy == "groups":
        settings |= {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": rng.choice([0.5, 2.0])}
    if strategy == "forced words":
        _draw_words(rng, settings, extras)
    if strategy == "contrastive":
        settings |= {"penalty_alpha": rng.choice([0.3, 0.7]), "top_k": rng.randint(2, 5)}
        if rng.random() < 0.2:
            settings["low_memory"] = True
    if strategy == "dola":
        settings["dola_layers"] = rng.choice(["low", "high", [1], [0, 2]])
    if strategy == "lookup":
        settings |= {"prompt_lookup_num_tokens": rng.randint(1, 5)}
        if rng.random() < 0.5:
            settings["max_matching_ngram_size"] = rng.randint(1, 3)
    if strategy == "assisted":
        extras["assistant"] = rng.choice(["itself", "another", "another's text"])
        if rng.random() < 0.5:
            settings["num_assistant_tokens"] = rng.randint(1, 6)
        for name in rng.sample(sorted(DRAFTING), rng.choice([0, 1])):
            settings |= DRAFTING[name](rng)
        if extras["assistant"] == "another's text" and rng.random() < 0.3:
            settings |= {"assistant_lookbehind": rng.randint(1, 9), "target_lookbehind": rng.randint(1, 9)}
    if strategy == "guidance":
        settings["guidance_scale"] = rng.choice([0.5, 1.5, 3.0])
        if rng.random() < 0.5:
            num = rng.randint(1, 5)
            extras["negative"] = [_draw_ids(rng, rng.choice([num, rng.randint(1, num)])) for _ in range(num_rows)]
        if rng.random() < 0.2:
            settings["num_beams"] = 2


def _draw_cache(rng: Random, name: str, strategy: str, settings: dict[str, Any]) -> None:
    roll = rng.random()
    if roll < 0.1 and strategy not in ("lookup", "assisted"):
        settings["use_cache"] = False
    elif roll < 0.3 and name not in STATES:
        settings["cache_implementation"] = rng.choice(["dynamic", "static", "static", *OUR_KINDS])
        if settings["cache_implementation"] == "quantized" and rng.random() < 0.5:
            settings["cache_config"] = {"nbits": rng.choice([4, 8]), "residual_length": rng.randint(1, 4)}
    elif roll < 0.4:
        settings["prefill_chunk_size"] = rng.randint(1, 4)


def _draw_outputs(rng: Random, settings: dict[str, Any]) -> None:
    if rng.random() < 0.6:
        settings["return_dict_in_generate"] = True
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
            if rng.random() < 0.35:
                settings[name] = True


def _draw_words(rng: Random, settings: dict[str, Any], extras: dict[str, Any]) -> None:
    """Words that must be written: as a setting, or as objects."""
    words: list[Any] = [_draw_ids(rng, rng.randint(1, 2)) for _ in range(rng.choice([1, 1, 2]))]
    if rng.random() < 0.3:
        words[0] = [words[0], [rng.randrange(3, VOCAB)]]  # either
    if rng.random() < 0.4:
        extras["constraints"] = words
    else:
        settings["force_words_ids"] = words
    if rng.random() < 0.3:
        settings["num_return_sequences"] = rng.randint(2, settings["num_beams"])


def _draw_extras(rng: Random, strategy: str, num_rows: int, settings: dict[str, Any], extras: dict[str, Any]) -> None:
    if rng.random() < 0.1:
        extras["allowed"] = [sorted(rng.sample(range(VOCAB), 40)) for _ in range(rng.choice([1, 3]))]
    if rng.random() < 0.1:
        settings["stop_strings"] = texts.draw_stops(rng)
    if rng.random() < 0.05:
        settings["max_time"] = rng.choice([1e-9, 1e6])
    if rng.random() < 0.1:
        extras["processor"] = rng.randrange(VOCAB)
    if rng.random() < 0.1:
        extras["criterion"] = sorted(rng.sample(range(VOCAB), 12))
    if rng.random() < 0.1:
        extras["their processors"] = [(name, OBJECTS[name](rng)) for name in rng.sample(sorted(OBJECTS), 2)]
    if rng.random() < 0.05 and strategy not in turns.DRAFTED:  # theirs drafts nothing past the setting, for ever
        extras["longest"] = rng.randint(2, 14)
    if rng.random() < 0.2:
        extras["in place"] = True
    is_drafted = strategy in turns.DRAFTED
    if (strategy in ("greedy", SAMPLING) or (is_drafted and num_rows == 1)) and rng.random() < 0.3:
        extras["streamer"] = True


PROCESSORS: dict[str, Any] = {
    "repetition": lambda rng: {"repetition_penalty": rng.choice([0.7, 1.2, 2.0])},
    "encoder repetition": lambda rng: {"encoder_repetition_penalty": rng.choice([0.8, 1.5])},
    "n-grams": lambda rng: {"no_repeat_ngram_size": rng.randint(1, 3)},
    "encoder n-grams": lambda rng: {"encoder_no_repeat_ngram_size": rng.randint(1, 3)},
    "bad words": lambda rng: {"bad_words_ids": [_draw_ids(rng, rng.randint(1, 3)) for _ in range(rng.choice([1, 20]))]},
    "suppressed": lambda rng: {"suppress_tokens": sorted(rng.sample(range(VOCAB), 40))},
    "suppressed first": lambda rng: {"begin_suppress_tokens": sorted(rng.sample(range(VOCAB), 40))},
    "forced end": lambda rng: {"forced_eos_token_id": rng.randrange(VOCAB)},
    "forced first": lambda rng: {"forced_bos_token_id": rng.randrange(VOCAB)},
    "fewest": lambda rng: {"min_new_tokens": rng.randint(1, 6)},
    "shortest": lambda rng: {"min_length": rng.randint(1, 14)},
    "decay": lambda rng: {"exponential_decay_length_penalty": (rng.randint(0, 3), rng.choice([0.9, 1.5]))},
    "bias": lambda rng: {"sequence_bias": [[_draw_ids(rng, rng.randint(1, 2)), rng.choice([-5.0, 4.0])]]},
    "renormalised": lambda rng: {"renormalize_logits": True},
    "cleaned": lambda rng: {"remove_invalid_values": True},
    "watermark": lambda rng: {"watermarking_config": {"greenlist_ratio": 0.4, "bias": 3.0, "context_width": 1}},
}
DRAFTING: dict[str, Any] = {
    "schedule": lambda rng: {
        "num_assistant_tokens_schedule": rng.choice(["constant", "heuristic", "heuristic_transient"])
    },
    "threshold": lambda rng: {"assistant_confidence_threshold": rng.choice([0.0, 0.3, 0.9])},
}
OBJECTS: dict[str, Any] = {  # of transformers' classes, which a caller may pass beside the settings
    "RepetitionPenaltyLogitsProcessor": lambda rng: (rng.choice([0.8, 1.3]),),
    "NoRepeatNGramLogitsProcessor": lambda rng: (rng.randint(1, 3),),
    "NoBadWordsLogitsProcessor": lambda rng: ([_draw_ids(rng, 2) for _ in range(9)],),
    "SuppressTokensLogitsProcessor": lambda rng: (sorted(rng.sample(range(VOCAB), 30)),),
    "TemperatureLogitsWarper": lambda rng: (rng.choice([0.6, 1.6]),),
    "TopKLogitsWarper": lambda rng: (rng.randint(5, 40),),
    "MinPLogitsWarper": lambda rng: (rng.choice([0.01, 0.1]),),
    "LogitNormalization": lambda rng: (),
    "InfNanRemoveLogitsProcessor": lambda rng: (),
}
CUTS: dict[str, Any] = {
    "temperature": lambda rng: {"temperature": rng.choice([0.5, 1.7])},
    "top_p": lambda rng: {"top_p": rng.choice([0.3, 0.9])},
    "min_p": lambda rng: {"min_p": rng.choice([0.02, 0.3])},
    "typical_p": lambda rng: {"typical_p": rng.choice([0.2, 0.8])},
    "epsilon": lambda rng: {"epsilon_cutoff": rng.choice([0.001, 0.02])},
    "eta": lambda rng: {"eta_cutoff": rng.choice([0.001, 0.02])},
    "top_h": lambda rng: {"top_h": rng.choice([0.3, 0.7])},
    "synthid": lambda rng: {"watermarking_config": {"keys": [11, 5, 7], "ngram_len": 3}},
}


def make_inputs(call: Call, model: Any) -> dict[str, Any]:
    """The tensors of a call; embeddings are the model's own with something added, so that they are no token's."""
    if call.sounds:
        return _make_sounds(call)
    ids = torch.tensor(call.ids)
    given: dict[str, Any] = {"input_ids": ids}
    if call.mask is not None:
        given["attention_mask"] = torch.tensor(call.mask)
    if call.embeds != "none":
        table = models.make(call.model, call.seed).get_input_embeddings().weight.detach().cpu()
        drawn = torch.randn(*ids.shape, table.shape[1], generator=torch.Generator().manual_seed(7))
        order = torch.tensor(call.seen or [[1] * ids.shape[1]] * len(ids)).argsort(dim=-1, stable=True)
        noise = torch.zeros_like(drawn).scatter_(1, order[..., None].expand_as(drawn), drawn)  # tokens may be moved
        given["inputs_embeds"] = table[ids] + 0.1 * noise
        if call.embeds == "alone":
            del given["input_ids"]
    if "from nothing" in call.extras:
        return {}
    if "in place" in call.extras and call.embeds == "none":
        given["inputs"] = given.pop("input_ids")
    return {name: value.to(models.DEVICE) for name, value in given.items()}


def _make_sounds(call: Call) -> dict[str, Any]:
    longest = max(call.sounds)
    seen = (torch.arange(longest) < torch.tensor(call.sounds)[:, None]).long()
    features = torch.randn(len(call.sounds), 16, longest, generator=torch.Generator().manual_seed(call.seed))
    given = {"input_features": features * seen[:, None]}  # transformers finds a language among the padding too
    if "masked" in call.extras:
        given["attention_mask"] = seen
    if (prompt := call.settings.get("prompt_ids")) is not None:
        given["prompt_ids"] = torch.tensor(prompt)
    return {name: value.to(models.DEVICE) for name, value in given.items()}
