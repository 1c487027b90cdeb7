"""`python -m tests.fuzz.beside --device cuda --native --minutes 5 --jobs 14`: native models on a GPU beside the CPU.

Without `--native`: all ways beside transformers' own `generate`, on the device.
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.beside.processes import listen


def main() -> int:
    """Run, print the findings and how many calls were tried; 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.beside", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--native", action="store_true", help="compare native models there and on the CPU")
    given = parser.parse_args()
    num_tried = num_found = 0
    for count, finding in listen(given.seed, given.minutes, given.jobs, given.device, given.native):
        num_tried, num_found = num_tried + count, num_found + bool(finding)
        if finding:
            print(finding, flush=True)
    print(f"{num_tried:,} calls, {num_found} different")
    return bool(num_found)


if __name__ == "__main__":
    sys.exit(main())
