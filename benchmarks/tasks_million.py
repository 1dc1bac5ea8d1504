"""A task set of a million rows: how long it takes to build, and how much memory it takes to build, to open and to draw from.

    python benchmarks/tasks_million.py [--rows 1000000] [--out benchmarks/results/tasks_million.json]

The rows are word problems made up here, in GSM8K's columns, in one Parquet file. Each stage is a process of its own, so that
its memory is its own: building, opening, drawing 10,000 tasks, and a node that joins and needs its first task.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import commit

BATCH = 10_000
DRAWN = 10_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tasks_million.json")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        print(json.dumps(STAGES[arguments.stage](arguments.folder, arguments.rows)))  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {stage: _run(stage, Path(folder), arguments.rows) for stage in STAGES}
    report = {
        "commit": commit(),
        "rows": arguments.rows,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        **found,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))  # noqa: T201


def _run(stage: str, folder: Path, rows: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--stage", stage, "--folder", str(folder), "--rows", str(rows)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


# --- stages, each in a process of its own ----------------------------------------------------------------------------


def write(folder: Path, rows: int) -> dict[str, float]:
    """The source: every question is another one, the solution is as long as GSM8K's."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    with parquet.ParquetWriter(folder / "rows.parquet", schema) as writer:
        for start in range(0, rows, BATCH):
            batch = [_row(n) for n in range(start, min(start + BATCH, rows))]
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
    return {"file_bytes": (folder / "rows.parquet").stat().st_size}


def build(folder: Path, rows: int) -> dict[str, float]:
    from shoal import tasks

    before, started_s, cpu_s = _rss_bytes(), time.monotonic(), time.process_time()
    found = tasks.load(_section(folder), folder / "pool")
    files = list((folder / "pool").iterdir())
    return {
        "wall_s": round(time.monotonic() - started_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
        "rows_per_s": round(rows / (time.monotonic() - started_s)),
        "rss_before_bytes": before,
        "peak_rss_bytes": _peak_bytes(),
        "tasks": len(found.train) + len(found.heldout),
        "files": len(files),
        "disk_bytes": sum(path.stat().st_size for path in files),
    }


def open_(folder: Path, rows: int) -> dict[str, float]:
    """Open the built set, then draw from all of it."""
    from shoal import tasks

    before, started_s = _rss_bytes(), time.monotonic()
    found = tasks.load(_section(folder), folder / "pool")
    opened_s, opened_bytes, read = time.monotonic() - started_s, _rss_bytes(), len(found.store.verified)
    started_s = time.monotonic()
    for n in range(DRAWN):
        assert found.train[found.pick(hashlib.sha256(str(n).encode()).digest())].question
    drawn_s = time.monotonic() - started_s
    return {
        "open_s": round(opened_s, 3),
        "open_rss_added_bytes": opened_bytes - before,
        "files_read_to_open": read,
        "draw_us": round(drawn_s / DRAWN * 1e6, 1),
        "drawn": DRAWN,
        "rss_added_after_drawing_bytes": _rss_bytes() - before,
        "of_it_private_bytes": _private_bytes(),
        "chunks_open": len(found.store.mapped),
    }


def join(folder: Path, rows: int) -> dict[str, float]:
    """A node's first task, with the files at hand: what it must have before it can work."""
    from shoal import tasks

    asked: list[int] = []

    def fetch(sha256: str) -> bytes:
        data = (folder / "pool" / sha256).read_bytes()
        asked.append(len(data))
        return data

    digest = json.loads((folder / "pool" / "built.json").read_text())["digest"]
    started_s = time.monotonic()
    found = tasks.join(_section(folder).model_copy(update={"digest": digest}), folder / "node", fetch)
    assert found.train[rows // 2].question
    return {
        "first_task_s": round(time.monotonic() - started_s, 3),
        "fetched_files": len(asked),
        "fetched_bytes": sum(asked),
    }


STAGES = {"write": write, "build": build, "open": open_, "join": join}


def _section(folder: Path):  # type: ignore[no-untyped-def]
    from shoal.config.tasks import SourceSection, TaskSection

    return TaskSection(sources=[SourceSection(path=str(folder / "rows.parquet"))], heldout=1024)


def _row(n: int) -> dict[str, str]:
    seed = hashlib.sha256(str(n).encode()).hexdigest()
    question = (
        f"Ann number {n} finds {n % 97 + 2} shells of the kinds {seed[:20]} and {seed[20:40]} on the beach each morning and "
        f"gives {n % 13 + 1} of them to her brother. How many shells does she keep in {n % 30 + 2} days?"
    )
    kept = (n % 97 + 2 - n % 13 - 1) * (n % 30 + 2)
    steps = f"She keeps {n % 97 + 2} - {n % 13 + 1} = {n % 97 - n % 13 + 1} a day.\n" * 3
    return {"question": question, "answer": f"{steps}#### {kept}"}


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _private_bytes() -> int:
    """Memory that is not a mapped file's: pages of those can be dropped at any time."""
    statm = Path("/proc/self/statm").read_text().split()
    return (int(statm[1]) - int(statm[2])) * PAGE_BYTES


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
