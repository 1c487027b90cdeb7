"""One call tried in every way, made smaller while it still differs, and written as a script."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.fuzz.beside import known, models
from tests.fuzz.beside.calls import OUR_KINDS, Call
from tests.fuzz.beside.comparing import compare, find_missing_word
from tests.fuzz.beside.ways import WAYS, Answer, run_ours, run_theirs

SHRINK_SECONDS = 3.0  # of CPU time
SHAKES = 6
ROWS = {"negative", "begun"}  # extras with one item for each row
EXTREME = ("t5", "mt5", "umt5")  # their logits are of hundreds, so rounding decides which of their beams come first


@dataclass(frozen=True)
class Unlike:
    """A difference: the way of ours, its kind, and what differs."""

    way: str
    kind: str
    details: str

    def __str__(self) -> str:
        return f"{self.way}, {self.kind}: {self.details}"

    def is_like(self, other: Unlike) -> bool:
        """Whether it is a difference of the same kind; of errors, one of the same type."""
        is_same_error = self.kind != "raised" or self.details.split(":")[0] == other.details.split(":")[0]
        return (self.way, self.kind) == (other.way, other.kind) and is_same_error


def try_call(call: Call) -> list[Unlike]:
    """The differences between transformers and ours that are not known.

    Methods that the installed transformers has not are compared between our own ways; their second turns with those
    that begin anew.
    """
    ours = {way: answer for way in WAYS if (answer := run_ours(call, way)) is not None}
    raised = {way: answer.error for way, answer in ours.items() if answer.error is not None and not answer.is_ours}
    if raised:
        return [Unlike(way, "raised", f"{type(error).__name__}: {error}") for way, error in raised.items()]
    sound = next((answer for answer in ours.values() if answer.error is None), None)
    theirs = None if known.has_no_reference(call) else _ask(call, sound)
    if theirs is not None and theirs.error is not None:
        if sound is not None and not known.can_more(call, theirs.error):
            return [Unlike("all", "not refused", f"{type(theirs.error).__name__}: {theirs.error}")]
        theirs = None
    if theirs is None:
        if sound is None:
            return []
        theirs = sound if "again" not in call.extras else _begin_anew(call) or sound
    found = {way: _find_unlike(call, way, theirs, answer) for way, answer in ours.items()}
    return [unlike for unlike in found.values() if unlike is not None]


def _find_unlike(call: Call, way: str, theirs: Answer, answer: Answer) -> Unlike | None:
    if answer.error is not None:
        return None if known.refuses(call, way, answer.error) else Unlike(way, "refused", str(answer.error))
    if (missing := find_missing_word(call, answer)) is not None:
        return Unlike(way, "missing", missing)
    found = compare(call, theirs, answer, way=way)
    if found is None or known.differs(call, way, found):
        return None
    return None if _is_unsteady(call, way, theirs, answer) else Unlike(way, "differs", found)


def _is_unsteady(call: Call, way: str, theirs: Answer, ours: Answer) -> bool:
    """Whether the answer that was compared with is another one too where numbers are rounded otherwise: a tie."""
    attention = "eager" if call.settings.get("output_attentions") else call.attention
    for number in range(SHAKES):
        model = models.make_shaken(call.model, call.seed, number, attention)
        again = _begin_anew(call, model) if known.has_no_reference(call) else _ask(call, ours, model)
        if again is not None and again.error is None and compare(call, theirs, again, way=way) is not None:
            return True
    return False


def _begin_anew(call: Call, model: Any = None) -> Answer | None:
    """Our own answer, by an object's forward, whose second turn has no cache; None where there is none."""
    answer = run_ours(call, "adapter", model, begins_anew=True)
    return answer if answer is not None and answer.error is None else None


def try_devices(call: Call, device: str) -> list[Unlike]:
    """The differences between the native model on a device and on the CPU; models of huge logits are left out."""
    if call.model in EXTREME:
        return []
    answers = []
    for place in ("cpu", device):
        with models.on(place):
            answers.append(run_ours(call, "native"))
    mine, other = answers
    if mine is None or other is None:
        return []
    if mine.error is not None or other.error is not None:
        if type(mine.error) is type(other.error):
            return []
        return [Unlike(device, "raised", f"{other.error!r} for {mine.error!r}")]
    found = compare(call, mine, other, way="native")
    return [] if found is None else [Unlike(device, "differs", found)]


