"""Two answers compared: tokens, types, shapes, scores, states."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.beside.calls import BEAM_SAMPLING, OUR_KINDS, Call
from tests.fuzz.beside.families import STATES
from tests.fuzz.beside.models import VOCAB
from tests.fuzz.beside.turns import mark_answers
from tests.fuzz.beside.ways import Answer

ROUNDING = {"atol": 5e-3, "rtol": 2e-3}
STEPS = ("scores", "logits")
LAYERS = ("attentions", "hidden_states", "decoder_attentions", "cross_attentions", "decoder_hidden_states")
WEIGHTS = {"encoder_attentions", "decoder_attentions", "cross_attentions"}
WHOLE = ("encoder_attentions", "encoder_hidden_states")


def compare(call: Call, theirs: Answer, ours: Answer, *, way: str) -> str | None:
    """What differs, in a line or two; None where nothing does."""
    if not _has_type(theirs.output, ours.output, way):
        return f"returned a {type(ours.output).__name__} for a {type(theirs.output).__name__}"
    is_free = call.strategy == BEAM_SAMPLING  # drawn in another way, so tokens say nothing
    if not is_free:
        if theirs.sequences.tolist() != ours.sequences.tolist():
            return f"wrote\n  {ours.sequences.tolist()} for\n  {theirs.sequences.tolist()}"
        told, expected = ((_cut if call.sounds else _join)(one.streamed) for one in (ours, theirs))
        if told != expected:
            return f"told {told} for {expected}"
    if isinstance(theirs.output, torch.Tensor):
        return None
    if call.sounds and type(theirs.output) is dict:
        return compare_heard(call, theirs, ours)
    is_reference = type(theirs.output).__module__.startswith("transformers.")
    named, ours_named = ({name for name in one.output if one.output[name] is not None} for one in (theirs, ours))
    if named != ours_named and is_reference:
        return f"returned {sorted(ours_named - named)} more and {sorted(named - ours_named)} less"
    if is_free:
        return None
    found = _compare_fields(call, theirs.output, ours.output)
    if found is None and is_reference and way != "native" and "past_key_values" in named:
        return _compare_caches(call, theirs.output.past_key_values, ours.output.past_key_values)
    return found


def find_missing_word(call: Call, answer: Answer) -> str | None:
    """What differs if a row's text is without a word that it must hold; of several texts, others may be returned."""
    words = [*call.settings.get("force_words_ids", ()), *call.extras.get("constraints", ())]
    for text in answer.sequences.tolist() if call.copies == 1 else ():
        if not all(_has_word(text, word) for word in words):
            return f"wrote {text} without {words}"
    return None


def _has_word(text: list[int], word: list[Any]) -> bool:
    either = [word] if isinstance(word[0], int) else word
    return any(text[place : place + len(one)] == one for one in either for place in range(len(text)))


def _join(told: list[Any]) -> list[Any]:
    """What a streamer was told, token by token: drafts are as long as a drafter likes."""
    return [one for value in told for one in (value if isinstance(value, list) else [value])]


def _cut(told: list[Any]) -> list[Any]:
    """What was told of sounds' frames, up to their ends: the rows of a batch that are through stand beyond them."""
    return [[[min(place, end), end] for place, end in rows] for rows in told]


def _has_type(theirs: Any, ours: Any, way: str) -> bool:
    if type(theirs) is type(ours):
        return True
    is_reference = type(theirs).__module__.startswith("transformers.") and way != "native"
    return isinstance(ours, type(theirs)) if is_reference else type(ours).__name__ == type(theirs).__name__


