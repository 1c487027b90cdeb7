"""The TensorFlow and Flax processors: as recorded from the reference, over torch, and live where a framework is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import CASES, LENGTH, VOCAB, Case, make_arrays

import unspool
from unspool import InputError, SettingError, UnsupportedError
from unspool.frameworks import flax, jax_arrays, tensorflow, tensorflow_arrays
from unspool.frameworks.torch_arrays import open_torch

PACKAGES = {"TF": "tensorflow", "Flax": "jax"}
ALL = [pytest.param(framework, case, id=case.key[:90]) for framework, cases in CASES.items() for case in cases]
NAMES = {
    framework: sorted(name for name in unspool.find_homes() if name.startswith(framework) and "Output" not in name)
    for framework in PACKAGES
}


def over_torch(name: str) -> Any:
    """The class of that name, over torch's tensors."""
    home = tensorflow if name.startswith("TF") else flax
    return type(name, (getattr(home, name),), {"open_arrays": staticmethod(open_torch)})


@lru_cache
def read_recorded(framework: str) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(Path(__file__).with_name(f"recorded_{framework}.npz")) as file:
        return dict(file)


@pytest.mark.parametrize(("framework", "case"), ALL)
def test_over_torch_as_recorded(framework: str, case: Case) -> None:
    processor = over_torch(case.name)(**case.given)
    ids, scores = (torch.tensor(part) for part in make_arrays(case.name))
    for length in case.lengths:
        found = processor(ids, scores, length)
        assert found.dtype == scores.dtype
        torch.testing.assert_close(
            found, torch.tensor(read_recorded(framework)[f"{case.key}@{length}"]), rtol=1e-6, atol=1e-6
        )
    for part, own in zip(make_arrays(case.name), (ids, scores), strict=True):  # what was given stays
        assert torch.equal(torch.tensor(part), own)


def convert_all(framework: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A framework's own way to make an array, and to compile a function."""
    package = pytest.importorskip(PACKAGES[framework])
    if framework == "TF":
        return package.convert_to_tensor, lambda call: package.function(call, jit_compile=True)
    return package.numpy.asarray, package.jit


@pytest.mark.filterwarnings("ignore")  # the frameworks' own
@pytest.mark.parametrize(("framework", "case"), ALL)
def test_live_and_compiled_as_recorded(framework: str, case: Case) -> None:
    convert, compile_ = convert_all(framework)
    processor = getattr(unspool, case.name)(**case.given)
    ids, scores = (convert(part) for part in make_arrays(case.name))
    compiled = compile_(processor)
    for length in case.lengths:
        expected = read_recorded(framework)[f"{case.key}@{length}"]
        for found in (processor(ids, scores, length), compiled(ids, scores, convert(np.int32(length)))):
            np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-6, atol=1e-6)


# --- properties over torch ------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids from a small vocabulary, scores, and a length."""
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, LENGTH))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    ids = torch.randint(0, 5, (rows, LENGTH), generator=generator)
    return ids, torch.randn(rows, VOCAB, generator=generator), length


@settings(max_examples=40)
@given(call=calls(), size=st.integers(1, 4), penalty=st.floats(0.3, 3))
def test_they_are_what_the_torch_processors_are(call: Any, size: int, penalty: float) -> None:
    ids, scores, length = call
    words = [[3], [1, 2], [0, 0, 4], [4, 3, 2, 1]]
    pairs = [
        (over_torch("TFNoRepeatNGramLogitsProcessor")(size), unspool.NoRepeatNGramLogitsProcessor(size)),
        (over_torch("TFNoBadWordsLogitsProcessor")(words, 22), unspool.NoBadWordsLogitsProcessor(words, 22)),
        (over_torch("TFRepetitionPenaltyLogitsProcessor")(penalty), unspool.RepetitionPenaltyLogitsProcessor(penalty)),
        (over_torch("FlaxTopPLogitsWarper")(0.7), unspool.TopPLogitsWarper(0.7)),
        (over_torch("TFTopKLogitsWarper")(size), unspool.TopKLogitsWarper(size)),
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine(ids, scores, length), theirs(ids[:, :length], scores))


