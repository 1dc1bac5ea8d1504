"""`shoal pool up` starts the trusted processes, and ends with the run. A pool trains with the commands of the docs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.launch import members
from shoal.cli.launch.swarm import PoolSwarm, local_url
from shoal.cli.main import USAGE, main
from shoal.config import parse
from shoal.coordinator.folder import create_pool, open_pool
from shoal.errors import UserError
from shoal.protocol.invite import Address

from ...watch.support import node, status
from ..support import wait_until

PAGE = Path(__file__).parents[3] / "docs" / "operate.md"
DEADLINE_S = 3600.0  # on a very busy machine; a quiet one takes about two minutes


def pool(folder: Path, url: str = "http://127.0.0.1:8700", **config: Any) -> PoolSwarm:
    counts = {"workers": {"count": 2}, "validator": {"count": 2}}
    settings = parse({"tasks": {"sources": [{"generator": "arithmetic"}]}, **counts, **config})
    create_pool(folder, settings, "sums", url)
    return PoolSwarm(folder, *open_pool(folder))


def planned(swarm: PoolSwarm) -> dict[str, list[str]]:
    swarm._resolve({})
    return {each.name: members.command(each, swarm.local_config, swarm.out, swarm.cores) for each in swarm.members}


def test_every_trusted_role_is_started_but_no_worker(tmp_path: Path) -> None:
    commands = planned(pool(tmp_path / "pool"))
    assert list(commands) == ["learner", "origin", "relay-0", "validator-0", "validator-1", "evaluator"]
    assert [command[0] for command in commands.values()] == [name.partition("-")[0] for name in commands]
    for name, command in commands.items():
        assert command[command.index("--dir") + 1] == str(tmp_path / "pool" / name)
    assert commands["origin"][3:5] == ["--watch", str(tmp_path / "pool" / "learner" / "versions")]


def test_async_level_0_gives_all_cores_to_the_learner(tmp_path: Path) -> None:
    swarm = pool(tmp_path / "pool", coordinator={"async_level": 0})
    swarm.cores = 4
    learner = planned(swarm)["learner"]
    assert learner[learner.index("--threads") + 1] == "4"


def test_a_role_whose_invite_was_moved_away_is_not_started(tmp_path: Path) -> None:
    pool(tmp_path / "pool")
    (tmp_path / "pool" / "invites" / "relay-0.invite").rename(tmp_path / "relay.invite")
    assert "relay-0" not in planned(PoolSwarm(tmp_path / "pool", *open_pool(tmp_path / "pool")))


def test_a_process_gets_its_invite_with_its_mode_and_the_pool_keeps_its_config(tmp_path: Path) -> None:
    swarm = pool(tmp_path / "pool")
    before = (tmp_path / "pool" / "config.toml").read_bytes()
    swarm._resolve({"dtype": "float32"})
    for member in swarm.invites:
        swarm._invite(member)
    invite = tmp_path / "pool" / "learner" / "invite"
    assert invite.read_bytes() == (tmp_path / "pool" / "invites" / "learner.invite").read_bytes()
    assert invite.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "pool" / "config.toml").read_bytes() == before


def test_a_pool_with_no_learner_here_or_several_sites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shoal pool meet"):
        pool(tmp_path / "sites", learner={"sites": 2})
    pool(tmp_path / "pool")
    (tmp_path / "pool" / "invites" / "learner.invite").unlink()
    with pytest.raises(UserError, match="holds 0 invites for the role learner"):
        PoolSwarm(tmp_path / "pool", *open_pool(tmp_path / "pool"))


def test_a_folder_without_a_pool_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "up", str(tmp_path)]) == USAGE
    assert "make one with `shoal pool init CONFIG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url", "local"),
    [
        ("0.0.0.0", "http://192.0.2.1:8700", "http://127.0.0.1:8700"),
        ("::", "http://[2001:db8::1]:8700", "http://[::1]:8700"),
        ("127.0.0.1", "https://pool.example", "http://127.0.0.1:8700"),
        ("192.0.2.1", "http://192.0.2.1:8700", "http://192.0.2.1:8700"),
    ],
)
def test_the_screen_connects_to_the_coordinator_on_this_machine(host: str, url: str, local: str) -> None:
    settings = parse({"coordinator": {"listen": f"[{host}]:8700" if ":" in host else f"{host}:8700"}})
    assert local_url(settings, Address(url=url, run="sums")) == local


def test_pool_up_ends_once_nodes_elsewhere_have_stopped_sending_heartbeats(tmp_path: Path) -> None:
    swarm = pool(tmp_path / "pool")

    def at(seen_s: float) -> bool:
        return swarm._may_end(status(now_s=100.0, nodes=[node("worker-0", seen_s=seen_s)]).status)

    assert not at(99.0)
    assert at(80.0)
    swarm.finished_s -= 61
    assert at(99.0), "`shoal pool up` must not wait forever for a worker that does not end"


@contextmanager
def running(command: str, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of docs/operate.md with this interpreter's `shoal`."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-ec", command], cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_pool_trains_with_the_commands_of_the_page(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Try it on this machine\n")[2].partition("\n## ")[0]
    trusted, worker = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8700)) == 0:
            pytest.skip("port 8700 of this machine is in use")
    logs = tmp_path / "trusted.log", tmp_path / "worker.log"
    with running(trusted, tmp_path, logs[0]) as up:
        invite = tmp_path / "pool" / "invites" / "worker-0.invite"
        wait_until(lambda: invite.exists() or up.poll() is not None, 300)
        with running(worker, tmp_path, logs[1]) as joined:
            ended = up.wait(DEADLINE_S), joined.wait(60)
    assert ended == (0, 0), logs[0].read_text()[-3000:] + logs[1].read_text()[-1000:]
    summary = json.loads((tmp_path / "pool" / "summary.json").read_text())
    assert summary["steps"] == 24 and summary["rejected"] == {"worker-0": 0}
    assert summary["heldout_after"]["greedy"] > summary["heldout_before"]["greedy"]
    assert (tmp_path / "pool" / "model" / "model.safetensors").is_file()
