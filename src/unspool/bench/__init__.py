"""`unspool bench`: this machine's speed, ours and that of other engines, in one run of interleaved rounds.

`task` is the request, `engine` the interface of an engine, `native` ours, `peers/` the others; `rounds` runs them in
turns, `floor` computes the memory bound, `report` and `chart` show the results.
"""

from unspool.bench.chart import draw_chart
from unspool.bench.engine import Engine, Timing
from unspool.bench.floor import find_floors, measure_bandwidth
from unspool.bench.native import make_native_engines
from unspool.bench.peers import PEERS, make_peers
from unspool.bench.report import Report, format_table, to_json
from unspool.bench.rounds import Result, run_rounds
from unspool.bench.task import Task, make_task
from unspool.bench.work import WORKS, Work, list_works

__all__ = [
    "PEERS",
    "WORKS",
    "Engine",
    "Report",
    "Result",
    "Task",
    "Timing",
    "Work",
    "draw_chart",
    "find_floors",
    "format_table",
    "list_works",
    "make_native_engines",
    "make_peers",
    "make_task",
    "measure_bandwidth",
    "run_rounds",
    "to_json",
]