@settings(max_examples=25)
@given(call=calls(), place=st.integers(0, 40))
def test_a_row_is_the_same_alone_and_what_follows_the_length_is_not_read(call: Any, place: int) -> None:
    ids, scores, length = call
    case = (cases := [*CASES["TF"], *CASES["Flax"]])[place % len(cases)]
    processor = over_torch(case.name)(**case.given)
    found = processor(ids, scores, length)
    other = ids.clone()
    other[:, length:] = torch.randint(-9, 50, other[:, length:].shape)
    assert torch.equal(processor(other, scores, torch.tensor(length)), found)
    for row in range(len(ids)):
        assert torch.equal(processor(ids[row : row + 1], scores[row : row + 1], length)[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_keep_their_dtype(dtype: torch.dtype) -> None:
    for cases in CASES.values():
        for case in cases:
            ids, scores = (torch.tensor(part) for part in make_arrays(case.name))
            assert over_torch(case.name)(**case.given)(ids, scores.to(dtype), 3).dtype == dtype


# --- lists, bases, refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", PACKAGES)
def test_a_list_runs_each_in_turn(framework: str) -> None:
    ids, scores = (torch.tensor(part) for part in make_arrays("any"))
    base = getattr(unspool, f"{framework}LogitsProcessor")

    class Shift(base):  # type: ignore[misc, valid-type]
        def __call__(self, input_ids: Any, scores: Any, cur_len: int, shift: float) -> Any:
            return scores + shift + cur_len

    parts = [over_torch(f"{framework}TemperatureLogitsWarper")(2.0), Shift()]
    processors = getattr(unspool, f"{framework}LogitsProcessorList")(parts)
    assert isinstance(processors, list)
    assert torch.equal(processors(ids, scores, 4, shift=1.0), scores / 2 + 1.0 + 4)
    with pytest.raises(SettingError, match="Shift needs shift"):
        processors(ids, scores, 4)
    with pytest.raises(UnsupportedError, match="abstract"):
        base()(ids, scores)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TemperatureLogitsWarper", [0.0]),
        ("TemperatureLogitsWarper", [float("nan")]),
        ("TopKLogitsWarper", [0]),
        ("TopKLogitsWarper", [3, float("nan")]),
        ("TopPLogitsWarper", [1.5]),
        ("TopPLogitsWarper", [0.5, 0.0, 0]),
        ("MinLengthLogitsProcessor", [-1, 2]),
        ("MinLengthLogitsProcessor", [3, -1]),
        ("ForcedBOSTokenLogitsProcessor", [-1]),
        ("ForcedEOSTokenLogitsProcessor", [4, None]),
        ("SuppressTokensLogitsProcessor", [[-1]]),
        ("SuppressTokensAtBeginLogitsProcessor", [[1], True]),
        ("ForceTokensLogitsProcessor", [[]]),
        ("ForceTokensLogitsProcessor", [[[-1, 2]]]),
        ("ForceTokensLogitsProcessor", [[[2**40, 2]]]),
        ("ForceTokensLogitsProcessor", [7]),
        ("RepetitionPenaltyLogitsProcessor", [-1.0]),
        ("NoRepeatNGramLogitsProcessor", [0]),
        ("NoBadWordsLogitsProcessor", [[], 1]),
        ("NoBadWordsLogitsProcessor", [[[]], 1]),
        ("NoBadWordsLogitsProcessor", [[[1.5]], 1]),
    ],
)
def test_what_a_rule_can_not_be_is_refused_when_it_is_made(name: str, arguments: list[Any]) -> None:
    for framework in PACKAGES:
        if f"{framework}{name}" in NAMES[framework]:
            with pytest.raises(SettingError, match=r"\w"):
                over_torch(f"{framework}{name}")(*arguments)


def test_what_can_not_be_read_is_refused() -> None:
    ids, scores = (torch.tensor(part) for part in make_arrays("any"))
    repeat = over_torch("TFNoRepeatNGramLogitsProcessor")(2)
    for bad in (None, ids[0], ids[:2], ids[:, :0]):
        with pytest.raises(InputError, match="reads ids"):
            repeat(bad, scores, 3)
    with pytest.raises(InputError, match="cur_len is None"):
        repeat(ids, scores, None)
    with pytest.raises(InputError, match="bos_token_id is 99, and the scores are of 23 tokens"):
        over_torch("FlaxForcedBOSTokenLogitsProcessor")(99)(ids, scores, 1)
    assert torch.equal(over_torch("TFTopKLogitsWarper")(VOCAB)(None, scores, None), scores)  # which reads neither


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither framework is there."""
    openers = (tensorflow_arrays.open_tensorflow, jax_arrays.open_jax)
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)
    for one in openers:
        one.cache_clear()
    yield
    for one in openers:
        one.cache_clear()


@pytest.mark.parametrize("framework", PACKAGES)
def test_without_the_framework_an_error_names_the_extra(framework: str, nothing_installed: None) -> None:
    assert len(NAMES[framework]) == {"TF": 15, "Flax": 13}[framework]
    for case in CASES[framework]:
        with pytest.raises(unspool.MissingExtraError, match=rf"pip install 'unspool\[{PACKAGES[framework]}\]'"):
            getattr(unspool, case.name)(**case.given)


def test_every_processor_is_recorded_somewhere() -> None:
    for framework, names in NAMES.items():
        called = {case.name for case in CASES[framework]}
        assert set(names) - called == {f"{framework}Logits{kind}" for kind in ("Processor", "ProcessorList", "Warper")}


def test_a_framework_is_imported_when_a_processor_is_made_and_not_before() -> None:
    code = (
        "import sys, unspool\n"
        "for name in unspool.find_homes():\n"
        "    if name.startswith(('TF', 'Flax')):\n"
        "        getattr(unspool, name)\n"
        "print({'tensorflow', 'jax'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"
