"""Rows computed while their batch fills give the same bits, whatever came, was withdrawn or was killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.config import parse
from shoal.learner import loop
from shoal.learner.groups import Group
from shoal.learner.incoming import Incoming
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.share import Share, can_compute, compute_early

from .support import (
    VALIDATOR,
    Pool,
    accepted,
    equal,
    make_groups,
    make_learner,
    masters,
    rollouts,
    run_config,
    step_file,
)
from .test_ranks import torchrun

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
STEPS = 2
SHOWN = [[], [0], [0, 1, 2], *[[0, 1, 2, 3]] * 2]  # of five groups, of which each fills a row


@pytest.fixture(autouse=True, scope="module")
def no_peak() -> Iterator[None]:
    """Nothing is measured that takes time and changes no bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "measure_gflops", lambda *_: 1.0)
        yield


def files() -> list[bytes]:
    return [step_file(step) for step in range(STEPS)]


def run(
    model: Path, out: Path, shown: Sequence[Sequence[int]], made: list[bytes] | None = None, **changed: Any
) -> list[Any]:
    """The reports of a run whose batches fill like this."""
    pool = Pool(*(made or files()))
    pool.shown = shown
    changed = {"checkpoint_every": STEPS} | changed
    assert make_learner(model, out, pool, steps=STEPS, **changed).run(threading.Event()) == "finished"
    return pool.reports


