"""A trace writes what `generate` writes, whatever the settings, and its numbers are those of the scores."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model, read_cases
from tests.fakes import make_tokenizer
from unspool import LanguageModel, SynthIDTextWatermarkingConfig, WatermarkingConfig

PROMPT = [129, 66, 74, 146, 54, 13, 127, 97, 61, 30, 112]
REPEATING = [7, 8, 9, 10, 7, 8, 9, 10, 7, 8]
DRAWN: dict[str, Any] = {"do_sample": True, "seed": 5}
MARK = {"greenlist_ratio": 0.25, "bias": 2.5, "hashing_key": 15485863, "seeding_scheme": "lefthash", "context_width": 1}

# Beside the settings of the reference's cases: what those don't combine.
MORE: dict[str, dict[str, Any]] = {
    "sample": DRAWN,
    "sample everything": {
        **DRAWN,
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
    },
    "mirostat": {**DRAWN, "mirostat_tau": 3.0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "dry_multiplier": 0.8, "min_new_tokens": 4},
    "beam sample": {**DRAWN, "num_beams": 3, "num_return_sequences": 2},
    "contrastive one by one": {"penalty_alpha": 0.6, "top_k": 4, "low_memory": True},
    "guided sample": {**DRAWN, "guidance_scale": 1.7, "top_p": 0.8},
    "guided beams": {"num_beams": 3, "guidance_scale": 1.7},
    "guided with a negative prompt": {"guidance_scale": 2.0, "negative_prompt": [5, 6, 7]},
    "dola sample": {**DRAWN, "dola_layers": [1, 2], "temperature": 1.2},
    "lookup": {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.05},
    "lookup sample": {**DRAWN, "prompt_lookup_num_tokens": 3, "top_k": 20},
    "auto": {"speculate": "auto"},
    "early exit": {"assistant_early_exit": 1},
    "early exit sample": {**DRAWN, "assistant_early_exit": 1, "top_p": 0.9},
    "regex": {"regex": "[a-c]{3} (the|cat)+"},
    "regex sample": {**DRAWN, "regex": "[a-c]{3} (the|cat)+", "temperature": 1.5, "drafter": False},
    "choice": {"choice": ["hello world", "hello cat"]},
    "watermark sample": {**DRAWN, "watermarking_config": WatermarkingConfig(**MARK), "top_k": 40},
    "synthid": {**DRAWN, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    "stop string": {"stop_strings": ["e", "%"]},
    "watermark and lookup": {"prompt_lookup_num_tokens": 3, "watermarking_config": WatermarkingConfig(**MARK)},
}
OF_PAIRS = {"t5": ("greedy", "greedy_rep", "forced_bos", "beam3", "diverse_eos", "force_two", "contrastive")}
LEFT_OUT = ("cfg_negative", "sample", "beam4_lp", "greedy_m", "greedy_b", "greedy_f", "greedy_n", "encoder", "force_p")


@lru_cache(maxsize=4)
def find_lm(name: str) -> LanguageModel:
    lm = copy.copy(load_model(name))
    lm.tokenizer = make_tokenizer()
    return lm


def list_cases() -> list[Any]:
    cases = [
        pytest.param(case.model, dict(case.settings), id=str(case))
        for case in read_cases()
        if case.name in OF_PAIRS.get(case.model, ()) or (case.model == "llama" and not case.name.startswith(LEFT_OUT))
    ]
    more = [
        pytest.param(model, settings, id=f"{model}-{name}")
        for model in ("llama", "t5")
        for name, settings in MORE.items()
        if model == "llama" or name in ("sample everything", "beam sample", "lookup", "regex", "watermark sample")
    ]
    return cases + more


def read_settings(settings: dict[str, Any]) -> dict[str, Any]:
    settings = dict(settings)
    settings.pop("single", None)
    if "watermark" in settings:
        settings["watermarking_config"] = WatermarkingConfig(**settings.pop("watermark"))
    if "synthid" in settings:
        settings["watermarking_config"] = SynthIDTextWatermarkingConfig(**settings.pop("synthid"))
    if settings.get("do_sample"):
        settings.setdefault("seed", 3)
    return {"max_new_tokens": 10, **settings}


@pytest.mark.parametrize(("model", "settings"), list_cases())
def test_a_trace_writes_what_generate_writes(model: str, settings: dict[str, Any]) -> None:
    lm, settings = find_lm(model), read_settings(settings)
    prompt = REPEATING if {"prompt_lookup_num_tokens", "speculate"} & set(settings) else PROMPT
    expected = lm.generate(prompt, **settings)
    events = list(lm.trace(prompt, **settings))
    start, *middle, end = events
    assert (start["type"], end["type"]) == ("start", "end")
    assert [one["ids"] for one in end["sequences"]] == expected.token_ids
    assert [one["text"] for one in end["sequences"]] == expected.texts
    assert end["finish_reason"] == expected.finish_reasons[0]
    tokens = [event for event in middle if event["type"] == "token"]
    if settings.get("num_beams", 1) > 1:
        assert not tokens and all(event["type"] == "beams" for event in middle)
        check_beams(lm, prompt, settings, middle, end)
        return
    assert [event["id"] for event in tokens] == expected.token_ids[0]
    assert [event["index"] for event in tokens] == list(range(len(tokens)))
    assert "".join(event["delta"] for event in tokens) == expected.text
    for event in tokens:
        check_token(event, lm.model.info.vocab_size)
    check_drafts(middle)
    check_scores(lm, prompt, settings, tokens)


def check_token(event: dict[str, Any], vocab: int) -> None:
    """What holds of every token's numbers."""
    top = event["top"]
    assert event["id"] in [one["id"] for one in top] and len(top) in (20, 21)
    assert sum(one["raw"] for one in top) <= 1 + 1e-4 and sum(one["p"] for one in top) <= 1 + 1e-4
    raws = [one["raw"] for one in top[:20]]
    assert raws == sorted(raws, reverse=True)
    left = vocab
    for step in event["steps"]:
        assert step["left"] <= left or step["processor"] == "GrammarLogitsProcessor"
        assert step["removed"] == 0 or step["line"] is None or 0 <= step["line"] <= 1
        left = step["left"]
    names = {step["processor"] for step in event["steps"] if step["removed"]}
    for one in top:
        assert (one["cut_by"] is not None) == (one["p"] == 0 and left < vocab and one["cut_by"] in names)
    chosen = next(one for one in top if one["id"] == event["id"])
    assert chosen["cut_by"] is None and chosen["p"] > 0
    assert chosen["p"] == pytest.approx(torch.tensor(event["logprob"]).exp().item(), rel=1e-4)
    assert 0 <= event["entropy"] <= torch.tensor(vocab).log().item() + 1e-4
    assert event["rank"] >= 1 and event["ms"] >= 0


