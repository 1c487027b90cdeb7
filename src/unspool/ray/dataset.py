"""`unspool.ray.Generate`: what `ds.map_batches` calls, and `generate`, which calls `map_batches` as it should be."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from unspool.errors import InputError, SettingError, excerpt
from unspool.numeric import is_whole
from unspool.ray.cluster import Actors, import_ray
from unspool.ray.worker import Answered, Worker, locate

if TYPE_CHECKING:
    from unspool.batch.lines import BadLineError, Line

CALLS_AT_ONCE: Final = 4  # of an actor: the last rows of one batch share passes with the first of the next
RETRIES = 16  # of a task whose actor has died: a row that ends every actor that reads it does not go round for ever
_TAKEN: Final = ("prompt", "messages", "id", "custom_id", "method", "url", "body")
_COLUMNS: Final = {"prompt_column": "prompt", "messages_column": "messages", "id_column": "id"}
_OWN: Final = (*_COLUMNS, "seed", "load", "engine")  # arguments of `Generate` that are no settings
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
        self._columns = _name_columns(prompt_column, messages_column, id_column)
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

        found = {name: row.get(column) for name, column in self._columns.items()}
        asked = {name: _drop_nones(value) for name, value in found.items() if value is not None}
        number = row.get("line")
        try:
            settings = _read_settings(row.get("settings"))
            if "body" not in asked:
                asked |= settings
            elif isinstance(asked["body"], dict):
                asked["body"] |= settings
            if not is_whole(number) or not 0 <= number < 1 << 63:
                number = _number_by_content(asked)
            return number, read_row(number, asked)
        except BadLineError as error:
            return 0, error
        except SettingError as error:
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
    if not hasattr(ds, "map_batches"):
        raise SettingError(f"generate() takes a dataset, such as ray.data.from_items(rows), not {ds!r:.80}")
    bounds = actors if isinstance(actors, tuple | list) else (actors, actors)
    if len(bounds) != 2:
        raise SettingError(f"`actors` is a number, or the least and the most, not {actors!r:.40}")
    given = Actors(*bounds, cpus, gpus)
    if not is_whole(batch_size) or batch_size < 1:
        raise SettingError(f"`batch_size` is a whole number of rows from 1 on, not {batch_size!r:.40}")
    _check_options(options)
    _check_columns(ds, options)
    return map_batches(ds, Generate, given, batch_size, locate(model), options)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise for settings that no row can have, before there are actors that would say so for each."""
    from unspool.batch.answers import check_settings

    check_settings({name: value for name, value in options.items() if name not in _OWN})


def _check_columns(ds: Any, options: Mapping[str, Any]) -> None:
    """Raise if a dataset has no column for prompts, or has one of ours, as far as that is known before it is read."""
    schema = ds.schema(fetch_if_missing=False)
    if schema is None:
        return
    columns = _name_columns(**{name: options[name] for name in _COLUMNS if name in options})
    for option, column in _COLUMNS.items():
        if options.get(option, column) != column and options[option] not in schema.names:
            raise InputError(f"the rows have no column {options[option]!r:.80}, which `{option}` names")
    if not {columns.get(name) for name in ("prompt", "messages", "body")} & set(schema.names):
        raise InputError(
            f"the rows have the columns {', '.join(schema.names)[:400]} and none for prompts; name it with "
            "`prompt_column` or `messages_column`"
        )
    _refuse_made(schema.names)


def _name_columns(prompt_column: str = "prompt", messages_column: str = "messages", id_column: str = "id") -> Any:
    """The column of each thing that is taken from a row; one that was given another meaning has its own no more."""
    named = {"prompt": prompt_column, "messages": messages_column, "id": id_column}
    if len(set(named.values())) < len(named):
        raise SettingError(f"{', '.join(map(repr, named.values()))} are to be three columns")
    return named | {name: name for name in _TAKEN if name not in named and name not in named.values()}


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
    _refuse_made(batch.column_names)
    return batch


def _refuse_made(columns: Sequence[str]) -> None:
    taken = [name for name in _MADE if name in columns]
    if taken:
        raise InputError(f"the rows already have a column {taken[0]!r}; rename or drop it before generating")


def _read_settings(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    from unspool.batch.lines import load_json

    try:
        settings = load_json(value) if isinstance(value, str) else _drop_nones(value)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"`settings` of a row is not valid JSON: {error}") from error
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
    try:
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"a column holds what JSON has no form for: {error}") from error
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
