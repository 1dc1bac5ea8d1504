import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.calling import RefusedError
from shoal.protocol.messages import Assignment, HeartbeatAnswer
from shoal.store.rollouts import read_submission
from shoal.worker.loop import SHORT_S, OneThread, Worker, follow
from shoal.worker.produce import Producer

from ..workers import ALICE, RUN, FakeNode, assignment, config

CONFIG = config(tasks={"length_targets": [4, 6]}, sampling={"max_tokens": 6, "group_size": 3})
pytestmark = pytest.mark.usefixtures("one_thread")


class ScriptedNode(FakeNode):
    """Answers heartbeats from a list; keeps what the worker says it does too."""

    answer: HeartbeatAnswer | None = None

    def __init__(
        self, answers: list[HeartbeatAnswer], before_answer: Callable[[int], None] = lambda beat: None
    ) -> None:
        super().__init__()
        self.answers = answers
        self.before_answer = before_answer
        self.refusals: dict[str, RefusedError] = {}
        self.said: list[str] = []
        self.asked_with: list[int | None] = []

    def pause_s(self, least_s: float) -> float:
        return least_s

    def doing(self, what: str, *, waiting: bool = False) -> None:
        self.said.append(("waiting for " if waiting else "") + what)

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        assert wants_task
        self.before_answer(len(self.asked_with))
        self.asked_with.append(self.policy_version)
        return self.answers.pop(0)

    def send_file(self, path: str, data: bytes) -> None:
        if path in self.refusals:
            raise self.refusals[path]
        super().send_file(path, data)


@dataclass
class FakeFollower:
    held: Any = None
    last_error: str = ""

    def newest(self) -> Any:
        return self.held

    def bring(self, folder: Path, version: int, digest: str = "d" * 64) -> None:
        self.held = (folder, SimpleNamespace(version=version, digest=digest))


def held(folder: Path = Path("v"), digest: str = "d" * 64) -> FakeFollower:
    """One that holds version 0."""
    follower = FakeFollower()
    follower.bring(folder, 0, digest)
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
def test_it_works_until_it_is_told_that_it_is_over(tiny_folder: Path, last: HeartbeatAnswer) -> None:
    node = ScriptedNode([running(task(0)), running(task(1)), last])
    assert work(node, held(tiny_folder)) == last.state
    assert list(node.uploads) == [task(0).upload_path, task(1).upload_path]
    files = [read_submission(data, max_rows=6, max_tokens=6) for data in node.uploads.values()]
    assert [file.header.submission for file in files] == [0, 1], "each file is for the task under which it is uploaded"
    assert node.tokens == sum(len(row.tokens) for file in files for row in file.rows)


def test_a_stopped_worker_asks_for_nothing(tiny_folder: Path) -> None:
    stop = threading.Event()
    stop.set()
    node = ScriptedNode([])
    assert worker(node).run(FakeFollower(), stop) == "stopped"  # type: ignore[arg-type]


def test_weights_are_taken_between_submissions(tiny_folders: tuple[Path, Path]) -> None:
    follower = held(tiny_folders[0])

    def publish(beat: int) -> None:
        if beat == 1:
            follower.bring(tiny_folders[1], 1)  # arrives while the second task is handed out

    node = ScriptedNode([running(task(0)), running(task(1)), running(task(2, version=1)), FINISHED], publish)
    work(node, follower)
    assert node.asked_with == [0, 0, 1, 1]
    assert [line for line in node.said if line.startswith("loading")] == ["loading version 0", "loading version 1"]


def test_it_does_not_work_with_other_weights_than_the_task_names(tiny_folder: Path) -> None:
    """As after a coordinator's return to older state: a version was published again, with other weights."""
    node = ScriptedNode([running(task(0)), running(task(0)), FINISHED])
    follower = held(tiny_folder, digest="e" * 64)
    assert work(node, follower) == "finished"
    assert not node.uploads and "are not the pool's" in node.said[-1]


class NotReady(Producer):
    def load(self, folder: Path, version: int) -> int | None:
        super().load(folder, version)
        return None


def test_it_says_that_it_has_what_its_producer_says(tiny_folder: Path) -> None:
    node = ScriptedNode([running(waiting_for="weights"), FINISHED])
    follower = held(tiny_folder)
    work(node, follower, NotReady)
    assert node.asked_with == [None, None]