def _compare_fields(call: Call, theirs: Any, ours: Any) -> str | None:
    for name in ("sequences_scores",):
        if name in theirs and not _is_near(theirs[name], ours[name]):
            return f"{name} {ours[name].tolist()} for {theirs[name].tolist()}"
    if "beam_indices" in theirs and theirs.beam_indices.tolist() != ours.beam_indices.tolist():
        return f"beam_indices {ours.beam_indices.tolist()} for {theirs.beam_indices.tolist()}"
    live = _mark_live(call, theirs)
    for name in STEPS:
        if name in theirs and (found := _compare_steps(theirs[name], ours[name], live)):
            return f"{name} {found}"
    for name in LAYERS if not call.is_right_padded else ():  # whose columns are others: see `turn_round`
        if name not in theirs:
            continue
        found = _compare_layers(call, theirs[name], ours[name], live, is_weights=name.endswith("attentions"))
        if found:
            return f"{name} {found}"
    for name in WHOLE:
        if name in theirs and (found := _compare_encoder(call, theirs[name], ours[name])):
            return f"{name} {found}"
    return None


def _mark_live(call: Call, output: Any) -> list[torch.Tensor]:
    """For every step, the rows that count: those that have not ended, or that a returned sequence came through."""
    if "beam_indices" in output:
        indices = output.beam_indices
        return [found[found >= 0].unique() for found in indices.unbind(dim=1)]
    width = _count_read(output) if call.sounds or "again" in call.extras else call.num_read
    steps = output.sequences.shape[1] - width
    if call.has_beams:
        return [torch.zeros(0, dtype=torch.long)] * steps
    live = mark_answers(call, output.sequences, width)
    return [rows.nonzero()[:, 0] for rows in live.unbind(dim=1)]


def _count_read(output: Any) -> int:
    """The tokens that the text of a window follows: those that no step wrote."""
    steps = [len(output[name]) for name in (*STEPS, *LAYERS) if name in output]
    return int(output.sequences.shape[1]) - max(steps, default=0)


def compare_heard(call: Call, answer: Answer, other_answer: Answer) -> str | None:
    """What differs between the segments and times of sounds."""
    theirs, ours = answer.output, other_answer.output
    unasked = {"past_key_values"} | (set() if call.settings.get("output_attentions") else WEIGHTS)
    if theirs.keys() - unasked != ours.keys() - unasked:
        return f"returned {sorted(ours)} for {sorted(theirs)}"
    is_one = len(answer.streamed) == 1  # theirs begin anew with every window, though not those of segments
    if is_one and "token_timestamps" in theirs and not _is_near(theirs["token_timestamps"], ours["token_timestamps"]):
        return f"token_timestamps {ours['token_timestamps'].tolist()} for {theirs['token_timestamps'].tolist()}"
    for row, (one, other) in enumerate(zip(theirs.get("segments", ()), ours.get("segments", ()), strict=True)):
        if len(one) != len(other):
            return f"row {row} has {len(other)} segments for {len(one)}"
        for place, (mine, found) in enumerate(zip(one, other, strict=True)):
            if unlike := _compare_segments(call, mine, found):
                return f"row {row}, segment {place}: {unlike}"
    return None


