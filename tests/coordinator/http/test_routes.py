"""The coordinator's routes over real loopback HTTP."""

import asyncio
import json
import re
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest

from shoal.config import ConfigError, parse
from shoal.coordinator.folder import NONCES, OPEN_INVITE, TABLES, create_invite
from shoal.coordinator.http.routes import Coordinator
from shoal.coordinator.http.serving import ServedRun
from shoal.errors import ShoalError
from shoal.ledger.connection import DatabaseLostError, SqliteConnection
from shoal.protocol import pace
from shoal.protocol.history import Status, find_run
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Address, InviteError, make_invite
from shoal.protocol.messages import LARGEST, VERSION, RunDescriptor
from shoal.protocol.signing import SignedAuth

from ..support import metrics_of, verdict
from .support import ANYONE, CONFIG, ROLES, RUN, Site, refused, sending, served, task_of

LIMITS = [("/v1/register", 4 << 10), ("/v1/heartbeat", 32 << 10)]

# --- open routes -----------------------------------------------------------------------------------------------------


def test_the_runs_description_is_signed_by_the_coordinators_key(site: Site) -> None:
    public = CONFIG.model_copy(update={"tasks": CONFIG.tasks.public("")})
    served = {"/v1/run": (ANYONE, public), "/v1/config": (site.clients["validator"], CONFIG)}
    for path, (client, config) in served.items():
        signed = Signed.model_validate_json(client.get(f"{site.url}{path}").content)
        descriptor = RunDescriptor.model_validate_json(signed.open(site.identity.public, domain="run"))
        assert descriptor.run == RUN and parse(descriptor.config) == config
        assert set(descriptor.keys) == set(ROLES) - {"worker"}


