"""Passes over ragged rows: made of real tokens alone they are what they are filled to the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from unspool.cache import Cache, Span
from unspool.models.decoder.model import Decoder
from unspool.models.decoder.ragged import Flattening
from unspool.models.paths import plain as plain_path
from unspool.protocols import Forward, Want

FAMILIES = (
    *("llama", "llama-yarn", "mistral", "qwen2-window", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gptj"),
    *("opt", "opt-350m", "bloom", "phi", "falcon-40b", "falcon-rw"),
)
LONGEST = 20
lengths = st.lists(st.integers(1, LONGEST), min_size=1, max_size=5)


def make_decoder(pair: Any) -> Decoder:
    """A decoder whose passes are all made by torch's operators: the C library has no filled form."""
    native = pair.native
    model = Decoder(native.spec, native.weights, pair.config, native.device, native.dtype)
    model.paths = []
    return model


def make_tokens(rows: int, num_new: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, num_new), generator=torch.Generator().manual_seed(seed))


def both_ways(model: Decoder, passes: Callable[[], list[torch.Tensor]], bound: float = 1e-5) -> None:
    """What passes give is the same, up to rounding, filled and flat."""
    made = []
    for model.flattens_rows in (False, True):
        made.append(passes())
    for filled, flat in zip(*made, strict=True):
        assert filled.shape == flat.shape
        assert float((filled - flat).abs().max()) <= bound * max(1.0, float(filled.abs().max()))


def take_real(filled: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch.cat([row[:count] for row, count in zip(filled, counts, strict=True)])


@given(first=lengths, second=st.lists(st.integers(0, LONGEST), min_size=5, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=8)
@pytest.mark.parametrize("family", FAMILIES)
def test_flat_passes_equal_filled_ones(
    pair_of: Callable[[str], Any], family: str, first: list[int], second: list[int], seed: int
) -> None:
    """Prompts, a second part after rows of different lengths (some without any), and a step after that."""
    model = make_decoder(pair_of(family))
    rows, after = len(first), second[: len(first)]

    def passes() -> list[torch.Tensor]:
        cache = model.new_cache("dynamic", rows, 64)
        tokens = make_tokens(rows, LONGEST, seed)
        prompt = model.forward(tokens[:, : max(first)], cache, counts=first, want=Want("all", last_states=True))
        assert prompt.last_states is not None and cache.lengths == first
        made = [take_real(prompt.logits, first), take_real(prompt.last_states, first)]
        if any(after):
            more = model.forward(tokens[:, : max(after)], cache, counts=after)
            made.append(more.logits[[count > 0 for count in after]])
        return [*made, model.forward(tokens[:, :1], cache).logits]

    both_ways(model, passes)


KINDS = ("dynamic", "static", "paged", "hybrid", "quantized", "quantized_static", "offloaded", "sink")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "bloom"])
def test_every_kind_of_cache_takes_flat_passes(pair_of: Callable[[str], Any], family: str, kind: str) -> None:
    """A kind that wants filled keys gets them, and attention alone is filled."""
    model = make_decoder(pair_of(family))

    def passes() -> list[torch.Tensor]:
        cache, tokens = model.new_cache(kind, 3, 64), make_tokens(3, 30)
        made = [model.forward(tokens, cache, counts=[30, 2, 13]).logits]
        made.append(model.forward(tokens[:, :9], cache, counts=[1, 9, 0]).logits[:2])
        return [*made, model.forward(tokens[:, :1], cache).logits]

    both_ways(model, passes)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_keys_that_are_packed_are_read_filled(pair_of: Callable[[str], Any], family: str) -> None:
    """A number may be rounded to the next of 255 steps where another order of sums has moved it."""
    model = make_decoder(pair_of(family))

    def passes() -> list[torch.Tensor]:
        packing = {"nbits": 8, "residual_length": 4, "q_group_size": 4}
        cache, tokens = model.new_cache("quantized", 3, 64, config=packing), make_tokens(3, 30)
        model.forward(tokens, cache, counts=[30, 2, 13])
        assert cache.places().packed.num_packed[0] > 0
        after = model.forward(tokens[:, :9], cache, counts=[1, 9, 3]).logits
        return [after, model.forward(tokens[:, :1], cache).logits]

    both_ways(model, passes, bound=0.03)


