"""`shoal pool discover` and `shoal pool invite --publish`. The route is tested in `coordinator/http/test_routes.py`."""

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import DONE, FAILED, USAGE, main
from shoal.config.sections import RequirementsSection
from shoal.coordinator.folder import OPEN_INVITE
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Address, make_invite, open_payload, read_invite
from shoal.protocol.messages import Capability

from ..protocol.test_history import OWNER, RUN, offer

URL = "http://10.1.2.3:8700"


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fields of the run's offer that a test may change."""
    changed: dict[str, Any] = {}
    monkeypatch.setattr("shoal.protocol.history.find_run", lambda url, client, key: offer(**changed))
    monkeypatch.setattr("shoal.cli.roles.capability", lambda: Capability(device="cpu", engine="torch"))
    return changed


def test_discover_shows_the_run_and_what_this_machine_lacks(
    offered: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    requirements = RequirementsSection(engines=["vllm"], stake=7, places=3).model_dump()
    offered |= {"requirements": requirements, "model": "a\x1b[2Jmodel", "places_free": 1}
    assert main(["pool", "discover", URL]) == DONE
    printed = capsys.readouterr().out
    assert f"{RUN}, key {OWNER.public}\n" in printed and "\x1b" not in printed
    assert "step 4 of 24, by invite only, 2 workers, 1 places free\n" in printed
    assert "lacks one of these engines: vllm (this machine has torch)" in printed


def test_discover_writes_the_invite_of_an_open_run(
    offered: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "worker.invite"
    assert main(["pool", "discover", URL, "--out", str(out)]) == FAILED and not out.exists()
    assert "only workers with an invite" in capsys.readouterr().err
    made = make_invite(OWNER, url=URL, run=RUN, role="worker", name="g", expires_s=2**40, open=True)
    offered["invite"] = made.encode()
    assert main(["pool", "discover", URL]) == DONE
    printed = capsys.readouterr().out
    assert "open to staked workers, 2 workers\n" in printed and "meets its requirements" in printed
    assert f"stakes 1: shoal pool discover {URL} --out worker.invite" in printed
    assert main(["pool", "discover", URL, "--out", str(out)]) == DONE
    assert read_invite(str(out)) == made
    assert main(["pool", "discover", URL, "--out", str(out)]) == USAGE, "no invite may be overwritten"


def test_a_published_invite_is_open_and_in_the_pools_folder(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "identity.pem")
    Address(url=URL, run="r").write(tmp_path)
    invite = ["pool", "invite", str(tmp_path), "--role", "worker", "--name", "guest", "--publish"]
    for more in ([], ["--open", "--out", "x"], ["--open", "--url", "http://h"]):
        assert main([*invite, *more]) == USAGE
    for _ in range(2):  # the second one replaces the first
        assert main([*invite, "--open"]) == DONE
    made = read_invite(str(tmp_path / OPEN_INVITE))
    assert open_payload(made.signed.model_dump_json(), made.key, "r").open
    assert main([*invite, "--open", "--name", "A_typo"]) == USAGE
    assert read_invite(str(tmp_path / OPEN_INVITE)) == made, "a refused invite must not remove the published one"
