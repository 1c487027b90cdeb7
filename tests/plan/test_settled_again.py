"""Plans that were settled before: equal settings share what does not depend on the prompts' lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.test_plan import INFO, SHAPE, assign, plan_for

from unspool.config.watermarking import WatermarkingConfig
from unspool.errors import UnspoolError
from unspool.plan import Plan, PromptShape, settling
from unspool.plan.memo import describe_values

CHOICES: dict[str, list[Any]] = {
    "do_sample": [True, False],
    "num_beams": [1, 2],
    "max_new_tokens": [1, 5, 40],
    "max_length": [3, 30],
    "min_new_tokens": [2, 9],
    "temperature": [0.5, 1.0],
    "penalty_alpha": [0.6],
    "top_k": [4],
    "eos_token_id": [3, [3, 4], True],
    "num_return_sequences": [2],
    "guidance_scale": [1.5],
    "cache_implementation": ["paged", "static"],
    "forced_bos_token_id": [2],
    "prompt_lookup_num_tokens": [3],
    "seed": [1, [1, 2]],
}


def try_to(origin: str, shape: PromptShape, asked: dict[str, Any], context: int | None) -> Plan | str:
    try:
        return plan_for(origin, shape, replace(INFO, max_context=context), **asked)
    except UnspoolError as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=150)
@given(data=st.data())
def test_a_plan_is_the_same_whether_its_like_was_settled_before(data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(CHOICES)), max_size=4))
    asked = {name: data.draw(st.sampled_from(CHOICES[name])) for name in sorted(names)}
    origin, context = data.draw(st.sampled_from(["call", "config", "model"])), data.draw(st.sampled_from([None, 24]))
    widths = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=3))
    shapes = [
        replace(SHAPE, width=width, longest=max(1, width), has_embeds=not width, hidden=0 if width else 7)
        for width in widths
    ]
    settling._known._kept.clear()
    again = [try_to(origin, shape, asked, context) for shape in shapes]
    for shape, known in zip(shapes, again, strict=True):
        settling._known._kept.clear()
        fresh = try_to(origin, shape, asked, context)
        if isinstance(fresh, Plan) and isinstance(known, Plan):
            assert replace(fresh, settings=known.settings) == known and vars(fresh.settings) == vars(known.settings)
        else:
            assert fresh == known


def test_calls_with_equal_settings_have_in_common_what_follows_from_them() -> None:
    settling._known._kept.clear()
    short, long = (plan_for(shape=replace(SHAPE, width=n, longest=n), top_k=3, do_sample=True) for n in (2, 9))
    assert short.derived is long.derived and short.settings is not long.settings
    assert (short.prompt_width, long.prompt_width, short.max_length, long.max_length) == (2, 9, 22, 29)
    other = plan_for(shape=SHAPE, top_k=4, do_sample=True)
    assert other.derived is not short.derived
    marked = [plan_for(do_sample=True, watermarking_config=WatermarkingConfig(bias=bias)) for bias in (2.0, 2.0, 3.0)]
    assert marked[0].derived is marked[1].derived is not marked[2].derived


def test_values_are_described_by_what_they_are() -> None:
    assert describe_values({"a": 1}) != describe_values({"a": True}) != describe_values({"a": 1.0})
    assert describe_values({"a": [1, 2]}) == describe_values({"a": [1, 2]}) != describe_values({"a": [1, True]})
    assert describe_values({"a": 1, "b": 2}) != describe_values({"a": 1}, {"b": 2})
    assert describe_values({"a": []}) != describe_values({"a": {}}) != describe_values({"a": None})
    assert describe_values({"a": {}}) == describe_values({"a": {}})
    assert (
        describe_values({"a": {"b": [1]}}) == describe_values({"a": {"b": [1]}}) != describe_values({"a": {"b": [2]}})
    )
    assert describe_values({"a": {"b": 1}}) != describe_values({"a": {"b": True}}) != describe_values({"a": [["b", 1]]})
    for value in (object(), {"b": object()}, [[object()]], list(range(1000)), assign()):
        assert describe_values({"a": value}) is None
