"""`unspool bench`: this machine's speed, ours and that of other engines, in one run of interleaved rounds.

`benchmark` is what was asked for, `engine` the interface of an engine, `native` ours, `peers/` the others; `rounds`
runs them in turns, `floor` computes the memory bound, `report` and `chart` show the results. `trace` is another
measurement: requests that arrive over time, through the batch engine and in static batches.
"""

from unspool.bench.benchmark import WORKS, Benchmark, check_sizes, make_benchmark
from unspool.bench.chart import draw_chart
from unspool.bench.engine import TimedEngine, Timing
from unspool.bench.floor import find_floors, measure_bandwidth
from unspool.bench.native import make_native_engines
from unspool.bench.peers import PEERS, make_peers
from unspool.bench.report import Report, format_table, to_json
from unspool.bench.rounds import Figures, run_rounds
from unspool.bench.scenarios import Scenario, list_scenarios
from unspool.bench.trace import (
    TraceReport,
    find_prompts,
    format_trace,
    make_trace,
    read_trace,
    serve,
    serve_statically,
    trace_to_json,
)
from unspool.bench.trace_chart import draw_trace

__all__ = [
    "PEERS",
    "WORKS",
    "Benchmark",
    "Figures",
    "Report",
    "Scenario",
    "TimedEngine",
    "Timing",
    "TraceReport",
    "check_sizes",
    "draw_chart",
    "draw_trace",
    "find_floors",
    "find_prompts",
    "format_table",
    "format_trace",
    "list_scenarios",
    "make_benchmark",
    "make_native_engines",
    "make_peers",
    "make_trace",
    "measure_bandwidth",
    "read_trace",
    "run_rounds",
    "serve",
    "serve_statically",
    "to_json",
    "trace_to_json",
]