@pytest.mark.parametrize("family", ["llama", "opt-350m", "bloom"])
def test_embeddings_early_logits_and_early_ends(pair_of: Callable[[str], Any], family: str) -> None:
    model = make_decoder(pair_of(family))
    counts, tokens = [3, 11, 1], make_tokens(3, 11)

    def passes() -> list[torch.Tensor]:
        def read(want: Want, **given: Any) -> Forward:
            given = given or {"tokens": tokens}
            return model.forward(
                given.pop("tokens", None), model.new_cache("dynamic", 3), counts=counts, want=want, **given
            )

        early = read(Want(early=(0, 2)))
        assert early.early_logits is not None
        embeds = model.get_input_embeddings()(tokens)
        return [early.logits, *early.early_logits, read(Want(exit_layer=2)).logits, read(Want(), embeds=embeds).logits]

    both_ways(model, passes)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_row_is_what_it_is_alone_and_nothing_is_written_past_its_end(
    pair_of: Callable[[str], Any], family: str
) -> None:
    model = make_decoder(pair_of(family))
    counts, tokens, cache = [17, 4, 9], make_tokens(3, 17), model.new_cache("dynamic", 3, 40)
    model.flattens_rows = True
    together = model.forward(tokens, cache, counts=counts).logits
    for row, count in enumerate(counts):
        alone = model.forward(tokens[row : row + 1, :count], model.new_cache("dynamic", 1)).logits
        assert float((together[row] - alone[0]).abs().max()) <= 1e-5 * float(alone.abs().max())
    for buffer in cache.places().buffers:
        for row, count in enumerate(counts):
            assert buffer[row, :count].abs().amin(dim=(1, 2, 3)).min() > 0 and not buffer[row, count:].any()


# --- when a pass is flat --------------------------------------------------------------------------------------


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The counts of the passes that were flat."""
    seen: list[list[int]] = []

    def make(starts: Sequence[int], counts: Sequence[int], positions: torch.Tensor) -> Any:
        seen.append(list(counts))
        return Ragged(starts, counts, positions)

    Ragged = plain_path.Ragged
    monkeypatch.setattr(plain_path, "Ragged", make)
    return seen


def test_large_ragged_prompts_are_flat_on_a_cpu(pair_of: Callable[[str], Any], laid_out: list[list[int]]) -> None:
    model: Decoder = pair_of("llama").native  # with the C library, where it is built
    for counts in ([100, 80, 20], [120, 120, 120], [20, 5, 5], [120, 100]):
        tokens = make_tokens(len(counts), max(counts))
        model.forward(tokens, model.new_cache("dynamic", len(counts)), counts=counts)
    assert laid_out == [[100, 80, 20]]  # equal rows, few tokens and little to save are read filled, or by the library
    model.forward(make_tokens(2, 60), model.new_cache("dynamic", 2), counts=[60, 20], want=Want(hidden_states=True))
    assert len(laid_out) == 1  # states are returned filled


def test_what_saves_work(pair_of: Callable[[str], Any]) -> None:
    def decide(family: str, starts: list[int], counts: list[int], *, kernel: bool, cache: Cache | None = None) -> bool:
        model: Decoder = pair_of(family).native
        layout = Flattening(model.spec, model.device, model.dtype)
        layout._has_kernel = kernel and model.spec.attention_softcap is None
        num_new = max(counts)
        span = Span(starts, num_new, counts, max(starts) + num_new, len(set(starts)) == 1)
        return layout.flattens(cache or model.new_cache("dynamic", len(counts)), span)

    assert decide("llama", [0, 0], [100, 20], kernel=False)
    assert not decide("llama", [0, 0], [100, 95], kernel=False)
    assert not decide("llama", [0, 0], [40, 10], kernel=True)  # few tokens
    # Rows of one length that hold something need a mask when they are filled, and torch's kernel needs none.
    assert decide("llama", [50, 50], [100, 100], kernel=True)
    assert not decide("llama", [50, 50], [100, 100], kernel=False)
    assert not decide("llama", [0, 0], [100, 100], kernel=True)
    assert decide("mistral", [0], [100], kernel=True) and not decide("mistral", [0], [100], kernel=False)
    assert decide("mistral", [0], [1100], kernel=False)  # the mask would be larger than a block
    assert decide("gemma2", [0], [1100], kernel=True)  # and so would the scores
    assert not decide("bloom", [50, 50], [1100, 1100], kernel=True)  # its bias is a mask anyway
    away = pair_of("llama").native.new_cache("offloaded", 2)
    assert decide("llama", [50, 50], [100, 100], kernel=True, cache=away)  # its keys come back plain
    rings = pair_of("mistral").native.new_cache("sliding_window", 1, 2000)
    assert not decide("mistral", [0], [1100], kernel=True, cache=rings)


def test_generate_gives_the_same_tokens(pair_of: Callable[[str], Any]) -> None:
    model = make_decoder(pair_of("gemma2"))
    ids, mask = make_tokens(3, 40), torch.ones(3, 40, dtype=torch.int64)
    mask[0, :33], mask[2, :12] = 0, 0
    made = []
    for model.flattens_rows in (False, True):
        for chunk in (None, 7):
            made.append(
                unspool.generate(
                    model,
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=8,
                    do_sample=False,
                    prefill_chunk_size=chunk,
                )
            )
    assert all(torch.equal(made[0], other) for other in made[1:])
