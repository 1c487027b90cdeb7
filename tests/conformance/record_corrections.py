"""Record what the reference answers without a cache, for the cases in which its cache is at fault.

    python tests/conformance/record_corrections.py        (with transformers 4.52.4 installed)

See differences.md for why. Nothing else imports this.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
CASES = {
    "mamba": (
        "beam4_ret3",
        "beam4_lpneg",
        "beam4_eos",
        "diverse4_ret4",
        "force_phrase",
        "force_two",
        "force_mixed_ret",
        "cfg_1.5",
    )
}


def main() -> None:
    """Write corrections/NAME.json for every model that has some."""
    assert transformers.__version__ == "4.52.4"
    for name, wanted in CASES.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "goldens/models" / name).eval()
        recorded = json.loads((HERE / f"goldens/cases/{name}.json").read_text())
        inputs = {key: torch.tensor(value) for key, value in recorded["inputs"].items()}
        corrected = {}
        for case in wanted:
            settings = {"max_new_tokens": recorded["max_new_tokens"], **recorded["cases"][case]["settings"]}
            output = model.generate(
                **inputs, **settings, use_cache=False, return_dict_in_generate=True, output_scores=True
            )
            told = [key for key in recorded["cases"][case] if key != "settings"]
            answer = {**output, "scores_step3_row0": output.scores[3][0]}
            corrected[case] = {key: answer[key].tolist() for key in told}
            for key in {"sequences_scores", "scores_step3_row0"} & set(told):
                corrected[case][key] = [round(x, 5) for x in corrected[case][key]]
        (HERE / "corrections" / f"{name}.json").write_text(json.dumps(corrected) + "\n")


if __name__ == "__main__":
    main()
