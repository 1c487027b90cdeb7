"""Record what the reference's processors return: run where transformers 4.52.4, TensorFlow 2.21 and JAX 0.10.2 are.

python tests/frameworks/record.py     # writes recorded_TF.npz and recorded_Flax.npz beside this file
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.frameworks.cases import CASES, make_arrays  # noqa: E402


def main() -> None:
    """Call every case's processor at every length."""
    import jax.numpy
    import tensorflow
    from transformers.generation import flax_logits_process, tf_logits_process

    homes = {
        "TF": (tf_logits_process, tensorflow.convert_to_tensor),
        "Flax": (flax_logits_process, jax.numpy.asarray),
    }
    for framework, (home, convert) in homes.items():
        found = {}
        for case in CASES[framework]:
            processor = getattr(home, case.name)(**case.given)
            ids, scores = make_arrays(case.name)
            for length in case.lengths:
                made = processor(convert(ids), convert(scores), length)
                found[f"{case.key}@{length}"] = np.asarray(made)
        np.savez_compressed(HERE / f"recorded_{framework}.npz", **found)
        print(framework, len(found), "arrays")


if __name__ == "__main__":
    main()
