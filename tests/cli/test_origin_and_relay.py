"""Origin and relay as members of a pool, with a real coordinator on loopback."""

import json
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.cli.origin_and_relay import WATCH_S, run_origin, run_relay
from shoal.config import parse
from shoal.coordinator.folder import create_invite
from shoal.coordinator.http.reports import CachedBody
from shoal.coordinator.http.serving import serve_forever
from shoal.errors import UserError
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity
from shoal.protocol.invite import FILE as ADDRESS
from shoal.protocol.invite import Invite
from shoal.protocol.messages import Evaluation, Ok
from shoal.protocol.node import Node
from shoal.shardcast import Access, Client, FetchError, Manifest, Origin, PublishError
from shoal.shardcast.fetch.client import fetch_published
from shoal.watch.figures import weights_tree
from shoal.worker.loop import follow

from .support import wait_until

RUN = "test-0"
CONFIG = parse({"run": {"steps": 3}, "evaluator": {"n": 4}})


class InThread:
    """A role that runs in a thread instead of a process, so that a test can stop it."""

    def __init__(self, run: Callable[..., Any], *arguments: Any) -> None:
        self.stop = threading.Event()
        self.result: Any = None
        self.thread = threading.Thread(target=self._run, args=(run, *arguments), daemon=True)
        self.thread.start()

    def _run(self, run: Callable[..., Any], *arguments: Any) -> None:
        try:
            self.result = run(*arguments, self.stop)
        except Exception as error:  # noqa: BLE001 - `join` returns it
            self.result = error

    def join(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive(), "the role did not end in time"
        return self.result

    def stopped(self) -> Any:
        self.stop.set()
        return self.join()


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.watched = folder / "versions"
        self.watched.mkdir()
        self.coordinator = InThread(serve_forever, CONFIG, RUN, folder / "coordinator", 0)
        wait_until(lambda: bool(self._address()))

    def _address(self) -> str:
        path = self.folder / "coordinator" / ADDRESS
        return path.read_text() if path.exists() else ""

    def invite(self, role: Any) -> Invite:
        """Return the role's invite; a process that restarts has the same one."""
        path = self.folder / f"{role}.invite"
        if not path.exists():
            path.write_text(create_invite(self.folder / "coordinator", role, role, None, 1).encode())
        return Invite.decode(path.read_text())

    def origin(self) -> InThread:
        return InThread(run_origin, self.invite("origin"), self.folder / "origin", self.watched)

    def relay(self) -> InThread:
        return InThread(run_relay, self.invite("relay"), self.folder / "relay")

    def mirroring(self) -> tuple[InThread, InThread, str]:
        """Start an origin and a relay, and let the relay mirror version 0. Return both and the origin's key."""
        origin, relay = self.origin(), self.relay()
        self.write(0)
        wait_until(lambda: (node := self.node("relay")) is not None and node.policy_version == 0)
        return origin, relay, Identity.load(self.folder / "origin" / "identity.pem").public

    def write(self, version: int) -> dict[str, bytes]:
        """Write a version as the learner does, with a rename at the end. Return its files."""
        files = {"config.json": b"%d" % version, "model.safetensors": bytes([version]) * 10_000}
        temporary = self.watched / f".v{version:06d}"
        temporary.mkdir()
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        temporary.rename(self.watched / f"v{version:06d}")
        return files

    def status(self) -> Status:
        url = json.loads(self._address())["url"]
        return Status.model_validate_json(httpx.get(f"{url}/v1/status").content)

    def node(self, name: str) -> Any:
        return next((node for node in self.status().nodes if node.name == name), None)

    def announced(self) -> list[str]:
        with sqlite3.connect(self.folder / "coordinator" / "pool.sqlite") as database:
            return [body for (body,) in database.execute("SELECT body FROM ledger WHERE kind = 'policy'")]

    def end(self) -> None:
        """End the run: publish the last version, and report its evaluation."""
        self.write(3)
        wait_until(lambda: self.status().newest_version == 3)
        evaluator = Node.join(self.invite("evaluator"), self.folder / "evaluator")
        evaluation = Evaluation(version=3, greedy=0.5, sampled=None, n=4, final=True)
        evaluator.post("/v1/evaluations", evaluation, Ok)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "coordinator").mkdir()
    site = Site(tmp_path)
    yield site
    site.coordinator.stopped()


