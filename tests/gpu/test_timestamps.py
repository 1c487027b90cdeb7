"""Whisper's rules for timestamps in kernels beside the same rules on torch's operators.

The kernels run on a GPU, or slowly in Triton's interpreter, with `TRITON_INTERPRET=1`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, pytestmark

from unspool.logits import WhisperTimeStampLogitsProcessor

__all__ = ["pytestmark"]

END, FIRST, VOCAB = 50, 61, 2_300
TEXT, STAMP = 7, FIRST + 30
ENDINGS = [[], [TEXT], [STAMP], [STAMP, STAMP], [TEXT, STAMP], [STAMP, STAMP + 3, TEXT], [STAMP, TEXT, STAMP + 5]]


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("ending", ENDINGS, ids=str)
@pytest.mark.parametrize("shift", [0.0, 4.0, -4.0])
def test_rules(ending: list[int], limit: int | None, compares: bool, shift: float) -> None:
    """Texts that begin, and that end in every way; timestamps much likelier or less likely than text."""
    from unspool.kernels.gpu.sampling.timestamps import TimestampRules, obey_timestamps

    config = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=limit
    )
    prompt = [52, FIRST + 90, 56]  # what a prompt holds is not followed
    ids = torch.tensor([[*prompt, *ending], [*prompt, *[TEXT] * len(ending)]])
    scores = torch.randn(2, VOCAB)
    scores[:, FIRST:] += shift
    scores[0, FIRST + 40] = -torch.inf
    rules = WhisperTimeStampLogitsProcessor(config, len(prompt), compares)
    expected = rules(ids, scores)
    known = TimestampRules(len(prompt), FIRST, END, VOCAB if limit is None else limit, compares)
    found = obey_timestamps(ids.to(DEVICE), scores.to(DEVICE), known)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(rules(ids.to(DEVICE), scores.to(DEVICE)).cpu(), expected)


def test_before_the_first_token() -> None:
    """Nothing but the mark without timestamps is forbidden while a prompt is being forced."""
    from unspool.kernels.gpu.sampling.timestamps import TimestampRules, obey_timestamps

    scores = torch.randn(1, VOCAB)
    found = obey_timestamps(
        torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), scores.to(DEVICE), TimestampRules(5, FIRST, END, 9, False)
    )
    scores[:, FIRST - 1] = -torch.inf
    assert torch.equal(found.cpu(), scores)
