"""Files of prompts on a cluster: whatever dies, every row has one answer, and it is the answer of a single engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ray.fakes import ENGINE, LINES, MakeDeadly
from tests.server.running import make_fake_lm
from unspool.batch.job import Job
from unspool.batch.ledger import BatchFailedError
from unspool.batch.output import JobOutput
from unspool.batch.sources import open_source
from unspool.engine import Engine
from unspool.errors import EngineError, SettingError, UnspoolError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
SETTINGS = {"max_new_tokens": 12, "temperature": 1.2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LINES) + "not json\n")
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines that one engine writes, sorted: answers and the one error."""
    path, lm = tmp_path_factory.mktemp("whole") / "out.jsonl", make_fake_lm()
    with Engine(lm, **ENGINE) as engine:
        assert Job(lm, engine, open_source(source), JobOutput(path), name="fake", settings=SETTINGS).run()
    return read(path)


def read(path: Path) -> list[str]:
    errors = path.with_name(path.name + ".errors")
    return sorted([*path.read_text().splitlines(), *(errors.read_text().splitlines() if errors.exists() else ())])


def read_parts(folder: Path) -> list[str]:
    return sorted(line for path in (folder / "parts").iterdir() for line in path.read_text().splitlines())


def make_pipeline(source: Path, model: Any = make_fake_lm, **options: Any) -> Any:
    from unspool.ray.batch import RayPipeline
    from unspool.ray.cluster import Actors

    count = options.pop("actors", 1)
    actors = Actors(count, count, options.pop("cpus", 1.0))
    given = {"name": "fake", "settings": SETTINGS, "engine": ENGINE, "rows_per_task": 8, **options}
    return RayPipeline(model, open_source(source), actors, **given)


def test_an_actor_that_dies_in_the_middle(source: Path, whole: list[str], tmp_path: Path) -> None:
    from unspool.ray.batch import RayJob

    job = RayJob(make_pipeline(source, MakeDeadly(tmp_path)), JobOutput(tmp_path / "out.jsonl"))
    assert job.run() and len(list(tmp_path.glob("death.*"))) == 1
    assert read(tmp_path / "out.jsonl") == whole
    assert (job.progress.done, job.progress.failed) == (len(LINES) + 1, 1)
    again = RayJob(make_pipeline(source), JobOutput(tmp_path / "out.jsonl"))
    assert again.is_resumed and again.run() and read(tmp_path / "out.jsonl") == whole


def test_a_job_goes_from_one_process_to_a_cluster_and_back(source: Path, whole: list[str], tmp_path: Path) -> None:
    from unspool.ray.batch import RayJob

    path, lm = tmp_path / "out.jsonl", make_fake_lm()
    with Engine(lm, **ENGINE) as engine:
        first = Job(lm, engine, open_source(source), JobOutput(path), name="fake", settings=SETTINGS)
        assert not first.run(stop=lambda: first.progress.done >= 20)
        job = RayJob(make_pipeline(source), JobOutput(path))
        assert job.is_resumed and not job.run(stop=lambda: job.progress.done >= 60)
        assert Job(lm, engine, open_source(source), JobOutput(path), name="fake", settings=SETTINGS).run()
    assert read(path) == whole


def test_rows_in_small_blocks_are_neither_lost_nor_doubled(source: Path, tmp_path: Path) -> None:
    """Ray hands over what a dead actor's task has yielded, and of the second try only what comes behind it."""
    import ray

    from unspool.ray import generate

    rows = [{"prompt": row["prompt"], "line": number} for number, row in enumerate(LINES[:40])]
    ds = ray.data.from_items(rows, override_num_blocks=2)
    ds.context.target_max_block_size = 1  # every yield is a block
    made = generate(ds, MakeDeadly(tmp_path), batch_size=20, max_new_tokens=12, engine=ENGINE)
    assert sorted(row["line"] for row in made.iter_rows()) == list(range(40))
    assert len(list(tmp_path.glob("death.*"))) == 1


def test_a_node_that_is_lost(cluster: Any, source: Path, whole: list[str], tmp_path: Path) -> None:
    from unspool.ray.batch import RayJob

    node = cluster.add_node(num_cpus=4, object_store_memory=100 << 20)
    pipeline = make_pipeline(source, MakeDeadly(tmp_path, deaths=0, seconds=0.03), actors=2, cpus=3.0)
    job = RayJob(pipeline, JobOutput(tmp_path / "out.jsonl"))
    gone = threading.Event()

    def lose() -> None:
        cluster.remove_node(node, allow_graceful=False)
        gone.set()

    def tell(progress: Any) -> None:
        if progress.done >= 16 and not threads:
            threads.append(threading.Thread(target=lose))
            threads[0].start()

    threads: list[threading.Thread] = []
    assert job.run(tell)
    threads[0].join()
    assert gone.is_set() and read(tmp_path / "out.jsonl") == whole


