"""`unspool.ray.Generate`: what `ds.map_batches` calls, and `generate`, which calls `map_batches` as it should be."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from unspool.errors import InputError, SettingError, excerpt
from unspool.ray.cluster import Actors, import_ray
from unspool.ray.worker import Answered, Worker, locate

if TYPE_CHECKING:
    from unspool.batch.lines import BadLineError, Line

CALLS_AT_ONCE: Final = 4  # of an actor: the last rows of one batch share passes with the first of the next
RETRIES = 16  # of a task whose actor has died: a row that ends every actor that reads it does not go round for ever
_TAKEN: Final = ("prompt", "messages", "id", "custom_id", "method", "url", "body")
_MADE: Final = (
    "generated_text",
    "generated_texts",
    "finish_reason",
    "num_prompt_tokens",
    "num_generated_tokens",
    "generation_error",
)


class Generate(Worker):
    """Answers the rows of a dataset: `ds.map_batches(Generate, fn_constructor_args=("smollm2-135m",), …)`.

    A row has a `prompt` or `messages`, or columns that `prompt_column` and the like name; `settings` (an object, or
    its JSON text) are its own settings, an integer `line` its seed's number; all columns are kept. Added are
    `generated_text`, `generated_texts`, `finish_reason`, `num_prompt_tokens`, `num_generated_tokens` and
    `generation_error`, which says why a row failed. Batches are tables of pyarrow, and rows leave in their order, as
    soon as those before them are done. Further arguments are settings for rows that don't say otherwise.
    """

    def __init__(
        self,
        model: Any,
        *,
        prompt_column: str = "prompt",
        messages_column: str = "messages",
        id_column: str = "id",
        seed: int = 0,
        load: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._names = {prompt_column: "prompt", messages_column: "messages", id_column: "id"}
        super().__init__(model, seed=seed, load=load, engine=engine, settings=settings, any_model=True)

    def __call__(self, batch: Any) -> Iterator[Any]:
        """Tables of the batch's rows, with what was generated for each."""
        table = _as_table(batch)
        place = 0
        for done in self.answer(map(self._read, table.to_pylist())):
            yield _add_columns(table.slice(place, len(done)), list(map(_describe, done)))
            place += len(done)

    def _read(self, row: dict[str, Any]) -> tuple[int, Line | BadLineError]:
        from unspool.batch.lines import BadLineError, read_row

        named = {self._names.get(column, column): value for column, value in row.items()}
        asked = {name: _drop_nones(named[name]) for name in _TAKEN if named.get(name) is not None}
        number = named.get("line")
        try:
            settings = _read_settings(named.get("settings"))
            asked = asked | settings if "body" not in asked else {**asked, "body": {**asked["body"], **settings}}
            if not isinstance(number, int) or not 0 <= number < 1 << 63:
                number = _number_by_content(asked)
            return number, read_row(number, asked)
        except BadLineError as error:
            return 0, error
        except (InputError, TypeError, ValueError) as error:
            return 0, BadLineError(str(error))


def generate(
    ds: Any,
    model: Any,
    *,
    actors: int | tuple[int, int] = 1,
    gpus: float | None = None,
    cpus: float = 1.0,
    batch_size: int = 64,
    **options: Any,
) -> Any:
    """A dataset with what a model generates for each row, from actors with `gpus` and `cpus` each.

    `actors` is their number, or the least and the most. Without `gpus` an actor takes one if the cluster has any; a
    fraction lets actors with small models share one. Further arguments are those of `Generate`.
    """
    import_ray("unspool.ray.generate")
    least, most = actors if isinstance(actors, tuple) else (actors, actors)
    given = Actors(least, most, cpus, gpus)
    return map_batches(ds, Generate, given, batch_size, locate(model), options)


def map_batches(ds: Any, kind: type, actors: Actors, batch_size: int, model: Any, options: Mapping[str, Any]) -> Any:
    """`ds.map_batches` over actors with an engine each, so that engines are never empty between batches."""
    ray = import_ray("unspool.ray")
    strategy = ray.data.ActorPoolStrategy(
        min_size=actors.least,
        max_size=actors.most,
        max_tasks_in_flight_per_actor=2 * CALLS_AT_ONCE,
        max_concurrent_calls_per_actor=CALLS_AT_ONCE,
        enable_true_multi_threading=True,
    )
    # The one way to bound the retries of a task, which Ray is going to drop: without it they have no end.
    has_bound = "ray_remote_args_fn" in inspect.signature(ds.map_batches).parameters
    bound: dict[str, Any] = {"ray_remote_args_fn": partial(dict, max_task_retries=RETRIES)} if has_bound else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`ray_remote_args_fn` is deprecated")
        return ds.map_batches(
            kind,
            fn_constructor_args=(model,),
            fn_constructor_kwargs=dict(options),
            batch_size=batch_size,
            batch_format="pyarrow",
            compute=strategy,
            **bound,
            **actors.find_resources(ray),
        )


def _as_table(batch: Any) -> Any:
    import pyarrow as pa

    if isinstance(batch, Mapping):
        batch = pa.table({name: pa.array(list(values)) for name, values in batch.items()})
    elif not isinstance(batch, pa.Table):
        batch = pa.Table.from_pandas(batch, preserve_index=False)
    taken = [name for name in _MADE if name in batch.column_names]
    if taken:
        raise InputError(f"the rows already have a column {taken[0]!r}; rename or drop it before generating")
    return batch


def _read_settings(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    settings = json.loads(value) if isinstance(value, str) else _drop_nones(value)
    if not isinstance(settings, dict):
        raise SettingError(f"`settings` of a row is an object or its JSON text, not {excerpt(value)}")
    for name in settings:
        if name in _TAKEN:
            raise SettingError(f"`settings` of a row has {name!r}, which is a column of its own")
    return settings


def _drop_nones(value: Any) -> Any:
    """A value without what Arrow fills in: fields that other rows have."""
    if isinstance(value, dict):
        return {name: _drop_nones(one) for name, one in value.items() if one is not None}
    return [_drop_nones(one) for one in value] if isinstance(value, list) else value


def _number_by_content(asked: Mapping[str, Any]) -> int:
    """A number for a row that has none: the same for the same request, wherever it is in the dataset."""
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _describe(done: Answered) -> tuple[Any, ...]:
    """The columns that are added to a row."""
    if done.error is not None or done.choices is None or done.work is None:
        return None, None, None, None, None, str(done.error)
    choices = done.choices
    texts = [choice.text for choice in choices]
    prompts = done.work.order.num_prompt_tokens
    return texts[0], texts, choices[0].finish_reason, prompts, done.work.num_new, None


def _add_columns(table: Any, rows: list[tuple[Any, ...]]) -> Any:
    import pyarrow as pa

    kinds = (pa.string(), pa.list_(pa.string()), pa.string(), pa.int64(), pa.int64(), pa.string())
    for name, kind, values in zip(_MADE, kinds, zip(*rows, strict=True), strict=True):
        table = table.append_column(name, pa.array(values, kind))
    return table
