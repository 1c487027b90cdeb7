"""The peers: what each needs, and how its library is called. Libraries that are not installed are played by stubs."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unspool.bench import make_benchmark, make_native_engines, make_peers
from unspool.bench.benchmark import Benchmark
from unspool.errors import LoadError, SettingError, UnsupportedError

TINY = Path(__file__).parents[1] / "conformance" / "goldens" / "models" / "llama"
VOCABULARY = 11


def next_token(tokens: list[int]) -> int:
    """What the stubs' model writes: it has read all of a row, in order."""
    return (3 * sum(place * token for place, token in enumerate(tokens, start=1)) + 1) % VOCABULARY


def write_on(prompt: list[int], num_new: int) -> list[int]:
    row = list(prompt)
    for _ in range(num_new):
        row.append(next_token(row))
    return row[len(prompt) :]


PROMPTS = [[1, 2, 3], [4, 5, 6]]
EXPECTED = [write_on(row, 5) for row in PROMPTS]


def make(tmp_path: Path) -> Benchmark:
    path = tmp_path / "model.gguf"
    path.touch()
    return Benchmark("model.gguf", path, "gguf", device="cpu", threads=2, batch=2)


# --- what can't be is refused before anything is loaded ------------------------------------------------------
def test_unknown_peers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="there is no peer 'llama'; did you mean llama-cpp"):
        make_peers(["llama"], make(tmp_path))
    with pytest.raises(SettingError, match="no peer 'vllm'; they are transformers, llama-cpp"):
        make_peers(["vllm"], make(tmp_path))
    with pytest.raises(SettingError, match="each engine once, and two would be called 'transformers'"):
        make_peers(["transformers", "transformers"], make(tmp_path))
    with pytest.raises(SettingError, match="17 peers are asked for, and at most 16"):
        make_peers(["llama-cpp"] * 17, make(tmp_path))
    with pytest.raises(SettingError, match="transformers reads the model that is measured, not"):
        make_peers([f"transformers={tmp_path}"], make(tmp_path))
    for path in ("", str(tmp_path / "missing.gguf")):
        with pytest.raises(SettingError, match=f"--peer llama-cpp={path}: there is no such file"):
            make_peers([f"llama-cpp={path}"], make(tmp_path))


@pytest.mark.parametrize(
    ("peer", "package", "install"),
    [
        ("transformers", "transformers", "pip install 'unspool\\[bench\\]'"),
        ("transformers", "gguf", "pip install 'unspool\\[bench\\]'"),
        ("llama-cpp", "llama_cpp", "pip install llama-cpp-python"),
        ("onnxruntime", "onnxruntime", "pip install onnxruntime"),
        ("ctranslate2", "ctranslate2", "pip install ctranslate2"),
    ],
)
def test_a_missing_package_is_named(
    peer: str, package: str, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=f"the peer {peer} needs the package '{package}'.*{install}"):
        make_peers([peer], make(tmp_path))


def test_a_peer_says_which_form_of_the_model_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("llama_cpp", "onnxruntime", "ctranslate2"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace())
    folder = Benchmark("folder", tmp_path, "folder", device="cpu")
    with pytest.raises(SettingError, match=r"llama-cpp reads a GGUF file, .* --peer llama-cpp=FILE.gguf"):
        make_peers(["llama-cpp"], folder)
    with pytest.raises(SettingError, match=r"onnxruntime reads an ONNX file .* --peer onnxruntime=PATH"):
        make_peers(["onnxruntime"], folder)
    with pytest.raises(SettingError, match=r"ctranslate2 reads a converted model.*ct2-transformers-converter"):
        make_peers(["ctranslate2"], folder)
    with pytest.raises(LoadError, match=r"holds no model\.bin"):
        make_peers([f"ctranslate2={tmp_path}"], make(tmp_path))
    with pytest.raises(LoadError, match="holds 0 ONNX files"):
        make_peers([f"onnxruntime={tmp_path}"], make(tmp_path))
    on_gpu = Benchmark("folder", tmp_path, "folder", device="cuda")
    with pytest.raises(UnsupportedError, match="run on a CPU, and --device is cuda"):
        make_peers([f"onnxruntime={tmp_path}"], on_gpu)


# --- transformers and ours are here -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    benchmark = make_benchmark(str(TINY), device="cpu", threads=1)
    engines = [make_native_engines(benchmark)[0], make_peers(["transformers"], benchmark)[0]]
    for engine in engines:
        engine.load()
    return engines[0], engines[1]


