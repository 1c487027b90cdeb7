"""Parts from outside: what registering gives, what is refused, and what a package that fails does."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes import FakeModel

import unspool
from unspool import GenerationConfig, PluginError, SettingError, generate
from unspool.api.opening import INPUT_NAMES
from unspool.api.starting import start
from unspool.cache import CacheKindEntry
from unspool.cli.parser import Parser
from unspool.cli.settings import add_settings, collect_settings
from unspool.config.parameter import make_flag, make_number
from unspool.config.parameters import ARGUMENTS, PARAMETERS
from unspool.logits.entry import ProcessorEntry
from unspool.logits.order import PROCESSORS, list_stage
from unspool.logits.order_table import make_table
from unspool.models.families.llama import LLAMA
from unspool.plan.drafters import DrafterEntry
from unspool.plan.strategies import StrategyEntry
from unspool.registry import unregister
from unspool.stopping.entry import StopEntry


class Lift(unspool.LogitsProcessor):
    """Adds a number to the score of token 7."""

    def __init__(self, lift: Any) -> None:
        self.lift = torch.as_tensor(lift, dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros_like(scores)
        bias[:, 7] = self.lift
        return scores + bias


class Doubled(unspool.StoppingCriteria):
    """Stops at a token that comes twice in a row."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == input_ids[:, -2]


LIFT = ProcessorEntry(
    processor=Lift,
    parameters=(
        make_number("lift_seven", 0.0, "control", "Added to token 7.", per_row=True, off=(0.0,)),
        make_flag("lift_gently", False, "control", "Not so much."),
    ),
)
DOUBLED = StopEntry(
    stop=Doubled,
    reason="doubled",
    parameters=(make_flag("stop_doubled", False, "length", "Stop at a doubled token.", off=(False,)),),
    make=lambda kind, value, context: kind(),
)


@contextmanager
def registered(*entries: Any) -> Iterator[None]:
    unspool.register(*entries)
    try:
        yield
    finally:
        unregister(*entries)


def test_a_processors_settings_are_settings_like_others(tmp_path: Path) -> None:
    before = GenerationConfig(do_sample=True)
    with pytest.raises(SettingError, match="no setting 'lift_seven'"):
        generate(FakeModel(), [[1, 2]], max_new_tokens=3, lift_seven=100.0)
    with registered(LIFT):
        assert before.lift_seven == 0.0  # a config of before has the default
        found = generate(FakeModel(), [[1, 2], [3, 4]], max_new_tokens=3, lift_seven=[1000.0, 0.0])
        assert found[0, 2:].tolist() == [7, 7, 7]
        assert found[1].tolist() == generate(FakeModel(), [[3, 4]], max_new_tokens=3)[0].tolist()
        config = GenerationConfig(lift_seven=1000.0)
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "generation_config.json").read_text()) == {"lift_seven": 1000.0}
        read = GenerationConfig.from_pretrained(tmp_path)
        assert generate(FakeModel(), [[1, 2]], read, max_new_tokens=2)[0, 2:].tolist() == [7, 7]
        with pytest.raises(SettingError, match="`lift_seven` must be a number"):
            GenerationConfig(lift_seven="much")
        with pytest.raises(SettingError, match="`lift_gently` is set to `True`, which is only read together with"):
            generate(FakeModel(), [[1, 2]], max_new_tokens=3, lift_gently=True)
        parser = Parser("run", "", "")
        add_settings(parser)
        assert collect_settings(parser.read(["--lift-seven", "2.5", "--lift-gently"])) == {
            "lift_seven": 2.5,
            "lift_gently": True,
        }
    assert "lift_seven" not in PARAMETERS


def test_a_processor_stands_where_its_entry_says() -> None:
    with registered(LIFT):
        assert list_stage("control")[-1] is LIFT
        assert "| `Lift` | `lift_seven` | None, 0.0 | yes | `lift_gently` |" in make_table(list(PROCESSORS.values()))
        assert "Lift" not in make_table()
    names = [entry.setting for entry in PROCESSORS.values()]
    first = ProcessorEntry(processor=Lift, parameters=LIFT.parameters, stage="sampling", after="top_k")
    with registered(first):
        place = list(PROCESSORS).index("top_k")
        assert list(PROCESSORS) == [*names[: place + 1], "lift_seven", *names[place + 1 :]]
        assert PARAMETERS["lift_seven"].needs == ("do_sample",)


