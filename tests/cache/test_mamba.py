"""The cache of states: rows, trials, what it was and what it can't be, on a recurrence of a few numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache import JOIN, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL, UNDO, Cache, KeyShape, MambaCache, make_cache
from unspool.errors import LoadError, SettingError, UnsupportedError

LAYERS, INNER, WIDTH, KERNEL = 2, 3, 2, 4
SIZES = SimpleNamespace(num_hidden_layers=LAYERS, intermediate_size=INNER, state_size=WIDTH, conv_kernel=KERNEL)


def new_cache(rows: int = 3) -> MambaCache:
    return MambaCache(SIZES, rows, dtype=torch.float32)


def run(state: torch.Tensor, inputs: tuple[torch.Tensor, ...], counts: Any) -> torch.Tensor:
    """A recurrence that forgets half at every position; whole numbers, so that the comparison is exact."""
    (given,) = inputs
    state = state.clone()
    for row, count in enumerate(counts):
        for place in range(count):
            state[row] = state[row] * 0.5 + given[row, place]
    return state


class Plain:
    """What the cache must amount to: each row's whole past, read again from nothing whenever it is asked for."""

    def __init__(self, cache: MambaCache, rows: int) -> None:
        self.cache, self.rows, self.written = cache, [[] for _ in range(rows)], 0.0

    def read(self, num_new: int, counts: list[int] | None = None) -> None:
        """One forward pass of distinct numbers."""
        rows = len(self.rows)
        span = self.cache.begin(rows, num_new, counts)
        numbers = torch.arange(rows * num_new, dtype=torch.float32).view(rows, num_new) + self.written + 1
        self.written += rows * num_new
        for layer in range(LAYERS):
            inputs = (numbers + 1000 * layer)[:, :, None].expand(rows, num_new, INNER)
            window = self.cache.extend(layer, inputs)
            for row, count in enumerate(span.counts):
                past = [x + 1000 * layer for x in self.rows[row]] + inputs[row, :count, 0].tolist()
                whole = [0.0] * (KERNEL - 1) + past  # before the text there is nothing
                assert window[row, : KERNEL - 1 + count, 0].tolist() == whole[-(KERNEL - 1 + count) :]
            fed = inputs[:, :, None, :].expand(rows, num_new, WIDTH, INNER)
            self.cache.next_state(layer).copy_(run(self.cache.state(layer), (fed,), span.counts))
            self.cache.keep_inputs(layer, (fed,), run)
        self.cache.end()
        for row, count in enumerate(span.counts):
            self.rows[row] = self.rows[row] + numbers[row, :count].tolist()
        self.check()

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        assert self.cache.get_seq_length() == max(self.cache.lengths)
        for layer in range(LAYERS):
            for row, past in enumerate(self.rows):
                state = 0.0
                for number in past:
                    state = state * 0.5 + number + 1000 * layer
                expected = torch.full((INNER, WIDTH), state)
                torch.testing.assert_close(self.cache.ssm_states[layer, row], expected, rtol=1e-6, atol=0)
                held = ([0.0] * KERNEL + [number + 1000 * layer for number in past])[-KERNEL:]
                assert self.cache.conv_states[layer, row, 0].tolist() == held

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        self.check()

    def select(self, index: list[int]) -> None:
        self.cache.select_rows(index)
        self.rows = [list(self.rows[i]) for i in index]
        self.check()


# --- passes and rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [None, [1, 4, 2], [4, 0, 3]])
def test_passes_follow_each_other(counts: list[int] | None) -> None:
    plain = Plain(new_cache(), 3)
    plain.read(4, counts)
    plain.read(1)
    plain.read(1, [0, 1, 1])
    plain.read(7, [7, 2, 0])
    plain.read(1)


@pytest.mark.parametrize("index", [[1], [0, 2], [2, 0, 1], [1, 1, 0, 2, 2], [0, 1, 2]])
def test_selected_rows_go_on(index: list[int]) -> None:
    plain = Plain(new_cache(), 3)
    plain.read(4, [2, 4, 3])
    plain.select(index)
    plain.read(1)
    plain.read(3)


