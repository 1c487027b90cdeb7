"""A batch gives every row the answer that it gets alone, whatever ends it and however it is shared out."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fakes import BLOCK_BYTES, Fake
from tests.server.running import make_fake_lm

from unspool.batch.job import Job
from unspool.batch.ledger import BatchFailedError, Progress, Share
from unspool.batch.output import JobOutput
from unspool.batch.sources import open_source
from unspool.engine import Engine
from unspool.errors import SettingError

NUM_ROWS = 40


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(make_fake_lm(), memory=BLOCK_BYTES * 4000, max_rows=8) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rng = random.Random(3)
    with path.open("w") as file:
        for number in range(1, NUM_ROWS + 1):
            text = "".join(rng.choice("abcdefg hij") for _ in range(rng.randint(1, 30)))
            row: dict[str, Any] = {"prompt": text, "id": f"row {number}", "max_new_tokens": rng.randint(1, 9)}
            if number % 5 == 0:
                body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "n": 2, "logprobs": True}
                row = {"custom_id": f"row {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            if number % 7 == 0:
                row["num_beams" if "prompt" in row else "body"] = 3
            file.write(json.dumps(row) + "\n")
    return path


def make_job(engine: Engine, source: Path, output: Path, **options: Any) -> Job:
    return Job(engine._lm, engine, open_source(source), JobOutput(output), name="fake", **options)


def read(path: Path) -> dict[int, str]:
    """Lines by number. The fake model rounds by the rows that it reads together, the CPU library does not."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {json.loads(line)["line"]: re.sub(r"(\.\d{4})\d+", r"\1", line) for line in lines}
    assert len(found) == len(lines)  # none twice
    return found


@pytest.fixture
def whole(engine: Engine, source: Path, tmp_path: Path) -> dict[int, str]:
    assert make_job(engine, source, tmp_path / "whole.jsonl").run()
    return read(tmp_path / "whole.jsonl")


def test_answers_and_errors(engine: Engine, source: Path, tmp_path: Path, whole: dict[int, str]) -> None:
    errors = read(tmp_path / "whole.jsonl.errors")
    assert sorted([*whole, *errors]) == list(range(1, NUM_ROWS + 1)) and list(errors) == [35]  # its body was no object
    assert "`body` is the object" in errors[35] and json.loads(errors[35])["custom_id"] == "row 35"
    plain, chat = json.loads(whole[1]), json.loads(whole[5])
    given = json.loads(source.read_text().splitlines()[0])
    assert plain["id"] == "row 1" and plain["usage"]["completion_tokens"] <= given["max_new_tokens"]
    body = chat["response"]["body"]
    assert chat["custom_id"] == "row 5" and len(body["choices"]) == 2 and body["choices"][0]["logprobs"]["content"]
    assert body["choices"][0]["message"]["content"] != body["choices"][1]["message"]["content"]


@pytest.mark.parametrize("suffix", ["", ".errors", ".job"])
def test_what_is_read_is_not_written_over(engine: Engine, source: Path, suffix: str) -> None:
    read_file = source if not suffix else source.with_name(f"out{suffix}")
    before = source.read_bytes()
    read_file.write_bytes(before)
    with pytest.raises(SettingError, match="the file that is read"):
        make_job(engine, read_file, source if not suffix else source.with_name("out"), restarts=True)
    assert read_file.read_bytes() == before