def test_before_the_first_weights_it_says_that_it_has_none(tiny_folder: Path) -> None:
    follower = FakeFollower()

    def arrive(beat: int) -> None:
        if beat == 1:
            follower.bring(tiny_folder, 0)

    node = ScriptedNode(
        [running(waiting_for="weights"), running(waiting_for="weights"), running(task(0)), FINISHED], arrive
    )
    assert work(node, follower) == "finished"
    assert node.asked_with == [None, None, 0, 0]
    assert len(node.uploads) == 1


def test_while_there_is_no_task_it_waits_and_says_for_what(tiny_folder: Path) -> None:
    node = ScriptedNode([running(waiting_for="the learner"), FINISHED])
    work(node, FakeFollower())
    assert node.said == ["waiting for the learner"]
    node = ScriptedNode([running(waiting_for="the learner"), FINISHED])
    work(node, FakeFollower(last_error="no relay answers"))
    assert node.said == ["waiting for weights: no relay answers"]


def test_a_task_that_came_too_late_costs_only_itself(tiny_folder: Path) -> None:
    node = ScriptedNode([running(task(0)), running(task(1)), FINISHED])
    node.refusals[task(0).upload_path] = RefusedError("came after its deadline", 409)
    assert work(node, held(tiny_folder)) == "finished"
    assert list(node.uploads) == [task(1).upload_path]
    assert "generating for step 1" in node.said, "people count steps from 1"
    assert any("not uploading" in line and "deadline" in line for line in node.said)


def test_any_other_refusal_is_an_error(tiny_folder: Path) -> None:
    node = ScriptedNode([running(task(0))])
    node.refusals[task(0).upload_path] = RefusedError("only worker may ask", 403)
    with pytest.raises(RefusedError):
        work(node, held(tiny_folder))


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
    """An upload ends when the worker has asked for the task after it."""

    def __init__(self, answers: list[HeartbeatAnswer]) -> None:
        super().__init__(answers)
        self.asked = threading.Event()
        self.announced: list[str | None] = []

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        self.announced.append(self.finished.submission if self.finished else None)
        if self.announced[-1]:
            self.asked.set()
        return super().beat(wants_task=wants_task)

    def send_file(self, path: str, data: bytes) -> None:
        assert self.asked.wait(60), "the worker waits for this upload before it asks for the next task"
        self.asked.clear()
        super().send_file(path, data)