def fetched(site: Site, publisher: str, version: int, token: Callable[[str], str] | None = None) -> dict[str, bytes]:
    access = Access(publisher, RUN, token=token)
    folder, _ = Client([site.node("relay").url], access, site.folder / "cache", timeout_s=5).fetch(version)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_relay_finds_an_origin_that_the_cached_status_lacks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    old, get, answers = site.status().model_dump_json(), CachedBody.get, []
    assert "origin" not in [node.role for node in site.status().nodes]
    origin = site.origin()
    site.write(0)
    wait_until(lambda: bool(site.announced()))

    def old_once(status: CachedBody) -> str:
        answers.append(old if not answers else get(status))
        return answers[-1]

    monkeypatch.setattr(CachedBody, "get", old_once)
    relay = site.relay()
    wait_until(lambda: bool(answers) and (node := site.node("relay")) is not None and node.policy_version == 0)
    assert answers[0] == old
    relay.stopped()
    origin.stopped()


def test_a_relay_behind_a_proxy_announces_the_proxys_url_and_accepts_passes_for_that_url_only(
    site: Site, tmp_path: Path
) -> None:
    proxy = "http://127.0.0.1:9"

    def run(invite: Invite, folder: Path, stop: threading.Event) -> str:
        return run_relay(invite, folder, stop, ("127.0.0.1", 0), proxy)

    origin, relay = site.origin(), InThread(run, site.invite("relay"), tmp_path / "relay")
    files = site.write(0)
    wait_until(lambda: site.node("relay") is not None and site.node("relay").policy_version == 0)
    assert site.node("relay").url == proxy
    reader = Node.join(site.invite("worker"), tmp_path / "worker")
    assert reader.beat().relays == [proxy]
    here = f"http://127.0.0.1:{(tmp_path / 'relay' / 'port').read_text()}"
    manifest = f"{here}/v000000/manifest.json"
    answers = {
        url: httpx.get(manifest, headers={"Authorization": f"Bearer {reader.reader_pass(url)}"})
        for url in (proxy, here)
    }
    assert (answers[proxy].status_code, answers[here].status_code) == (200, 401)
    assert files and origin.stopped() == relay.stopped() == "stopped"


