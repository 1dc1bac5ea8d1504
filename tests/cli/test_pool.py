"""A pool's operator at a shell: `pool init`, `coordinator`, `pool status`, `pool invite`; and nodes that join."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.launch.members import LOCK, locked
from shoal.cli.main import DONE, EVICTED, FAILED, USAGE, main
from shoal.config import load
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address, Invite, make_invite, open_payload, run_id

from .support import replace_begin, wait_until

URL = "http://10.1.2.3:8700"
SMALL = '[model]\nname = "bundled:tiny"\n[sampling]\nmax_tokens = 8\n[workers]\ncount = 3\n'


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "sums.toml"
    path.write_text(SMALL)
    return str(path)


def init(config: str, folder: Path, *more: str, url: str = URL) -> int:
    return main(["pool", "init", config, "--dir", str(folder), "--url", url, *more])


def invites(folder: Path) -> dict[str, Invite]:
    return {path.stem: Invite.decode(path.read_text()) for path in (folder / "invites").glob("*.invite")}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- shoal pool init --------------------------------------------------------------------------------------------------


def run_of(folder: Path, name: str) -> str:
    """Return the id of the run called `name` in the pool in `folder / "pool"`."""
    return run_id(name, Identity.load(folder / "pool" / "identity.pem").public)


def invite_of(run: str, **fields: Any) -> Invite:
    identity = Identity.generate()
    return make_invite(identity, run=run_id(run, identity.public), **fields)


def test_a_pool_has_a_private_invite_for_every_node_and_prints_the_commands(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my pool"
    assert init(config, folder, "--set", "workers.count=2", "--set", "relays.count=2") == DONE
    key, roles = Identity.load(folder / "identity.pem").public, {}
    for name, invite in invites(folder).items():
        payload = open_payload(invite.signed.model_dump_json(), key, f"sums-{key[:16]}")
        assert (invite.url, invite.run, payload.name) == (URL, f"sums-{key[:16]}", name)
        roles[name] = payload.role
    several = {f"{role}-{number}": role for role in ("relay", "worker") for number in range(2)}
    alone = {role: role for role in ("learner", "origin", "evaluator")}
    assert roles == several | alone | {"validator-0": "validator"}
    assert Address.read(folder) == Address(url=URL, run=f"sums-{key[:16]}")
    assert {mode(path) for path in [*(folder / "invites").iterdir(), folder / "identity.pem"]} == {0o600}
    assert mode(folder) == 0o700
    printed = capsys.readouterr().out
    assert f"shoal pool up '{folder}'\n" in printed and f"shoal coordinator --dir '{folder}'\n" in printed
    assert "shoal worker --join worker-0.invite --dir worker-0\n" in printed
    assert "shoal origin --join origin.invite --dir origin --watch learner/versions\n" in printed
    assert f"shoal pool status {URL}\n" in printed
    assert "set origin.listen, relays.listen in" in printed, "the operator must be warned"
    init(config, tmp_path / "behind NAT", "--set", "origin.url=http://192.0.2.7:8710")
    assert "set relays.listen in" in capsys.readouterr().out
    init(config, tmp_path / "local", url="http://127.0.0.1:8700")
    assert "cannot reach" not in capsys.readouterr().out


def test_each_of_the_learners_sites_has_an_invite_and_its_commands(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(config, tmp_path / "pool", "--set", "learner.sites=2")
    assert {"learner", "learner-1"} <= set(invites(tmp_path / "pool"))
    printed = capsys.readouterr().out
    assert f"shoal pool meet {tmp_path / 'pool' / 'config.toml'} --dir meet\n" in printed
    assert "shoal learner --join learner.invite --dir learner --site site-0.invite\n" in printed
    assert "shoal learner --join learner-1.invite --dir learner-1 --site site-1.invite\n" in printed
    assert "shoal origin --join origin.invite --dir origin --watch meet/versions\n" in printed
    assert "set origin.listen, relays.listen, sites.listen in" in printed
    assert "pool up" not in printed, "`shoal pool up` cannot start sites, so it must not be suggested"


@pytest.mark.parametrize(
    ("url", "more", "host", "port"),
    [
        (URL, (), "0.0.0.0", 8700),
        ("http://127.0.0.1:8700", (), "127.0.0.1", 8700),
        (URL, ("--set", "coordinator.listen=10.1.2.3:9"), "10.1.2.3", 9),
        ("https://pool.example.org", ("--set", "coordinator.listen=0.0.0.0:9"), "0.0.0.0", 9),
        ("http://[2001:db8::7]:8700", (), "::", 8700),
        ("http://pool.example.org", (), "0.0.0.0", 80),
    ],
)
def test_the_coordinator_listens_at_the_urls_port_unless_the_config_says_otherwise(
    url: str, more: tuple[str, ...], host: str, port: int, config: str, tmp_path: Path
) -> None:
    assert init(config, tmp_path / "pool", *more, url=url) == DONE
    section = load(tmp_path / "pool" / "config.toml").coordinator
    assert (section.host, section.port) == (host, port)
    assert Address.read(tmp_path / "pool").url == url


def test_a_second_init_is_refused_and_changes_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(config, tmp_path / "pool")
    before = {path: path.read_bytes() for path in (tmp_path / "pool").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert init(config, tmp_path / "pool") == USAGE
    printed = capsys.readouterr()
    assert (
        "is not empty; choose another --dir" in printed.err and len(printed.err.splitlines()) == 1 and not printed.out
    )
    assert {path: path.read_bytes() for path in (tmp_path / "pool").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("url", "more", "words"),
    [
        ("10.1.2.3:8700", (), "is not a coordinator's URL: write http://HOST:PORT"),
        ("http://10.1.2.3:99999", (), "is not a coordinator's URL"),
        ("http://h:1/pool", (), "is not a coordinator's URL"),
        ("https://h", (), "--set coordinator.listen=HOST:PORT"),
        (URL, ("--set", "sampling.max_tokens=1024"), "share its 1024 positions"),
        (URL, ("--set", "model.name=./nowhere"), "no model at"),
        (URL, ("--set", "relays.count=0"), "relays.count"),
        (URL, ("--run", "two words"), "'two words' cannot name a run: use 1 to 100 ASCII characters"),
    ],
)
def test_a_pool_that_could_not_work_is_not_created(
    url: str,
    more: tuple[str, ...],
    words: str,
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert init(config, tmp_path / "pool", *more, url=url) == USAGE
    printed = capsys.readouterr().err
    assert words in printed and len(printed.splitlines()) == 1
    assert not (tmp_path / "pool").exists()


# --- shoal coordinator, shoal pool status ----------------------------------------------------------------------------------


@pytest.fixture
def running(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run a pool's coordinator on a free port. Yield the pool's folder."""
    init(config, tmp_path / "pool", url="http://127.0.0.1:1")
    settings = tmp_path / "pool" / "config.toml"
    settings.write_text(settings.read_text().replace('"127.0.0.1:1"', '"127.0.0.1:0"'))
    Address(url="", run="sums").write(tmp_path / "pool")  # so the coordinator writes its own URL
    stop = replace_begin(monkeypatch)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(main(["coordinator", "--dir", str(tmp_path / "pool")])))
    thread.start()
    wait_until(lambda: Address.read(tmp_path / "pool").url or not thread.is_alive(), what="the coordinator to listen")
    yield tmp_path / "pool"
    stop.set()
    thread.join(30)
    assert statuses == [DONE]