def test_a_stop_ends_rows_with_its_reason() -> None:
    model = FakeModel()
    model.table += torch.eye(23) * 40  # it writes one token for ever
    with registered(DOUBLED):
        found = generate(model, [[1, 2]], max_new_tokens=9, stop_doubled=True, return_dict_in_generate=True)
        assert found.sequences.shape[1] < 11 and found.sequences[0, -1] == found.sequences[0, -2]
        assert generate(model, [[1, 2]], max_new_tokens=9).shape[1] == 11


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (object(), "takes entries of unspool.plugins"),
        (Lift, "takes entries of unspool.plugins"),
        (ProcessorEntry(processor=Lift, parameters=("lift",)), "the entry of a processor is wrong"),
        (ProcessorEntry(processor=Lift), "no setting that switches it on"),
        (ProcessorEntry(processor=Lift, parameters=(PARAMETERS["top_k"],)), "there is a processor 'top_k' already"),
        (
            ProcessorEntry(processor=Lift, parameters=(make_number("num_beams", 1.0, "control", "."),)),
            "there is a setting or an argument 'num_beams' already",
        ),
        (
            ProcessorEntry(processor=Lift, parameters=(make_number("tokenizer", 1.0, "control", "."),)),
            "there is a setting or an argument 'tokenizer' already",
        ),
        (
            ProcessorEntry(processor=Lift, parameters=(make_number("to_dict", 1.0, "control", "."),)),
            "there is a setting or an argument 'to_dict' already",
        ),
        (
            ProcessorEntry(processor=Lift, parameters=(make_number("a-b", 1.0, "control", "."),)),
            "needs a Python name",
        ),
        (
            ProcessorEntry(processor=Lift, parameters=LIFT.parameters, stage="never"),
            "the stage 'never'",
        ),
        (ProcessorEntry(processor=Lift, parameters=LIFT.parameters, after="nobody"), "after 'nobody'"),
        (CacheKindEntry("static", len), "there is a kind of cache 'static' already"),
        (CacheKindEntry("", len), "a kind of cache needs a name"),
        (CacheKindEntry("cupboard", None), "has no function that makes it"),
        (replace(LLAMA, name="cat"), "LlamaForCausalLM is read by the family 'llama' already"),
        (replace(LLAMA, architectures=("Cat",)), "there is a model family 'llama' already"),
        (replace(LLAMA, name="cat", architectures=(), gguf=()), "names no architecture"),
        (StrategyEntry(name="idle", make=len), "no setting that switches it on"),
        (
            StrategyEntry(name="idle", make="unspool.errors:__doc__", parameters=LIFT.parameters),
            "no function that makes",
        ),
        (StrategyEntry(name="beams", make=len, parameters=LIFT.parameters), "there is a strategy 'beams' already"),
        (DrafterEntry(name="idle", make=len), "no setting that switches it on"),
        (
            DrafterEntry(name="early_exit", make=len, parameters=LIFT.parameters),
            "a drafter 'early_exit' already",
        ),
        (StopEntry(stop=Doubled, reason="eos", parameters=DOUBLED.parameters), "there is a stop 'eos' already"),
        (StopEntry(stop=Doubled, reason="criteria", parameters=DOUBLED.parameters), "a caller's own criteria"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_added_is_refused_and_nothing_is(entry: Any, told: str) -> None:
    names = list(PARAMETERS)
    with pytest.raises(PluginError, match=told):
        unspool.register(DOUBLED, entry)
    assert list(PARAMETERS) == names


def test_no_setting_can_take_the_name_of_an_argument() -> None:
    named = {*inspect.signature(generate).parameters, *inspect.signature(start).parameters, *INPUT_NAMES}
    assert named - {"kwargs"} == set(ARGUMENTS)


def test_only_what_was_registered_can_be_taken_back() -> None:
    for entry in (LIFT, PROCESSORS["top_k"]):
        with pytest.raises(PluginError, match="not a processor that was registered"):
            unregister(entry)


# --- packages -------------------------------------------------------------------------------------------------


def install(folder: Path, name: str, code: str) -> None:
    """A package with an entry point, as an installer leaves it."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[unspool.plugins]\n{name} = {name}:offer\n")


GOOD = """
import sys
from unspool.logits.entry import ProcessorEntry
from unspool.config.parameter import make_number
def offer():
    return [ProcessorEntry(processor="good:Kind", parameters=(make_number("good_one", None, "control", "Good."),))]
"""


def run_python(folder: Path, code: str, **environment: str) -> str:
    path = f"{folder}:{Path(unspool.__file__).parents[1]}"
    command = [sys.executable, "-W", "always", "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": path, **environment})
    assert told.returncode == 0, told.stderr
    return told.stdout + told.stderr


def test_packages_are_loaded_when_settings_are_read_and_not_before(tmp_path: Path) -> None:
    install(tmp_path, "good", GOOD)
    code = (
        "import sys, unspool; print('good' in sys.modules);"
        "from unspool.config import PARAMETERS; print('good_one' in PARAMETERS, 'good' in sys.modules)"
    )
    assert run_python(tmp_path, code).split() == ["False", "True", "True"]
    assert run_python(tmp_path, code, UNSPOOL_PLUGINS="off").split() == ["False", "False", "False"]
    shown = "from unspool.cli.main import main; import sys; main(['run', '--help']); sys.exit('torch' in sys.modules)"
    assert "--good-one X" in run_python(tmp_path, shown)


def test_a_package_that_fails_is_left_out_with_a_warning(tmp_path: Path) -> None:
    install(tmp_path, "good", GOOD)
    install(tmp_path, "bad", "raise OSError('no such device')")
    install(tmp_path, "odd", "offer = 5")
    install(tmp_path, "twin", GOOD.replace("good:", "twin:"))  # a name that is taken
    told = run_python(tmp_path, "from unspool.config import PARAMETERS; print('good_one' in PARAMETERS)")
    assert told.startswith("True")
    assert "the unspool plug-in 'bad' of bad 1.0 was left out: OSError: no such device" in told
    assert "'odd' of odd 1.0 was left out: PluginError: unspool.register takes entries" in told
    assert "'twin' of twin 1.0 was left out: PluginError: there is a processor 'good_one' already" in told