@pytest.mark.parametrize(("num_rows", "num_beams"), [(1, 1), (3, 1), (1, 4)])
def test_transformers_writes_what_we_write(pair: tuple[Any, Any], num_rows: int, num_beams: int) -> None:
    prompts = [[5, 6, 7 + row] for row in range(num_rows)]
    timings = [engine.generate(prompts, 6, num_beams=num_beams) for engine in pair]
    assert timings[0].tokens == timings[1].tokens
    assert [len(row) for row in timings[0].tokens] == [6] * num_rows  # end tokens end nothing
    for timing in timings:
        assert len(timing.ends) == (6 if num_beams == 1 else 1)
        assert timing.ends == sorted(timing.ends) and timing.started < timing.ends[0]


def test_engines_say_what_they_are(pair: tuple[Any, Any]) -> None:
    pair[0].generate([[5, 6]], 3)
    assert "float32" in pair[0].describe() and pair[0].describe().startswith("unspool ")
    assert pair[1].describe().startswith("transformers ") and "eager on cpu" in pair[1].describe()


def test_ways_of_keeping_weights_are_engines() -> None:
    benchmark = make_benchmark(str(TINY), quantize=["int8", "none"])
    assert [engine.name for engine in make_native_engines(benchmark)] == ["unspool int8", "unspool plain"]


# --- stubs -------------------------------------------------------------------------------------------------
class StubLlama(SimpleNamespace):
    """llama.cpp's functions, over rows that are plain lists."""

    __version__ = "0.0"

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.logits: dict[int, Any] = {}
        self.sizes: Any = None

    def llama_log_callback(self, function: Callable[..., Any]) -> Any:
        return function

    def llama_log_set(self, *_: Any) -> None: ...

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace(n_gpu_layers=-1)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> Any:
        assert params.n_gpu_layers == 0
        return None if b"damaged" in path else "model"

    def llama_model_get_vocab(self, model: str) -> str:
        return "vocab"

    def llama_vocab_n_tokens(self, vocab: str) -> int:
        return VOCABULARY

    def llama_model_desc(self, model: str, buffer: Any, size: int) -> None:
        buffer.value = b"stub Q4_0"

    def llama_context_default_params(self) -> Any:
        return SimpleNamespace()

    def llama_init_from_model(self, model: str, sizes: Any) -> str:
        self.sizes = sizes
        return "context"

    def llama_get_memory(self, context: str) -> str:
        return "memory"

    def llama_memory_clear(self, memory: str, data: bool) -> None:
        self.rows.clear()

    def llama_batch_init(self, num_tokens: int, embd: int, num_rows: int) -> Any:
        names = ("token", "pos", "n_seq_id", "logits")
        return SimpleNamespace(
            n_tokens=0, **{name: [0] * num_tokens for name in names}, seq_id=[[0] for _ in range(num_tokens)]
        )

    def llama_batch_free(self, batch: Any) -> None: ...

    def llama_decode(self, context: str, batch: Any) -> int:
        for place in range(batch.n_tokens):
            row = self.rows.setdefault(batch.seq_id[place][0], [])
            assert batch.pos[place] == len(row) and batch.n_seq_id[place] == 1
            row.append(batch.token[place])
            if batch.logits[place]:
                values = np.zeros(VOCABULARY, dtype=np.float32)
                values[next_token(row)] = 1.0
                self.logits[place] = values
        return 1 if len(self.rows) > self.sizes.n_seq_max else 0

    def llama_get_logits_ith(self, context: str, place: int) -> Any:
        return self.logits[place].ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def test_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = StubLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", stub)
    engine = make_peers(["llama-cpp"], make(tmp_path))[0]
    engine.load()
    assert stub.sizes.n_ctx == 8 * 513 and stub.sizes.n_threads == stub.sizes.n_threads_batch == 2
    for _ in range(2):  # the second call begins anew
        timing = engine.generate(PROMPTS, 5)
        assert timing.tokens == EXPECTED and len(timing.ends) == 5
    assert engine.describe() == "llama-cpp-python 0.0, stub Q4_0, 2 threads"
    assert "beam" not in engine.can
    with pytest.raises(RuntimeError, match="llama_decode gave 1 for 9 rows"):
        engine.generate([[1]] * 9, 2)


def test_llama_cpp_refuses_what_it_cant_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", StubLlama())
    path = tmp_path / "damaged.gguf"
    path.touch()
    benchmark = Benchmark("other", tmp_path, "folder", device="cpu")
    with pytest.raises(LoadError, match="can't read"):
        make_peers([f"llama-cpp={path}"], benchmark)[0].load()