def test_an_origin_announces_the_url_of_the_config(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    public = "http://127.0.0.1:9"
    config = CONFIG.model_copy(update={"origin": CONFIG.origin.model_copy(update={"url": public})})
    monkeypatch.setattr(Node, "read_config", lambda *_: config)
    origin = site.origin()
    wait_until(lambda: site.node("origin") is not None)
    assert site.node("origin").url == public and origin.stopped() == "stopped"

    def with_url(invite: Invite, folder: Path, watched: Path, stop: threading.Event) -> str:
        return run_origin(invite, folder, watched, stop, url="http://127.0.0.1:10")

    origin = InThread(with_url, site.invite("origin"), site.folder / "origin", site.watched)
    wait_until(lambda: site.node("origin").url == "http://127.0.0.1:10")
    assert origin.stopped() == "stopped"


def test_a_relay_reports_and_logs_what_it_waits_for_and_why(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def doing() -> str:
        return node.stats.doing if (node := site.node("relay")) else ""

    origin = site.origin()
    site.write(0)
    wait_until(lambda: site.status().newest_version == 0)
    origin.stopped()
    relay = site.relay()
    wait_until(lambda: doing().startswith("the origin: "))
    logged = [text for text in caplog.messages if text.startswith("cannot mirror the newest version yet: ")]
    assert logged and len(logged) == len(set(logged))
    origin = site.origin()
    wait_until(lambda: doing() == "the origin")
    assert (relay.stopped(), origin.stopped()) == ("stopped", "stopped")


def test_a_version_goes_from_the_learners_folder_through_origin_and_relay(site: Site, tmp_path: Path) -> None:
    origin, relay = site.origin(), site.relay()
    files = site.write(0)
    wait_until(lambda: site.status().newest_version == 0)
    wait_until(lambda: (node := site.node("relay")) is not None and node.policy_version == 0)
    publisher = Identity.load(tmp_path / "origin" / "identity.pem").public
    reader = Node.join(site.invite("worker"), tmp_path / "worker")
    reader.beat()
    assert fetched(site, publisher, 0, reader.reader_pass) == files
    files = site.write(1)
    wait_until(lambda: site.node("relay").policy_version == 1)
    assert fetched(site, publisher, 1, reader.reader_pass) == files
    assert [json.loads(body)["version"] for body in site.announced()] == [0, 1], "each version must be announced once"
    site.end()
    assert (origin.join(), relay.join()) == ("finished", "finished")


def test_nodes_report_from_where_how_fast_and_how_late_they_fetch(site: Site, tmp_path: Path) -> None:
    """A worker follows the newest version; the validator and the evaluator fetch single versions."""
    origin, relay, publisher = site.mirroring()
    worker = Node.join(site.invite("worker"), tmp_path / "worker")
    validator = Node.join(site.invite("validator"), tmp_path / "validator")
    url = site.node("relay").url
    for node in (worker, validator):
        assert node.beat().relays == [url]
    with follow(worker, CONFIG, tmp_path / "worker" / "weights", publisher) as follower:
        wait_until(lambda: follower.newest() is not None)
    fetch_published(Client([url], validator.access(publisher, CONFIG), tmp_path / "validator" / "weights"), 0)
    for node in (worker, validator):
        node.beat()
        wait_until(lambda name=node.name: site.node(name).stats.intake.bytes_per_s)  # the status may lag
        intake = site.node(node.name).stats.intake
        assert list(intake.bytes_per_s) == [url]
        assert intake.bytes_per_s[url] > 0 and 0 < intake.behind_s < 15
    rows, _ = weights_tree(site.status().nodes, 100)
    assert {node.name: depth for depth, node in rows} == {"origin": 0, "relay": 1, "worker": 2, "validator": 2}
    assert (origin.stopped(), relay.stopped()) == ("stopped", "stopped")


def test_only_members_that_are_not_evicted_may_fetch_weights(site: Site, tmp_path: Path) -> None:
    origin, relay, publisher = site.mirroring()
    with pytest.raises(FetchError, match="401"):
        fetched(site, publisher, 0)
    reader = Node.join(site.invite("worker"), tmp_path / "worker")
    reader.beat()
    assert reader.reader_grant()
    with sqlite3.connect(tmp_path / "coordinator" / "pool.sqlite") as database:
        database.execute("UPDATE nodes SET state = 'banned' WHERE key = ?", [reader.identity.public])

    def refused() -> bool:
        try:
            Client([site.node("relay").url], Access(publisher, RUN, token=reader.reader_pass), tmp_path / "c").latest()
        except FetchError as error:
            return "403" in str(error)
        return False

    wait_until(refused)
    assert reader.beat().reader_grant == ""
    assert (origin.stopped(), relay.stopped()) == ("stopped", "stopped")


def test_a_restarted_origin_keeps_its_port_and_announces_nothing_twice(site: Site, tmp_path: Path) -> None:
    site.write(0)
    first = site.origin()
    wait_until(lambda: site.status().newest_version == 0)
    url = site.node("origin").url
    assert first.stopped() == "stopped"
    again = site.origin()
    wait_until(lambda: (tmp_path / "origin" / "port").exists() and site.node("origin").policy_version == 0)
    site.write(1)
    wait_until(lambda: site.status().newest_version == 1)
    assert site.node("origin").url == url
    assert len(site.announced()) == 2
    assert again.stopped() == "stopped"


def test_an_origin_whose_port_was_taken_takes_a_free_one(site: Site, tmp_path: Path) -> None:
    (tmp_path / "origin").mkdir()
    site.write(0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        (tmp_path / "origin" / "port").write_text(str(taken))
        origin = site.origin()
        wait_until(lambda: site.status().newest_version == 0 or origin.result is not None)
        assert origin.stopped() == "stopped"
    port = (tmp_path / "origin" / "port").read_text()
    assert site.node("origin").url == f"http://127.0.0.1:{port}" and port != str(taken)


def test_a_version_is_announced_only_when_it_is_complete(site: Site) -> None:
    site.write(0)
    origin = site.origin()
    wait_until(lambda: site.status().newest_version == 0)
    temporary = site.watched / ".v000001"
    temporary.mkdir()
    (temporary / "config.json").write_text("{}")
    header = b'{"w":{"dtype":"BF16","shape":[5000],"data_offsets":[0,10000]}}'
    (temporary / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(10_000))
    time.sleep(5 * WATCH_S)
    assert site.status().newest_version == 0, "a version that is still being written must not be published"
    temporary.rename(site.watched / "v000001")
    wait_until(lambda: site.status().newest_version == 1)
    assert [json.loads(body)["version"] for body in site.announced()] == [0, 1]
    assert origin.stopped() == "stopped"


def test_only_the_newest_of_several_unpublished_versions_is_published(site: Site) -> None:
    for version in (0, 1, 2):
        site.write(version)
    origin = site.origin()
    wait_until(lambda: site.status().newest_version == 2)
    assert [json.loads(body)["version"] for body in site.announced()] == [2]
    assert origin.stopped() == "stopped"


@pytest.mark.parametrize("newer", [True, False])
def test_a_version_that_vanishes_during_its_publication_is_skipped_only_if_there_is_a_newer_one(
    site: Site, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    publish = Origin.publish

    def slowly(self: Origin, path: Path, version: int) -> Manifest:
        if version == 0:
            if newer:
                site.write(1)
            shutil.rmtree(path)
        return publish(self, path, version)

    monkeypatch.setattr(Origin, "publish", slowly)
    site.write(0)
    origin = site.origin()
    if newer:
        wait_until(lambda: site.status().newest_version == 1)
        assert origin.stopped() == "stopped"
    else:
        assert isinstance(origin.join(), FileNotFoundError)
    assert [json.loads(body)["version"] for body in site.announced()] == ([1] if newer else [])


def test_an_origin_whose_key_would_be_published_is_refused_and_creates_no_key(site: Site) -> None:
    with pytest.raises(PublishError, match="lies inside"):
        run_origin(site.invite("origin"), site.watched / "origin", site.watched, threading.Event())
    assert not (site.watched / "origin").exists()


def test_an_origin_that_watches_the_parent_of_the_versions_is_refused(site: Site) -> None:
    learner = site.folder / "learner"
    (learner / "versions").mkdir(parents=True)
    with pytest.raises(UserError, match=f"learner holds no versions; watch {learner / 'versions'}$"):
        run_origin(site.invite("origin"), site.folder / "origin", learner, threading.Event())


def test_an_origin_skips_other_names_and_waits_for_a_missing_folder(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    site.watched.rmdir()
    origin = site.origin()
    wait_until(lambda: site.node("origin"))
    site.watched.mkdir()
    (site.watched / "vocabulary").mkdir()
    site.write(0)
    wait_until(lambda: site.status().newest_version == 0)
    assert [text for text in caplog.messages if "does not exist yet" in text] == [
        f"{site.watched} does not exist yet: waiting for it"
    ]
    assert origin.stopped() == "stopped"
