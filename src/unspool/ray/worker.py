"""A model and its engine in an actor: rows in, answers out, in the order of the rows."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from unspool.errors import EngineError, MissingExtraError, SettingError
from unspool.ray.cluster import find_share, limit_memory

if TYPE_CHECKING:
    from unspool.batch.lines import BadLineError, Line
    from unspool.server.work import Choice, Work

_WAITING: Final = 1 << 16  # calls bound what they submit themselves


class Answered(NamedTuple):
    """A row that is done."""

    number: int
    line: Line | None
    work: Work | None = None
    choices: list[Choice] | None = None
    error: Exception | None = None


class Worker:
    """An engine that answers rows; several threads may ask at once, and their rows share passes."""

    def __init__(
        self,
        model: Any,
        *,
        name: str | None = None,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        load: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        any_model: bool = False,
        created: int = 0,
        weights: str | None = None,
    ) -> None:
        """`model` is what `unspool.load` takes, a language model, or a function that returns one.

        With `weights`, a model with files of another digest is refused: this machine has other ones under the name.
        """
        try:
            from unspool.batch.answers import Answers, find_name
        except ImportError as error:
            raise MissingExtraError(error.name or "msgspec", "ray", "an actor") from error
        from unspool.engine import Engine

        lm = _find_model(model, dict(load or {}))
        if weights is not None:
            _check_weights(lm, weights)
        self.engine = Engine(lm, **_size_engine(lm, {"max_waiting": _WAITING, **(engine or {})}))
        self.answers = Answers(
            lm,
            self.engine,
            name=name or (find_name(str(model)) if isinstance(model, str | Path) else lm.name),
            settings=settings,
            seed=seed,
            any_model=any_model,
            created=created,
        )

    def answer(self, rows: Iterable[tuple[int, Line | BadLineError]]) -> Iterator[list[Answered]]:
        """Rows that are done, in the order in which they were given: those that are done by now, at a time.

        If an actor dies, Ray runs its task again and drops as many outputs as were taken before. Rows that left as they
        finish would be in another order then: some would be lost, and others be there twice.
        """
        coming, begun, is_open = iter(rows), deque[Answered](), True
        try:
            while is_open or begun:
                while is_open and len(begun) < self.engine.most_ahead:
                    row = next(coming, None)
                    if row is None:
                        is_open = False
                    else:
                        begun.append(self._begin(*row))
                done = [self._finish(begun.popleft())] if begun else []
                while begun and (begun[0].work is None or begun[0].work.is_done):
                    done.append(self._finish(begun.popleft()))
                if done:
                    yield done
        finally:
            for left in begun:
                if left.work is not None:
                    left.work.close()

    def _begin(self, number: int, row: Line | BadLineError) -> Answered:
        if isinstance(row, Exception):
            return Answered(number, None, error=row)
        try:
            return Answered(number, row, self.answers.begin(row))
        except EngineError:
            raise
        except Exception as error:
            return Answered(number, row, error=error)

    def _finish(self, begun: Answered) -> Answered:
        if begun.work is None:
            return begun
        try:
            return begun._replace(choices=self.answers.wait(begun.work))
        except EngineError:
            raise
        except Exception as error:
            return begun._replace(error=error)

    def __del__(self) -> None:
        with suppress(Exception):
            self.engine.close()


def locate(model: Any) -> Any:
    """A model as actors are given it: they have folders of their own, so that a path is given whole."""
    if isinstance(model, str | Path) and Path(model).exists():
        return str(Path(model).resolve())
    return str(model) if isinstance(model, Path) else model


def _find_model(model: Any, options: dict[str, Any]) -> Any:
    from unspool.api import LanguageModel, load

    if isinstance(model, str | Path):
        return load(str(model), **options)
    if options:
        raise SettingError("options of loading are for a model that is given by its name or path")
    made = model if isinstance(model, LanguageModel) else model() if callable(model) else None
    if not isinstance(made, LanguageModel):
        raise SettingError(
            f"`model` is a name, a path, a language model or a function that returns one, not {model!r:.80}"
        )
    return made


def _check_weights(lm: Any, weights: str) -> None:
    from unspool.batch.ledger import describe_model

    found = describe_model(lm)["weights"]
    if found != weights:
        raise SettingError(
            f"the files of {lm.name!r:.200} on {platform.node()} are not those that this job was begun with "
            f"({str(found)[:12]}, not {weights[:12]}): answers would not belong together. Give every machine the same"
        )


def _size_engine(lm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine that keeps to its actor's share of a GPU: without them it takes most of what is free."""
    if lm.device.type != "cuda" or options.get("memory") is not None:
        return options
    share = find_share()
    if share == 1:
        return options
    import torch

    from unspool.server.models import count_bytes

    total = torch.cuda.get_device_properties(lm.device).total_memory
    return {**options, "memory": limit_memory(share, total, count_bytes(lm))}
