import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.calling import RefusedError
from shoal.protocol.messages import Assignment, HeartbeatAnswer
from shoal.store.rollouts import read_submission
from shoal.tasks.prompt import ChatTemplateError
from shoal.worker.loop import SHORT_S, OneThread, Worker, follow
from shoal.worker.produce import Producer

from ..workers import ALICE, RUN, FakeNode, assignment, config

CONFIG = config(tasks={"length_targets": [4, 6]}, sampling={"max_tokens": 6, "group_size": 3})
pytestmark = pytest.mark.usefixtures("one_thread")


class ScriptedNode(FakeNode):
    """Answers heartbeats from a list, and keeps the worker's reports."""

    answer: HeartbeatAnswer | None = None

    def __init__(
        self, answers: list[HeartbeatAnswer], before_answer: Callable[[int], None] = lambda beat: None
    ) -> None:
        super().__init__()
        self.answers = answers
        self.before_answer = before_answer
        self.refusals: dict[str, RefusedError] = {}
        self.activities: list[str] = []
        self.reported: list[int | None] = []  # the version that each heartbeat reports

    def pause_s(self, min_s: float) -> float:
        return min_s

    def doing(self, what: str, *, waiting: bool = False) -> None:
        self.activities.append(("waiting for " if waiting else "") + what)

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        assert wants_task
        self.before_answer(len(self.reported))
        self.reported.append(self.policy_version)
        return self.answers.pop(0)

    def send_file(self, path: str, data: bytes) -> None:
        if path in self.refusals:
            raise self.refusals[path]
        super().send_file(path, data)


@dataclass
class FakeFollower:
    version: Any = None
    last_error: str = ""

    def newest(self) -> Any:
        return self.version

    def set(self, folder: Path, version: int, digest: str = "d" * 64) -> None:
        self.version = (folder, SimpleNamespace(version=version, digest=digest))


def at_version_0(folder: Path = Path("v"), digest: str = "d" * 64) -> FakeFollower:
    follower = FakeFollower()
    follower.set(folder, 0, digest)
    return follower


def task(number: int, version: int = 0) -> Assignment:
    return assignment(number, step=number, version=version)


def running(assignment: Assignment | None = None, waiting_for: str = "") -> HeartbeatAnswer:
    return HeartbeatAnswer(state="running", newest_version=0, relays=[], assignment=assignment, waiting_for=waiting_for)


FINISHED = HeartbeatAnswer(state="finished", newest_version=0, relays=[])
EVICTED = HeartbeatAnswer(state="evicted", newest_version=0, relays=[])


def worker(node: ScriptedNode, kind: type[Producer] = Producer) -> Worker:
    return Worker(node, kind(CONFIG, RUN, ALICE, TorchEngine("float32")))  # type: ignore[arg-type]


def work(node: ScriptedNode, follower: FakeFollower, kind: type[Producer] = Producer) -> str:
    return worker(node, kind).run(follower, threading.Event())  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [FINISHED, EVICTED])
def test_a_worker_works_until_the_run_ends_or_it_is_evicted(tiny_folder: Path, last: HeartbeatAnswer) -> None:
    node = ScriptedNode([running(task(0)), running(task(1)), last])
    assert work(node, at_version_0(tiny_folder)) == last.state
    assert list(node.uploads) == [task(0).upload_path, task(1).upload_path]
    files = [read_submission(data, max_rows=6, max_tokens=6) for data in node.uploads.values()]
    assert [file.header.submission for file in files] == [0, 1], "each task must get its own file"
    assert node.tokens == sum(len(row.tokens) for file in files for row in file.rows)


def test_a_stopped_worker_sends_nothing() -> None:
    stop = threading.Event()
    stop.set()
    assert worker(ScriptedNode([])).run(FakeFollower(), stop) == "stopped"  # type: ignore[arg-type]


def test_weights_are_loaded_between_submissions(tiny_folders: tuple[Path, Path]) -> None:
    follower = at_version_0(tiny_folders[0])

    def publish(beat: int) -> None:
        if beat == 1:
            follower.set(tiny_folders[1], 1)  # the new version arrives while the second task is assigned

    node = ScriptedNode([running(task(0)), running(task(1)), running(task(2, version=1)), FINISHED], publish)
    work(node, follower)
    assert node.reported == [0, 0, 1, 1]
    assert [line for line in node.activities if line.startswith("loading")] == [
        "loading version 0",
        "loading version 1",
    ]


