"""`python -m tests.fuzz --minutes 60 --jobs 2`: inputs by the thousand; `--kind NAME --seed N --count 1`: one again."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.findings import find_kind, list_kinds, make_input
from tests.fuzz.runner import run


def main() -> int:
    """Run, print the table, and list the findings; 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long to run (default: 1, unless --count is given)")
    parser.add_argument("--count", type=int, help="how many inputs of each kind")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--kind", action="append", choices=list_kinds(), help="a kind of input; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--report", type=Path, help="a JSON file to write the counts and the findings to")
    parser.add_argument("--show", action="store_true", help="print the inputs instead of running them")
    given = parser.parse_args()
    if given.show:
        for name in given.kind or list_kinds():
            for seed in range(given.seed, given.seed + (given.count or 1)):
                print(f"{name} {seed}: {make_input(find_kind(name), seed)!r}")
        return 0
    minutes = 1.0 if given.minutes is None and given.count is None else given.minutes
    jobs = 1 if given.count == 1 else given.jobs
    tally = run(given.kind, minutes=minutes, count=given.count, first_seed=given.seed, jobs=jobs, say=_say)
    for finding in tally.findings:
        print(f"\n{finding}")
    print(f"\n{tally.table()}")
    if given.report:
        findings = [asdict(finding) for finding in tally.findings]
        given.report.write_text(json.dumps({"counts": tally.counts, "findings": findings}, indent=1))
    return 1 if tally.findings else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