def _ask(call: Call, ours: Answer | None, model: Any = None) -> Answer:
    """transformers' answer. Of prompts that are padded on the right, that to the same prompts padded on the left.

    Kinds of cache that it has elsewhere alone change no answer: it is asked without.
    """
    if call.settings.get("cache_implementation") in OUR_KINDS:
        kept = {name: value for name, value in call.settings.items() if name != "cache_implementation"}
        call = call.change(settings=kept)
    if not call.is_right_padded:
        return run_theirs(call, model, ours)
    theirs = run_theirs(turn_round(call), model, ours)
    if theirs.error is None:
        width = call.num_read
        theirs.sequences[:, :width] = torch.tensor(call.ids)[:, :width].repeat_interleave(call.copies, dim=0)
    return theirs


def turn_round(call: Call) -> Call:
    """The call with each row's real tokens moved to the right."""
    assert call.seen is not None
    rows = [list(zip(*row, strict=True)) for row in zip(call.ids, call.seen, strict=True)]
    turned = [sorted(row, key=lambda column: column[1]) for row in rows]
    return call.change(
        ids=[[token for token, _ in row] for row in turned], mask=[[seen for _, seen in row] for row in turned]
    )


def shrink(call: Call, unlike: Unlike) -> tuple[Call, Unlike]:
    """A smaller call with a difference of the same kind."""
    deadline = time.process_time() + SHRINK_SECONDS
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _list_smaller(call):
            if time.process_time() > deadline:
                return call, unlike
            alike = [one for one in try_call(smaller) if one.is_like(unlike)]
            if alike:
                call, unlike, is_smaller = smaller, alike[0], True
                break
    return call, unlike


def _list_smaller(call: Call) -> Iterator[Call]:
    for name in call.extras:
        left_out = {"again": ("again", "then", "leaves out", "room", "states")}.get(name, (name,))
        if name != "then":  # or the second turn draws too
            kept = {key: value for key, value in call.extras.items() if key not in left_out}
            yield replace(call, extras=kept)
    for name in call.settings:
        if name not in ("do_sample", "max_new_tokens", *call.extras.get("config", ())):
            yield replace(call, settings={key: value for key, value in call.settings.items() if key != name})
    if len(call.ids) > 1:
        for row in range(len(call.ids)):
            rows = [other for other in range(len(call.ids)) if other != row]
            mask = None if call.mask is None else [call.mask[other] for other in rows]
            extras = dict(call.extras)
            for name in ROWS.intersection(extras):
                extras[name] = [extras[name][other] for other in rows]
            yield replace(call, ids=[call.ids[other] for other in rows], mask=mask, extras=extras)
    if len(call.sounds) > 1 and not isinstance(call.settings.get("language"), list):
        for row in range(len(call.sounds)):
            yield replace(call, sounds=[frames for other, frames in enumerate(call.sounds) if other != row])
    if call.mask is not None and all(all(row) for row in call.mask):
        yield replace(call, mask=None)
    if call.embeds != "none":
        yield replace(call, embeds="none")
    if call.attention == "eager" and not call.settings.get("output_attentions"):
        yield replace(call, attention="sdpa")
    if call.settings.get("max_new_tokens", 1) > 1:
        yield replace(call, settings={**call.settings, "max_new_tokens": call.settings["max_new_tokens"] - 1})


def write_script(call: Call) -> str:
    """A program that shows the difference, to be run in the repository's root."""
    parts: dict[str, Any] = {"ids": call.ids, "mask": call.mask, "embeds": call.embeds, "settings": call.settings}
    parts |= {"extras": call.extras, "attention": call.attention, "sounds": call.sounds}
    told = "\n".join(f"    {name}={value!r}," for name, value in parts.items())
    return (
        "from tests.fuzz.beside.calls import Call\n"
        "from tests.fuzz.beside.ways import WAYS, run_ours, run_theirs\n"
        f"call = Call(\n    model={call.model!r}, seed={call.seed}, strategy={call.strategy!r},\n{told}\n)\n"
        "answers = {way: run_ours(call, way) for way in WAYS}\n"
        "ours = next((one for one in answers.values() if one is not None and one.error is None), None)\n"
        'for name, answer in {"transformers": run_theirs(call, None, ours), **answers}.items():\n'
        '    print(name, "none" if answer is None else answer.error or answer.output, sep="\\n")\n'
    )
