"""The child processes of a run: how they start, fail and restart."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from shoal.cli.launch import members
from shoal.cli.launch.children import ENVIRONMENT, MAX_QUOTED, Child, Children, Usage
from shoal.cli.launch.swarm import PREPARE
from shoal.config import parse
from shoal.errors import ShoalError

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment variables that `Children` sets."""
    for name in [*ENVIRONMENT, "PYTHONWARNINGS"]:
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture(params=["cpu", "cuda"])
def children(request: pytest.FixtureRequest, tmp_path: Path) -> Children:
    return Children(tmp_path, request.param, 0)


def test_processes_that_use_cuda_are_not_forked(children: Children, request: pytest.FixtureRequest) -> None:
    expected = {"cpu": "forkserver", "cuda": "spawn"}[request.node.callspec.params["children"]]
    assert children.context.get_start_method() == expected


def test_run_returns_the_last_output_line_of_a_command(children: Children, tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / ("x" * 200) / ("y" * 200)  # the line is long, and must not be cut
    shutil.copytree(tiny_folder, folder)
    last = children.run("prepare", [str(CONFIGS / "tiny.toml"), "--set", f"model.name={folder}"], PREPARE)
    assert json.loads(last)["folder"] == str(folder)
    assert (tmp_path / "prepare.log").read_text().splitlines()[-1] == last


def test_the_error_of_a_failed_command_quotes_its_last_log_line(children: Children, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="nowhere.toml"):
        children.run("prepare", [str(tmp_path / "nowhere.toml")], PREPARE)


def test_the_error_of_a_killed_command_names_the_signal(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prepare.log").write_text("shoal prepare: an error of the previous start\n")
    (tmp_path / "killed.py").write_text("import os\n\ndef main(command):\n    os.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ShoalError, match=r"^prepare was ended by signal 9 \(Killed"):
        children.run("prepare", [], "killed")


def test_an_error_is_quoted_only_from_the_log_since_the_start(tmp_path: Path) -> None:
    child = Child("worker-0", [], tmp_path / "log", multiprocessing.get_context("spawn"), "no_such_module")
    child.log.write_text("shoal worker: an error of the previous start\n")
    child.start()
    assert child.process is not None
    child.process.join(60)
    assert child.last_error() == "ModuleNotFoundError: No module named 'no_such_module'"
    child.log_start_bytes = child.log.stat().st_size
    assert child.last_error() == "it logged nothing"


def test_a_run_continues_without_an_optional_child(children: Children, tmp_path: Path) -> None:
    child = children.start("page", ["dashboard", str(tmp_path / "nowhere")], optional=True)
    assert child.process is not None
    child.process.join(60)
    lines: list[str] = []
    children.revive(lines.append)
    children.revive(lines.append)
    assert len(lines) == 1 and "the run continues without it" in lines[0] and children.has_ended("page")


def test_a_child_that_cannot_run_is_named(children: Children, tmp_path: Path) -> None:
    child = children.start("lost", ["relay", "--join", "no invite", "--dir", str(tmp_path / "lost")])
    assert child.process is not None
    child.process.join(60)
    with pytest.raises(ShoalError, match=r"lost cannot run: .*invite"):
        children.revive(lambda line: None)
    children.stop_all()


def test_a_long_error_is_quoted_from_its_start(tmp_path: Path) -> None:
    child = Child("worker-0", [], tmp_path / "log", multiprocessing.get_context("spawn"))
    child.log.write_text("starting\nshoal worker: the port 8000 is in use" + " and so on" * 1000 + "\n")
    assert child.last_error().startswith("shoal worker: the port 8000 is in use and so on")
    assert len(child.last_error()) == MAX_QUOTED + 1


@pytest.mark.parametrize("status", [2, 4])
def test_a_lasting_failure_stops_the_run_without_a_restart(tmp_path: Path, status: int) -> None:
    children = Children(tmp_path, "cuda")
    child = Child("relay-0", [], tmp_path / "log", children.context, process=Ended(status))  # type: ignore[arg-type]
    child.log.write_text("shoal relay: [Errno 98] port 80 is in use\n")
    children.all.append(child)
    with pytest.raises(ShoalError, match=r"relay-0 cannot run: shoal relay: \[Errno 98\] port 80 is in use"):
        children.revive(lambda line: None)
    assert child.restarts == 0


@pytest.mark.parametrize("status", [1, -9])
def test_a_crash_is_followed_by_a_restart(tmp_path: Path, status: int) -> None:
    children, lines = Children(tmp_path, "cuda"), list[str]()
    child = Child("relay-0", [], tmp_path / "log", children.context, process=Ended(status))  # type: ignore[arg-type]
    child.log.write_text("shoal relay: no route to host\n")
    children.all.append(child)
    children.revive(lines.append)
    assert child.restarts == 1 and "restart 1 in 0.5 s" in lines[0]


@pytest.mark.parametrize(("ran_s", "fails"), [(3700.0, False), (3500.0, True)])
def test_only_crashes_in_a_row_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran_s: float, fails: bool
) -> None:
    children, now_s = Children(tmp_path, "cuda"), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    child = Child("relay-0", [], tmp_path / "log", children.context)
    child.log.write_text("shoal relay: no route to host\n")
    children.all.append(child)
    with pytest.raises(ShoalError, match="relay-0 ended 6 times in a row") if fails else nullcontext():
        for _ in range(20):
            child.process, child.start_at_s = Ended(1), now_s  # type: ignore[assignment]
            now_s += ran_s
            children.revive(lambda line: None)
    assert child.restarts == (5 if fails else 20)


def test_a_killed_process_prints_no_warning_about_semaphores(tmp_path: Path) -> None:
    script = """
import multiprocessing, os, signal, sys
from pathlib import Path
from shoal.cli.launch.children import Children
Children(Path(sys.argv[1]), "cuda", 0)
kept = multiprocessing.get_context("spawn").Semaphore()
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


class Ended:
    """A process that ended with `exitcode`."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


def test_workers_are_started_with_the_engines_in_turn(tmp_path: Path) -> None:
    settings = parse({"workers": {"engines": ["torch", "vllm"], "count": 3}})
    started = {each.name: members.command(each, settings, tmp_path, 2) for each in members.members(settings)}
    with_vllm = {
        name for name, words in started.items() if words[words.index("--join") + 2 :][:2] == ["--engine", "vllm"]
    }
    assert with_vllm == {"worker-1"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_cpu_time_of_a_process_are_measured_and_kept_after_its_end() -> None:
    gone = 2**22 + 1  # no process has this id
    usage = Usage(rss_bytes={"gone": 7}, seconds={("gone", gone): 5.0})
    least_s, rounding_s = sum(os.times()[:4]), 4 / os.sysconf("SC_CLK_TCK")
    assert usage.measure({"learner": os.getpid(), "gone": gone})
    most_s = sum(os.times()[:4])
    assert least_s - rounding_s <= usage.cpu_s()["learner"] <= most_s + rounding_s
    assert usage.rss_bytes["learner"] > usage.rss_bytes["gone"] == 7
    assert usage.cpu_s()["gone"] == 5.0
    assert usage.together_bytes > 0
    assert not usage.measure({}), "the next measurement comes later"


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.01, 5.0), (0.2, 20.0)])
def test_measuring_memory_takes_at_most_one_percent_of_the_time(
    monkeypatch: pytest.MonkeyPatch, took_s: float, pause_s: float
) -> None:
    now_s = 100.0

    def slow(*_: object) -> int:
        nonlocal now_s
        now_s += took_s / 2  # two files of the process are read
        return 0

    monkeypatch.setattr("shoal.cli.launch.children._memory_bytes", slow)
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    usage = Usage()
    assert usage.measure({"learner": os.getpid()})
    now_s += pause_s - 0.1
    assert not usage.measure({})
    now_s += 0.2
    assert usage.measure({})


def test_the_cpu_time_of_a_restarted_process_is_the_sum_over_its_processes() -> None:
    assert Usage(seconds={("learner", 1): 2.0, ("learner", 2): 3.0, ("origin", 3): 1.0}).cpu_s() == {
        "learner": 5.0,
        "origin": 1.0,
    }
