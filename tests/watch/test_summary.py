"""The final report of a run consists of a summary, a curve and a table."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rich.console import Console

from shoal.config import Config
from shoal.protocol.history import Exactness, RunHistory, Status
from shoal.protocol.messages import Evaluation
from shoal.watch.plot import draw_curve, smoothed
from shoal.watch.summary import Leg, summary_table, write_report

from .support import node

CONFIG = Config.model_validate({"run": {"seed": 7}, "sampling": {"max_tokens": 64}})
BLUE = (0x1F, 0x6F, 0xB4)
RED = (0xD1, 0x49, 0x5B)


def evaluation(version: int, greedy: float | None, sampled: float | None, final: bool = False) -> Evaluation:
    return Evaluation(version=version, greedy=greedy, sampled=sampled, n=256 if final else 64, final=final)


def step(number: int, reward: float, age: float) -> dict[str, float]:
    figures = {"perf/tokens": 5000.0, "perf/busy_s": 3.0, "perf/waiting_s": 1.0, "async/staleness_max": age}
    return {"step": float(number), "time_s": 30.0 * number, "reward/mean": reward} | figures


def status(**changes: Any) -> tuple[Status, RunHistory]:
    values = {
        "run": "sums",
        "state": "finished",
        "step": 3,
        "steps": 3,
        "have": 0,
        "need": 16,
        "newest_version": 3,
        "started_s": 0.0,
        "now_s": 100.0,
        "nodes": [node("learner", "learner"), node("worker-0", accepted=40), node("liar", accepted=1, rejected=2)],
        "metrics": [step(0, 0.125, 0), step(1, 0.5, 2), step(2, 0.375, 1)],
        "evaluations": [
            evaluation(0, 0.1, 0.0625),
            evaluation(2, 0.3, 0.2),
            evaluation(3, 0.5, 0.45),
            evaluation(3, 0.75, None, final=True),
        ],
        "reject_reasons": {"proof": 2},
        "slashed": ["liar"],
        "stale_groups": 3,
        "late_groups": 4,
        "useful_groups": 200,
        "tokens_generated": 40_000,
        "exact": Exactness(submissions=39, tokens=38_000),
    } | changes
    history = RunHistory(metrics=values.pop("metrics"), evaluations=values.pop("evaluations"))
    return Status.model_validate(values | {"trained": len(history.metrics), "notices": []}), history


def report(folder: Path, shown: tuple[Status, RunHistory]) -> dict[str, Any]:
    measured = Leg(
        wall_s=101.5,
        restarts={"learner": 1, "worker-0": 0},
        peak_rss_bytes={"learner": 2 << 30, "worker-0": 1 << 30},
        peak_together_bytes=5 << 29,
        cpu_s={"learner": 93.5},
    )
    return write_report(folder, config=CONFIG, status=shown[0], history=shown[1], measured=measured)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def has_color(path: Path, color: tuple[int, int, int]) -> bool:
    pixels = (matplotlib.image.imread(path)[:, :, :3] * 255).round().astype(int)
    return bool((pixels == color).all(axis=2).any())


def shown_text(summary: dict[str, Any], width: int = 80, folder: Path | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(summary_table(summary, folder))
    return console.export_text()


def test_the_summary_has_exactly_these_keys_and_values(tmp_path: Path) -> None:
    summary = report(tmp_path, status())
    assert summary == {
        "config": CONFIG.model_dump(mode="json"),
        "waste": {"too_old": 3, "too_late": 4, "of": 204, "share": 7 / 204},
        "seed": 7,
        "steps": 3,
        "wall_s": 101.5,
        "heldout_before": {"greedy": 0.1, "sampled": 0.0625, "n": 64},
        "heldout_after": {"greedy": 0.75, "sampled": None, "n": 256},
        "reward_first": 0.125,
        "reward_last": 0.375,
        "accepted": {"worker-0": 40, "liar": 1},
        "rejected": {"worker-0": 0, "liar": 2},
        "reject_reasons": {"proof": 2},
        "slashed": ["liar"],
        "tokens_generated": 40_000,
        "exact": {"submissions": 39, "tokens": 38_000, "mismatched_tokens": 0},
        "tokens_trained": 15_000,
        "learner_busy_frac": 0.75,
        "max_staleness": 2.0,
        "restarts": {"learner": 1, "worker-0": 0},
        "peak_rss_bytes": {"learner": 2 << 30, "worker-0": 1 << 30},
        "peak_together_bytes": 5 << 29,
        "cpu_s": {"learner": 93.5},
    }


def test_the_folder_holds_the_newest_summary_and_a_curve_and_nothing_else(tmp_path: Path) -> None:
    report(tmp_path, status(slashed=[]))
    summary = report(tmp_path, status())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert png_size(tmp_path / "reward.png") == (1200, 675)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reward.png", "summary.json"]


def test_a_run_without_results_reports_nulls(tmp_path: Path) -> None:
    summary = report(tmp_path, status(metrics=[], evaluations=[], nodes=[], reject_reasons={}, slashed=[]))
    for key in ("heldout_before", "heldout_after", "reward_first", "reward_last", "learner_busy_frac"):
        assert summary[key] is None, key
    assert summary["max_staleness"] is None
    assert (summary["steps"], summary["tokens_trained"], summary["accepted"]) == (0, 0, {})
    assert png_size(tmp_path / "reward.png") == (1200, 675)
    assert "– → –" in shown_text(summary)


def test_a_final_evaluation_at_version_0_is_not_taken_as_the_evaluation_before_training(tmp_path: Path) -> None:
    summary = report(tmp_path, status(evaluations=[evaluation(0, 0.2, 0.1, final=True)]))
    assert summary["heldout_before"] is None
    assert summary["heldout_after"] == {"greedy": 0.2, "sampled": 0.1, "n": 256}


@pytest.mark.parametrize("steps", [1, 60])
def test_the_curve_shows_reward_and_heldout_points(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "curve.png"
    draw_curve([step(i, i / 100, 0) for i in range(steps)], [evaluation(0, 0.1, None)], path, "any $name")
    assert png_size(path) == (1200, 675)
    assert has_color(path, BLUE), "no reward is drawn"
    assert has_color(path, RED), "no held-out point is drawn"


def test_smoothing_keeps_length_and_level() -> None:
    assert smoothed([2.0] * 7) == [2.0] * 7
    assert smoothed([0.0, 3.0, 0.0, 3.0]) == [1.5, 1.0, 2.0, 1.5]
    assert smoothed([]) == []


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_table_summarizes_the_run(tmp_path: Path, width: int) -> None:
    text = shown_text(report(tmp_path, status()), width, Path("runs/sums"))
    assert max(len(line) for line in text.splitlines()) <= width
    for words in (
        "10.0 % [4.8, 19.8] → 75.0 % [69.4, 79.9] (n 64, then 256)",
        "6.2 % [2.5, 15.0] → –",
        "0.125 → 0.375",
        "3 in 1m 42s",
        "40.0k generated, 15.0k trained",
        "busy 75 %, rollouts at most 2 versions old",
        "liar 1, worker-0 40 (41 in all)",
        "liar 2 (2 in all): 2 proof",
        "learner 1 (1 in all)",
        "2.5 GiB",
        "runs/sums/: summary.json, reward.png",
    ):
        assert words in " ".join(text.split())  # lines may be wrapped
    assert any(line.split() == ["slashed", "liar"] for line in text.splitlines())


def test_a_pool_on_several_machines_reports_no_restarts_or_memory(tmp_path: Path) -> None:
    shown, history = status()
    summary = write_report(tmp_path, config=CONFIG, status=shown, history=history)
    assert summary["wall_s"] == 100.0
    assert (
        summary["restarts"] is summary["peak_rss_bytes"] is summary["peak_together_bytes"] is summary["cpu_s"] is None
    )
    text = shown_text(summary, 80, tmp_path)
    assert "restarts" not in text and "memory" not in text and "held-out greedy" in text
    (tmp_path / "model").mkdir()
    assert "model/, summary.json, reward.png" in shown_text(summary, 200, tmp_path)
