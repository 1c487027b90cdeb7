"""Record what transformers 4.52.4 (the last line that has constraints) says on walks, into walks.json.

python tests/constraints/record_walks.py    # in an environment with transformers 4.52.4
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

NUM_CASES = 36


def main() -> None:
    import transformers
    import walks  # beside this file
    from transformers.generation import beam_constraints as reference

    assert transformers.__version__ == "4.52.4", transformers.__version__
    lines = []
    for seed in range(NUM_CASES):
        case = walks.draw_case(seed)
        case["alone"] = walks.walk_constraint(reference, case["words"][0], case["tokens"])
        case["together"] = walks.walk_list(reference, case["words"], case["tokens"])
        lines.append(json.dumps(case, separators=(",", ":")))
    (HERE / "walks.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
