"""Every reference output: those that run must match, those to come must be refused."""

from __future__ import annotations

import json

import pytest
import torch

from tests.conformance.cases import (
    CORRECTIONS,
    FORKS,
    GOLDENS,
    NEAR_TIES,
    TOO_LONG,
    Case,
    as_scores,
    load_exact_model,
    load_model,
    read_cases,
    read_corrections,
    run_case,
)
from unspool.errors import UnspoolError

CASES = list(read_cases())
RUNNING = [case for case in CASES if case.to_come is None]
TO_COME = [case for case in CASES if case.to_come is not None]


def test_all_reference_outputs_are_here() -> None:
    assert len(CASES) == 646


def test_corrections_are_told_and_change_something() -> None:
    """Every corrected case is named in differences.md, and its recorded answer really is another one."""
    told = (GOLDENS.parent / "differences.md").read_text()
    for path in CORRECTIONS.glob("*.json"):
        recorded = json.loads((GOLDENS / "cases" / path.name).read_text())["cases"]
        for name, corrected in read_corrections(path.stem).items():
            assert f"`{name}`" in told
            differs = [
                corrected[key] != recorded[name][key] for key in ("sequences", "beam_indices") if key in corrected
            ]
            for key in {"sequences_scores", "scores_step3_row0"} & set(corrected):
                scores = zip(corrected[key], recorded[name][key], strict=True)
                differs.append(max(abs(new - old) for new, old in scores) > 1e-3)
            assert any(differs)


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_case_matches(case: Case) -> None:
    output = run_case(case)
    expected = case.expected
    if str(case) in FORKS and output.sequences.tolist() != case.sequences:
        exact = run_case(case, load_exact_model(case.model))
        assert output.sequences.tolist() == exact.sequences.tolist()
        torch.testing.assert_close(output.sequences_scores, exact.sequences_scores.float(), atol=1e-5, rtol=0)
        return
    if "sequences" in expected:
        assert output.sequences.tolist() == case.sequences
        assert (case.sequences != expected["sequences"]) == (str(case) in TOO_LONG)
    if "sequences_scores" in expected:
        assert_close(output.sequences_scores, as_scores(expected["sequences_scores"]))
    if "beam_indices" in expected and str(case) not in NEAR_TIES:
        assert output.beam_indices.tolist() == expected["beam_indices"]
    if "scores_step3_row0" in expected:
        assert_close(output.scores[3][0], as_scores(expected["scores_step3_row0"]))
    for row, values in enumerate(expected.get("first_step_scores", [])):
        assert_close(output.scores[0][row], as_scores(values))


@pytest.mark.parametrize("case", TO_COME, ids=str)
def test_cases_to_come_are_refused(case: Case) -> None:
    """Nothing that is not built passes silently; and what got built leaves the list."""
    with pytest.raises(UnspoolError):
        load_model(case.model)
        run_case(case)


@pytest.mark.parametrize("case", [case for case in RUNNING if case.name == "greedy"], ids=str)
def test_rows_alone_are_rows_in_the_batch(case: Case) -> None:
    """A row's tokens do not depend on the rows beside it, nor on its padding."""
    import unspool

    model = load_model(case.model).model
    if model.info.features is not None:
        features = torch.tensor(case.inputs["input_features"])
        whole = unspool.generate(model, input_features=features, max_new_tokens=case.max_new_tokens)
        for row in range(features.shape[0]):
            alone = unspool.generate(model, input_features=features[row : row + 1], max_new_tokens=case.max_new_tokens)
            assert whole[row, : alone.shape[1]].tolist() == alone[0].tolist()
        return
    ids, mask = (torch.tensor(case.inputs[name]) for name in ("input_ids", "attention_mask"))
    whole = unspool.generate(model, input_ids=ids, attention_mask=mask, max_new_tokens=case.max_new_tokens)
    width = 1 if model.info.is_encoder_decoder else ids.shape[1]
    for row in range(ids.shape[0]):
        real = ids[row][mask[row].bool()][None]
        alone = unspool.generate(model, input_ids=real, max_new_tokens=case.max_new_tokens)
        first = 1 if model.info.is_encoder_decoder else real.shape[1]
        new = alone[0, first:].tolist()
        assert whole[row, width : width + len(new)].tolist() == new


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    torch.testing.assert_close(found[finite], expected[finite], atol=1e-3, rtol=1e-5)
