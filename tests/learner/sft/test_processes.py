"""Fine-tuning at two sites as real processes, one of two ranks: the other is killed and comes back; what a site that differs
is told."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diloco.processes import Run

from .test_trainer import rows

__all__ = ["rows"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EPOCHS, UPDATES, OF_ROUND = 30, 240, 4  # 16 conversations in batches of 2; two sites make two updates each


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path, rows: Path) -> Iterator[Run]:
    config = tmp_path / "chat.toml"
    config.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[sft]\ndata = {json.dumps(str(rows))}\n"
        f"epochs = {EPOCHS}\nbatch = 2\nlr = 1e-3\nwarmup_steps = 2\nmax_tokens = 64\neval_frac = 0.2\n"
        "[sites]\nsites = 2\ninner_steps = 2\nwait_s = 4\nmomentum = 0.5\ngive_up_s = 300\n"
    )
    found = Run(tmp_path, config, "sft")
    yield found
    found.close()


def test_two_sites_end_with_the_same_model_though_one_is_killed(run: Run) -> None:
    sites = ["site-0", "site-1"]
    run.start("meet", "sites.quorum=2")
    run.start("site-0", ranks=2)
    run.start("site-1")
    run.until_together(*sites)
    run.signal("meet", signal.SIGKILL)
    run.start("meet")
    run.until_together(*sites)
    run.without("site-1", signal.SIGKILL)
    run.signal("meet", signal.SIGKILL)
    run.start("meet", "sites.quorum=2")  # or site-0 would be done before the other is back
    run.start("site-1")
    run.until_together(*sites)
    assert [run.end(name) for name in (*sites, "meet")] == [0, 0, 0], [run.log(name)[-800:] for name in sites]
    rounds = run.rounds()
    assert [each["round"] for each in rounds] == list(range(UPDATES // OF_ROUND))
    assert run.model("site-0") == run.model("site-1")
    held = [each["heldout_loss"] for each in run.figures("site-0") if "heldout_loss" in each]
    assert held[-1] < held[0]


def test_a_site_that_differs_is_told_in_what(run: Run, rows: Path) -> None:
    run.start("meet")
    run.until(run.invite("site-1").exists, "the invite")
    other = rows.with_name("other.jsonl")
    other.write_text(rows.read_text().replace("aaa", "aab"))
    for override, words in (
        ("sft.lr=2e-3", "site-1 has another sft.lr: 0.002, and the run has 0.001; give every site the same sft.lr"),
        (f"sft.data={other}", "site-1 has another data: "),
    ):
        command = [sys.executable, "-m", "shoal", "sft", str(run.config), "--out", str(run.folder / override[:8])]
        command += ["--join", str(run.invite("site-1")), "--set", override]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and words in done.stderr.splitlines()[-1]
