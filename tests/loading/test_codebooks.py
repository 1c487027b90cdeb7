"""GGUF's kinds with tables and few bits as blocks of 8 bits, and whole models of them.

`test_dequantize.py` has their numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.loading.dequantizing import HALVES, random_blocks

import unspool
from unspool.errors import LoadError
from unspool.loading.codebooks import CODED, read_coded
from unspool.loading.gguf import GGUFFile

GOLDENS = Path(__file__).parent / "quantised" / "goldens" / "gguf"


@pytest.mark.parametrize("stored", CODED)
def test_blocks_of_8_bits_are_the_same_codes(stored: str) -> None:
    rows, columns = 16, 4 * CODED[stored].numbers
    data = random_blocks(stored, rows, 4, seed=0)
    if stored == "MXFP4":  # powers of two that a float16 has
        data.reshape(-1, 17)[:, 0] = 110 + data.reshape(-1, 17)[:, 0] % 25
    raw = torch.from_numpy(data)
    found = read_coded(raw.flatten(), stored, (rows, columns))
    if stored in ("IQ1_M", "IQ2_XS", "IQ2_S", "Q2_K", "Q3_K"):  # 16 numbers share a factor
        assert found is None
        return
    exact = CODED[stored].dequantise(raw.view(-1, CODED[stored].num_bytes)).view(rows, columns)
    off = (found.dequantise() - exact).abs()
    assert (off <= exact.abs() * 2**-11).all()
    if stored in ("IQ4_NL", "TQ1_0", "TQ2_0", "MXFP4"):
        assert not off.any()
    assert read_coded(raw.flatten(), stored, (rows // 2, 2, columns)).shape == (rows, columns)


@pytest.mark.parametrize("stored", ["IQ4_XS", "IQ3_S", "TQ1_0"])
def test_nan_is_refused(stored: str, tmp_path: Path) -> None:
    blocks = random_blocks(stored, 4, 1, seed=0)
    (at,) = HALVES[stored]
    blocks[2, at : at + 2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("w", blocks.reshape(2, -1), raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model.gguf")
    for read in (lambda: file.read("w", dtype=torch.float32), lambda: file.blocks("w")):
        with pytest.raises(LoadError, match="NaN"):
            read()


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*.gguf")), ids=lambda path: path.stem)
def test_models_write_what_the_reference_writes(path: Path) -> None:
    """Random blocks in every matrix; the logits are those of the gguf package's numbers in float32."""
    exact, packed = unspool.load(path, quantize=None), unspool.load(path)
    with np.load(path.with_suffix(".npz")) as file:
        for place, prompt in enumerate(json.loads(path.with_suffix(".json").read_text())):
            ids, expected = torch.tensor([prompt["ids"]]), torch.from_numpy(file[f"logits.{place}"])
            assert (exact.model(ids).logits[0, -1] - expected).abs().max() < 3e-6 * expected.abs().max()
            assert (packed.model(ids).logits[0, -1] - expected).norm() < 0.03 * expected.norm()
    tokens = unspool.generate(exact.model, ids, max_new_tokens=len(prompt["greedy"]), eos_token_id=None)
    assert tokens[0, ids.shape[1] :].tolist() == prompt["greedy"]
