"""Real processes: `shoal meet` and sites that are killed, stopped and started again; and what a wrong site is told."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diloco.processes import Run

pytestmark = pytest.mark.slow
WAIT_S = 4.0


@pytest.fixture
def run(tmp_path: Path, tiny_folder: Path) -> Iterator[Run]:
    data, config = tmp_path / "text.jsonl", tmp_path / "small.toml"
    data.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}. " * 5}) + "\n" for i in range(3000)))
    config.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[pretrain]\ndata = {json.dumps(str(data))}\n"
        "steps = 300\nbatch = 2\ntokens = 32\nlr = 1e-3\nwarmup_steps = 5\nheldout = 8\neval_every = 100\n"
        f"checkpoint_every = 10\nshare = 5\n[sites]\nsites = 3\ninner_steps = 10\nwait_s = {WAIT_S}\n"
        "momentum = 0.5\ngive_up_s = 300\n"
    )
    found = Run(tmp_path, config, "pretrain")
    yield found
    found.close()


def test_sites_and_meeting_are_killed_and_stopped_and_all_end_with_the_same_bits(run: Run) -> None:
    sites = ["site-0", "site-1", "site-2"]
    for name in ("meet", *sites):
        run.start(name)
    run.until_round(2)
    run.signal("site-2", signal.SIGKILL)
    run.until_round(4)
    run.start("site-2")
    run.signal("site-1", signal.SIGSTOP)
    time.sleep(2 * WAIT_S)
    run.signal("site-1", signal.SIGCONT)
    run.until_round(len(run.rounds()) + 1)
    run.signal("meet", signal.SIGKILL)
    before = len(run.rounds())
    run.start("meet")
    run.until_round(before + 2)
    for name in ("site-0", "site-1"):  # more than half of them
        run.signal(name, signal.SIGKILL)
    run.until(lambda: run.rounds()[-1]["kept"] == ["site-2"], "a round of site-2 alone")
    run.signal("site-2", signal.SIGSTOP)  # or it would be done before the others are back
    for name in ("site-0", "site-1"):
        run.start(name)
        run.until(lambda name=name: f"{name} is back" in run.log("meet"), f"{name} to be back")
    run.signal("site-2", signal.SIGCONT)
    assert [run.end(name) for name in (*sites, "meet")] == [0, 0, 0, 0], [run.log(name)[-800:] for name in sites]
    rounds = run.rounds()
    assert [each["round"] for each in rounds] == list(range(30))  # none is lost
    missing = {name for each in rounds for name in each["missing"]}
    assert {"site-1", "site-2"} <= missing | {name for each in rounds for name in each["healed"]}
    agreed = {each["round"]: each["digest"] for each in rounds}
    for name in sites:
        landed = [each for each in run.figures(name) if "digests" in each and each["quorum"]]
        assert landed
        assert all(each["digests"] == [agreed[each["round"] - 1]] for each in landed)
        assert landed[-1]["round"] == 30
    assert len({run.model(name) for name in sites}) == 1
    held = [each["heldout_loss"] for each in run.figures("site-2") if "heldout_loss" in each]
    assert held[-1] < held[0]


def test_a_site_that_differs_is_told_what_and_the_others_go_on(run: Run) -> None:
    run.config.write_text(run.config.read_text().replace("steps = 300", "steps = 20"))
    run.start("meet", "sites.sites=2")
    invite = run.invite("site-1")
    run.until(invite.exists, "the invite")
    for override, words in (
        ("pretrain.lr=2e-3", "has another pretrain.lr: 0.002, and the run has 0.001; give every site the same"),
        ("pretrain.field=url", "it has no text in the field 'url'"),
        ("sites.kind=int8", "has another sites.kind: int8"),
    ):
        command = [sys.executable, "-m", "shoal", "pretrain", str(run.config), "--out", str(run.folder / override)]
        done = subprocess.run([*command, "--join", str(invite), "--set", override], capture_output=True, text=True)
        assert done.returncode == 1
        assert words in done.stderr.splitlines()[-1]
    run.start("site-0")
    assert [run.end(name) for name in ("site-0", "meet")] == [0, 0]


def test_a_site_whose_disk_is_full_ends_with_that_message_and_the_others_go_on(run: Run, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        run.config.write_text(run.config.read_text().replace("steps = 300", "steps = 60"))
        run.start("meet")
        for name in ("site-0", "site-2"):
            run.start(name)
        run.start("site-1", out=disk / "site-1")
        assert run.end("site-1") == 1
        assert "No space left on device" in run.log("site-1").splitlines()[-1]
        assert [run.end(name) for name in ("site-0", "site-2", "meet")] == [0, 0, 0]
    finally:
        run.close()
        subprocess.run(["umount", disk], check=True)
    assert run.model("site-0") == run.model("site-2")
    assert "site-1" in run.rounds()[0]["kept"] and run.rounds()[-1]["kept"] == ["site-0", "site-2"]
