"""`shoal pool meet` and its sites are real processes here. The tests kill, stop and restart them."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.diloco.processes import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WAIT_S = 4.0


@pytest.fixture
def run(tmp_path, tiny_folder) -> Iterator[Run]:
    data, config = tmp_path / "text.jsonl", tmp_path / "small.toml"
    data.write_text("".join(json.dumps({"text": f"{i} + {i} = {2 * i}. " * 5}) + "\n" for i in range(3000)))
    config.write_text(
        f"[model]\nname = {json.dumps(str(tiny_folder))}\ndtype = 'float32'\n[pretrain]\ndata = {json.dumps(str(data))}\n"
        "steps = 300\nbatch = 2\ntokens = 32\nlr = 1e-3\nwarmup_steps = 5\nheldout = 8\n"
        f"checkpoint_every = 10\n[sites]\nsites = 3\ninner_steps = 10\nwait_s = {WAIT_S}\n"
        "momentum = 0.5\n"
    )
    result = Run(tmp_path, config, "pretrain")
    yield result
    result.close()


def test_all_sites_have_the_same_bits_after_every_round_even_if_processes_die(run):
    # The run has more steps than the test waits for.
    run.config.write_text(run.config.read_text().replace("steps = 300", "steps = 100_000_000"))
    sites = ["site-0", "site-1", "site-2"]
    for name in ("meet", *sites):
        run.start(name)
    run.until_together(*sites)
    run.without("site-2", signal.SIGKILL)
    run.start("site-2")
    run.until_together("site-2")
    run.without("site-1", signal.SIGSTOP)
    run.signal("site-1", signal.SIGCONT)
    run.until_together("site-1")
    run.signal("meet", signal.SIGKILL)
    run.start("meet")
    run.until_together(*sites)
    since = len(run.rounds())
    for name in ("site-0", "site-1"):  # two of the three sites
        run.signal(name, signal.SIGKILL)
    run.until_round(lambda each: each["kept"] == ["site-2"], "of site-2 alone", since)
    for name in ("site-0", "site-1"):
        run.start(name)
    run.until_together(*sites)
    run.until(lambda: any(each["step"] > 0 for each in heldout(run, "site-0")), "a held-out loss of site-0")
    run.close()
    rounds = run.rounds()
    assert [each["round"] for each in rounds] == list(range(len(rounds)))  # no round is lost
    assert {name for each in rounds for name in each["healed"]} == set(sites)
    agreed = {each["round"]: each["digest"] for each in rounds}
    for name in sites:
        landed = [each for each in run.figures(name) if "digest" in each and each["quorum"]]
        assert landed
        assert all(each["digest"] == agreed[each["round"] - 1] for each in landed)
    held = [each["heldout_loss"] for each in heldout(run, "site-0")]
    assert held[-1] < held[0]


def test_a_meeting_with_a_flipped_bit_in_its_state_ends(run):
    run.config.write_text(
        run.config.read_text().replace("steps = 300", "steps = 100_000_000").replace("sites = 3", "sites = 1")
    )
    for name in ("meet", "site-0"):
        run.start(name)
    run.until_together("site-0")
    run.signal("meet", signal.SIGKILL)
    named = json.loads((run.folder / "meet" / "meeting.json").read_text())["round"]
    state = run.folder / "meet" / f"state-{named:06d}.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 3] ^= 64
    state.write_bytes(data)
    since = len(run.rounds())
    run.start("meet")
    assert run.end("meet") != 0
    assert f"{state.name} is damaged" in run.log("meet") and len(run.rounds()) == since


def heldout(run: Run, name: str) -> list[dict[str, Any]]:
    return [each for each in run.figures(name) if "heldout_loss" in each]


def test_a_site_of_two_ranks_returns_after_one_rank_died(run):
    a_row_each = "pretrain.micro_batch=1"
    run.start("meet", "sites.sites=2", "sites.quorum=2")  # each site waits for the other
    run.start("site-0", a_row_each, ranks=2)
    run.start("site-1")
    run.until_together("site-0", "site-1")
    run.kill_rank("site-0", 1)
    assert run.end("site-0") != 0
    run.start("site-0", a_row_each, ranks=2)
    assert [run.end(name) for name in ("site-0", "site-1", "meet")] == [0, 0, 0], run.log("site-0")[-800:]
    rounds = run.rounds()
    assert [each["round"] for each in rounds] == list(range(30))
    assert all(each["kept"] == ["site-0", "site-1"] for each in rounds)
    assert run.model("site-0") == run.model("site-1")
    held = [each["heldout_loss"] for each in heldout(run, "site-0")]
    assert held[-1] < held[0]


def test_a_site_with_other_settings_is_refused_and_the_others_continue(run):
    run.config.write_text(run.config.read_text().replace("steps = 300", "steps = 20"))
    run.start("meet", "sites.sites=2")
    invite = run.invite("site-1")
    run.until(invite.exists, "the invite")
    for override, status, words in (
        ("pretrain.lr=2e-3", 1, "has another pretrain.lr: 0.002, and the run has 0.001; give every site the same"),
        ("pretrain.field=url", 2, "no text in 'url'"),
        ("sites.kind=int8", 1, "has another sites.kind: int8"),
    ):
        command = [sys.executable, "-m", "shoal", "pretrain", str(run.config), "--out", str(run.folder / override)]
        done = subprocess.run([*command, "--join", str(invite), "--set", override], capture_output=True, text=True)
        assert done.returncode == status
        assert words in done.stderr.splitlines()[-1]
    run.start("site-0")
    assert [run.end(name) for name in ("site-0", "meet")] == [0, 0]


def test_a_site_with_a_full_disk_ends_and_the_others_continue(run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        run.config.write_text(run.config.read_text().replace("steps = 300", "steps = 60"))
        run.start("meet", "sites.quorum=3")  # no round closes before all sites have joined
        for name in ("site-0", "site-2"):
            run.start(name)
        run.start("site-1", out=disk / "site-1")
        assert run.end("site-1") == 1
        assert "No space left on device" in run.log("site-1").splitlines()[-1]
        run.signal("meet", signal.SIGKILL)
        run.start("meet", "sites.wait_s=15")
        assert [run.end(name) for name in ("site-0", "site-2", "meet")] == [0, 0, 0]
    finally:
        run.close()
        subprocess.run(["umount", disk], check=True)
    assert run.model("site-0") == run.model("site-2")
    assert run.rounds()[0]["kept"] == ["site-0", "site-1", "site-2"]
    assert "site-1" not in run.rounds()[-1]["kept"]
