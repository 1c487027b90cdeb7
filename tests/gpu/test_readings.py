"""Guidance and DoLa at a captured pass's end, beside what torch makes of the same logits."""

from __future__ import annotations

import pytest
import torch

from unspool.kernels.readings import Contrast, Guide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(rows: int, absent: int, num_early: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(vocab + rows)
    logits = torch.randn((1 + num_early) * rows, vocab, device="cuda", generator=generator) * 3
    lengths = torch.tensor([5] * (rows - absent) + [-1] * absent, dtype=torch.int32, device="cuda")
    return logits, torch.zeros(rows, dtype=torch.int64, device="cuda"), lengths


@pytest.mark.parametrize("vocab", [100, 9001, 128256])
@pytest.mark.parametrize(("rows", "absent"), [(2, 0), (12, 2), (48, 0)])
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.5, -2.0, 7.0])
def test_guidance(vocab: int, rows: int, absent: int, scale: float) -> None:
    from unspool.kernels.gpu.sampling.readings import CapturedReading

    logits, tokens, lengths = make(rows, absent, 0, vocab)
    made = CapturedReading(Guide(scale), rows, 0, vocab, logits.device)
    made.run(logits, tokens, lengths)
    real = rows - absent
    expected = Guide(scale).read(logits[:real].double())
    assert float((made.scores[: real // 2] - expected).abs().max()) < 4e-5 * (1 + abs(scale))
    best = made.scores[: real // 2].max(dim=-1)
    assert tokens[: real // 2].tolist() == best.indices.tolist()
    assert lengths.tolist() == [6] * real + [-1] * absent


def test_one_graph_serves_every_scale() -> None:
    from unspool.kernels.gpu.sampling.readings import CapturedReading

    logits, tokens, lengths = make(4, 0, 0, 9001)
    made = CapturedReading(Guide(1.5), 4, 0, 9001, logits.device)
    made.run(logits, tokens, lengths)  # what is set up once must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(logits, tokens, lengths)
    for scale in (1.5, -2.0, 0.25, 7.0, 7.0, 1.5):
        made.set_inputs(Guide(scale))
        graph.replay()
        expected = Guide(scale).read(logits.double())
        assert float((made.scores[:2] - expected).abs().max()) < 4e-5 * (1 + abs(scale))


@pytest.mark.parametrize("vocab", [100, 9001, 128256])
@pytest.mark.parametrize(("rows", "absent"), [(1, 0), (6, 1), (32, 0)])
@pytest.mark.parametrize("num_early", [1, 4])
@pytest.mark.parametrize("by_row", [True, False])
def test_contrast(vocab: int, rows: int, absent: int, num_early: int, by_row: bool) -> None:
    from unspool.kernels.gpu.sampling.readings import CapturedReading

    logits, tokens, lengths = make(rows, absent, num_early, vocab)
    contrast = Contrast(by_row)
    made = CapturedReading(contrast, rows, num_early, vocab, logits.device)
    made.run(logits, tokens, lengths)
    real = rows - absent
    early = logits.view(1 + num_early, rows, vocab)[1:, :real]
    expected, chosen = contrast.read(logits[:real].double(), early.double())
    assert made.chosen[:real].tolist() == chosen.tolist()
    is_in = expected > -torch.inf
    agrees = (made.scores[:real] > -torch.inf) == is_in
    assert int((~agrees).sum()) <= 1  # a token at the very edge may fall to either side
    both = is_in & agrees
    assert float((made.scores[:real][both] - expected[both]).abs().max()) < 4e-5
    assert tokens[:real].tolist() == made.scores[:real].max(dim=-1).indices.tolist()
    assert lengths.tolist() == [6] * real + [-1] * absent


def test_rows_without_numbers_have_no_likeliest_token() -> None:
    from unspool.kernels.gpu.sampling.readings import CapturedReading

    logits, tokens, lengths = make(4, 0, 0, 5000)
    logits[1, 4321] = float("nan")
    CapturedReading(Guide(1.5), 4, 0, 5000, logits.device).run(logits, tokens, lengths)
    assert tokens[1] == -1 and tokens[0] >= 0
