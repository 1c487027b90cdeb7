"""Writes src/unspool/loading/codebooks.npz, the tables of GGUF's IQ kinds, from the gguf package (ggml's, MIT).

python tools/make_codebooks.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import quants

OUTPUT = Path(__file__).parents[1] / "src" / "unspool" / "loading" / "codebooks.npz"
KINDS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def main() -> None:
    tables = {}
    for name in KINDS:
        kind = getattr(quants, name)
        kind.init_grid()
        tables[name] = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    np.savez_compressed(OUTPUT, **tables)
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