def left(out: Path) -> dict[str, bytes]:
    """Every published version and every tensor of the last checkpoint, as bytes."""
    found = {path.parent.name: path.read_bytes() for path in out.glob("versions/*/model.safetensors")}
    for path in out.glob(f"checkpoints/step-{STEPS:06d}/*.safetensors"):
        found |= {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
    return found


def said(reports: list[Any]) -> list[Any]:
    """What reports say of the training, not of its speed."""
    speed = ("perf/", "sync/", "memory/")
    figures = [{k: v for k, v in report.metrics.items() if not k.startswith(speed)} for report in reports]
    return [figures, [report.record for report in reports]]


@pytest.fixture(scope="module")
def at_once(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Path, list[Any]]:
    out = tmp_path_factory.mktemp("at once")
    return out, run(tiny_folder, out, ())


def test_a_streamed_step_gives_the_same_bits(
    tiny_folder: Path, tmp_path: Path, at_once: tuple[Path, list[Any]]
) -> None:
    out, reports = at_once
    streamed = run(tiny_folder, tmp_path, SHOWN, stream=True)
    assert left(tmp_path) == left(out) and said(streamed) == said(reports)
    assert all(report.metrics["perf/early_frac"] == 0 for report in reports)
    assert all(0.5 < report.metrics["perf/early_frac"] < 0.9 for report in streamed), "three rows of five"


@pytest.mark.slow
def test_groups_that_are_withdrawn_leave_no_trace(
    tiny_folder: Path, tmp_path: Path, at_once: tuple[Path, list[Any]]
) -> None:
    """Their worker was evicted. What was computed with them is computed again."""
    streamed = run(tiny_folder, tmp_path, [[0, 4, 1], [0, 4, 1], [0, 1, 2], [3, 4]], stream=True)
    assert left(tmp_path) == left(at_once[0]) and said(streamed) == said(at_once[1])
    assert all(report.metrics["perf/early_frac"] == 0 for report in streamed)


@pytest.mark.slow
def test_a_learner_that_ends_in_mid_batch_begins_the_step_again(
    tiny_folder: Path, tmp_path: Path, at_once: tuple[Path, list[Any]]
) -> None:
    class Lost(Pool):
        def get(self, path: str, kind: Any) -> Any:
            if self.looks[1] == len(SHOWN):
                raise ConnectionError
            return super().get(path, kind)

    lost = Lost(*files())
    lost.shown = SHOWN
    with pytest.raises(ConnectionError):
        make_learner(tiny_folder, tmp_path, lost, steps=STEPS, stream=True).run(threading.Event())
    assert len(lost.reports) == 1
    run(tiny_folder, tmp_path, SHOWN, stream=True)
    assert left(tmp_path) == left(at_once[0])


# --- shares of several updates, without a run ----------------------------------------------------------------------------


def groups() -> list[Group]:
    """Seven, of which one has equal rewards and one was never checked."""
    made = [replace(one, submission=f"{one.submission}{turn}") for turn in range(3) for one in make_groups()][:7]
    made[2] = replace(made[2], rewards=[1.0] * 4)
    made[4] = replace(made[4], checked=False)
    return made


def learner(folder: Path, out: Path, **changed: Any) -> Learner:
    section = {"lr": 1e-3, "warmup_steps": 0, "row_tokens": 20, "loss": {"beta": 0.0, "entropy": 0.0}}
    section |= changed
    config = parse({"learner": section, "sampling": {"max_tokens": 8}, "coordinator": {"prompts_per_step": 8}})
    torch.manual_seed(0)  # adapters are drawn
    return Learner(None, config, Policy(folder, config.learner, "float32", "cpu", 1.0), out)


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer_steps_per_step": 2},
        {"optimizer_steps_per_step": 2, "behaviour_logprobs": "recomputed"},
        {"optimizer_steps_per_step": 1, "lora": {"rank": 4}},
        {"optimizer_steps_per_step": 1, "row_tokens": 64},
    ],
    ids=["two updates", "own behaviour", "lora", "long rows"],
)
def test_a_share_that_grew_is_the_share_that_came_whole(
    tiny_folder: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    found = []
    for streams in (False, True):
        trained = learner(tiny_folder, tmp_path, stream=streams, **changed)
        first = Share(trained.config, trained.policy)
        for known in range(len(groups())) if streams else ():
            first.take(groups()[:known][:: changed["optimizer_steps_per_step"]])
            if first.due:
                first.compute_next()
        assert (first.n_computed > 0) is streams
        figures = trained.train(groups(), first)
        found.append((masters(trained.policy), {k: v for k, v in figures.items() if not k.startswith("perf/")}))
    assert equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert found[0][1]["optim/grad_norm"] > 0


def test_a_group_that_is_withdrawn_from_a_share_is_taken_back(tiny_folder: Path, tmp_path: Path) -> None:
    """Its worker was evicted. What was computed with it is computed again."""
    found = []
    for withdrawn in ([], groups()[5:6]):
        trained = learner(tiny_folder, tmp_path, optimizer_steps_per_step=1)
        first = Share(trained.config, trained.policy)
        first.take([*groups()[:1], *withdrawn, *groups()[1:2]])
        while first.due:
            first.compute_next()
        assert first.n_computed > 0
        trained.train(groups(), first)
        found.append(masters(trained.policy))
    assert equal(*found)


@pytest.mark.parametrize("behaviour", ["validated", "recomputed"])
def test_what_no_update_changes_is_computed_early_of_the_other_shares(
    tiny_folder: Path, tmp_path: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's logprobs, and the first policy's where they are needed: the same bits as in their turn."""
    found, asked = [], []
    reference = Policy.reference_logprobs
    monkeypatch.setattr(Policy, "reference_logprobs", lambda *args: asked.append(1) or reference(*args))
    for streams in (False, True):
        loss = {"beta": 0.1, "entropy": 0.01}
        trained = learner(
            tiny_folder,
            tmp_path,
            stream=streams,
            loss=loss,
            behaviour_logprobs=behaviour,
            lr=1e-2,
            optimizer_steps_per_step=2,
        )
        shares = [Share(trained.config, trained.policy) for _ in range(2)]
        for known in range(len(groups())) if streams else ():
            for number, share in enumerate(shares):
                share.take(groups()[:known][number::2])
            while can_compute(shares):
                compute_early(shares)
        figures = trained.train(groups(), *shares)
        found.append((masters(trained.policy), {k: v for k, v in figures.items() if not k.startswith("perf/")}))
    assert equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert len(asked) == 2, "the rows of the second share that are closed"
    assert found[0][1]["policy/kl"] > 0


# --- on several ranks ----------------------------------------------------------------------------------------------------


class Wire:
    """What the leader tells one other rank."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def broadcast(self, message: bytes | None) -> bytes:
        if message is None:
            return self.sent.pop(0)
        self.sent.append(message)
        return message


def test_other_ranks_are_told_what_is_new_and_what_is_withdrawn(tmp_path: Path) -> None:
    wire, pool, stop, config = Wire(), Pool(*files()), threading.Event(), run_config(STEPS, {})
    pool.shown = [[0], [0, 1, 2], [0, 2]]
    leader, other = (Incoming(0, node, wire, config, tmp_path) for node in (pool, None))  # type: ignore[arg-type]
    told = []
    while not leader.full:
        assert leader.more(stop, at_once=False)
        told.append(len(json.loads(wire.sent[0])["groups"]))
        assert other.more(stop, at_once=False)
        assert (other.groups, other.full) == ([group.outline for group in leader.fetched.groups], leader.full)
    assert told == [1, 2, 1, 4] and len(other.groups) == 5
    stop.set()
    assert not leader.more(stop, at_once=False) and not other.more(stop, at_once=False)


def test_other_ranks_do_not_wait_for_a_leader_that_failed(tmp_path: Path) -> None:
    wire, stop, config = Wire(), threading.Event(), run_config(STEPS, {})
    leader, other = (Incoming(0, node, wire, config, tmp_path) for node in (Pool(), None))  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        leader.more(stop, at_once=False)
    assert not other.more(stop, at_once=False)


# --- as processes --------------------------------------------------------------------------------------------------------


def job(model: Path, out: Path, shown: Sequence[Sequence[int]], made: list[bytes], **die: int) -> dict[str, Any]:
    kept = out.with_name(f"{out.name}-files")
    kept.mkdir(parents=True)
    for step, data in enumerate(made):
        (kept / f"{step}.parquet").write_bytes(data)
    where = {"model": str(model), "out": str(out), "files": str(kept), "validator": VALIDATOR.public}
    return where | {"steps": STEPS, "dtype": "float32", "changed": {"stream": True}, "die": die, "shown": shown}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 7])
