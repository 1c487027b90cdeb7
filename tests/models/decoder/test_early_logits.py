"""What the head makes of earlier layers' states: as the reference reads them for DoLa."""

from __future__ import annotations

import torch

from unspool.protocols import Want


def read_slowly(pair, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    output = pair.reference(tokens, output_hidden_states=True)
    head = pair.reference.get_output_embeddings()
    return output.logits[:, -1], [head(states[:, -1]) for states in output.hidden_states[:-1]]


@torch.no_grad()
def test_early_logits_equal_the_references(pair) -> None:
    if getattr(pair.reference.config, "word_embed_proj_dim", 32) != 32:
        return  # there the reference's head can't read its own hidden states
    tokens = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    num_layers = pair.native.info.num_layers
    want = Want(early=tuple(range(num_layers)))
    final, early = read_slowly(pair, tokens)
    shorter, earlier = read_slowly(pair, tokens[:, :6])
    for kind in ("dynamic", "static"):
        cache = pair.native.new_cache(kind, rows=2, capacity=16)
        ragged = torch.cat((tokens[:1, :8], tokens[1:, :5].repeat(1, 2)[:, :8]), dim=0)
        pair.native.forward(ragged, cache, counts=[8, 5], want=want)
        answer = pair.native.forward(
            torch.stack((tokens[0, 8], tokens[1, 5]))[:, None], cache, want=want
        )  # one step on the fast path, rows of different lengths
        assert len(answer.early_logits) == num_layers
        for ours, first, second in zip(
            (answer.logits, *answer.early_logits), (final, *early), (shorter, *earlier), strict=True
        ):
            torch.testing.assert_close(ours, torch.stack((first[0], second[1])), atol=2e-4, rtol=1e-4)
    single = pair.native.new_cache()
    pair.native.forward(tokens[:1, :8], single, want=want)
    alone = pair.native.forward(tokens[:1, 8:], single, want=Want(early=(1,)))
    torch.testing.assert_close(alone.early_logits[0], early[1][:1], atol=2e-4, rtol=1e-4)
    plain = pair.native.forward(tokens[:1], pair.native.new_cache())
    assert plain.early_logits is None