def test_it_asks_for_the_next_task_while_it_uploads_and_names_the_file(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.loop.SHORT_S", 0.01)
    node = SlowUploads([running(task(0)), running(task(1)), running(waiting_for="more"), FINISHED])
    assert work(node, held(tiny_folder)) == "finished"
    assert list(node.uploads) == [task(0).upload_path, task(1).upload_path], "one at a time, in order, none is lost"
    assert node.announced[:3] == [None, task(0).id, task(1).id]


# --- several submissions at once -------------------------------------------------------------------------------------

THREE = config(tasks={"length_targets": [4, 6]}, sampling={"max_tokens": 6}, workers={"in_flight": 3})


class Paced(Producer):
    """Its submissions are done when the test says so, and hold their number alone."""

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
    """Hands out task after task, `most` in all; keeps what the worker says it works on when it asks."""

    def __init__(self, most: int, when: dict[int, Callable[[], None]]) -> None:
        """`when`: what happens at which request, from 1 on."""
        super().__init__([])
        self.most, self.when = most, when
        self.worked_on: list[list[str]] = []
        self.given = 0

    def beat(self, *, wants_task: bool = False) -> HeartbeatAnswer:
        self.worked_on.append([id[-1] for id in self.working_on])
        self.asked_with.append(self.policy_version)
        self.when.pop(len(self.worked_on), lambda: None)()
        if self.given == self.most:
            return running(waiting_for="the learner") if self.working_on else FINISHED
        self.given += 1
        return running(task(self.given - 1, version=self.policy_version or 0))


def test_it_produces_as_many_as_the_run_says_and_delivers_them_in_order() -> None:
    producer = Paced()
    producer.end(1)  # the second is done long before the first
    pool = Pool(4, {3: lambda: producer.end(0, 2, 3)})
    assert Worker(pool, producer).run(held(), threading.Event()) == "finished"  # type: ignore[arg-type]
    assert pool.worked_on[:3] == [[], ["0"], ["0", "1"]]
    assert max(map(len, pool.worked_on)) < 3, "it does not ask while it works on as many as it may"
    assert [path[-1] for path in pool.uploads] == ["0", "1", "2", "3"]
    assert pool.working_on == []


def test_weights_are_taken_when_everything_is_delivered() -> None:
    producer, follower = Paced(), held()

    def publish() -> None:
        follower.bring(Path("v"), 1)
        threading.Timer(0.5, producer.end, range(5)).start()  # time enough to ask for another task

    pool = Pool(3, {2: publish})
    assert Worker(pool, producer).run(follower, threading.Event()) == "finished"  # type: ignore[arg-type]
    assert producer.loads == [0, 1]
    assert pool.asked_with[:3] == [0, 0, 1] and pool.worked_on[2] == [], "it asks for no third task of old weights"


def test_what_fails_ends_the_worker_and_is_not_signed() -> None:
    producer = Paced()

    def fail(assignment: Assignment) -> bytes:
        if assignment.number == 1:
            raise RuntimeError("no memory")
        return Paced.submission(producer, assignment)

    producer.submission = fail  # type: ignore[method-assign]
    producer.end(0)
    pool = Pool(2, {})
    with pytest.raises(RuntimeError, match="no memory"):
        Worker(pool, producer).run(held(), threading.Event())  # type: ignore[arg-type]
    assert [path[-1] for path in pool.uploads] == ["0"]


def test_submissions_produced_together_are_those_produced_alone(tiny_folder: Path) -> None:
    node, follower = Pool(3, {}), held(tiny_folder)
    producer = Producer(THREE, RUN, ALICE, TorchEngine("float32", numerics="exact"))
    assert Worker(node, producer).run(follower, threading.Event()) == "finished"  # type: ignore[arg-type]
    alone = Producer(THREE, RUN, ALICE, TorchEngine("float32", numerics="exact"))
    alone.load(tiny_folder, 0)
    for number in range(3):
        rows = read_submission(node.uploads[task(number).upload_path], max_rows=64, max_tokens=6).rows
        assert rows == read_submission(alone.submission(task(number)), max_rows=64, max_tokens=6).rows


class Renewing(ScriptedNode):
    """Asks the worker to load its weights again while an upload is under way."""

    renewals = 0
    had: tuple[str, ...] = ()

    def renewal(self) -> int | None:
        return 1 if self.asked_with[1:] and not self.renewals else None

    def send_file(self, path: str, data: bytes) -> None:
        time.sleep(2 * SHORT_S)
        super().send_file(path, data)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "renewals" and value:
            self.had = tuple(self.uploads)
        super().__setattr__(name, value)


def test_what_the_old_weights_wrote_arrives_before_the_new_fingerprint(tiny_folder: Path) -> None:
    """Otherwise the coordinator takes it for work of the new ones, and a second mismatch for a second fault."""
    node, follower = Renewing([running(task(0)), running(), FINISHED]), held(tiny_folder)
    assert work(node, follower) == "finished"
    assert node.had == (task(0).upload_path,)


# --- jobs of other threads run in one --------------------------------------------------------------------------------


def compute(home: OneThread, asking: "Future[int]") -> None:
    asking.add_done_callback(home.wake)
    home.compute_until(asking, 30)
    assert asking.done()


def test_jobs_of_other_threads_run_in_its_own() -> None:
    home = OneThread()
    with ThreadPoolExecutor(1) as threads, home:
        asking = threads.submit(lambda: home(threading.get_ident))
        compute(home, asking)
    assert asking.result() == threading.get_ident()
    assert home(threading.get_ident) == threading.get_ident(), "its own jobs need no turn"


def test_what_fails_is_raised_where_it_was_asked() -> None:
    home = OneThread()
    with ThreadPoolExecutor(1) as threads, home:
        asking = threads.submit(lambda: home(lambda: 1 // 0))
        compute(home, asking)
    with pytest.raises(ZeroDivisionError):
        asking.result()


def test_a_turn_ends_with_its_time() -> None:
    with OneThread() as home:
        home.compute_until(Future(), 0.01)


def test_whoever_asks_too_late_is_refused() -> None:
    home, asked = OneThread(), threading.Event()

    def ask() -> int:
        asked.set()
        return home(lambda: 1)

    with ThreadPoolExecutor(1) as threads:
        with home:
            waiting = threads.submit(ask)
            asked.wait(30)
        with pytest.raises(CancelledError):
            waiting.result(30)
        with pytest.raises(CancelledError):
            threads.submit(ask).result(30)
