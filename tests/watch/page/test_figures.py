"""Curves, answers, sites and work that the dashboard computes from a run."""

import errno
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import UserError
from shoal.protocol.history import RunHistory, Status
from shoal.protocol.messages import Evaluation, Reason
from shoal.watch.figures import REASONS, redact
from shoal.watch.page.overview import buckets, curves, display_name, overview
from shoal.watch.page.work import _make_sequential, count_checks, flow
from shoal.watch.run import FolderRun


def steps(rewards: list[float]) -> list[dict[str, float]]:
    return [{"step": float(number), "reward/mean": value} for number, value in enumerate(rewards)]


def status(**changes: object) -> Status:
    base: dict[str, object] = {
        "run": "tiny-0-0123456789abcdef", "state": "running", "step": 1, "steps": 10, "have": 0, "need": 4,
        "newest_version": 1, "started_s": 0.0, "now_s": 100.0, "nodes": [], "trained": 1, "notices": [],
        "reject_reasons": {}, "slashed": [], "stale_groups": 0, "tokens_generated": 0,
    }  # fmt: skip
    return Status.model_validate(base | changes)


def overview_of(status: Status, history: RunHistory, *, running: bool = True, wall_s: float = 100.0) -> dict[str, Any]:
    run: Any = SimpleNamespace(history=history, config=None, running=lambda: running, wall_s=lambda _: wall_s)
    return overview(run, status)


def answers(status: Status, history: RunHistory) -> dict[str, tuple[str, str]]:
    answers = overview_of(status, history)["answers"]
    return {answer["question"]: (answer["answer"], answer["tone"]) for answer in answers}


@pytest.mark.parametrize("count", [0, 1, 5, 360, 361, 5000])
def test_buckets_cover_every_step_once(count: int) -> None:
    spans = buckets(count, 360)
    assert [step for first, until in spans for step in range(first, until)] == list(range(count))
    assert len(spans) <= 360


def test_a_spike_is_kept_when_steps_are_bucketed() -> None:
    rewards = [0.1] * 5000
    rewards[1234] = 9.0
    drawn = curves(steps(rewards))
    assert len(drawn["x"]) <= 360 and drawn["x"][-1] == 5000
    assert max(drawn["high"]["reward"]) == 9.0 and max(drawn["values"]["reward"]) < 1.0


def test_a_short_run_is_not_bucketed_and_its_values_are_rounded() -> None:
    drawn = curves(steps([0.1, 0.123456789, float("nan")]))
    assert drawn["values"]["reward"] == [0.1, 0.12346, None] and drawn["low"] == {}


@pytest.mark.parametrize(
    ("rewards", "answer"),
    [
        ([0.1, 0.2], "Too early to say"),
        ([0.1 + 0.05 * n for n in range(12)], "Yes"),
        ([0.9 - 0.05 * n for n in range(12)], "No, reward falls"),
        ([0.4, 0.5] * 6, "Not visibly"),
    ],
)
def test_the_trend_of_the_reward_answers_whether_the_run_learns(rewards: list[float], answer: str) -> None:
    assert answers(status(), RunHistory(metrics=steps(rewards)))["Is it learning?"][0] == answer


def test_held_out_accuracy_has_priority_over_the_reward() -> None:
    evaluations = [Evaluation(version=v, greedy=g, sampled=None, n=256, final=False) for v, g in ((0, 0.8), (9, 0.4))]
    history = RunHistory(metrics=steps([0.1 + 0.05 * n for n in range(12)]), evaluations=evaluations)
    assert answers(status(), history)["Is it learning?"] == ("No, it got worse", "bad")


@pytest.mark.parametrize(
    ("changes", "answer", "detail"),
    [
        ({}, "Nothing checked yet", "There is no verdict yet."),
        (
            {"reject_reasons": {"proof": 2, "tasks": 1, "unreadable": 5}},
            "Suspected",
            "Provably false: 3 rejected: 2 proof, 1 tasks.",
        ),
        (
            {"reject_reasons": {"proof": 1}, "slashed": ["bob"]},
            "Caught",
            "Slashed: bob (1 rejected: proof). Rejected work is never trained on.",
        ),
    ],
)
def test_the_answer_about_cheating_counts_only_hard_reasons(
    changes: dict[str, object], answer: str, detail: str
) -> None:
    cheating = overview_of(status(**changes), RunHistory())["answers"][2]
    assert (cheating["answer"], cheating["detail"]) == (answer, detail)


def test_a_silent_node_is_a_problem() -> None:
    node = {"name": "worker-3", "role": "worker", "url": None, "policy_version": 0, "seen_s": 10.0, "evicted": False}
    nodes = [node | {"accepted": 0, "rejected": 0, "stats": {}}]
    assert answers(status(nodes=nodes), RunHistory())["Is it healthy?"] == ("Look here", "warn")
    nodes[0]["seen_s"] = 99.0
    assert answers(status(nodes=nodes), RunHistory())["Is it healthy?"][1] == "good"