def check_drafts(events: list[dict[str, Any]]) -> None:
    """Verdicts agree with the tokens that follow them."""
    accepted = drafted = 0
    for place, event in enumerate(events):
        if event["type"] != "draft":
            continue
        verdicts = [one["verdict"] for one in event["tokens"]]
        assert event["accepted"] == verdicts.count("accepted") and event["drafted"] == len(verdicts)
        accepted, drafted = accepted + event["accepted"], drafted + event["drafted"]
        assert (event["total_accepted"], event["total_drafted"]) == (accepted, drafted)
        following = events[place + 1 : place + 1 + event["accepted"]]
        assert [one["id"] for one in following] == [one["id"] for one in event["tokens"]][: event["accepted"]]
        assert all(one["draft"] == "accepted" for one in following)
        if "rejected" in verdicts:
            corrected = events[place + 1 + event["accepted"]]
            assert corrected["draft"] == "corrected" and corrected["id"] != event["tokens"][event["accepted"]]["id"]


def check_scores(lm: LanguageModel, prompt: list[int], settings: dict[str, Any], tokens: list[dict[str, Any]]) -> None:
    """Probabilities are those of `output_logits` and `output_scores`."""
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = lm.generate(prompt, **settings, **asked).output
    for event, logits, scores in zip(tokens, output.logits, output.scores, strict=True):
        raw, processed = torch.softmax(logits[0], -1), torch.softmax(scores[0], -1)
        for one in event["top"]:
            assert one["raw"] == pytest.approx(raw[one["id"]].item(), rel=1e-3, abs=1e-6)
            assert one["p"] == pytest.approx(processed[one["id"]].item(), rel=1e-3, abs=1e-6)
        if event["steps"] and settings.get("drafter") is None and "mirostat_tau" not in settings:
            assert event["steps"][-1]["left"] == int((scores[0] > -torch.inf).sum())


def check_beams(
    lm: LanguageModel, prompt: list[int], settings: dict[str, Any], events: list[dict[str, Any]], end: dict[str, Any]
) -> None:
    """Following the live beams that a sequence names gives its tokens."""
    for number, event in enumerate(events):
        assert event["step"] == number
        before = events[number - 1]["live"] if number else []
        for one in (*event["live"], *event["ended"]):
            assert (one["parent"] is None) if not number else one["parent"] in range(len(before))
    for sequence in end["sequences"]:
        assert len(sequence["beams"]) == len(sequence["ids"])
        told = []
        for number, index in enumerate(sequence["beams"]):
            if index is not None:
                told.append(events[number]["live"][index]["id"])
        ended = sequence["ids"][len(told) :]
        assert told == sequence["ids"][: len(told)]
        if ended:
            found = [one["id"] for one in events[len(told)]["ended"] if one["score"] == sequence["score"]]
            assert ended[0] in found
        check_sums(lm, prompt, settings, events, sequence)


def check_sums(
    lm: LanguageModel,
    prompt: list[int],
    settings: dict[str, Any],
    events: list[dict[str, Any]],
    sequence: dict[str, Any],
) -> None:
    """A sequence's log-probability has all its tokens in it, and the model's own is that of a pass over the text."""
    nodes, parent = [], None
    for number, (index, token) in enumerate(zip(sequence["beams"], sequence["ids"], strict=True)):
        event = events[number]
        ended = (one for one in event["ended"] if (one["parent"], one["id"]) == (parent, token))
        nodes.append(next(ended) if index is None else event["live"][index])
        parent = index
    length = len(nodes)
    expected = sequence["score"] * length ** settings.get("length_penalty", 1.0)
    if expected > -1e8:  # copies of a text have scores of beams that do not exist
        assert nodes[-1]["sum_logprob"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    if lm.model.info.is_encoder_decoder or "guidance_scale" in settings:
        return
    read = lm.generate([*prompt, *sequence["ids"]], max_new_tokens=1, prompt_logprobs=0, min_new_tokens=0)
    own = [one.logprob for one in read.prompt_logprobs[0][len(prompt) :]]
    assert [one["raw_logprob"] for one in nodes] == pytest.approx(own, rel=1e-3, abs=1e-3)