def test_a_coordinator_starts_from_its_folder_and_status_shows_it(
    running: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for where in (Address.read(running).url, str(running)):
        assert main(["pool", "status", where]) == DONE
        assert "sums" in capsys.readouterr().out


def test_a_start_of_the_coordinator_keeps_the_pools_url(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(config, tmp_path / "pool", url="http://127.0.0.1:8700")
    replace_begin(monkeypatch).set()  # the coordinator listens, then ends
    assert main(["coordinator", "--dir", str(tmp_path / "pool"), "--port", "0"]) == DONE
    assert Address.read(tmp_path / "pool") == Address(url="http://127.0.0.1:8700", run=run_of(tmp_path, "sums"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["{config}"], "start it with: shoal coordinator --dir"),
        (["--run", "other"], "already has a config and a name"),
        (["--set", "run.steps=3"], "already has a config and a name"),
    ],
)
def test_a_pools_config_and_name_cannot_be_given_again(
    more: list[str], words: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(config, tmp_path / "pool")
    arguments = [argument.replace("{config}", config) for argument in more]
    assert main(["coordinator", *arguments, "--dir", str(tmp_path / "pool")]) == USAGE
    assert words in capsys.readouterr().err


def test_a_folder_without_a_pool_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "--dir", str(tmp_path)]) == USAGE
    assert "shoal pool init CONFIG" in capsys.readouterr().err