def test_a_peer_runs_on_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an engine of its own, called by its file where there are several."""
    read: list[bytes] = []

    class Noting(StubLlama):
        def llama_model_load_from_file(self, path: bytes, params: Any) -> Any:
            read.append(path)
            return super().llama_model_load_from_file(path, params)

    monkeypatch.setitem(sys.modules, "llama_cpp", Noting())
    paths = [tmp_path / "q4_0.gguf", tmp_path / "q8_0.gguf"]
    for path in paths:
        path.touch()
    words = [f"llama-cpp={path}" for path in paths]
    engines = make_peers(["llama-cpp", *words], make(tmp_path))
    assert [engine.name for engine in engines] == ["llama-cpp", "llama-cpp q4_0", "llama-cpp q8_0"]
    for engine in engines:
        engine.load()
        assert engine.generate(PROMPTS, 5).tokens == EXPECTED
    assert read == [str(path).encode() for path in (tmp_path / "model.gguf", *paths)]
    assert [engine.name for engine in make_peers(words[:1], make(tmp_path))] == ["llama-cpp"]
    with pytest.raises(SettingError, match="two would be called 'llama-cpp q4_0'"):
        make_peers([words[0], words[0]], make(tmp_path))


class StubSession:
    """An exported decoder whose keys are the tokens themselves."""

    past = ("past_key_values.0.key", "past_key_values.0.value")
    extra: tuple[str, ...] = ("attention_mask", "position_ids")

    def __init__(self, path: str, options: Any, providers: list[str]) -> None:
        assert options.intra_op_num_threads == 2 and providers == ["CPUExecutionProvider"]

    def get_inputs(self) -> list[Any]:
        shape = ["rows", 1, "past", 1]
        kinds = [SimpleNamespace(name=name, shape=shape, type="tensor(float)") for name in self.past]
        return [
            SimpleNamespace(name=name, shape=[], type="tensor(int64)") for name in ("input_ids", *self.extra)
        ] + kinds

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in ("logits", "present.0.key", "present.0.value")]

    def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
        ids, held = feeds["input_ids"], feeds[self.past[0]]
        read = np.concatenate((held[:, 0, :, 0], ids), axis=1)
        assert feeds["attention_mask"].shape == read.shape
        assert feeds["position_ids"].tolist() == [list(range(held.shape[2], read.shape[1]))] * len(ids)
        logits = np.zeros((*ids.shape, VOCABULARY), dtype=np.float32)
        for row, tokens in enumerate(read.tolist()):
            logits[row, -1, next_token([int(token) for token in tokens])] = 1.0
        keys = read[:, None, :, None].astype(np.float32)
        return [logits, keys, keys]


def test_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SimpleNamespace(__version__="0.0", SessionOptions=SimpleNamespace, InferenceSession=StubSession)
    monkeypatch.setitem(sys.modules, "onnxruntime", stub)
    (tmp_path / "decoder.onnx").touch()
    engine = make_peers([f"onnxruntime={tmp_path}"], make(tmp_path))[0]
    engine.load()
    timing = engine.generate(PROMPTS, 5)
    assert timing.tokens == EXPECTED and len(timing.ends) == 5
    assert engine.describe() == "onnxruntime 0.0, decoder.onnx"
    monkeypatch.setattr(StubSession, "extra", ("beam_idx",))
    with pytest.raises(LoadError, match=r"takes input_ids, beam_idx, .* text-generation-with-past"):
        engine.load()


class StubGenerator:
    """CTranslate2's generator, over words."""

    compute_type = "int8"

    def __init__(self, folder: str, device: str, inter_threads: int, intra_threads: int) -> None:
        assert (device, inter_threads, intra_threads) == ("cpu", 1, 2)

    def generate_batch(self, words: list[list[str]], **asked: Any) -> list[Any]:
        assert asked["max_length"] == asked["min_length"] and not asked["include_prompt_in_result"]
        rows = [write_on([int(word[1:]) for word in row], asked["max_length"]) for row in words]
        for step in range(asked["max_length"]):
            for number in range(len(rows)):
                if asked["callback"] is not None:
                    assert asked["callback"](SimpleNamespace(step=step, batch_id=number)) is False
        return [SimpleNamespace(sequences=[[f"w{token}" for token in row]]) for row in rows]


def test_ctranslate2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", SimpleNamespace(__version__="0.0", Generator=StubGenerator))
    (tmp_path / "model.bin").touch()
    (tmp_path / "vocabulary.json").write_text(json.dumps([f"w{token}" for token in range(VOCABULARY)]))
    engine = make_peers([f"ctranslate2={tmp_path}"], make(tmp_path))[0]
    engine.load()
    timing = engine.generate(PROMPTS, 5)
    assert timing.tokens == EXPECTED and len(timing.ends) == 5
    assert len(engine.generate(PROMPTS[:1], 5, num_beams=4).ends) == 1
    assert engine.describe() == "CTranslate2 0.0, int8"
    (tmp_path / "vocabulary.json").write_text('{"w": 1}')
    with pytest.raises(LoadError, match="no list of tokens"):
        make_peers([f"ctranslate2={tmp_path}"], make(tmp_path))
