"""`shoal discover`, and an operator's commands for several runs at one address (served in `coordinator/test_sharing.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import DONE, FAILED, USAGE, main
from shoal.config.checking import RequirementsSection
from shoal.coordinator.http.serving import OPEN_INVITE
from shoal.coordinator.state.folder import CLOSED
from shoal.protocol.address import Address
from shoal.protocol.discovery import FoundRuns
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite, open_payload, read_invite, run_id
from shoal.protocol.messages import VERSION, Capability, ClosedRun, RunList, RunOffer

from .test_pool import config, init

__all__ = ["config"]  # a fixture

URL = "http://10.1.2.3:8700"
OWNER = Identity.generate()
RUN = run_id("sums", OWNER.public)


def offer(place: str, **changed: Any) -> RunOffer:
    fields: dict[str, Any] = {
        "place": place,
        "run": RUN,
        "key": OWNER.public,
        "url": f"{URL}/runs/{place}",
        "model": "bundled:tiny",
        "state": "running",
        "step": 3,
        "steps": 24,
        "workers": 2,
        "places_free": None,
        "requirements": RequirementsSection().model_dump(),
    }
    return RunOffer(**fields | changed)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = RequirementsSection(memory_gib=64, tokens_per_s=50, stake=7, places=3).model_dump()
    invite = make_invite(OWNER, url=f"{URL}/runs/sums", run=RUN, role="worker", name="g", expires_s=2**40, open=True)
    runs = [
        offer("sums", invite=invite.encode()),
        offer("large", requirements=wants, model="a\x1b[2Jmodel", places_free=1),
    ]
    found = FoundRuns(
        URL, OWNER.public, RunList(protocol=VERSION, runs=runs, closed=[ClosedRun(place="old", why="away")])
    )
    monkeypatch.setattr("shoal.protocol.discovery.find_runs", lambda url, client, key: found)
    monkeypatch.setattr("shoal.cli.roles.capability", lambda: Capability(memory_bytes=8 << 30, device="cpu"))


@pytest.mark.usefixtures("listed")
def test_it_says_which_runs_this_machine_may_join(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["discover", URL]) == DONE
    printed = capsys.readouterr().out
    sums, large, old = printed.split("\n\n")[1:]
    assert "sums: bundled:tiny, step 3 of 24, open to stake, 2 workers\n" in sums
    assert "meets its requirements" in sums and f"{URL}/runs/sums --join sums" in sums
    assert "lacks 64 GiB of memory (it has 8.0)" in large and "at least 50 tokens/s, measured" in large
    assert "invited only, 2 workers, 1 places free" in large and "old: closed, away" in old
    assert OWNER.public in printed and "\x1b" not in printed
    assert main(["discover", URL, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["runs"][1]["places_free"] == 1


@pytest.mark.usefixtures("listed")
def test_a_run_is_joined_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sums.invite"
    assert main(["discover", URL, "--join", "sums", "--out", str(out)]) == DONE
    assert read_invite(str(out)).url == f"{URL}/runs/sums"
    assert main(["discover", URL, "--join", "sums", "--out", str(out)]) == USAGE, "no invite is overwritten"
    assert main(["discover", URL, "--out", str(out)]) == USAGE
    capsys.readouterr()
    for name, words in (("large", "only workers with an invite"), ("old", "closed: away"), ("x", "not listed")):
        assert main(["discover", URL, "--join", name]) == FAILED
        printed = capsys.readouterr()
        assert words in printed.err and not printed.out


def test_a_run_of_several_has_a_folder_of_its_places_name(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(config, tmp_path / "runs" / "other", url=f"{URL}/runs/sums") == USAGE
    assert "--dir RUNS/sums" in capsys.readouterr().err and not (tmp_path / "runs" / "other").exists()
    assert init(config, tmp_path / "runs" / "sums", url=f"{URL}/runs/sums") == DONE
    printed = capsys.readouterr().out
    assert f"shoal coordinator --runs {tmp_path / 'runs'} --port 8700\n" in printed
    assert f"shoal status {URL}/runs/sums\n" in printed
    assert read_invite(str(tmp_path / "runs" / "sums" / "invites" / "worker-0.invite")).url == f"{URL}/runs/sums"
    assert main(["coordinator", "--dir", str(tmp_path / "runs" / "sums")]) == USAGE
    assert f"shoal coordinator --runs {tmp_path / 'runs'}" in capsys.readouterr().err


def test_a_published_invite_is_open_and_in_the_runs_folder(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "identity.pem")
    Address(url=URL, run="r").write(tmp_path)
    invite = ["invite", str(tmp_path), "--role", "worker", "--name", "guest", "--publish"]
    for more in ([], ["--open", "--out", "x"], ["--open", "--url", "http://h"]):
        assert main([*invite, *more]) == USAGE
    for _ in range(2):  # the second one takes the first one's place
        assert main([*invite, "--open"]) == DONE
    made = read_invite(str(tmp_path / OPEN_INVITE))
    assert open_payload(made.signed.model_dump_json(), made.key, "r").open


def test_only_a_run_that_shares_its_listener_is_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Address(url=f"{URL}/runs/sums", run="r").write(tmp_path)
    assert main(["pool", "close", str(tmp_path)]) == DONE and (tmp_path / CLOSED).exists()
    assert main(["pool", "reopen", str(tmp_path)]) == DONE and not (tmp_path / CLOSED).exists()
    assert main(["pool", "reopen", str(tmp_path)]) == USAGE
    Address(url=URL, run="r").write(tmp_path)
    capsys.readouterr()
    assert main(["pool", "close", str(tmp_path)]) == USAGE
    assert "has its coordinator for itself" in capsys.readouterr().err and not (tmp_path / CLOSED).exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--runs", "{runs}"], "--port PORT"),
        (["--runs", "{runs}", "--port", "0", "--run", "x"], "each run has its config"),
        (["tiny", "--runs", "{runs}", "--port", "0"], "each run has its config"),
        (["--dir", "{runs}", "--host", "::1"], "go with --runs"),
        (["--dir", "{runs}", "--runs", "{runs}"], "not allowed with"),
        ([], "required"),
    ],
)
def test_wrong_ways_to_start_several_runs(
    more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["coordinator", *(word.replace("{runs}", str(tmp_path)) for word in more)])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == USAGE and words in capsys.readouterr().err
