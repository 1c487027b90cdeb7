"""The models that are served, by name: loaded at the start, or when they are asked for and there is room."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from unspool._version import __version__
from unspool.api import LanguageModel
from unspool.engine import Engine
from unspool.errors import ResourceError, SettingError, UnspoolError
from unspool.forks import make_lock
from unspool.server.orders import Target
from unspool.server.refusals import RequestError, read_error
from unspool.server.tokens import ClientTokens

_log = logging.getLogger("unspool.server")
_LOOK_EVERY = 0.5  # seconds


@dataclass(eq=False)
class Served:
    """One model under a name; its weights and its engine are there while it is loaded."""

    name: str
    load: Callable[[], LanguageModel]
    aliases: tuple[str, ...] = ()
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0  # bytes, as its files say; measured once it is loaded
    is_alone: bool = False  # no other model is served, so the engine's options are meant for it
    created: int = field(default_factory=lambda: int(time.time()))
    lm: LanguageModel | None = None
    engine: Engine | None = None
    texts: ClientTokens = field(default_factory=lambda: ClientTokens(None))
    fingerprint: str = ""
    active: int = 0  # requests that use it
    used_at: float = 0.0
    restarts: int = 0
    failure: str = ""

    def open(self) -> None:
        """Load it and make its engine."""
        if self.lm is None:
            self.lm = self.load()
            self.texts = ClientTokens(self.lm.tokenizer)
            self.fingerprint = _make_fingerprint(self.lm)
            self.size = max(self.size, count_bytes(self.lm))
        if self.lm.model.info.features is not None:
            self._check_no_engine()
        elif self.engine is None:
            self.engine = Engine(self.lm, **self.engine_options)

    def _check_no_engine(self) -> None:
        """Raise if options of an engine were given for a model that has none."""
        given = [f"`{name}`" for name in self.engine_options if name != "max_waiting"]
        if given and self.is_alone:
            raise SettingError(
                f"{', '.join(given)} can't be set for {self.name}: it transcribes one sound after the other, and no "
                "engine decodes its rows; leave it out"
            )

    def close(self) -> None:
        """Give its memory back."""
        engine, self.engine, self.lm = self.engine, None, None
        self.texts = ClientTokens(None)
        if engine is not None:
            engine.close()

    @property
    def is_loaded(self) -> bool:
        """Whether it can answer at once."""
        return self.lm is not None

    @property
    def has_failed(self) -> bool:
        """Whether its engine has ended by a fault."""
        return self.lm is not None and self.engine is not None and self.engine.is_closed


class Models:
    """Served models by name. At most `memory` bytes of weights are held; those unused longest make room."""

    def __init__(self, served: Sequence[Served], *, memory: int | None = None, restarts: bool = False) -> None:
        if not served:
            raise SettingError("a server needs at least one model")
        self._by_name: dict[str, Served] = {}
        self.all = list(served)
        self._memory, self._restarts = memory, restarts
        self._loading = make_lock(self, "_loading")
        # A thread of its own: those that wait for a model hold up nobody else's work.
        self._loader = ThreadPoolExecutor(1, "unspool-loading")
        for one in served:
            for name in dict.fromkeys((one.name, *one.aliases)):
                if name in self._by_name:
                    raise SettingError(
                        f"two served models have the name {name!r}; give one of them another (NAME=MODEL)"
                    )
                self._by_name[name] = one

    def find(self, name: Any) -> Served:
        """The model of a name; without a name the only one."""
        if name is None or name == "":
            if len(self.all) == 1:
                return self.all[0]
            raise RequestError(400, f"`model` is required: {', '.join(one.name for one in self.all)}", param="model")
        found = self._by_name.get(name.removesuffix(":latest")) if isinstance(name, str) else None
        if found is None:
            raise RequestError(
                404,
                f"The model {str(name)[:128]!r} does not exist; served are: {', '.join(one.name for one in self.all)}",
                param="model",
                code="model_not_found",
            )
        return found

    async def borrow(self, name: Any) -> Served:
        """The model of a name, loaded, until `give_back`."""
        found = self.find(name)
        found.active += 1
        found.used_at = time.monotonic()
        try:
            if found.has_failed:
                await self._run(self._revive, found)
            if not found.is_loaded:
                await self._run(self._load, found)
        except BaseException as error:
            found.active -= 1
            if isinstance(error, UnspoolError):
                raise read_error(error) from error
            raise
        return found

    async def _run(self, work: Callable[[Served], None], served: Served) -> None:
        context = contextvars.copy_context()  # what is logged names the request
        await asyncio.get_running_loop().run_in_executor(self._loader, context.run, work, served)

    def give_back(self, served: Served) -> None:
        """Let others make room where it is, when nobody uses it."""
        served.active -= 1
        served.used_at = time.monotonic()

    async def watch(self) -> None:
        """Make engines that end by a fault anew, without waiting for the next request; ends when it is cancelled."""
        while self._restarts:
            await asyncio.sleep(_LOOK_EVERY)
            for one in self.all:
                if one.has_failed:
                    try:
                        await self._run(self._revive, one)
                    except Exception:
                        _log.exception("the engine of %s can't be made anew", one.name)

    def _revive(self, served: Served) -> None:
        with self._loading:
            if not served.has_failed:
                return
            if not self._restarts:
                raise RequestError(
                    503,
                    f"the engine of {served.name} has stopped by a fault; the server must be started again",
                    code="engine",
                )
            _log.error("the engine of %s is made anew after a fault", served.name)
            served.engine = None
            served.restarts += 1
            served.open()

    def _load(self, served: Served) -> None:
        with self._loading:
            if served.is_loaded:
                return
            self._make_room(served)
            try:
                served.open()
                served.failure = ""
            except UnspoolError as error:
                served.failure = str(error)
                _log.error("%s can't be loaded: %s", served.name, error)
                if isinstance(error, ResourceError):
                    raise RequestError(
                        503, "there is no memory for this model now", code="no_memory", retry_after=10
                    ) from error
                raise

    def _make_room(self, served: Served) -> None:
        """Close models that nobody uses, the one unused longest first, until one more fits."""
        if self._memory is None:
            return
        idle = sorted((one for one in self.all if one.is_loaded and not one.active), key=lambda one: one.used_at)
        while sum(one.size for one in self.all if one.is_loaded) + served.size > self._memory:
            if not idle:
                raise RequestError(
                    503,
                    f"{served.name} does not fit beside the models in use; try again later",
                    code="no_memory",
                    retry_after=10,
                )
            idle.pop(0).close()

    def open_all(self) -> None:
        """Load every model, as far as the memory goes."""
        held = 0
        for one in self.all:
            if self._memory is not None and held and held + one.size > self._memory:
                continue
            self._load(one)
            held += one.size

    def close(self) -> None:
        """Give all memory back."""
        self._loader.shutdown(wait=False, cancel_futures=True)
        for one in self.all:
            one.close()

    def target(self, served: Served, limits: Any) -> Target:
        """What requests for a loaded model are read for."""
        assert served.lm is not None
        return Target(served.name, served.lm, limits, served.engine)


def count_bytes(lm: LanguageModel) -> int:
    """Bytes of a model's weights."""
    model = lm.model
    parameters = getattr(model, "parameters", None)
    if parameters is None:
        return 0
    try:
        held = [*parameters(), *(model.buffers() if hasattr(model, "buffers") else ())]
    except TypeError:
        return 0
    return sum(one.numel() * one.element_size() for one in held)


def _make_fingerprint(lm: LanguageModel) -> str:
    """What a seed's text depends on: this version, the weights' file, how they are held, and the device."""
    source = lm.source
    size = source.stat().st_size if source.is_file() else 0
    held = getattr(lm.model, "weights_format", "")
    parts = (__version__, lm.name, str(size), str(lm.model.dtype), held, str(lm.device), lm.model.info.family)
    return "unspool_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
