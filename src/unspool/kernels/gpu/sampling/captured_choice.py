"""The choice of tokens at the end of a captured pass, from which the next pass goes on without the host.

The references are `decoding.randomness.draw_uniform`, `decoding.tails.draw_by_operators` and `select.take_likeliest`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.mixing import mix
from unspool.kernels.gpu.sampling.ends import PassEnd
from unspool.kernels.gpu.sampling.held_input import HeldInput
from unspool.kernels.gpu.sampling.row_draw import draw_row
from unspool.kernels.gpu.sampling.tail import TailSettings, draw_tail
from unspool.kernels.gpu.sampling.tokens import count_tiles, take_highest
from unspool.kernels.gpu.sampling.whole_tail import WholeTail
from unspool.kernels.token_choice import ChoiceSizes, TokenChoice

ROWS = 128  # per program
_STEP = tl.constexpr(0x9E3779B97F4A7C15)  # as `splitmix.STEP`
# The parts' dtypes where they are ranked, as `TailSettings` has them.
_DTYPES = {"top_k": torch.int64, "top_p": torch.float64}


@triton.jit
def _draw_uniforms(SEEDS, LENGTHS, OUT, rows, ROWS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    let_next_start(PDL)
    wait_for_input(PDL)
    seed = tl.load(SEEDS + row, mask=row < rows, other=0)
    position = tl.load(LENGTHS + row, mask=row < rows, other=0).to(tl.int64) + 1  # of the token behind the one read
    state = mix(seed.to(tl.uint64) + _STEP)
    state = mix(state + position.to(tl.uint64) * _STEP)
    tl.store(OUT + row, (state >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=row < rows)  # 2^-53


@triton.jit(do_not_specialize=["num_logged"])
def _enter_tokens(
    CHOSEN, TOKENS, LENGTHS, LOG, rows, num_logged, ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    let_next_start(PDL)
    wait_for_input(PDL)
    token = tl.load(CHOSEN + row, mask=row < rows, other=0)
    length = tl.load(LENGTHS + row, mask=row < rows, other=-1)
    tl.store(TOKENS + row, token, mask=row < rows)
    tl.store(LENGTHS + row, length + 1, mask=(row < rows) & (length >= 0))
    line = tl.maximum(length, 0) % num_logged
    tl.store(LOG + line * rows + row, token, mask=row < rows)


def draw_uniforms(seeds: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
    """out (rows,) float64: the numbers in [0, 1) of rows that hold so many tokens (rows,) int32 before the one that is
    read, by their seeds (rows,) int64."""
    rows = len(seeds)
    grid, options = (count_parts(rows, ROWS),), launch_options()
    launch(_draw_uniforms, grid, seeds, lengths, out, rows, ROWS=min(ROWS, max(2, round_up(rows))), **options)


def enter_tokens(chosen: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, log: torch.Tensor) -> None:
    """Enter what rows chose (rows,) where the next pass reads it and in the log (see `take_highest`), and increment the
    lengths of rows that are present."""
    rows = len(chosen)
    grid, options = (count_parts(rows, ROWS),), launch_options()
    width = min(ROWS, max(2, round_up(rows)))
    launch(_enter_tokens, grid, chosen, tokens, lengths, log, rows, len(log), ROWS=width, **options)


class CapturedChoice:
    """Chooses the tokens of a captured pass, for a fixed number of rows: they are those that the next pass reads."""

    def __init__(self, sizes: ChoiceSizes, rows: int, vocab: int, device: torch.device) -> None:
        self._sizes, self._rows = sizes, rows
        self._mask = HeldInput(torch.zeros(vocab, dtype=torch.bool, device=device))  # what is not 0 is forbidden
        self._tops = torch.empty(rows, count_tiles(vocab), dtype=torch.float32, device=device)
        self._seeds = HeldInput(torch.zeros(rows, dtype=torch.int64, device=device))
        self._uniforms = torch.zeros(rows, dtype=torch.float64, device=device)
        parts = sizes.parts or ()
        cuts = [part for part in parts if part != "temperature"]
        self._whole: WholeTail | None = None  # it holds the settings, if there is one
        self._settings: dict[str, HeldInput] = {}
        if cuts and not sizes.most_ranked:
            self._whole = WholeTail(rows, vocab, parts, device)
        else:
            self._settings = {part: HeldInput.of_rows(rows, _DTYPES.get(part, torch.float32), device) for part in parts}
        self._logits: torch.Tensor | None = None

    def holds(self, choice: TokenChoice) -> bool:  # noqa: ARG002 - what it would need is in `set_inputs`
        """Whether the next pass has all of its inputs: tokens are brought to it with every launch."""
        return False

    def set_inputs(self, choice: TokenChoice) -> None:
        """Set the inputs of the next passes; what they have already is not copied again."""
        if choice.mask is not None:
            self._mask.give(choice.mask)
        if choice.seeds is not None:
            self._seeds.give(choice.seeds)
        if self._whole is not None:
            self._whole.set(choice.settings)
        for part, held in self._settings.items():
            held.give(choice.settings[part])

    @property
    def mask(self) -> torch.Tensor | None:
        """Where a pass that finds the likeliest tokens by itself reads which are forbidden (vocab,); None: none is."""
        return self._mask.values if self._sizes.is_masked else None

    def finish(self, end: PassEnd) -> None:
        """Launch the choice after a pass over one token of every row."""
        assert end.log is not None
        self._logits = logits = end.logits[: self._rows]
        if self._sizes.is_masked:
            logits.masked_fill_(self._mask.values, float("-inf"))
        if self._sizes.parts is None:
            take_highest(logits, self._tops, end.tokens, end.lengths, None, end.log)
            return
        draw_uniforms(self._seeds.values, end.lengths, self._uniforms)
        enter_tokens(self._draw(logits), end.tokens, end.lengths, end.log)

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        sizes, uniforms = self._sizes, self._uniforms
        if self._whole is not None:
            return self._whole.draw(logits, uniforms, as_graph=False)
        settings = {part: held.values for part, held in self._settings.items()}
        if sizes.most_ranked:
            return draw_tail(
                logits, uniforms, TailSettings(largest_k=sizes.most_ranked, fewest=sizes.fewest, **settings)
            )
        if "temperature" in settings:
            logits.div_(settings["temperature"])
        return draw_row(logits, uniforms)

    def take(self, rows: int) -> tuple[torch.Tensor, None]:
        """The logits (rows, vocab) until the next pass, changed by the choice; the tokens are in the log."""
        assert self._logits is not None
        return self._logits[:rows], None