def test_health_status_and_metrics_are_public(site: Site) -> None:
    assert ANYONE.get(f"{site.url}/healthz").json() == {"run": RUN, "protocol": VERSION}
    status = Status.model_validate_json(ANYONE.get(f"{site.url}/v1/status").content)
    assert status.run == RUN and len(status.nodes) >= len(ROLES)
    answer = ANYONE.get(f"{site.url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = metrics_of(answer.text)
    assert samples["shoal_newest_version"] == 0
    assert 'shoal_node_silence_seconds{name="relay",role="relay"}' in samples


def test_a_run_offers_itself_to_machines_that_look_for_one(site: Site) -> None:
    offer = find_run(site.url, ANYONE, site.identity.public)
    assert (offer.run, offer.state, offer.step, offer.steps) == (RUN, "running", 0, CONFIG.run.steps)
    assert offer.workers >= 1 and offer.places_free is None and offer.invite == ""
    with pytest.raises(ShoalError, match="cannot be trusted"):
        find_run(site.url, ANYONE, Identity.generate().public)


def test_only_a_published_invite_that_is_open_and_valid_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = Identity.load_or_create(tmp_path / "identity.pem")
    Address(url="http://h:1", run=RUN).write(tmp_path)
    coordinator, path = Coordinator(CONFIG, RUN, identity, tmp_path), tmp_path / OPEN_INVITE
    assert coordinator.published_invite() == ""
    for days, offered in ((1, True), (-1, False)):
        invite = create_invite(tmp_path, "worker", "guest", None, days, open=True)
        invite.save(path)
        assert coordinator.published_invite() == (invite.encode() if offered else "")
    path.unlink()
    with monkeypatch.context() as patch:  # as if the operator removed it between a check and the read
        patch.setattr(Path, "exists", lambda path: True)
        assert coordinator.published_invite() == ""
    create_invite(tmp_path, "worker", "one", None, 1).save(path)
    with pytest.raises(InviteError, match="is not an open invite"):  # a private invite must not be published
        ServedRun(CONFIG, RUN, tmp_path)


def test_a_restart_with_a_config_that_makes_earlier_work_a_lie_is_refused(tmp_path: Path) -> None:
    Address(url="http://h:1", run=RUN).write(tmp_path)
    opened = ServedRun(CONFIG, RUN, tmp_path)
    opened.close()
    opened.coordinator.pool.db.connection.close()
    changed = CONFIG.model_copy(update={"sampling": CONFIG.sampling.model_copy(update={"temperature": 0.8})})
    with pytest.raises(
        ConfigError, match="sampling.temperature is 0.8, but the work of this run so far was done with 1"
    ):
        ServedRun(changed, RUN, tmp_path)


class Unwritable:
    """An SQLite connection that can read, but whose disk refuses writes."""

    in_transaction = False

    def __init__(self, sqlite: sqlite3.Connection) -> None:
        self.sqlite = sqlite

    def execute(self, sql: str, arguments: tuple[object, ...]) -> sqlite3.Cursor:
        if sql.startswith("SELECT"):
            return self.sqlite.execute(sql, arguments)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        raise error


@pytest.mark.parametrize("name", [TABLES, NONCES])
def test_a_coordinator_ends_after_its_disk_failed_even_if_it_can_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    served = ServedRun(CONFIG, RUN, tmp_path)
    connection = served.coordinator.nonces.connection if name == NONCES else served.coordinator.pool.db.connection
    assert isinstance(connection, SqliteConnection)
    monkeypatch.setattr(connection, "sqlite", Unwritable(connection.sqlite))
    with pytest.raises(DatabaseLostError):
        connection.change("DELETE FROM nodes")
    stop = threading.Event()
    deadline = threading.Timer(60, stop.set)
    deadline.start()
    with pytest.raises(DatabaseLostError, match=rf"cannot use .*{name}: disk I/O error; check its disk"):
        asyncio.run(served.live(stop))
    deadline.cancel()


def test_a_node_of_another_protocol_version_is_refused_with_the_reason(site: Site) -> None:
    made = make_invite(site.identity, url=site.url, run=RUN, role="worker", name="old", expires_s=int(time.time()) + 60)
    for version in (1, VERSION + 1):
        body = {"protocol": version, "invite": made.signed.model_dump_json()}
        refused(site.client(Identity.generate()).post("/v1/register", json=body), 400, "install the same version")


def test_a_relay_cannot_announce_the_coordinators_address(site: Site) -> None:
    made = make_invite(site.identity, url=site.url, run=RUN, role="relay", name="r", expires_s=int(time.time()) + 60)
    body = {"protocol": VERSION, "invite": made.signed.model_dump_json(), "url": site.url}
    refused(site.client(Identity.generate()).post("/v1/register", json=body), 409, "the address of the coordinator")


def test_only_the_operator_books_stakes(site: Site) -> None:
    key = "c" * 64
    deposit = {"kind": "stake", "key": key, "amount": 70}
    for client in (site.clients["worker"], site.clients["learner"], site.client(Identity.generate())):
        refused(client.post("/v1/bookings", json=deposit), 403, "only the operator")
    operator = site.client(site.identity)
    operator.post("/v1/bookings", json=deposit).raise_for_status()
    refused(operator.post("/v1/bookings", json=deposit | {"kind": "unstake"}), 409, "not registered")
    entries = site.clients["validator"].get("/v1/ledger/0").text
    assert json.dumps({"amount": 70, "key": key}, separators=(",", ":")).replace('"', '\\"') in entries


# --- authorisation ---------------------------------------------------------------------------------------------------

OPEN = {("GET", path) for path in ("/healthz", "/metrics", "/v1/run", "/v1/offer", "/v1/status", "/v1/history")}
ALLOWED = {
    ("POST", "/v1/register"): {*ROLES, "stranger"},
    ("POST", "/v1/bookings"): set(),  # only the operator
    ("POST", "/v1/heartbeat"): set(ROLES),
    ("POST", "/v1/drain"): {"worker"},
    ("GET", "/v1/config"): {"validator", "evaluator"},
    ("GET", "/v1/ledger/{after}"): {"validator"},
    ("POST", "/v1/heads"): {"validator"},
    ("GET", "/v1/tasks/{sha256}"): set(ROLES),
    ("PUT", "/v1/submissions/{id}"): {"worker"},
    ("GET", "/v1/submissions/{id}"): {"validator"},
    ("POST", "/v1/claims"): {"validator"},
    ("PUT", "/v1/accepted/{id}"): {"validator"},
    ("GET", "/v1/accepted/{id}"): {"learner"},
    ("POST", "/v1/verdicts"): {"validator"},
    ("POST", "/v1/policies"): {"origin"},
    ("GET", "/v1/batches/{step}"): {"learner"},
    ("POST", "/v1/steps"): {"learner"},
    ("POST", "/v1/evaluations"): {"evaluator"},
}


def test_every_route_is_listed_here(tmp_path: Path) -> None:
    app = Coordinator(CONFIG, RUN, Identity.generate(), tmp_path).app()
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    assert {route for route in routes if route[0] != "HEAD"} == OPEN | set(ALLOWED)


@pytest.mark.parametrize("method, path", ALLOWED)
def test_a_route_serves_only_its_roles(site: Site, method: str, path: str) -> None:
    target, allowed = re.sub("{.*}", "x", path), ALLOWED[method, path]
    refused(ANYONE.request(method, site.url + target), 401, "unsigned")
    leaving = {"worker": site.register("leaving", "worker")} if path == "/v1/drain" else {}
    with site.client(Identity.generate()) as stranger:
        for name, client in {**site.clients, **leaving, "stranger": stranger}.items():
            if name not in allowed:
                refused(client.request(method, target), 403, "only", *allowed)
            else:
                assert client.request(method, target).status_code not in (401, 403)


def ban(site: Site, name: str) -> None:
    with sqlite3.connect(site.folder / "pool.sqlite") as database:
        database.execute("UPDATE nodes SET state = 'banned', seen_s = 0 WHERE name = ?", [name])


def test_a_banned_key_may_only_learn_so_and_read_task_data(tmp_path: Path) -> None:
    """Its process ends once a heartbeat's answer says so. Until then it may have to finish a task."""
    with served(tmp_path) as own:
        own.staff("worker", "origin")
        worker = own.clients["worker"]
        beat = {"policy_version": 0, "wants_task": True}
        task = worker.post("/v1/heartbeat", json=beat).json()["assignment"]
        ban(own, "worker")
        answer = worker.post("/v1/heartbeat", json=beat).json()
        assert (answer["state"], answer["assignment"], answer["reader_grant"]) == ("evicted", None, "")
        refused(worker.get(f"/v1/tasks/{'0' * 64}"), 404, "no task data")
        for method, path in [("GET", "/v1/ledger/0"), ("PUT", task["upload_path"]), ("POST", "/v1/drain")]:
            refused(worker.request(method, path), 409, "evicted")
        with sqlite3.connect(tmp_path / "pool.sqlite") as database:
            seen_s = database.execute("SELECT seen_s FROM nodes WHERE name = 'worker'").fetchone()
        assert seen_s == (0,), "its heartbeat was recorded"


def test_a_banned_key_does_not_keep_a_members_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RARE_RATE", 1e-6)
    with served(tmp_path) as own:
        own.staff("worker", "origin")
        for _ in range(2):
            task_of(own.clients["worker"])
        ban(own, "worker")
        assert own.clients["worker"].post("/v1/heartbeat", json={}).json()["state"] == "evicted"
        refused(own.clients["worker"].post("/v1/heartbeat", json={}), 429, "a second from this node")


def test_strangers_cannot_make_the_coordinator_write_anything(site: Site) -> None:
    """They can sign any number of requests with their own keys; each spent nonce would be a row in the database."""
    with sqlite3.connect(site.folder / "nonces.sqlite") as database:
        count = "SELECT count(*) FROM nonces"
        before = database.execute(count).fetchone()
        forged = make_invite(Identity.generate(), url=site.url, run=RUN, role="worker", name="x", expires_s=1 << 40)
        spent = make_invite(site.identity, url=site.url, run=RUN, role="worker", name="spent", expires_s=2_000_000_000)
        first, second = site.client(Identity.generate()), site.client(Identity.generate())
        for client, invite, why in (
            (first, forged, "not signed by this coordinator"),
            (first, spent, ""),
            (second, spent, "used by another key"),
        ):
            registration = {"protocol": VERSION, "invite": invite.signed.model_dump_json()}
            answer = client.post("/v1/register", json=registration)
            assert answer.json() == {"name": "spent", "role": "worker"} if not why else why in answer.text
            assert answer.status_code == (403 if why else 200)
        site.client(Identity.generate()).post("/v1/heartbeat", json={})
        assert database.execute(count).fetchone() == (before[0] + 1,), "only the admitted key's nonce may be stored"


def test_changed_requests_old_requests_and_requests_for_another_run_are_refused(site: Site) -> None:
    auth = SignedAuth(site.identities["validator"], RUN)
    headers = next(auth.auth_flow(httpx.Request("POST", f"{site.url}/v1/claims", content=b"{}"))).headers
    refused(ANYONE.post(f"{site.url}/v1/claims", content=b"[]", headers=headers), 401, "body changed")
    refused(ANYONE.post(f"{site.url}/v1/steps", content=b"{}", headers=headers), 401, "bad signature")
    refused(ANYONE.post(f"{site.url}/v1/claims?a", content=b"{}", headers=headers), 401, "bad signature")
    refused(site.client(Identity.generate(), "test-1").post("/v1/heartbeat"), 401, "wrong audience")
    late = SignedAuth(Identity.generate(), RUN, clock=lambda: time.time() - 61)
    refused(ANYONE.post(f"{site.url}/v1/claims", auth=late), 401, "stale")


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff", b"null", b"[]", b"[" * 10_000, b'{"unknown": 1}'),
        *(b'{"policy_version": -1}', b'{"policy_version": "1"}', b'{"policy_version": 1e999}'),
        b'{"policy_version": %d}' % (LARGEST + 1),
        b'{"stats": {"rss_bytes": %s}}' % (b"9" * 400),
        b'{"stats": {"busy_s": NaN}}',
        b'{"stats": {"doing": "\\ud800"}}',
        b'{"stats": {"doing": "%s"}}' % (b"x" * 81),
    ],
)
def test_an_invalid_heartbeat_is_a_bad_request(site: Site, body: bytes) -> None:
    refused(site.clients["worker"].post("/v1/heartbeat", content=body), 400)


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"most": 0}', b'{"most": 1025}', b'{"most": "1"}'])
def test_an_invalid_claim_is_a_bad_request(site: Site, body: bytes) -> None:
    refused(site.clients["validator"].post("/v1/claims", content=body), 400)