def test_a_learner_killed_in_a_streamed_row_resumes_to_the_same_bits(
    tiny_folder: Path, tmp_path: Path, at_once: tuple[Path, list[Any]], rows: int
) -> None:
    out = tmp_path / "out"
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([job(tiny_folder, out, SHOWN, files(), computing=rows)]))
    command = [sys.executable, "-m", "tests.learner.process", str(path)]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    run(tiny_folder, out, SHOWN, stream=True)
    assert left(out) == left(at_once[0])


@pytest.mark.slow
def test_two_ranks_stream_to_the_bits_of_two_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    made = [b"broken", step_file(1)]
    outs = {"whole": (), "streamed": SHOWN, "withdrawn": [[0, 1, 2, 4], [0, 1, 2, 4], [0, 1]]}
    torchrun(2, tmp_path, [job(tiny_folder, tmp_path / name, shown, made) for name, shown in outs.items()])
    reports = {name: json.loads((tmp_path / name / "reports.json").read_text()) for name in outs}
    for name in outs:
        assert left(tmp_path / name) == left(tmp_path / "whole")
    assert [reports[name][1]["metrics"]["perf/early_frac"] > 0 for name in outs] == [False, True, False]


@pytest.mark.slow
def test_bad_files_are_left_out_of_a_streamed_step_once(tiny_folder: Path, tmp_path: Path) -> None:
    spoilt = [replace(row, reward=1e9) if row.group == 1 else row for row in rollouts(5, 4)]
    made = [accepted(version=0, rows=spoilt), b"broken"]
    told = [
        run(tiny_folder, tmp_path / name, shown, made, stream=bool(shown))
        for name, shown in (("whole", ()), ("streamed", SHOWN))
    ]
    assert left(tmp_path / "whole") == left(tmp_path / "streamed") and said(told[0]) == said(told[1])
    assert told[1][0].metrics["data/implausible"] == 1.0 and told[1][1].metrics["data/quarantined"] == 5.0
