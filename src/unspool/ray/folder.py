"""A folder of answers: lines are written where they are made, and Ray's checkpoints say which are done."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import BlockBasedFileDatasink
from ray.exceptions import RayError

from unspool.batch.ledger import Progress
from unspool.batch.output import Done, Note, take_output
from unspool.errors import ResourceError, SettingError, UnspoolError
from unspool.loading.locks import FileLock
from unspool.ray.batch import RayPipeline, read_failure


class LinesFolder(BlockBasedFileDatasink):  # type: ignore[misc]  # Ray is not read
    """Lines of answers, a file per task."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), file_format="jsonl")

    def write_block_to_file(self, block: Any, file: Any) -> None:
        """Write the lines of a block."""
        for line in block.to_arrow()["answer"]:
            file.write(line.as_py())


class FolderJob:
    """Answers a file's rows by actors, into the files of a folder on a disk that all of them see.

    Answers and failures are in `parts/`. A part counts as done once its checkpoint has its name: a run that ends
    before leaves a pending one, and the next run deletes the part that belongs to it.
    """

    def __init__(self, pipeline: RayPipeline, folder: Path | str, *, restarts: bool = False) -> None:
        self._pipeline, self.folder = pipeline, Path(folder)
        self._parts, self._checkpoint = self.folder / "parts", self.folder / "checkpoint"
        if self.folder.exists() and not self.folder.is_dir():
            raise SettingError(f"{folder} is a file; an output that ends with / is a folder")
        note = Note(self.folder / "job.json", self.folder)
        self._lock = FileLock(self.folder / ".job.lock")
        job = pipeline.describe()
        self._weights = job["weights"]
        self.folder.mkdir(exist_ok=True, parents=True)
        take_output(self._lock, self.folder)
        try:
            self._open(note, job, restarts=restarts)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, note: Note, job: dict[str, Any], *, restarts: bool) -> None:
        if restarts and note.path.exists():  # else `checkpoint` may be somebody's own
            for path in (self._parts, self._checkpoint):
                shutil.rmtree(path, ignore_errors=True)
            note.path.unlink(missing_ok=True)
        self.is_resumed = note.path.exists()
        if self.is_resumed:
            note.compare(job)
        elif any(path != self._lock.path for path in self.folder.iterdir()):
            raise SettingError(f"{self.folder} is not empty and no batch wrote it; name another")
        else:
            note.write(job)
        for path in self._list_committed():
            if self._count_rows(path) is None:  # power was lost before the disk had it: Ray removes the part
                path.rename(path.with_name(f"{path.stem}.pending.parquet"))
        done = self._count_done()
        self.progress = Progress(self._pipeline.count(), done, num_before=done)

    def _list_committed(self) -> list[Path]:
        return [path for path in self._checkpoint.glob("*.parquet") if ".pending." not in path.name]

    def _count_rows(self, checkpoint: Path) -> int | None:
        """Rows of a checkpoint; None if it or its part is not whole."""
        try:
            rows = int(pq.read_metadata(checkpoint).num_rows)
            with (self._parts / f"{checkpoint.stem}.jsonl").open("rb") as file:
                lines = sum(line.endswith(b"\n") for line in file)
        except Exception:  # whatever pyarrow makes of half a file
            return None
        return rows if lines == rows else None

    def _count_done(self) -> int:
        return sum(self._count_rows(path) or 0 for path in self._list_committed())

    def run(self) -> bool:
        """Answer what is not answered yet; whether all is."""
        try:
            return self._run()
        finally:
            self._lock.release()

    def _run(self) -> bool:
        if self.progress.done < self.progress.total:
            started = time.monotonic()
            dataset = self._pipeline.build(Done(), self._weights)
            dataset.context.checkpoint_config = CheckpointConfig(
                "line", str(self._checkpoint.resolve()), delete_checkpoint_on_success=False
            )
            try:
                dataset.write_datasink(LinesFolder(self._parts.resolve()))
            except UnspoolError:
                raise
            except OSError as error:
                if not isinstance(error, RayError):
                    raise ResourceError(
                        f"{self.folder} can't be written: {error}; make room and start again"
                    ) from error
                raise read_failure(error) from error
            except Exception as error:
                raise read_failure(error) from error
            finally:
                self.progress.started = started
                self.progress.done = self._count_done()
        return self.progress.done >= self.progress.total