def test_the_largest_version_is_accepted(site: Site) -> None:
    answer = site.clients["worker"].post("/v1/heartbeat", json={"policy_version": LARGEST, "wants_task": True})
    assert "to be published" in answer.json()["waiting_for"]


@pytest.mark.parametrize("path", ["/v1/submissions/x", "/v1/submissions/..%2f..%2fidentity.pem"])
def test_an_unknown_submission_is_not_found_and_an_invalid_number_is_a_bad_request(site: Site, path: str) -> None:
    refused(site.clients["validator"].get(path), 404, "no submission")
    refused(site.clients["worker"].put(path, content=b"x"), 404, "no submission")
    refused(site.clients["learner"].get("/v1/batches/first"), 400, "not a step")
    refused(site.clients["learner"].get("/v1/batches/-1"), 400, "not a step")
    refused(site.clients["validator"].get("/v1/ledger/x"), 400, "is not the number of an entry")


# --- bodies ----------------------------------------------------------------------------------------------------------

HUGE_BYTES = 1 << 30


def announced(site: Site, signer: str | None, method: str, path: str, size_bytes: int = HUGE_BYTES) -> int:
    """Send only the head of a request. Return the status of the answer."""
    with sending(site, signer, method, path, size_bytes=size_bytes) as connection:
        return int(connection.recv(100).split()[1])