def test_a_task_that_needs_other_weights_is_not_started(tiny_folder: Path) -> None:
    """A coordinator restored from a backup may publish a version again, with other weights."""
    node = ScriptedNode([running(task(0)), running(task(0)), FINISHED])
    follower = at_version_0(tiny_folder, digest="e" * 64)
    assert work(node, follower) == "finished"
    assert not node.uploads and "the pool's version 0 differs from the weights" in node.activities[-1]


class NotReady(Producer):
    def load(self, folder: Path, version: int) -> int | None:
        super().load(folder, version)
        return None


def test_the_producer_decides_which_version_is_reported(tiny_folder: Path) -> None:
    node = ScriptedNode([running(waiting_for="weights"), FINISHED])
    follower = at_version_0(tiny_folder)
    work(node, follower, NotReady)
    assert node.reported == [None, None]


def test_before_the_first_weights_no_version_is_reported(tiny_folder: Path) -> None:
    follower = FakeFollower()

    def arrive(beat: int) -> None:
        if beat == 1:
            follower.set(tiny_folder, 0)

    node = ScriptedNode(
        [running(waiting_for="weights"), running(waiting_for="weights"), running(task(0)), FINISHED], arrive
    )
    assert work(node, follower) == "finished"
    assert node.reported == [None, None, 0, 0]
    assert len(node.uploads) == 1


def test_a_worker_without_a_task_reports_what_it_waits_for(tiny_folder: Path) -> None:
    node = ScriptedNode([running(waiting_for="the learner"), FINISHED])
    work(node, FakeFollower())
    assert node.activities == ["waiting for the learner"]
    node = ScriptedNode([running(waiting_for="the learner"), FINISHED])
    work(node, FakeFollower(last_error="no relay answers"))
    assert node.activities == ["waiting for weights: no relay answers"]


def test_an_upload_refused_with_409_costs_only_its_own_task_and_any_other_refusal_is_an_error(
    tiny_folder: Path,
) -> None:
    node = ScriptedNode([running(task(0)), running(task(1)), FINISHED])
    node.refusals[task(0).upload_path] = RefusedError("came after its deadline", 409)
    assert work(node, at_version_0(tiny_folder)) == "finished"
    assert list(node.uploads) == [task(1).upload_path]
    assert "generating for step 1" in node.activities, "the first step must be shown as step 1"
    assert any("not uploading" in line and "deadline" in line for line in node.activities)
    node = ScriptedNode([running(task(0))])
    node.refusals[task(0).upload_path] = RefusedError("only worker may ask", 403)
    with pytest.raises(RefusedError):
        work(node, at_version_0(tiny_folder))


def test_relays_are_followed_only_when_the_coordinator_names_some(tmp_path: Path) -> None:
    node = ScriptedNode([])
    follower = follow(node, CONFIG, tmp_path, "a" * 64)  # type: ignore[arg-type]
    assert follower.wanted() is None
    node.answer = running()
    assert follower.wanted() is None
    node.answer = HeartbeatAnswer(state="running", newest_version=4, relays=["http://r:1"])
    assert follower.wanted() == 4
    assert follower.client().urls == ["http://r:1"] and follower.client().access.run == RUN


class SlowUploads(ScriptedNode):
    """A pool in which an upload ends only when the worker has requested the next task."""

    def __init__(self, answers: list[HeartbeatAnswer]) -> None:
        super().__init__(answers)
        self.requested = threading.Event()
        self.announced: list[str | None] = []

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        self.announced.append(self.finished.submission if self.finished else None)
        if self.announced[-1]:
            self.requested.set()
        return super().beat(wants_task=wants_task)

    def send_file(self, path: str, data: bytes) -> None:
        assert self.requested.wait(60), "the worker did not request the next task during this upload"
        self.requested.clear()
        super().send_file(path, data)


