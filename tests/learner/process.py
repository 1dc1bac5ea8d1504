"""Runs a learner in its own process, for tests that kill it or start several ranks.

    python -m tests.learner.process JOBS.json
    python -m torch.distributed.run --nproc-per-node 2 -m tests.learner.process JOBS.json

JOBS.json holds a list of jobs. Each job is a run in its own folder, with the fields "model", "out", "files",
"validator", "steps", "dtype", "changed" and "die". The run's reports are written to OUT/reports.json. With
"die": {"updating": n} or {"checkpointing": n}, the process sends itself SIGKILL after n updates or checkpoints. A job
with "site", the path of an invite, runs at one of several sites.
A job with the fields "check", "model", "out" and "settings" runs a check of `sharding` instead.
"""

import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import hf_storage

from shoal.learner.ranks import Ranks

from .sharding import CHECKS
from .support import Pool, SitePool, make_learner, make_site_learner


def main() -> None:
    torch.set_num_threads(1)
    ranks = Ranks.start(timeout_s=240, leader_timeout_s=240)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        out = Path(job["out"])
        if "check" in job:
            out.mkdir(parents=True, exist_ok=True)
            result = CHECKS[job["check"]](ranks, Path(job["model"]), job["settings"])
            (out / f"{ranks.rank}.json").write_text(json.dumps(result))
            continue
        files = [path.read_bytes() for path in sorted(Path(job["files"]).iterdir())]
        kind = SitePool if "site" in job else Pool
        pool = kind(*files, validator=job["validator"]) if ranks.leads else None
        make = partial(make_site_learner, Path(job["site"])) if "site" in job else make_learner
        learner = make(
            Path(job["model"]), out, pool, steps=job["steps"], dtype=job["dtype"], ranks=ranks, **job["changed"]
        )
        if n := job["die"].get("updating"):
            learner.policy.optimizer.step = dies_after(n, learner.policy.optimizer.step)  # type: ignore[method-assign]
        if n := job["die"].get("checkpointing"):
            writer: Any = hf_storage.HuggingFaceStorageWriter
            writer.finish = dies_after(n, writer.finish)  # the tensors are written by then, but not their index
        learner.run(threading.Event())
        if pool is not None:
            reports = [report.model_dump() for report in pool.reports]
            (out / "reports.json").write_text(json.dumps(reports))
    ranks.stop()


def dies_after(n: int, do: Any) -> Any:
    left = n

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return do(*args, **kwargs)

    return wrapped


if __name__ == "__main__":
    main()