@pytest.mark.parametrize(
    ("signer", "method", "path", "status"),
    [
        (None, "PUT", "/v1/submissions/x", 401),
        ("stranger", "PUT", "/v1/submissions/x", 403),
        ("learner", "PUT", "/v1/submissions/x", 403),
        ("worker", "PUT", "/v1/accepted/x", 403),
        ("worker", "PUT", "/v1/submissions/x", 413),
        ("stranger", "POST", "/v1/register", 413),
        ("worker", "POST", "/v1/heartbeat", 413),
        ("validator", "POST", "/v1/verdicts", 413),
    ],
)
def test_a_large_body_is_refused_before_any_of_it_is_read(
    site: Site, signer: str | None, method: str, path: str, status: int
) -> None:
    assert announced(site, signer, method, path) == status


def test_a_body_whose_sender_has_no_task_or_claim_for_it_is_refused_before_any_of_it_is_read(site: Site) -> None:
    assert announced(site, "worker", "PUT", "/v1/submissions/x", size_bytes=4_096) == 404
    assert announced(site, "validator", "PUT", "/v1/accepted/x", size_bytes=4_096) == 404
    task = task_of(site.register("someone", "worker"))
    assert announced(site, "worker", "PUT", task["upload_path"], size_bytes=4_096) == 403


@pytest.mark.parametrize(("path", "limit_bytes"), LIMITS)
def test_a_too_long_body_is_not_read_and_a_body_of_unknown_length_is_read_up_to_the_limit(
    site: Site, path: str, limit_bytes: int
) -> None:
    assert announced(site, "worker", "POST", path, size_bytes=limit_bytes + 1) == 413
    body = b" " * (limit_bytes + 1)
    client = site.clients["worker"]
    signed = next(client.auth.auth_flow(httpx.Request("POST", site.url + path, content=body)))  # type: ignore[union-attr]
    headers = {name: value for name, value in signed.headers.items() if name != "content-length"}
    answer = ANYONE.post(site.url + path, headers=headers, content=iter([body[:1000], body[1000:]]))
    refused(answer, 413, f"more than {limit_bytes} bytes")
    assert ANYONE.get(f"{site.url}/healthz").status_code == 200


def test_an_encoded_body_is_refused(site: Site) -> None:
    refused(site.clients["worker"].post("/v1/heartbeat", headers={"content-encoding": "gzip"}), 415, "content-encoding")


