"""The reasons for which `shoal run` stops a run, with a fake clock, coordinator and disk."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.cli.launch import watch
from shoal.cli.launch.watch import LONGEST_WORK_S, STALL_S, Watch
from shoal.cli.preflight.machine import RESERVE_BYTES
from shoal.errors import ShoalError
from shoal.protocol.history import History, PoolWatch

from ...watch.support import node, status


class Site:
    """The watch's inputs: the time, the coordinator's status (`known`; None: it is unreachable), the free bytes."""

    def __init__(self, folder: Path, stall_s: float = STALL_S) -> None:
        self.now_s = 0.0
        self.free = 10 * RESERVE_BYTES
        self.trained = 0  # steps in the history
        self.known: dict[str, Any] | None = {}
        client = httpx.Client(transport=httpx.MockTransport(self.answer))
        pool = PoolWatch("http://c:1", client)
        self.watch = Watch(folder, pool, stall_s=stall_s, clock=lambda: self.now_s, free=lambda folder: self.free)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.known is None:
            raise httpx.ConnectError("refused", request=request)
        if request.url.path == "/v1/history":
            metrics = [{"step": float(step)} for step in range(self.trained)]
            history = History(cursor=self.trained, metrics=metrics, evaluations=[], samples=[])
            return httpx.Response(200, text=history.model_dump_json())
        return httpx.Response(200, text=status(**self.known).status.model_dump_json())

    def at(self, now_s: float, **known: Any) -> None:
        self.now_s, self.known = now_s, known
        self.watch.look()
        self.watch.check()


def test_a_run_without_progress_is_stopped_and_names_who_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, stall_s=100)
    site.at(0, nodes=[node("worker-0", accepted=1)])
    site.at(90, nodes=[node("worker-0", accepted=2)])
    site.at(180, nodes=[node("worker-0", accepted=2)])
    waiting = node("learner", "learner", stats={"doing": "the batch of step 2", "waiting": True})
    with pytest.raises(
        ShoalError, match=r"nothing was accepted or trained for 101 s; learner is waiting for the batch of step 2"
    ):
        site.at(191, nodes=[node("worker-0", accepted=2), waiting])


def test_a_long_step_is_no_stall_but_a_learner_that_is_gone_is(tmp_path: Path) -> None:
    site = Site(tmp_path, stall_s=100)
    training = {"doing": "training step 2", "waiting": False}
    site.at(0, nodes=[node("learner", "learner", stats=training)])
    site.at(LONGEST_WORK_S - 1, nodes=[node("learner", "learner", stats=training)])
    with pytest.raises(ShoalError, match="nothing was accepted or trained for 14399 s; learner is training step 2"):
        site.at(LONGEST_WORK_S - 1, nodes=[node("learner", "learner", stats=training, seen_s=0.0)])
    with pytest.raises(ShoalError, match="relay-0 is serving"):  # a relay computes nothing
        site.at(LONGEST_WORK_S - 1, nodes=[node("relay-0", "relay", stats={"doing": "serving", "waiting": False})])
    with pytest.raises(ShoalError, match="nothing was accepted or trained for 14401 s"):
        site.at(LONGEST_WORK_S + 1, nodes=[node("learner", "learner", stats=training)])


def test_a_trained_step_is_progress(tmp_path: Path) -> None:
    site = Site(tmp_path, stall_s=100)
    site.at(0)
    site.trained = 1
    site.at(90)
    site.at(180)
    with pytest.raises(ShoalError):
        site.at(191)


def test_a_run_whose_coordinator_is_unreachable_is_stopped(tmp_path: Path) -> None:
    site = Site(tmp_path, stall_s=100)
    site.at(0)
    site.now_s, site.known = 101, None
    assert site.watch.look() is None
    with pytest.raises(ShoalError):
        site.watch.check()


def test_a_run_whose_groups_teach_nothing_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "NO_SIGNAL_GROUPS", 39)
    site = Site(tmp_path)
    signal = {"groups": 38, "useful": 0, "flat": 38, "lowest": 0.0, "highest": 0.0}
    site.at(0)
    site.at(0, signal=signal)
    with pytest.raises(ShoalError, match=r"39 of the newest 39 groups had equal rewards, all 0.0: nothing to learn"):
        site.at(1, signal=signal | {"flat": 39})


@pytest.mark.parametrize(
    ("first", "later", "last"),
    [(39, 77, 78), (20, 0, 39)],
    ids=["the groups before the resume do not count", "a useful group resets the count"],
)
def test_groups_before_a_resume_do_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, later: int, last: int
) -> None:
    monkeypatch.setattr(watch, "NO_SIGNAL_GROUPS", 39)
    site = Site(tmp_path)
    signal = {"groups": 40, "useful": 0, "lowest": 0.0, "highest": 0.0}
    site.at(0, signal=signal | {"flat": first})
    site.at(1, signal=signal | {"flat": later})
    with pytest.raises(ShoalError, match=f"{last} of the newest {last} groups"):
        site.at(2, signal=signal | {"flat": last})


def test_a_full_disk_stops_the_run_and_names_the_file_system(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.at(0)
    site.free = RESERVE_BYTES - 1
    with pytest.raises(ShoalError, match=r"the file system /\S* is full: 64 MiB are left"):
        site.watch.check()


def grading(total: int, errors: int, recent: int | None = None) -> dict[str, Any]:
    newest = min(total, 512) if recent is None else recent
    return {"grading": {"total": total, "recent": newest, "errors": errors}}


def test_a_run_whose_grader_fails_too_often_is_stopped(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.at(0, **grading(0, 0))
    site.at(1, **grading(63, 63))  # too few to judge
    site.at(2, **grading(600, 51))  # 51 of 512: within the limit
    message = (
        r"the grader failed for 52 of the newest 512 completions \(why: a validator's log\), more than "
        r"10%; .*by hand .*start a new run"
    )
    with pytest.raises(ShoalError, match=message):
        site.at(3, **grading(601, 52))


def test_grader_errors_before_a_resume_do_not_stop_the_run(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.at(0, **grading(2000, 512))
    site.at(1, **grading(2511, 500))
    with pytest.raises(ShoalError):
        site.at(2, **grading(2512, 500))