def test_a_row_that_ends_every_actor_ends_the_job(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unspool.ray.batch import RayJob

    monkeypatch.setattr("unspool.ray.dataset.RETRIES", 1)
    job = RayJob(make_pipeline(source, MakeDeadly(tmp_path, deaths=99)), JobOutput(tmp_path / "out.jsonl"))
    with pytest.raises(EngineError, match="What is written stays"):
        job.run()
    assert 2 <= len(list(tmp_path.glob("death.*"))) < 10


def test_too_many_errors(source: Path, tmp_path: Path) -> None:
    from unspool.ray.batch import RayJob

    with pytest.raises(BatchFailedError, match="1 rows failed, and at most 0 may"):
        RayJob(make_pipeline(source), JobOutput(tmp_path / "out.jsonl"), max_errors=0).run()
    with pytest.raises(UnspoolError, match="rows"):
        RayJob(make_pipeline(source, engine={"rows": 3}), JobOutput(tmp_path / "none.jsonl")).run()


# --- a folder of parts, with Ray's checkpoints ------------------------------------------------------------------------
class Full:
    """A disk that is full while a file is there."""

    def __init__(self, flag: Path) -> None:
        from unspool.ray.folder import LinesFolder

        class FullParts(LinesFolder):
            def write_block_to_file(self, block: Any, file: Any) -> None:
                if flag.exists() and len(list(Path(self.path).iterdir())) > 4:
                    file.write(b'{"line": 1, "te')
                    raise OSError(28, "No space left on device")
                super().write_block_to_file(block, file)

        self.kind = FullParts


def test_a_full_disk_and_checkpoints_that_are_not_whole(
    source: Path, whole: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unspool.ray import folder

    flag, place = tmp_path / "full", tmp_path / "out"
    flag.touch()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "LinesFolder", Full(flag).kind)
        job = folder.FolderJob(make_pipeline(source, MakeDeadly(tmp_path)), place)
        with pytest.raises(UnspoolError, match="No space left on device"):
            job.run()
    assert 0 < job.progress.done < len(whole)
    assert list((place / "checkpoint").glob("*.pending.parquet"))
    half, cut, torn = sorted(path for path in (place / "checkpoint").iterdir() if ".pending." not in path.name)[:3]
    half.write_bytes(half.read_bytes()[:40])  # power went while the disk wrote the checkpoint
    part = place / "parts" / f"{cut.stem}.jsonl"
    part.write_text(part.read_text()[:-5])  # or the part
    torn.rename(torn.with_name(f"{torn.stem}.pending.parquet"))  # or before its checkpoint had its name
    again = folder.FolderJob(make_pipeline(source), place)
    assert again.is_resumed and again.progress.num_before < job.progress.done
    assert again.run() and read_parts(place) == whole
    assert folder.FolderJob(make_pipeline(source), place).run() and read_parts(place) == whole
    with pytest.raises(SettingError, match="begun with seed 0, and now it is 1"):
        folder.FolderJob(make_pipeline(source, seed=1), place)
    with pytest.raises(SettingError, match="no batch wrote it"):
        folder.FolderJob(make_pipeline(source), tmp_path)


def test_a_folder_of_others_is_left_alone(source: Path, tmp_path: Path) -> None:
    from unspool.ray.folder import FolderJob

    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights").write_text("mine")
    with pytest.raises(SettingError, match="no batch wrote it; name another"):
        FolderJob(make_pipeline(source), tmp_path, restarts=True)
    assert (tmp_path / "checkpoint" / "weights").read_text() == "mine"


def test_the_command(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": "abc " * (1 + n % 7), "id": n}) + "\n" for n in range(30)))
    options = ("-m", tiny, "--max-new-tokens", "12", "--do-sample", "--seed", "5")
    assert cli("batch", str(path), "-o", str(tmp_path / "one.jsonl"), *options).code == 0
    ended = cli("batch", str(path), "-o", str(tmp_path / "ray.jsonl"), *options, "--ray", "--actors", "1:2")
    assert ended.code == 0 and "30 lines" in ended.err, ended.err
    assert read(tmp_path / "ray.jsonl") == read(tmp_path / "one.jsonl")
    assert cli("batch", str(path), "-o", f"{tmp_path / 'parts'}/", *options, "--ray").code == 0
    assert read_parts(tmp_path / "parts") == read(tmp_path / "one.jsonl")
