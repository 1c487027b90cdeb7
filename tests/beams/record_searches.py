"""Record what the scorers of transformers 4.52.4 (the last line that has them) decide, into searches.json.

python tests/beams/record_searches.py    # in an environment with transformers 4.52.4
"""

from __future__ import annotations

import json
import sys
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

NUM_CASES = 72
SORT = torch.Tensor.sort


def make_reference() -> Any:
    """The reference's classes, without two faults of theirs and with a note of a third."""
    import transformers
    from transformers.generation import beam_constraints, beam_search

    assert transformers.__version__ == "4.52.4", transformers.__version__

    # The reference leaves open in which order equal candidates come; unspool keeps the order they had.
    torch.Tensor.sort = partialmethod(SORT, stable=True)

    class DisjunctiveConstraint(beam_constraints.DisjunctiveConstraint):
        def copy(self, stateful: bool = False) -> Any:
            # The reference's copies append to one list: of several tokens that go on with the phrases begun, only the
            # first one counts as a step.
            twin = DisjunctiveConstraint(self.token_ids)
            if stateful:
                twin.current_seq, twin.completed = list(self.current_seq), self.completed
            return twin

    class ConstrainedBeamSearchScorer(beam_search.ConstrainedBeamSearchScorer):
        is_faulty = False

        def finalize(self, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            # The reference lets sequences that break the constraints displace finished ones that keep them.
            for row, finished in enumerate(self._beam_hyps):
                rows = input_ids[row * self.num_beams : (row + 1) * self.num_beams].tolist()
                kept = sum(map(self.check_completes_constraints, rows))
                if not self._done[row] and kept < self.num_beam_hyps_to_keep <= len(finished) + kept:
                    type(self).is_faulty = True
            return super().finalize(input_ids, *args, **kwargs)

    return SimpleNamespace(
        PhrasalConstraint=beam_constraints.PhrasalConstraint,
        DisjunctiveConstraint=DisjunctiveConstraint,
        BeamSearchScorer=beam_search.BeamSearchScorer,
        ConstrainedBeamSearchScorer=ConstrainedBeamSearchScorer,
    )


def record_case(seed: int) -> dict[str, Any]:
    import toy_search  # beside this file

    case = toy_search.draw_case(seed)
    try:
        library, steps = make_reference(), []
        result = toy_search.run_search(case, library, steps)
    except (TypeError, RuntimeError):  # the reference forgets the ancestry of sequences that break the constraints
        case["with_ancestry"] = False
        library, steps = make_reference(), []
        result = toy_search.run_search(case, library, steps)
    faulty = library.ConstrainedBeamSearchScorer.is_faulty
    return {**case, "trace": steps, "result": result, "displaces": faulty}


def main() -> None:
    lines = [json.dumps(record_case(seed), separators=(",", ":")) for seed in range(NUM_CASES)]
    (HERE / "searches.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