def two_sites(rewards: list[float], **site_1: float) -> list[dict[str, float]]:
    """Return the metrics of two sites whose results are used. `site_1`: figures of site-1 in the last step."""
    both = {f"sites/site-{n}/{key}": 1.0 for n in (0, 1) for key in ("kept", "loss")} | {"sites/kept": 2.0}
    metrics = [step | both for step in steps(rewards)]
    metrics[-1] |= {f"sites/site-1/{key}": value for key, value in site_1.items()}
    return metrics


def test_sites_are_listed_with_their_curves() -> None:
    history = RunHistory(metrics=two_sites([0.1, 0.2], computed_s=3.0, synced_s=1.0, sent_bytes=5.0, loss=0.5))
    sites = overview_of(status(), history)["sites"]
    assert [(site["name"], site["state"], site["tone"]) for site in sites] == [
        (f"site-{n}", "counts", "good") for n in (0, 1)
    ]
    assert {key: sites[1][key] for key in ("loss", "computing", "waiting", "syncing", "sent")} == {
        "loss": 0.5, "computing": 0.75, "waiting": 0.0, "syncing": 0.25, "sent": 5.0,
    }  # fmt: skip
    assert curves(history.metrics)["values"]["loss site-1"] == [1.0, 0.5]


def test_a_missing_site_is_a_problem() -> None:
    assert answers(status(), RunHistory(metrics=two_sites([0.1])))["Is it healthy?"][1] == "good"
    history = RunHistory(metrics=two_sites([0.1], kept=0.0))
    assert answers(status(), history)["Is it healthy?"] == ("Look here", "warn")


def test_every_reason_is_explained() -> None:
    assert REASONS.keys() == set(Reason)


def test_keys_addresses_and_control_characters_are_removed_from_reported_text() -> None:
    text = redact(f"{'0f' * 32} at https://10.0.0.1:80/x?k=1 and 10.0.0.7:9\x1b[2J")
    assert text == "[key] at [address] and [address]?[2J"
    assert display_name("quickstart-0-7715741485d6412d") == "quickstart-0"


def test_overlapping_claims_of_one_validator_are_drawn_one_after_another() -> None:
    bars = [{"from_s": 0.0, "to_s": 5.0}, {"from_s": 0.0, "to_s": 3.0}, {"from_s": 6.0, "to_s": 8.0}]
    _make_sequential(bars)
    assert [(bar["from_s"], bar["to_s"]) for bar in bars] == [(0.0, 3.0), (3.0, 5.0), (6.0, 8.0)]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no state.json"):
        FolderRun(tmp_path)
    (tmp_path / "state.json").write_text('{"status": 1}')
    with pytest.raises(UserError, match="of this version"):
        FolderRun(tmp_path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"state\.json cannot be read: Permission denied$"):
        FolderRun(tmp_path)


def test_a_run_has_stopped_when_its_coordinator_writes_nothing(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    state = json.loads((folder / "state.json").read_text())
    state["status"]["state"] = "running"

    def running(ended: bool, later_s: float) -> bool:
        (folder / "state.json").write_text(json.dumps(state | {"ended": ended}))
        return FolderRun(folder, lambda: time.time() + later_s).running()

    assert running(False, 0.0) and not running(False, 90.0), "a killed coordinator must count as stopped after a while"
    assert not running(True, 0.0), "a coordinator that was stopped must count as stopped at once"


def test_a_finished_run_shows_the_total_time_of_its_legs() -> None:
    shown = overview_of(status(state="finished", trained=10), RunHistory(), running=False, wall_s=63.0)
    assert shown["elapsed_s"] == 63.0 and "10 steps in 1m 03s" in shown["answers"][1]["detail"]


def test_work_is_counted_by_step_and_by_worker() -> None:
    def settled(state: str, step: int, reason: str | None = None, **more: Any) -> dict[str, Any]:
        line = {"kind": "submission", "state": state, "step": step, "reason": reason, "worker": "w", "full": True}
        return line | {"groups": 2} | more

    groups = [{"useful": True}, {"useful": False}]
    work = [
        {"kind": "version", "version": 0},
        settled("accepted", 0, group_list=groups),
        settled("rejected", 0, "proof"),
        settled("stale", 1),
        settled("expired", 1),
        settled("accepted", 1, group_list=groups),
    ]
    assert count_checks(work) == {"w": (1, 3)}
    by_step = flow(work)
    assert by_step["groups"] == {"useful": [1, 1], "filtered": [1, 1], "late": [0, 2], "rejected": [2, 0]}
    assert by_step["verdicts"] == {"": [1, 1], "proof": [1, 0]} and by_step["x"] == [1, 2]