def test_the_last_step_is_undone_as_often_as_it_is_taken() -> None:
    plain = Plain(new_cache(), 3)
    plain.read(4, [2, 4, 3])
    for _ in range(3):
        plain.read(1)
        plain.truncate([len(row) - 1 for row in plain.rows])
    plain.read(1)
    plain.select([2, 0])  # rows that leave take nothing away from it
    plain.truncate([len(row) - 1 for row in plain.rows])
    plain.read(3)


@pytest.mark.parametrize("what", ["undone", "many", "ragged", "moved", "two"])
def test_no_more_than_the_last_step_is_undone(what: str) -> None:
    plain = Plain(new_cache(), 3)
    plain.read(4)
    if what == "many":
        plain.read(2)
    else:
        plain.read(1)
        plain.read(1, [1, 0, 1] if what == "ragged" else None)
    if what == "undone":
        plain.truncate([5, 5, 5])
    if what == "moved":
        plain.select([1, 0, 2])
    back = 2 if what == "two" else 1
    with pytest.raises(UnsupportedError, match="a state can't be taken apart"):
        plain.cache.truncate([length - back for length in plain.cache.lengths])
    plain.check()


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Passes, trials that are taken back in part, rows that leave, come twice or change places (amid trials too)."""
    rows = draw(st.integers(1, 3))
    done: list[tuple[str, Any]] = [("rows", rows)]
    lengths, least = [0] * rows, None
    for _ in range(draw(st.integers(3, 10))):
        what = draw(
            st.sampled_from(["read", "read", "step", "step", "trial", "truncate", "truncate", "select", "clear"])
        )
        if what in ("read", "step"):
            num_new = 1 if what == "step" else draw(st.integers(1, 6))
            counts = None if what == "step" else draw(st.lists(st.integers(0, num_new), min_size=rows, max_size=rows))
            done.append(("read", (num_new, counts)))
            lengths = [n + c for n, c in zip(lengths, counts or [1] * rows, strict=True)]
        elif what == "trial":
            done.append(("trial", None))
            least = list(lengths)
        elif what == "truncate" and least is not None and len(done) > 2:
            lengths = [draw(st.integers(low, high)) for low, high in zip(least, lengths, strict=True)]
            done.append(("truncate", list(lengths)))
            least = None
        elif what == "clear" and any(lengths):
            lengths, least = [0] * rows, None
            done.append(("truncate", list(lengths)))
        elif what == "select" and any(entry[0] == "read" for entry in done):
            index = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5))
            rows, lengths = len(index), [lengths[i] for i in index]
            least = None if least is None else [least[i] for i in index]
            done.append(("select", index))
    return done


@settings(max_examples=80)
@given(history=histories())
def test_any_history_is_never_having_read_what_was_taken_back(history: list[tuple[str, Any]]) -> None:
    (_, rows), *rest = history
    plain = Plain(new_cache(rows), rows)
    for what, value in rest:
        if what == "read":
            plain.read(*value)
        elif what == "trial":
            plain.cache.begin_trial()
        elif not plain.cache.lengths:
            continue  # nothing was read yet
        else:
            getattr(plain, what)(value)


# --- trials -------------------------------------------------------------------------------------------------


def test_a_trial_is_taken_back_row_by_row() -> None:
    plain = Plain(new_cache(), 3)
    plain.read(5, [5, 2, 4])
    plain.cache.begin_trial()
    plain.read(4)
    plain.read(1)
    plain.truncate([7, 2, 9])
    plain.read(1)


def test_a_trial_ends_with_its_truncation() -> None:
    plain = Plain(new_cache(), 3)
    plain.read(3)
    plain.cache.begin_trial()
    plain.read(2)
    plain.truncate([5, 5, 5])
    with pytest.raises(UnsupportedError, match=r"from lengths \[5, 5, 5\] to \[4, 5, 5\].*begin_trial"):
        plain.cache.truncate([4, 5, 5])
    plain.check()  # the refusal changed nothing
    plain.read(1)


def test_a_trial_does_not_reach_before_its_beginning() -> None:
    plain = Plain(new_cache(), 3)
    plain.read(3)
    plain.cache.begin_trial()
    plain.read(2)
    with pytest.raises(UnsupportedError, match=r"can go back to \[3, 3, 3\], or all of them to 0"):
        plain.cache.truncate([2, 5, 5])
    plain.truncate([3, 4, 5])  # and the trial is still on after the refusal


def test_a_second_trial_begins_anew() -> None:
    plain = Plain(new_cache(), 3)
    plain.cache.begin_trial()
    plain.read(3)
    plain.cache.begin_trial()
    plain.read(2)
    with pytest.raises(UnsupportedError):
        plain.cache.truncate([2, 3, 3])
    plain.truncate([3, 4, 3])


def test_all_rows_can_always_go_back_to_nothing() -> None:
    plain = Plain(new_cache(), 3)
    plain.cache.truncate([])
    plain.read(3)
    plain.truncate([0, 0, 0])
    plain.read(2)


@pytest.mark.parametrize("lengths", [[3], [4, 3, 3], [-1, 2, 3], [3] * 4])
def test_rolling_back_goes_back_only(lengths: list[int]) -> None:
    plain = Plain(new_cache(), 3)
    plain.cache.begin_trial()
    plain.read(3)
    with pytest.raises(SettingError, match="can't roll back"):
        plain.cache.truncate(lengths)
    plain.check()


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_pass_that_fails_changes_nothing(is_trial: bool) -> None:
    plain = Plain(new_cache(), 3)
    plain.read(3)
    if is_trial:
        plain.cache.begin_trial()
    plain.cache.begin(3, 1)
    plain.cache.extend(0, torch.full((3, 1, INNER), 77.0))
    plain.cache.next_state(0).fill_(77.0)
    plain.cache.keep_inputs(0, (torch.full((3, 1, WIDTH, INNER), 77.0),), run)
    plain.check()
    plain.read(1)
    if is_trial:
        plain.truncate([3, 4, 3])


def test_rows_put_aside_come_back() -> None:
    plain = Plain(new_cache(), 3)
    plain.read(3)
    ended = list(plain.rows[1])
    plain.cache.put_aside([1])
    plain.read(2)
    plain.rows[1] = ended
    plain.cache.take_back()
    plain.check()
    plain.read(1)


# --- copies and files ---------------------------------------------------------------------------------------


def test_a_clone_goes_its_own_way() -> None:
    plain = Plain(new_cache(), 3)
    plain.read(4, [2, 4, 3])
    plain.cache.begin_trial()
    plain.read(3)
    copied = Plain(plain.cache.clone(), 3)
    copied.rows, copied.written = [list(row) for row in plain.rows], plain.written
    copied.truncate([3, 7, 3])  # the trial was cloned too
    copied.read(2)
    plain.truncate([2, 5, 6])
    plain.read(1)
    copied.check()


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    plain = Plain(new_cache(), 3)
    plain.read(6, [2, 6, 3])
    plain.cache.save(tmp_path / "states.safetensors")
    loaded = Cache.load(tmp_path / "states.safetensors")
    assert isinstance(loaded, MambaCache) and loaded.dtype == torch.float32 and loaded.lengths == [2, 6, 3]
    plain.cache = loaded
    plain.check()
    plain.read(2)
    plain.select([2, 0])


def test_a_file_whose_parts_do_not_fit_is_refused(tmp_path: Path) -> None:
    cache = new_cache(2)
    Plain(cache, 2).read(3)
    cache.lengths = [3, 3, 3]
    cache.save(tmp_path / "bad.safetensors")
    with pytest.raises(LoadError, match=r"damaged.*for 3 rows"):
        Cache.load(tmp_path / "bad.safetensors")


def test_what_does_not_fit_a_model_is_named() -> None:
    shape = KeyShape(LAYERS, 0, 0, torch.float32, torch.device("cpu"), config=SIZES)
    assert new_cache().find_misfit(shape) is None
    assert "dtype=model.dtype" in str(MambaCache(SIZES, 1).find_misfit(shape))
    for name, words in (("state_size", "state_size 9"), ("conv_kernel", "conv_kernel 9")):
        other = SimpleNamespace(**{**vars(SIZES), name: 9})
        assert words in str(MambaCache(other, 1, torch.float32).find_misfit(shape))


# --- what it says of itself ---------------------------------------------------------------------------------


def test_capabilities_and_memory() -> None:
    cache = new_cache(2)
    assert cache.can == {TRIAL, UNDO, SELECT_ROWS, RAGGED, JOIN} and ROLL_BACK not in cache.can and cache.is_endless
    assert cache.conv_states.shape == (LAYERS, 2, INNER, KERNEL) and cache.ssm_states.shape == (LAYERS, 2, INNER, WIDTH)
    before = cache.nbytes
    assert before == 2 * 4 * LAYERS * 2 * INNER * (KERNEL + WIDTH)
    plain = Plain(cache, 2)
    plain.read(50)
    assert cache.nbytes == before  # however long the text
    assert MambaCache(SIZES, 1).dtype == torch.float16  # the reference's default
    assert len(cache) == LAYERS and cache.get_max_cache_shape() is None


def test_the_table_makes_it() -> None:
    shape = KeyShape(LAYERS, 0, 0, torch.float32, torch.device("cpu"), config=SIZES)
    assert isinstance(made := make_cache("mamba", shape, 4), MambaCache) and made.max_batch_size == 4
    with pytest.raises(SettingError, match="takes nothing"):
        make_cache("mamba", shape, 4, options={"max_cache_len": 3})


def test_what_does_not_fit() -> None:
    with pytest.raises(SettingError, match="at least one row"):
        new_cache(0)
    cache = new_cache(2)
    with pytest.raises(SettingError, match=r"3 rows do not fit .*max_batch_size=2"):
        cache.begin(3, 1)
    plain = Plain(cache, 1)  # fewer are welcome
    plain.read(2)
    with pytest.raises(SettingError, match="holds 1 rows and the forward pass has 2"):
        cache.begin(2, 1)
    with pytest.raises(SettingError, match="do not fit 1 rows of 2"):
        cache.begin(1, 2, [3])
    plain.read(1)
    for call in (lambda: cache.write(0, torch.zeros(1)), lambda: cache.update(torch.zeros(1), torch.zeros(1), 0)):
        with pytest.raises(UnsupportedError, match="holds states and no keys"):
            call()
    with pytest.raises(RuntimeError, match="between begin"):
        cache.extend(0, torch.zeros(1, 1, INNER))


# --- the reference's surface --------------------------------------------------------------------------------


def test_states_can_be_written_and_read_in_the_references_shapes() -> None:
    cache = new_cache(2)
    prompt = torch.randn(2, INNER, KERNEL, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cache.update_conv_state(0, prompt, torch.arange(KERNEL)), prompt)
    token = torch.ones(2, INNER, 1)
    expected = torch.cat((prompt[..., 1:], token), dim=-1)
    assert torch.equal(cache.update_conv_state(0, token, torch.tensor([KERNEL])), expected)
    assert torch.equal(cache.conv_states[0], expected) and not cache.conv_states[1].any()
    assert cache.get_seq_length() == KERNEL + 1
    state = torch.randn(2, INNER, WIDTH, generator=torch.Generator().manual_seed(1))
    assert torch.equal(cache.update_ssm_state(1, state), state)
    assert torch.equal(cache.ssm_states[1], state) and not cache.ssm_states[0].any()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.ssm_states[1], state.flip(0))
    cache.reset()
    assert cache.lengths == [] and not cache.ssm_states.any() and not cache.conv_states.any()
    Plain(cache, 1).read(3)


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [(2, (2, INNER, WIDTH), "2 layers"), (0, (1, INNER, WIDTH), "2 rows"), (0, (2, INNER, WIDTH + 1), "state_size=2")],
)
def test_states_of_other_shapes_are_refused(layer: int, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        new_cache(2).update_ssm_state(layer, torch.zeros(shape))
    with pytest.raises(SettingError, match="conv_kernel_size=4"):
        new_cache(2).update_conv_state(0, torch.zeros(2, INNER, 5), torch.arange(5))