def test_a_body_that_never_arrives_delays_nobody(site: Site) -> None:
    with sending(site, None, "PUT", "/v1/submissions/x", size_bytes=1000) as slow:
        slow.sendall(b"abc")
        assert ANYONE.get(f"{site.url}/healthz").status_code == 200


# --- a whole step ----------------------------------------------------------------------------------------------------


def test_a_submission_goes_from_worker_to_validator_to_learner(site: Site, tmp_path: Path) -> None:
    with served(tmp_path) as own:
        own.staff("worker", "validator", "learner", "origin")
        worker, validator, learner = (own.clients[role] for role in ("worker", "validator", "learner"))
        assert validator.post("/v1/claims", json={"most": 1}).json() == {"claims": []}
        groups = []
        for _ in range(2):
            task = task_of(worker)
            assert task_of(worker) == task
            stored = worker.put(task["upload_path"], content=b"rollouts").raise_for_status().json()
            assert stored["size_bytes"] == 8
            refused(worker.put(task["upload_path"], content=b"rollouts"), 409, "uploaded, not open")
            (claim,) = validator.post("/v1/claims", json={"most": 4}).raise_for_status().json()["claims"]
            assert claim["assignment"]["id"] == task["id"]
            assert validator.get(task["upload_path"]).content == b"rollouts"
            signed = {"validator": own.identities["validator"], "run": RUN, "file": stored["hash"]}
            given = verdict(task["id"], **signed).model_dump(mode="json")
            refused(validator.post("/v1/verdicts", json=given), 409, "store the accepted file")
            stored = validator.put(f"/v1/accepted/{task['id']}", content=b"accepted").raise_for_status().json()
            given = verdict(task["id"], accepted=stored["hash"], **signed).model_dump(mode="json")
            validator.post("/v1/verdicts", json=given).raise_for_status()
            groups += [{"submission": task["id"], "group": 0}, {"submission": task["id"], "group": 1}]
        batch = learner.get("/v1/batches/0").raise_for_status().json()
        assert batch["ready"] and batch["groups"] == groups
        assert learner.get(f"/v1/accepted/{groups[0]['submission']}").content == b"accepted"
        report = {"step": 0, "metrics": {"loss": 0.5}, "trained": [groups[0]["submission"]]}
        learner.post("/v1/steps", json=report).raise_for_status()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 0.5, "the step trained right before the stop must be recorded"
    with sqlite3.connect(tmp_path / "pool.sqlite") as database:
        assert database.execute("SELECT kind FROM ledger ORDER BY seq DESC LIMIT 1").fetchone() == ("sealed",)
    with served(tmp_path) as own:  # a restart
        url = own.url
        status = Status.model_validate_json(ANYONE.get(f"{url}/v1/status").content)
        assert (status.step, status.trained) == (1, 1)
        history = ANYONE.get(f"{url}/v1/history").json()
        assert history["metrics"][0]["loss"] == 0.5
        assert ANYONE.get(f"{url}/v1/history?after={history['cursor']}").json()["metrics"] == []
        refused(ANYONE.get(f"{url}/v1/history?after=-1"), 400, "is not a cursor")
        learner.base_url = httpx.URL(url)
        assert learner.get("/v1/batches/0").json() == batch


def test_a_request_cannot_be_replayed_after_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as site:
        auth = site.register("worker", "worker").auth
        assert auth is not None
        request = next(auth.auth_flow(httpx.Request("POST", f"{site.url}/v1/heartbeat", content=b"{}")))
        assert ANYONE.post(request.url, headers=request.headers, content=b"{}").status_code == 200
    with served(tmp_path) as site:
        answer = ANYONE.post(f"{site.url}/v1/heartbeat", headers=request.headers, content=b"{}")
        refused(answer, 425, "replayed")


# --- task data --------------------------------------------------------------------------------------------------------


def test_members_get_task_data_by_its_hash_only(site: Site) -> None:
    name = "ab" * 32
    (site.folder / "tasks" / "public").mkdir(parents=True, exist_ok=True)
    (site.folder / "tasks" / name).write_bytes(b"tasks" * 1_000)
    (site.folder / "tasks" / "public" / name).write_bytes(b"prompts" * 1_000)
    (site.folder / "tasks" / "built.json").write_text("{}")
    for role in ROLES:
        what = b"tasks" if role in ("validator", "evaluator") else b"prompts"
        assert site.clients[role].get(f"/v1/tasks/{name}").content == what * 1_000
    for other in ("cd" * 32, "built.json", "..%2fidentity.pem", name.upper(), name + "0"):
        assert site.clients["worker"].get(f"/v1/tasks/{other}").status_code == 404
    refused(ANYONE.get(f"{site.url}/v1/tasks/{name}"), 401)
