"""`shoal pool status` of a sites' meeting."""

import io
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from shoal.cli.main import main
from shoal.cli.pool import meeting as sites
from shoal.cli.pool.meeting import meeting_at, screen, watch_meeting
from shoal.diloco.messages import Figures, Greeting, MeetingStatus, SiteStatus
from shoal.protocol.history import UnreachableError
from tests.diloco.test_meeting import ABOUT, terms
from tests.diloco.test_serve import served
from tests.watch.support import status as pool_status

TIMES = Figures(loss=2.5, computed_s=6.0, waited_s=3.0, synced_s=1.0, received_bytes=5000)


def site(**told: object) -> SiteStatus:
    known = {"expected": True, "offered": False, "accepted": 3, "share": None, "sent_bytes": 7000, "figures": TIMES}
    return SiteStatus.model_validate(known | told)


def status(round: int = 4, **of: SiteStatus) -> MeetingStatus:
    return MeetingStatus(run="text-0123", round=round, rounds=9, waiting_for=["b"], sites=of)


def printed(of: MeetingStatus) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(screen(of, 100))
    return console.export_text()


def answering(*answers: str | None) -> httpx.Client:
    """Each look finds the next of these; None: nobody answers."""
    left = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        if (found := next(left)) is None:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, text=found)

    return httpx.Client(transport=httpx.MockTransport(answer))


def test_a_meeting_says_who_takes_part_and_how_each_fares() -> None:
    text = printed(status(a=site(offered=True), b=site(), c=site(expected=False), d=site(figures=None, accepted=-1)))
    assert "text-0123  4 of 9 rounds, waiting for b" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()[0] in "abcd"}
    assert lines["a"].split() == [*["a", "has", "offered", "2.500", "60", "%", "30", "%", "10", "%", "7.0kB", "5.0kB"]]
    assert "training" in lines["b"] and "away, last counted in round 4" in lines["c"] and "–" in lines["d"]


def test_what_is_no_meeting_is_left_to_others() -> None:
    for answer in (None, "{}", pool_status().status.model_dump_json(), status().model_dump_json()[:-1] + ', "x": 1}'):
        assert meeting_at("http://m", answering(answer)) is None
    assert meeting_at("http://m", answering(status(a=site()).model_dump_json())) == status(a=site())


def test_a_log_gets_a_table_a_round_until_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "POLL_S", 0.0)
    console = Console(file=io.StringIO(), width=100, record=True)
    client = answering(*(status(round, a=site()).model_dump_json() for round in (4, 8, 8, 9)))
    watch_meeting("http://m", status(4, a=site()), client, console)
    text = console.export_text()
    assert [text.count(f"{round} of 9 rounds") for round in (4, 8, 9)] == [1, 1, 1]
    with pytest.raises(UnreachableError, match="answers no more"):
        watch_meeting("http://m", status(4, a=site()), answering(None), Console(file=io.StringIO()))


def test_the_command_shows_a_real_meeting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(tmp_path, terms()) as host:
        host.meeting.join("site-0", Greeting(about=ABOUT, placed=False))
        assert main(["pool", "status", f"http://127.0.0.1:{host.port}"]) == 0
    assert "site-0" in capsys.readouterr().out
