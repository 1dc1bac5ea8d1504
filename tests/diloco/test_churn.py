"""Random faults of sites and their meeting: a short run of `benchmarks.diloco.diloco_churn`, and its committed result."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "diloco_churn.json"
PAGE = ROOT / "docs" / "diloco.md"
LIMIT_S = 1800.0


def check(result: dict[str, Any]) -> None:
    assert result["wrong"] == []
    assert result["most_lost_steps_of_a_site"] <= result["inner_steps"]
    assert {name for fault in result["faults"] for name in fault["who"]} - {"meet"} <= {
        f"site-{number}" for number in range(result["sites"])
    }
    assert len(result["kept_by_round"]) == result["rounds"] > 10
    heldout = list(result["heldout_loss_by_round"].values())
    assert heldout[-1] < heldout[0]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_a_minute_of_churn_loses_no_round_and_leaves_all_sites_with_the_same_bits(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.diloco.diloco_churn", "--minutes", "1", "--every", "3"]
    done = subprocess.run(
        [*command, "--stop", "8", "--seed", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    check(json.loads(out.read_text()))


def test_the_page_states_the_committed_result():
    result = json.loads(RESULT.read_text())
    check(result)
    assert result["churned_s"] >= 20 * 60
    assert len({fault["kind"] for fault in result["faults"]}) == 8
    page = " ".join(PAGE.read_text().split())
    assert f"{len(result['faults'])} faults" in page and f"{result['rounds']:,} rounds" in page
    assert f"{result['digests_compared']:,} digests" in page