def _compare_segments(call: Call, theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    if theirs.keys() != ours.keys():
        return f"has {sorted(ours)} for {sorted(theirs)}"
    for name in ("start", "end", "tokens", "token_timestamps"):
        if name in theirs and not _is_near(theirs[name], ours[name]):
            return f"{name} {ours[name]} for {theirs[name]}"
    if theirs["idxs"] != ours["idxs"]:
        return f"idxs {ours['idxs']} for {theirs['idxs']}"
    return _compare_results(call, theirs["result"], ours["result"])


def _compare_results(call: Call, theirs: Any, ours: Any) -> str | None:
    if type(theirs) is not type(ours):
        return f"result is a {type(ours).__name__} for a {type(theirs).__name__}"
    if isinstance(theirs, torch.Tensor):  # theirs is padded to the longest of a batch
        is_same = theirs.tolist()[: len(ours)] == ours.tolist()
        return None if is_same else f"result {ours.tolist()} for {theirs.tolist()}"
    asked = {name for name in (*STEPS, *LAYERS[2:]) if call.settings.get(f"output_{name.removeprefix('decoder_')}")}
    if missing := asked - ours.keys():
        return f"result is without {sorted(missing)}"
    if not call.has_beams and "scores" in asked:
        found = _compare_steps(theirs["scores"], ours["scores"], [torch.arange(VOCAB)] * len(ours["scores"]))
        if found:
            return f"result's scores {found}"
    return _compare_results(call, theirs["sequences"], ours["sequences"])


def _compare_steps(theirs: Any, ours: Any, live: list[torch.Tensor]) -> str | None:
    if len(theirs) != len(ours):
        return f"of {len(ours)} steps for {len(theirs)}"
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if one.shape != other.shape:
            return f"of step {step} have the shape {list(other.shape)} for {list(one.shape)}"
        if one.dtype != other.dtype:
            return f"of step {step} are {other.dtype} for {one.dtype}"
        if step < len(live) and not _is_near(one[live[step]], other[live[step]]):
            return f"of step {step}: {_show(one[live[step]], other[live[step]])}"
    return None


def _compare_layers(call: Call, theirs: Any, ours: Any, live: list[torch.Tensor], *, is_weights: bool) -> str | None:
    if len(theirs) != len(ours):
        return f"of {len(ours)} steps for {len(theirs)}"
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if len(one) != len(other):
            return f"of step {step} have {len(other)} layers for {len(one)}"
        for layer, (mine, found) in enumerate(zip(one, other, strict=True)):
            if mine.shape != found.shape:
                return f"of step {step}, layer {layer} have the shape {list(found.shape)} for {list(mine.shape)}"
            rows = live[step] if step < len(live) else live[-1][:0]
            column = slice(-1, None)  # of the last token alone: the others may be padding
            if not is_weights and call.model == "gemma3n":  # (streams, rows, columns, width)
                mine, found = mine.movedim(0, 2), found.movedim(0, 2)
            if is_weights:
                near = _is_near(mine[rows, :, column], found[rows, :, column])
            else:
                near = _is_near(mine[rows, column], found[rows, column])
            if not near:
                return f"of step {step}, layer {layer} differ"
    return None


def _compare_encoder(call: Call, theirs: Any, ours: Any) -> str | None:
    if not all(isinstance(one, torch.Tensor) for one in (*theirs, *ours)):
        return None  # PegasusX has dicts of them
    if [list(one.shape) for one in theirs] != [list(one.shape) for one in ours]:
        return f"have the shapes {[list(one.shape) for one in ours]} for {[list(one.shape) for one in theirs]}"
    if theirs[0].dim() != 3 or call.mask is None:
        return None
    seen = torch.tensor(call.mask).bool()
    copies = len(theirs[0]) // len(seen)
    seen = seen.repeat_interleave(copies, dim=0)
    near = all(_is_near(one[seen], other[seen]) for one, other in zip(theirs, ours, strict=True))
    return None if near else "differ"


def _compare_caches(call: Call, theirs: Any, ours: Any) -> str | None:
    if call.settings.get("cache_implementation") in OUR_KINDS:
        return None
    if not isinstance(ours, type(theirs)):
        return f"past_key_values are a {type(ours).__name__} for a {type(theirs).__name__}"
    if call.model not in STATES and int(theirs.get_seq_length()) != int(ours.get_seq_length()):
        return f"past_key_values hold {ours.get_seq_length()} positions for {theirs.get_seq_length()}"
    return None


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and not bool(_find_unlike(one, other).any())


def _find_unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where numbers differ by more than rounding, which is as large as the largest of them says."""
    known = one.double()[one.isfinite()].abs()
    largest = float(known.max()) if len(known) else 0.0
    rounding = {**ROUNDING, "atol": ROUNDING["atol"] + 1e-4 * largest * (largest < 1e6)}
    return ~torch.isclose(one.double(), other.double(), **rounding)


def _show(one: torch.Tensor, other: torch.Tensor) -> str:
    unlike = _find_unlike(one, other)
    places = unlike.nonzero()[:4].tolist()
    values = [(place, float(other[tuple(place)]), float(one[tuple(place)])) for place in places]
    return f"{int(unlike.sum())} values differ, as (place, ours, theirs) {values}"