def test_what_plain_rows_ask_for_is_in_their_answers(engine: Engine, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "hello cat", "echo": True, "logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1},
        {"prompt": ["hello", "the cat"], "n": 2, "echo": True, "return_token_ids": True, "prompt_logprobs": 0},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({**row, "max_tokens": 3}) + "\n" for row in rows))
    assert make_job(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl").run()
    found = {row["line"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    one, several = found[1], found[2]
    lm = engine._lm
    assert one["text"].startswith("hello cat") and len(one["text"]) > len("hello cat")
    assert [entry[0] for entry in one["logprobs"][0]] == one["token_ids"]
    assert all(len(entry[2]) == 2 and entry[2][0][1] >= entry[1] for entry in one["logprobs"][0])
    prompt = lm.tokenizer.encode("hello cat")
    told = one["prompt_logprobs"][0]
    assert told[0] is None and [entry[0] for entry in told[1:]] == prompt[1:] and len(told[1][2]) == 2
    assert all(text.startswith("hello") for text in several["texts"][:2])
    assert all(text.startswith("the cat") for text in several["texts"][2:])
    assert len(several["token_ids"]) == 4 and len(several["prompt_logprobs"]) == 2


def test_items_of_responses_have_ids_that_stay(engine: Engine, tmp_path: Path) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 3}}
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    for name in ("1", "2"):
        assert make_job(engine, tmp_path / "in.jsonl", tmp_path / name).run()
    assert read(tmp_path / "1") == read(tmp_path / "2")
    assert json.loads((tmp_path / "1").read_text())["response"]["body"]["id"].startswith("resp_")


def test_a_row_that_names_its_request_keeps_the_name(engine: Engine, tmp_path: Path) -> None:
    bodies = [{"input": "hi", "max_output_tokens": 2, "request_id": name} for name in ("my_own-name", None)]
    rows = [{"custom_id": str(n), "url": "/v1/responses", "body": body} for n, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert make_job(engine, tmp_path / "in.jsonl", tmp_path / "out").run()
    named, other = sorted(map(json.loads, (tmp_path / "out").read_text().splitlines()), key=lambda one: one["line"])
    assert named["response"]["body"]["id"] == named["response"]["request_id"] == "resp_my_own-name"
    assert other["response"]["body"]["id"] == other["id"].replace("batch_req_", "resp_") and named["id"] != other["id"]


def test_half_a_character_fails_its_row_alone(engine: Engine, tmp_path: Path) -> None:
    rows = [{"prompt": "hi", "id": "\ud800"}, {"prompt": "hi", "\ud800": 1}, {"prompt": "hi", "id": "whole"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    job = make_job(engine, tmp_path / "in.jsonl", tmp_path / "out")
    assert job.run() and (job.progress.done, job.progress.failed) == (3, 2)
    assert json.loads((tmp_path / "out").read_text())["id"] == "whole"


def test_a_negative_number_of_errors_is_refused(engine: Engine, source: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="at least 0, not -1"):
        make_job(engine, source, tmp_path / "out", max_errors=-1)


@pytest.mark.parametrize("after", [0, 3, 17])
def test_an_interrupted_job_goes_on(
    engine: Engine, source: Path, tmp_path: Path, whole: dict[int, str], after: int
) -> None:
    path = tmp_path / "parts.jsonl"
    job = make_job(engine, source, path)
    assert not job.run(stop=lambda: job.progress.done >= after)
    assert len(read(path)) < len(whole)
    with path.open("ab") as file:
        file.write(b'{"line": 3, "te')  # as a kill leaves it
    again = make_job(engine, source, path)
    assert again.is_resumed and again.run()
    assert read(path) == whole
    assert make_job(engine, source, path).run() and read(path) == whole  # nothing is left to do


def test_shares_give_the_same_bytes(engine: Engine, source: Path, tmp_path: Path, whole: dict[int, str]) -> None:
    found: dict[int, str] = {}
    for index in (1, 2, 3):
        job = make_job(engine, source, tmp_path / f"{index}.jsonl", share=Share(index, 3))
        assert job.run()
        part = read(tmp_path / f"{index}.jsonl")
        assert not found.keys() & part.keys()
        found |= part
    assert found == whole
    assert make_job(engine, source, tmp_path / "few.jsonl", share=Share(limit=4)).run()
    assert sorted(read(tmp_path / "few.jsonl")) == [1, 2, 3, 4]
    with pytest.raises(SettingError, match="I/N"):
        Share(4, 3)


def test_rows_take_the_jobs_settings_unless_they_have_their_own(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "ab"}, {"prompt": "ab", "max_tokens": 2}, {"prompt": "ab", "max_new_tokens": 3}]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n\n")  # an empty line is no row
    job = make_job(engine, source, tmp_path / "out.jsonl", settings={"max_new_tokens": 5, "eos_token_id": None})
    assert job.run()
    counts = {n: json.loads(line)["usage"]["completion_tokens"] for n, line in read(tmp_path / "out.jsonl").items()}
    assert counts == {1: 5, 2: 2, 3: 3}
    with pytest.raises(SettingError, match="settings"):
        make_job(engine, source, tmp_path / "out.jsonl", settings={"max_new_tokens": 6})


def test_bad_rows_do_not_stop_it_unless_there_are_too_many(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": "a", "max_tokens": 1}, {"prompt": "a", "temprature": 1}, {"prompt": "a", "model": "gpt-4"}]
    rows += [{"prompt": "a", "top_p": 7}, {"prompt": "a", "stream": True}, {"prompt": "z", "max_tokens": 1}]
    source.write_text("\n".join(map(json.dumps, rows)))
    told: list[Progress] = []
    job = make_job(engine, source, tmp_path / "out.jsonl")
    assert job.run(told.append) and (job.progress.failed, job.progress.done) == (4, 6)
    errors = read(tmp_path / "out.jsonl.errors")
    words = {2: "temperature", 3: "--any-model", 4: "top_p", 5: "stream"}
    assert all(word in errors[number] for number, word in words.items())
    assert told and sorted(read(tmp_path / "out.jsonl")) == [1, 6]
    with pytest.raises(BatchFailedError, match="2 rows failed, and at most 1 may"):
        make_job(engine, source, tmp_path / "few.jsonl", max_errors=1).run()
    assert make_job(engine, source, tmp_path / "any.jsonl", any_model=True).run()
    assert 3 in read(tmp_path / "any.jsonl")


class Failing(Fake):
    """A model that fails once."""

    calls = 0

    def forward(self, *args: Any, **named: Any) -> Any:
        type(self).calls += 1
        if type(self).calls == 12:
            raise KeyboardInterrupt("the engine's thread ends here")
        return super().forward(*args, **named)


def test_a_dead_engine_loses_nothing(source: Path, tmp_path: Path, whole: dict[int, str]) -> None:
    from unspool.errors import EngineError

    with (
        Engine(make_fake_lm(Failing(vocab=160, max_context=2048)), memory=BLOCK_BYTES * 4000, max_rows=8) as broken,
        pytest.raises(EngineError),
    ):
        make_job(broken, source, tmp_path / "out.jsonl").run()
    with Engine(make_fake_lm(), memory=BLOCK_BYTES * 4000, max_rows=8) as fresh:
        assert make_job(fresh, source, tmp_path / "out.jsonl").run()
    assert read(tmp_path / "out.jsonl") == whole