def test_during_a_slow_upload_the_worker_announces_the_file_and_requests_the_next_task(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.loop.SHORT_S", 0.01)
    node = SlowUploads([running(task(0)), running(task(1)), running(waiting_for="more"), FINISHED])
    assert work(node, at_version_0(tiny_folder)) == "finished"
    assert list(node.uploads) == [task(0).upload_path, task(1).upload_path], "uploads must arrive in order"
    assert node.announced[:3] == [None, task(0).id, task(1).id]


# --- several submissions at once -------------------------------------------------------------------------------------

THREE = config(tasks={"length_targets": [4, 6]}, sampling={"max_tokens": 6}, workers={"in_flight": 3})


class Paced(Producer):
    """Produces submissions that consist of their numbers. Each is done when the test calls `end` with its number."""

    def __init__(self) -> None:
        super().__init__(THREE, RUN, ALICE, TorchEngine("float32"))
        self.done = {number: threading.Event() for number in range(5)}
        self.loads: list[int] = []

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.done[number].set()

    def load(self, folder: Path, version: int) -> int | None:
        self.loads.append(version)
        return version

    def submission(self, assignment: Assignment) -> bytes:
        assert self.done[assignment.number].wait(30)
        return str(assignment.number).encode()


class Pool(ScriptedNode):
    """Assigns `tasks` tasks, and records the tasks that the worker says it is working on."""

    def __init__(self, tasks: int, when: dict[int, Callable[[], None]]) -> None:
        """`when`: functions to call when a request arrives, by the request's number, counted from 1."""
        super().__init__([])
        self.tasks, self.when = tasks, when
        self.worked_on: list[list[str]] = []
        self.assigned = 0

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        self.worked_on.append([id[-1] for id in self.working_on])
        self.reported.append(self.policy_version)
        self.when.pop(len(self.worked_on), lambda: None)()
        if self.assigned == self.tasks:
            return running(waiting_for="the learner") if self.working_on else FINISHED
        self.assigned += 1
        return running(task(self.assigned - 1, version=self.policy_version or 0))


def test_in_flight_submissions_are_produced_at_once_and_uploaded_in_order() -> None:
    producer = Paced()
    producer.end(1)  # the second submission is done long before the first
    pool = Pool(4, {3: lambda: producer.end(0, 2, 3)})
    assert Worker(pool, producer).run(at_version_0(), threading.Event()) == "finished"  # type: ignore[arg-type]
    assert pool.worked_on[:3] == [[], ["0"], ["0", "1"]]
    assert max(map(len, pool.worked_on)) < 3, "a worker with in_flight tasks must request no task"
    assert [path[-1] for path in pool.uploads] == ["0", "1", "2", "3"]
    assert pool.working_on == []


def test_newer_weights_are_loaded_only_after_everything_is_uploaded() -> None:
    producer, follower = Paced(), at_version_0()

    def publish() -> None:
        follower.set(Path("v"), 1)
        # Within these 0.5 s the worker could wrongly request another task.
        threading.Timer(0.5, producer.end, range(5)).start()

    pool = Pool(3, {2: publish})
    assert Worker(pool, producer).run(follower, threading.Event()) == "finished"  # type: ignore[arg-type]
    assert producer.loads == [0, 1]
    assert pool.reported[:3] == [0, 0, 1] and pool.worked_on[2] == [], "it must request no third task of old weights"


def test_an_error_in_production_ends_the_worker() -> None:
    producer = Paced()

    def fail(assignment: Assignment) -> bytes:
        if assignment.number == 1:
            raise RuntimeError("no memory")
        return Paced.submission(producer, assignment)

    producer.submission = fail  # type: ignore[method-assign]
    producer.end(0)
    pool = Pool(2, {})
    with pytest.raises(RuntimeError, match="no memory"):
        Worker(pool, producer).run(at_version_0(), threading.Event())  # type: ignore[arg-type]
    assert [path[-1] for path in pool.uploads] == ["0"]


def test_submissions_produced_together_equal_those_produced_alone(tiny_folder: Path) -> None:
    node, follower = Pool(3, {}), at_version_0(tiny_folder)
    producer = Producer(THREE, RUN, ALICE, TorchEngine("float32", numerics="exact"))
    assert Worker(node, producer).run(follower, threading.Event()) == "finished"  # type: ignore[arg-type]
    alone = Producer(THREE, RUN, ALICE, TorchEngine("float32", numerics="exact"))
    alone.load(tiny_folder, 0)
    for number in range(3):
        uploaded = read_submission(node.uploads[task(number).upload_path], max_rows=64, max_tokens=6)
        expected = read_submission(alone.submission(task(number)), max_rows=64, max_tokens=6)
        assert list(uploaded.rows) == list(expected.rows)


class Renewing(ScriptedNode):
    """A pool that requests a new fingerprint during an upload."""

    renewals = 0
    uploaded_before: tuple[str, ...] = ()

    def renewal(self) -> int | None:
        return 1 if self.reported[1:] and not self.renewals else None

    def send_file(self, path: str, data: bytes) -> None:
        time.sleep(2 * SHORT_S)
        super().send_file(path, data)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "renewals" and value:
            self.uploaded_before = tuple(self.uploads)
        super().__setattr__(name, value)


def test_work_of_the_old_fingerprint_arrives_before_the_new_one(tiny_folder: Path) -> None:
    """If it arrived later, the coordinator would count a second mismatch for the same fault."""
    node, follower = Renewing([running(task(0)), running(), FINISHED]), at_version_0(tiny_folder)
    assert work(node, follower) == "finished"
    assert node.uploaded_before == (task(0).upload_path,)


# --- one thread runs the jobs of all threads -------------------------------------------------------------------------


def test_jobs_run_in_one_thread_and_raise_in_the_thread_that_submitted_them() -> None:
    compute = OneThread()
    with ThreadPoolExecutor(2) as threads, compute:
        jobs = [threads.submit(lambda job=job: compute(job)) for job in (threading.get_ident, lambda: 1 // 0)]  # type: ignore[misc]
        for job in jobs:
            job.add_done_callback(compute.wake)
            compute.compute_until(job, 30)
        compute.compute_until(Future(), 0.01)  # this call ends at its time limit
    assert jobs[0].result() == threading.get_ident() == compute(threading.get_ident)
    with pytest.raises(ZeroDivisionError):
        jobs[1].result()


def test_jobs_submitted_too_late_are_cancelled() -> None:
    compute, submitted = OneThread(), threading.Event()

    def submit() -> int:
        submitted.set()
        return compute(lambda: 1)

    with ThreadPoolExecutor(1) as threads:
        with compute:
            waiting = threads.submit(submit)
            submitted.wait(30)
        for job in (waiting, threads.submit(submit)):
            with pytest.raises(CancelledError):
                job.result(30)


# --- versions that cannot be used --------------------------------------------------------------------------------------


class RefusingNode(ScriptedNode):
    refused = ""

    def refuse(self, version: int, error: Exception) -> None:
        self.refused = f"version {version}: {error}"


def test_a_version_that_cannot_be_used_is_refused_and_the_loaded_one_stays(tiny_folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(tiny_folder, tmp_path / "bad"))
    save_file({"other": torch.zeros(2)}, bad / "model.safetensors")
    follower = at_version_0(tiny_folder)

    def publish(beat: int) -> None:
        if beat == 1:
            follower.set(bad, 1)
        if beat == 4:
            follower.set(tiny_folder, 2)

    node = RefusingNode(
        [running(task(0)), *[running(task(number)) for number in (1, 2, 3)], running(task(4, 2)), FINISHED], publish
    )
    assert work(node, follower) == "finished"
    assert node.reported == [0, 0, 0, 0, 0, 2] and len(node.uploads) == 5
    assert sum(activity == "loading version 1" for activity in node.activities) == 1, "it is tried once"
    assert node.refused == "", "a good version ends the refusal"


def test_a_first_version_that_cannot_be_used_waits_for_the_next(tiny_folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(tiny_folder, tmp_path / "bad"))
    (bad / "tokenizer_config.json").write_text('{"tokenizer_class": "AutoModelForCausalLM"}')
    follower = at_version_0(bad)
    node = RefusingNode(
        [running(), running(), FINISHED], lambda beat: follower.set(tiny_folder, 1) if beat == 1 else None
    )
    assert work(node, follower) == "finished"
    assert node.reported == [None, None, 1]
    assert "waiting for a newer version" in " ".join(node.activities)


def test_a_template_that_fails_on_a_task_costs_the_version_and_not_the_worker(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: Any) -> list[int]:
        raise ChatTemplateError("it exceeds a limit")

    monkeypatch.setattr("shoal.worker.produce.prompt_tokens", render)
    node = RefusingNode([running(task(0)), running(), FINISHED])
    assert work(node, at_version_0(tiny_folder)) == "finished"
    assert node.uploads == {} and node.refused.startswith("version 0: ") and node.reported[-1] is None
