"""`/metrics`: counts and times in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from unspool.server.models import Models

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_GAUGES: Final = (
    ("rows_running", "Rows that decode."),
    ("requests_running", "Requests at work in the engine."),
    ("requests_waiting", "Requests in the engine's queue."),
    ("blocks", "Blocks of keys in all."),
    ("blocks_used", "Blocks that rows use."),
    ("blocks_kept", "Blocks kept for prompts that begin alike."),
    ("prefix_hit_rate", "Share of prompt tokens found in blocks."),
    ("tokens_per_second", "New tokens per second of late."),
)
_COUNTS: Final = (("preemptions", "Requests sent back to the queue."), ("passes", "Forward passes."))


class Histogram:
    """Counts of values below bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total, self.number = bounds, [0] * len(bounds), 0.0, 0

    def add(self, value: float) -> None:
        """Count a value."""
        self.total += value
        self.number += 1
        for place, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[place] += 1

    def write(self, name: str, model: str) -> Iterator[str]:
        """The lines of the page for a model."""
        label = f'model="{_escape(model)}"'
        for bound, count in zip(self.bounds, self.counts, strict=True):
            yield f'{name}_bucket{{{label},le="{bound}"}} {count}'
        yield f'{name}_bucket{{{label},le="+Inf"}} {self.number}'
        yield f"{name}_sum{{{label}}} {_write(self.total)}"
        yield f"{name}_count{{{label}}} {self.number}"


class Histograms:
    """One of each model."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._by_model = bounds, dict[str, Histogram]()

    def add(self, model: str, value: float) -> None:
        """Count a value of a model's request."""
        self._by_model.setdefault(model, Histogram(self._bounds)).add(value)

    def write(self, name: str, meaning: str) -> Iterator[str]:
        """The lines of the page."""
        yield f"# HELP {name} {meaning}"
        yield f"# TYPE {name} histogram"
        for model, one in sorted(self._by_model.items()):
            yield from one.write(name, model)


class Metrics:
    """What the server has done."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int, str]] = Counter()  # by route, status and model
        self.tokens: Counter[tuple[str, str]] = Counter()
        self.first, self.between, self.whole = Histograms(_SECONDS), Histograms(_STEPS), Histograms(_SECONDS)
        self.gone: Counter[str] = Counter()  # clients that closed their connection early, by model

    @property
    def num_gone(self) -> int:
        """Clients that closed their connection early."""
        return self.gone.total()

    def write(self, models: Models, num_active: int) -> str:
        """The page."""
        return "\n".join(self._lines(models, num_active)) + "\n"

    def _lines(self, models: Models, num_active: int) -> Iterator[str]:
        yield "# HELP unspool_requests_total Requests answered."
        yield "# TYPE unspool_requests_total counter"
        for (route, status, model), count in sorted(self.requests.items()):
            labels = f'route="{route}",status="{status}",model="{_escape(model)}"'
            yield f"unspool_requests_total{{{labels}}} {count}"
        yield "# HELP unspool_tokens_total Tokens read and written."
        yield "# TYPE unspool_tokens_total counter"
        for (model, kind), count in sorted(self.tokens.items()):
            yield f'unspool_tokens_total{{model="{_escape(model)}",kind="{kind}"}} {count}'
        yield "# HELP unspool_requests_active Requests at work."
        yield "# TYPE unspool_requests_active gauge"
        yield f"unspool_requests_active {num_active}"
        yield "# HELP unspool_disconnects_total Clients that closed their connection before the answer's end."
        yield "# TYPE unspool_disconnects_total counter"
        for model, count in sorted(self.gone.items()):
            yield f'unspool_disconnects_total{{model="{_escape(model)}"}} {count}'
        yield from self.first.write("unspool_first_token_seconds", "Seconds to the first token.")
        yield from self.between.write("unspool_token_seconds", "Seconds between tokens, the mean of a request.")
        yield from self.whole.write("unspool_request_seconds", "Seconds of a request.")
        yield from self._write_engines(models)

    def _write_engines(self, models: Models) -> Iterator[str]:
        stats = [(_escape(one.name), one.engine.stats) for one in models.all if one.engine is not None]
        for kind, listed in (("gauge", _GAUGES), ("counter", _COUNTS)):
            for name, meaning in listed:
                full = f"unspool_engine_{name}" + ("_total" if kind == "counter" else "")
                yield f"# HELP {full} {meaning}"
                yield f"# TYPE {full} {kind}"
                for model, stat in stats:
                    yield f'{full}{{model="{model}"}} {_write(getattr(stat, name))}'
        yield "# HELP unspool_model_loaded Whether a model is loaded."
        yield "# TYPE unspool_model_loaded gauge"
        for one in models.all:
            yield f'unspool_model_loaded{{model="{_escape(one.name)}"}} {int(one.is_loaded)}'


def _write(value: float) -> str:
    """A number with all of its digits."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
