"""All blocks of an encoder-decoder's step in one kernel, beside torch's operators in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import needs_gpu, pytestmark

__all__ = ["pytestmark"]

WIDTH, ROOM = 64, 1510
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="the kernel is written for Hopper")


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def draw_layer(hidden: int, inner: int, *, has_first: bool) -> Any:
    from unspool.kernels.gpu.resident.blocks import ResidentLayer

    shapes = [(3 * hidden, hidden), *[(hidden, hidden)] * 3, (inner, hidden), (hidden, inner)]
    norms = [(random(hidden, scale=0.2) + 1, random(hidden, scale=0.2)) for _ in range(3)]
    return ResidentLayer(
        tuple(random(*shape, scale=shape[1] ** -0.5) for shape in shapes),
        tuple(random(shape[0], scale=0.3) for shape in shapes),
        tuple(norms if has_first else [None, *norms[1:]]),
    )


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Heads (heads, width) over keys (positions, heads, width)."""
    scores = torch.einsum("hd,khd->hk", query, keys) * scale
    return torch.einsum("hk,khd->hd", scores.softmax(1), values).flatten()


def run_reference(
    layers: list[Any],
    x: torch.Tensor,
    own: list[torch.Tensor],
    sources: list[torch.Tensor],
    is_norm_first: bool,
    scale: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The state after all blocks, before the norm that follows, and the new keys and values. States are rounded."""
    state, heads, made = x.double(), x.shape[0] // WIDTH, []

    def normalise(x: torch.Tensor, norm: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        return x if norm is None else F.layer_norm(x, x.shape, norm[0].double(), norm[1].double(), 1e-5)

    def round_state(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().double()

    for layer, held, source in zip(layers, own, sources, strict=True):
        weights = [matrix.double() for matrix in layer.matrices]
        biases = [bias.double() for bias in layer.biases]
        for part, norm in enumerate(layer.norms):
            entered = normalise(state, norm)
            state = state if is_norm_first else round_state(entered)
            first = 2 * part
            y = weights[first] @ entered + biases[first]
            if part == 0:
                query, key, value = y.view(3, heads, WIDTH)
                made.append(torch.stack((key, value)))
                keys = torch.cat((held.double(), made[-1][None]))
                y = attend(query, keys[:, 0], keys[:, 1], scale)
            elif part == 1:
                y = attend(y.view(heads, WIDTH), source[:, 0].double(), source[:, 1].double(), 0.1)
            else:
                y = F.relu(y)
            state = round_state(state + weights[first + 1] @ y + biases[first + 1])
    return state, made


class Blocks:
    """Some random layers, and the kernel for them."""

    def __init__(
        self, hidden: int, times: int, *, is_norm_first: bool, has_first: bool, num_layers: int = 3, key_tiles: int = 1
    ) -> None:
        from unspool.kernels.gpu.products.activations import CODES
        from unspool.kernels.gpu.resident.blocks import ResidentBlocks, takes_layers

        self.heads, self.hidden, self.is_norm_first = hidden // WIDTH, hidden, is_norm_first
        self.layers = [
            draw_layer(hidden, times * hidden, has_first=has_first or number > 0) for number in range(num_layers)
        ]
        assert takes_layers(self.layers, self.heads)
        self.run = ResidentBlocks(
            self.layers,
            eps=1e-5,
            activation=CODES["relu"],
            is_norm_first=is_norm_first,
            device=torch.device("cuda"),
            key_tiles=key_tiles,
        )
        self._base = torch.zeros(8, dtype=torch.bfloat16, device="cuda")

    def check(self, length: int, source: int, mean: float = 0.0, most: float = 0.03, scale: float = 0.2) -> None:
        """Run them over random keys, and compare."""
        own, others = ([random(ROOM, 2, self.heads, WIDTH) for _ in self.layers] for _ in range(2))
        table, sources = (
            torch.tensor([*((held.data_ptr() - self._base.data_ptr()) // 16 for held in kept), ROOM], device="cuda")
            for kept in (own, others)
        )
        x, out = random(1, self.hidden) + mean, torch.full((1, self.hidden), torch.nan, device="cuda").bfloat16()
        expected, made = run_reference(
            self.layers,
            x[0],
            [held[:length] for held in own],
            [held[:source] for held in others],
            self.is_norm_first,
            scale,
        )
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        self.run(x, out, self._base, table, lengths, sources, torch.tensor([source], device="cuda"), scale, 0.1)
        centred = expected - expected.mean()
        assert float((out[0].double() - expected).norm() / centred.norm()) < most
        for held, new in zip(own, made, strict=True):
            assert float((held[length].double() - new).norm() / new.norm()) < most


@needs_gpu
@needs_hopper
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize(("length", "source"), [(0, 1), (5, 130), (127, 512), (128, 700), (601, 64)])
@pytest.mark.parametrize(("is_norm_first", "has_first"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("hidden", "times"), [(512, 4), (768, 4), (1024, 4), (1024, 2), (512, 1), (1280, 4), (1280, 1)]
)
def test_blocks_are_torchs(
    hidden: int, times: int, is_norm_first: bool, has_first: bool, length: int, source: int, mean: float
) -> None:
    """Twice, so that words of one run are there in the next, over other keys."""
    torch.manual_seed(length + source)
    blocks = Blocks(hidden, times, is_norm_first=is_norm_first, has_first=has_first)
    is_rough = mean > 0 and (is_norm_first or not has_first)  # a state that stays so large is rounded to eighths
    scale = 0.0002 if mean > 0 and not has_first else 0.2  # large queries and keys: else one rounding decides for a key
    for _ in range(2):
        blocks.check(length, source, mean, most=0.1 if is_rough else 0.03, scale=scale)


@needs_gpu
@needs_hopper
@pytest.mark.parametrize(("length", "source"), [(3, 1500), (447, 1500), (200, 385), (1400, 1)])
@pytest.mark.parametrize("hidden", [512, 768, 1024, 1280])
def test_a_long_source_is_read_by_several_tiles(hidden: int, length: int, source: int) -> None:
    torch.manual_seed(length)
    blocks = Blocks(hidden, 4, is_norm_first=True, has_first=True, key_tiles=2)
    for _ in range(2):
        blocks.check(length, source)


@needs_gpu
@needs_hopper
@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize("hidden", [512, 1280])
def test_a_token_is_looked_up(hidden: int, has_places: bool) -> None:
    """As `embed` does it."""
    from unspool.kernels.gpu.resident.blocks import TokenState
    from unspool.kernels.gpu.sampling.tokens import LearnedPositions, embed

    torch.manual_seed(0)
    blocks = Blocks(hidden, 1, is_norm_first=True, has_first=True)
    base, none = torch.zeros(8, dtype=torch.bfloat16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    own = random(16, 2, hidden // WIDTH, WIDTH)
    table = torch.tensor([(own.data_ptr() - base.data_ptr()) // 16] * 3 + [16], device="cuda")
    length = torch.tensor([5], dtype=torch.int32, device="cuda")
    places = LearnedPositions(random(9, hidden), 2, length) if has_places else None
    token, rows = torch.tensor([70], device="cuda"), random(90, hidden)
    x, outs = torch.empty(1, hidden, device="cuda").bfloat16(), random(2, 1, hidden)
    embed(token, rows, 1.7, x, places)
    for begin, out in zip((x, TokenState(token, rows, 1.7, places)), outs, strict=True):
        blocks.run(begin, out, base, table, length, table, none, 0.1, 0.1)
    torch.cuda.synchronize()
    assert torch.equal(*outs) and bool(outs.isfinite().all())


@needs_gpu
@needs_hopper
def test_tags_come_again() -> None:
    """A tag has 16 bits. Parts that a short text does not write are not those of a long one, 65,536 layers before."""
    torch.manual_seed(0)
    blocks = Blocks(512, 1, is_norm_first=True, has_first=True)
    for begin in (0, 1 << 16, (1 << 16) // 3 - 2, (1 << 31) - 3):
        with torch.inference_mode():
            blocks.run._count.fill_(begin)
        for length, source in ((601, 700), (5, 9), (130, 300)):
            blocks.check(length, source)


@needs_gpu
@needs_hopper
def test_a_row_that_is_absent_writes_nothing() -> None:
    torch.manual_seed(0)
    blocks = Blocks(512, 1, is_norm_first=True, has_first=True, num_layers=2)
    base = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    own = random(16, 2, 8, WIDTH)
    table = torch.tensor([(own.data_ptr() - base.data_ptr()) // 16] * 2 + [16], device="cuda")
    none = torch.tensor([0], device="cuda")
    before, out = own.clone(), random(1, 512)
    absent = torch.tensor([-1], dtype=torch.int32, device="cuda")
    blocks.run(random(1, 512), out, base, table, absent, table, none, 0.1, 0.1)
    torch.cuda.synchronize()
    assert torch.equal(own, before)
