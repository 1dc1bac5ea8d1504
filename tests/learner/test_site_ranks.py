"""Two sites of two ranks each train like two sites of one rank. The ranks are real processes under torchrun.

Weights are compared as in `test_ranks`. Rounding changes a larger share of the adapters than of the weights, because
half of the adapters start at 0.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import site_invite
from shoal.diloco.serve import MeetingServer, serve
from shoal.protocol.identity import Identity

from .support import VALIDATOR, SitePool, step_file
from .test_ranks import assert_same_weights, torchrun, version
from .test_sites import meeting_of, site, sites_config, versions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
STEPS = 2
SITES = ("site-0", "site-1")
CHANGED: dict[str, dict[str, Any]] = {"whole": {}, "lora": {"lora": {"rank": 4}}}


@contextmanager
def served(meeting: Meeting) -> Iterator[None]:
    """Serve the meeting on a loopback port, and write the sites' invites into the meeting's folder."""
    stop, ready, identity = threading.Event(), threading.Event(), Identity.generate()

    async def live() -> None:
        server = MeetingServer(meeting, identity)
        runner, port = await serve(server, "127.0.0.1", 0, meeting.folder / "port")
        for name in SITES:
            site_invite(identity, f"http://127.0.0.1:{port}", meeting.run, name).save(meeting.folder / f"{name}.invite")
        ready.set()
        try:
            await server.live(stop.is_set)
        finally:
            await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(live(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(30)
        yield
    finally:
        stop.set()
        thread.join(30)


def in_threads(model: Path, out: Path, files: list[bytes], config: Config) -> None:
    """Train two sites of one rank each, in this process."""
    meeting = meeting_of(model, out / "meet", config)
    learners = [site(model, out, SitePool(*files), meeting, config, name) for name in SITES]
    with ThreadPoolExecutor() as threads:
        ended = [threads.submit(learner.run, threading.Event()) for learner in learners]
        assert [each.result(120) for each in ended] == ["finished"] * len(SITES)


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory, one_thread) -> Path:
    """A folder with one run per name in CHANGED, of two sites with two ranks each.

    A run has a folder for its meeting and for each site. The folder `plain` has the same runs with one rank per site.
    """
    folder, files = tmp_path_factory.mktemp("sites"), [step_file(step) for step in range(STEPS)]
    (folder / "files").mkdir()
    for number, data in enumerate(files):
        (folder / "files" / f"{number}.parquet").write_bytes(data)
    configs = {name: sites_config(STEPS, len(SITES), **changed) for name, changed in CHANGED.items()}
    meetings = {name: meeting_of(tiny_folder, folder / name / "meet", config) for name, config in configs.items()}

    def job(name: str, at: str) -> dict[str, Any]:
        where = {"model": str(tiny_folder), "out": str(folder / name / at), "files": str(folder / "files")}
        fields = {"steps": STEPS, "dtype": "float32", "die": {}, "changed": CHANGED[name] | {"sites": len(SITES)}}
        return where | fields | {"validator": VALIDATOR.public, "site": str(folder / name / "meet" / f"{at}.invite")}

    with served(meetings["whole"]), served(meetings["lora"]), ThreadPoolExecutor() as threads:
        for at in SITES:
            (folder / at).mkdir()
        started = [threads.submit(torchrun, 2, folder / at, [job(name, at) for name in CHANGED]) for at in SITES]
        for each in started:
            each.result(300)
    for name, config in configs.items():
        in_threads(tiny_folder, folder / "plain" / name, files, config)
    return folder


@pytest.mark.parametrize("name", CHANGED)
def test_all_sites_and_their_meeting_have_the_same_bits(trained, name):
    actual = versions(trained / name / "meet")
    assert len(actual) == STEPS + 1 and len(set(actual.values())) == STEPS + 1
    assert all(versions(trained / name / at) == actual for at in SITES)


@pytest.mark.parametrize("name", CHANGED)
def test_two_ranks_at_each_site_train_as_one_rank_does(trained, name):
    for number in range(STEPS + 1):
        assert_same_weights(
            version(trained / name / "meet", number), version(trained / "plain" / name / "meet", number), max_frac=5e-3
        )


@pytest.mark.parametrize("name", CHANGED)
def test_a_sites_record_has_its_number_of_ranks_and_the_groups_of_both_sites(trained, name):
    for at in SITES:
        reports = json.loads((trained / name / at / "reports.json").read_text())
        assert [report["step"] for report in reports] == list(range(STEPS))
        assert all(report["metrics"]["sites/kept"] == 2.0 for report in reports)
        signed = json.loads(json.loads(reports[0]["record"])["payload"])
        assert signed["computed"]["ranks"] == 2 and len(signed["groups"]) == 5