def test_an_unreachable_pool_is_reported_in_one_line_with_its_address(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(config, tmp_path / "pool", url="http://127.0.0.1:9")
    capsys.readouterr()
    for where in ("http://127.0.0.1:9", str(tmp_path / "pool")):
        for more in ([], ["--watch"]):
            assert main(["pool", "status", where, *more]) == FAILED
            printed = capsys.readouterr().err
            assert "no coordinator answers at http://127.0.0.1:9" in printed and len(printed.splitlines()) == 1


# --- shoal pool invite, and nodes that join --------------------------------------------------------------------------------


def test_more_nodes_can_be_invited_later(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init(config, tmp_path / "pool")
    capsys.readouterr()
    invite = ["pool", "invite", str(tmp_path / "pool"), "--role", "worker", "--name", "worker-9"]
    assert main(invite) == DONE
    assert Invite.decode(capsys.readouterr().out).url == URL
    assert main([*invite, "--out", str(tmp_path / "nine.invite")]) == DONE
    assert main([*invite, "--out", str(tmp_path / "nine.invite")]) == USAGE, "no invite may be overwritten"
    assert capsys.readouterr().out == ""
    assert Invite.decode((tmp_path / "nine.invite").read_text()).run == run_of(tmp_path, "sums")
    assert mode(tmp_path / "nine.invite") == 0o600


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--name", "w", "--url", "10.1.2.3:8700"], "write http://HOST:PORT"),
        (["--name", "w", "--url", "pool.example.org"], "write http://HOST:PORT"),
        (["--name", "Bad Name"], "'Bad Name' is not a valid node name"),
    ],
)
def test_an_invite_with_a_wrong_url_or_name_is_refused(
    more: list[str], words: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init(config, tmp_path / "pool")
    capsys.readouterr()
    assert main(["pool", "invite", str(tmp_path / "pool"), "--role", "worker", *more]) == USAGE
    printed = capsys.readouterr()
    assert words in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


@pytest.mark.parametrize(
    ("role", "expires_s", "words"),
    [("validator", 2**40, "for the role validator, not worker"), ("worker", 1, "has expired; ask for a new one")],
)
def test_an_invite_is_refused_before_torch_is_imported(role: str, expires_s: int, words: str, tmp_path: Path) -> None:
    identity = Identity.generate()
    made = make_invite(
        identity, url="http://127.0.0.1:9", run=run_id("r", identity.public), role=role, name="n", expires_s=expires_s
    )  # type: ignore[arg-type]
    made.save(tmp_path / "invite")
    script = (
        "import sys; from shoal.cli import main\n"
        f"status = main(['worker', '--join', {str(tmp_path / 'invite')!r}, '--dir', {str(tmp_path / 'w')!r}])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == USAGE and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "w").exists()


def test_a_node_that_joined_before_may_use_an_expired_invite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = invite_of("r", url=URL, role="worker", name="n", expires_s=1)
    Identity.generate().save(tmp_path / "w" / "identity.pem")
    replace_begin(monkeypatch)
    monkeypatch.setattr("shoal.cli.nodes._work", lambda role, invite, arguments, stop: "finished")
    assert main(["worker", "--join", made.encode(), "--dir", str(tmp_path / "w")]) == DONE


def test_a_second_meeting_of_sites_in_one_folder_is_refused_before_it_touches_a_file(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_begin(monkeypatch).set()
    (tmp_path / "meet").mkdir()
    unfinished = tmp_path / "meet" / ".state-000007.safetensors.tmp"  # the first meeting is writing it
    unfinished.write_text("")
    with locked(tmp_path / "meet"):
        meet = ["pool", "meet", config, "--dir", str(tmp_path / "meet"), "--set", "learner.sites=2"]
        assert main(meet) == USAGE
        assert {path.name for path in (tmp_path / "meet").iterdir()} == {unfinished.name, LOCK}
    assert f"the run in {tmp_path / 'meet'} is in progress; stop it first" in capsys.readouterr().err


def test_a_meeting_without_sites_is_refused(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "meet", config, "--dir", str(tmp_path / "meet")]) == USAGE
    assert "the config has no sites: set learner.sites, or pretrain.data" in capsys.readouterr().err
    assert not (tmp_path / "meet").exists()


@pytest.mark.parametrize(("ended", "status"), [("finished", DONE), ("stopped", DONE), ("evicted", EVICTED)])
def test_an_evicted_node_has_its_own_exit_status_and_a_nodes_files_are_private(
    ended: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = invite_of("r", url=URL, role="worker", name="n", expires_s=2**40)
    replace_begin(monkeypatch)

    def work(*_: object) -> str:
        (tmp_path / "weights").write_text("")
        return ended

    monkeypatch.setattr("shoal.cli.nodes._work", work)
    before = os.umask(0o022)
    try:
        assert main(["worker", "--join", made.encode(), "--dir", str(tmp_path / "w")]) == status
    finally:
        os.umask(before)
    assert mode(tmp_path / "weights") == 0o600


def test_an_invite_that_is_not_signed_by_the_key_it_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = invite_of("r", url=URL, role="worker", name="n", expires_s=2**40)
    made.model_copy(update={"key": Identity.generate().public}).save(tmp_path / "invite")
    assert main(["worker", "--join", str(tmp_path / "invite"), "--dir", str(tmp_path / "w")]) == USAGE
    assert "not signed by this coordinator" in capsys.readouterr().err
