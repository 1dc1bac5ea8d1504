"""The coordinator over real loopback HTTP, as it runs: `serve_forever` in a thread."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.config import parse
from shoal.coordinator.service import ADDRESS, invite_from, serve_forever
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import LARGEST, HeartbeatAnswer, RunDescriptor, Status
from shoal.protocol.signing import SignedAuth, sign_request

from .support import metrics_of

RUN = "test-0"
LIMIT_BYTES = 1 << 20  # of JSON, and here of submissions too
CONFIG = parse(
    {
        "coordinator": {"prompts_per_step": 4, "max_submission_bytes": 4_096},
        "workers": {"groups_per_submission": 2},
        "learner": {"optimizer_steps_per_step": 1},
    }
)
ROLES = ("learner", "origin", "relay", "worker", "validator", "evaluator")


@dataclass
class Site:
    """A coordinator that listens, and a client for each role that is registered."""

    url: str
    folder: Path
    identity: Identity
    clients: dict[str, httpx.Client]

    def client(self, identity: Identity, audience: str = RUN) -> httpx.Client:
        return httpx.Client(base_url=self.url, auth=SignedAuth(identity, audience), timeout=10)

    def register(self, name: str, role: Any, **changed: Any) -> httpx.Client:
        fields = {"url": self.url, "run": RUN, "role": role, "name": name, "expires_s": int(time.time()) + 60} | changed
        client = self.client(Identity.generate())
        made = make_invite(self.identity, **fields)
        client.post("/v1/register", json={"invite": made.signed.model_dump_json()}).raise_for_status()
        return client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("coordinator")
    with served(folder) as url:
        found = Site(url, folder, Identity.load(folder / "identity.pem"), {})
        found.clients = {role: found.register(role, role) for role in ROLES}
        found.clients["origin"].post("/v1/policies", json={"version": 0, "digest": "d" * 64, "size_bytes": 1})
        yield found


class served:
    """A coordinator in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stop = threading.Event()
        self.thread = threading.Thread(target=serve_forever, args=(CONFIG, RUN, folder, 0, self.stop))

    def __enter__(self) -> str:
        (self.folder / ADDRESS).unlink(missing_ok=True)
        self.thread.start()
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            if (self.folder / ADDRESS).exists() and (self.folder / ADDRESS).read_text():
                return invite_from(self.folder, "worker", "x", None, 1).url
            time.sleep(0.02)
        raise TimeoutError("the coordinator did not listen")

    def __exit__(self, *exc_info: object) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


def refused(response: httpx.Response, status: int, *words: str) -> None:
    """A refusal is one line of JSON with a reason, and nothing of the server's inside."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    for word in words:
        assert word in error
    assert "Traceback" not in response.text and 'File "' not in response.text and "\n" not in error


# --- open to all -----------------------------------------------------------------------------------------------------


def test_the_run_is_described_under_the_coordinators_key(site: Site) -> None:
    signed = Signed.model_validate_json(httpx.get(f"{site.url}/v1/run").content)
    descriptor = RunDescriptor.model_validate_json(signed.open(site.identity.public, domain="run"))
    assert descriptor.run == RUN and parse(descriptor.config) == CONFIG
    assert set(descriptor.keys) == set(ROLES) - {"worker"}


def test_health_and_status_are_open(site: Site) -> None:
    assert httpx.get(f"{site.url}/healthz").json() == {"run": RUN, "protocol": 1}
    status = Status.model_validate_json(httpx.get(f"{site.url}/v1/status").content)
    assert status.run == RUN and len(status.nodes) >= len(ROLES)


# --- who asks --------------------------------------------------------------------------------------------------------

PROTECTED = [
    ("POST", "/v1/register"),
    ("POST", "/v1/heartbeat"),
    ("PUT", "/v1/submissions/x"),
    ("GET", "/v1/submissions/x"),
    ("POST", "/v1/claims"),
    ("GET", "/v1/contents/x"),
    ("PUT", "/v1/accepted/x"),
    ("GET", "/v1/accepted/x"),
    ("POST", "/v1/verdicts"),
    ("POST", "/v1/policies"),
    ("GET", "/v1/batches/0"),
    ("POST", "/v1/steps"),
    ("POST", "/v1/evaluations"),
]
ALLOWED = {
    "/v1/submissions/x": {"PUT": "worker", "GET": "validator"},
    "/v1/accepted/x": {"PUT": "validator", "GET": "learner"},
    "/v1/claims": {"POST": "validator"},
    "/v1/contents/x": {"GET": "validator"},
    "/v1/verdicts": {"POST": "validator"},
    "/v1/policies": {"POST": "origin"},
    "/v1/batches/0": {"GET": "learner"},
    "/v1/steps": {"POST": "learner"},
    "/v1/evaluations": {"POST": "evaluator"},
}


@pytest.mark.parametrize("method, path", PROTECTED)
def test_nothing_is_answered_without_a_signature(site: Site, method: str, path: str) -> None:
    refused(httpx.request(method, site.url + path), 401, "unsigned")


@pytest.mark.parametrize("method, path", [pair for pair in PROTECTED if pair[1] in ALLOWED])
def test_each_route_answers_one_role(site: Site, method: str, path: str) -> None:
    for role in ROLES:
        if ALLOWED[path][method] != role:
            refused(site.clients[role].request(method, path), 403, "only", ALLOWED[path][method])


@pytest.mark.parametrize("method, path", [pair for pair in PROTECTED if pair[1] != "/v1/register"])
def test_a_stranger_is_refused(site: Site, method: str, path: str) -> None:
    refused(site.client(Identity.generate()).request(method, path), 403, "only")


def test_a_request_for_another_run_is_refused(site: Site) -> None:
    refused(site.client(Identity.generate(), "test-1").post("/v1/heartbeat"), 401, "wrong audience")


def test_a_request_counts_once(site: Site) -> None:
    auth = SignedAuth(Identity.generate(), RUN)
    request = next(auth.auth_flow(httpx.Request("POST", f"{site.url}/v1/claims")))
    with httpx.Client() as client:
        refused(client.send(request), 403)
        refused(client.send(request), 401, "replayed")


def test_a_changed_body_or_path_is_refused(site: Site) -> None:
    headers = sign_request(
        Identity.generate(),
        method="POST",
        path="/v1/claims",
        query="",
        body=b"{}",
        audience=RUN,
        created_s=int(time.time()),
        nonce="n" * 16,
    )
    refused(httpx.post(f"{site.url}/v1/claims", content=b"[]", headers=headers), 401, "body changed")
    refused(httpx.post(f"{site.url}/v1/steps", content=b"{}", headers=headers), 401, "bad signature")
    refused(httpx.post(f"{site.url}/v1/claims?a", content=b"{}", headers=headers), 401, "bad signature")


def test_an_old_request_is_refused(site: Site) -> None:
    late = SignedAuth(Identity.generate(), RUN, clock=lambda: time.time() - 61)
    refused(httpx.post(f"{site.url}/v1/claims", auth=late), 401, "stale")


# --- joining ---------------------------------------------------------------------------------------------------------


def test_an_invite_of_another_coordinator_is_refused(site: Site) -> None:
    forged = make_invite(Identity.generate(), url=site.url, run=RUN, role="learner", name="me", expires_s=2_000_000_000)
    answer = site.client(Identity.generate()).post("/v1/register", json={"invite": forged.signed.model_dump_json()})
    refused(answer, 403, "not signed by this coordinator")


def test_a_spent_invite_is_refused(site: Site) -> None:
    made = make_invite(site.identity, url=site.url, run=RUN, role="worker", name="once", expires_s=2_000_000_000)
    registration = {"invite": made.signed.model_dump_json()}
    first = site.client(Identity.generate())
    assert first.post("/v1/register", json=registration).json() == {"name": "once", "role": "worker"}
    assert first.post("/v1/register", json=registration).status_code == 200, "a restart"
    refused(site.client(Identity.generate()).post("/v1/register", json=registration), 403, "another key")


# --- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"null",
        b"[]",
        b'{"unknown": 1}',
        b'{"policy_version": -1}',
        b'{"policy_version": "1"}',
        b'{"policy_version": 1e999}',
        b'{"policy_version": %d}' % (LARGEST + 1),
        b'{"stats": {"rss_bytes": %s}}' % (b"9" * 400),
        b'{"stats": {"busy_s": NaN}}',
        b'{"stats": {"doing": "\\ud800"}}',
        b'{"stats": {"doing": "%s"}}' % (b"x" * 81),
        b"[" * 10_000,
    ],
)
def test_a_body_that_is_not_the_message_is_a_bad_request(site: Site, body: bytes) -> None:
    refused(site.clients["worker"].post("/v1/heartbeat", content=body), 400)


def test_the_largest_version_is_survived(site: Site) -> None:
    answer = site.clients["worker"].post("/v1/heartbeat", json={"policy_version": LARGEST, "wants_task": True})
    assert "to be published" in answer.json()["waiting_for"]


@pytest.mark.parametrize("path", ["/v1/submissions/x", "/v1/submissions/..%2f..%2fidentity.pem"])
def test_an_unknown_submission_is_not_found(site: Site, path: str) -> None:
    refused(site.clients["validator"].get(path), 404, "no submission")
    refused(site.clients["worker"].put(path, content=b"x"), 404, "no submission")


def test_another_workers_task_cannot_be_uploaded(site: Site) -> None:
    task = task_of(site.register("victim", "worker"))
    refused(site.clients["worker"].put(task["upload_path"], content=b"x"), 403, "another worker's task")


def test_a_step_that_is_no_number_is_a_bad_request(site: Site) -> None:
    refused(site.clients["learner"].get("/v1/batches/first"), 400, "no step")
    refused(site.clients["learner"].get("/v1/batches/-1"), 400, "no step")


def test_metrics_are_open_to_all_and_in_prometheus_format(site: Site) -> None:
    answer = httpx.get(f"{site.url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/plain; charset=utf-8"
    found = metrics_of(answer.text)
    assert found["shoal_newest_version"] == 0 and 'shoal_node_silence_seconds{name="relay",role="relay"}' in found


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"most": 0}', b'{"most": 1025}', b'{"most": "1"}'])
def test_a_claim_says_how_many_it_wants(site: Site, body: bytes) -> None:
    refused(site.clients["validator"].post("/v1/claims", content=body), 400)


def test_an_unknown_path_is_not_found(site: Site) -> None:
    assert httpx.get(f"{site.url}/v2/run").status_code == 404
    assert httpx.get(f"{site.url}/v1/claims").status_code == 405


@pytest.mark.parametrize("method, path", [("POST", "/v1/heartbeat"), ("PUT", "/v1/submissions/x")])
def test_a_body_beyond_the_limit_is_refused_and_the_coordinator_lives(site: Site, method: str, path: str) -> None:
    answer = site.clients["worker"].request(method, path, content=bytes(LIMIT_BYTES + 1))
    assert answer.status_code == 413 and "Traceback" not in answer.text
    assert httpx.get(f"{site.url}/healthz").status_code == 200


def test_a_body_that_never_comes_holds_nobody_up(site: Site) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"PUT /v1/submissions/x HTTP/1.1\r\nHost: c\r\nContent-Length: 1000\r\n\r\nabc")
        assert httpx.get(f"{site.url}/healthz", timeout=5).status_code == 200


# --- a submission's way ----------------------------------------------------------------------------------------------


def task_of(client: httpx.Client) -> dict[str, Any]:
    body = client.post("/v1/heartbeat", json={"policy_version": 0, "wants_task": True}).raise_for_status().content
    answer = HeartbeatAnswer.model_validate_json(body)
    assert answer.assignment is not None, answer.waiting_for
    return answer.assignment.model_dump()


def test_a_submission_goes_from_worker_to_validator_to_learner(site: Site, tmp_path: Path) -> None:
    with served(tmp_path) as url:
        own = Site(url, tmp_path, Identity.load(tmp_path / "identity.pem"), {})
        worker, validator, learner, origin = (
            own.register(role, role) for role in ("worker", "validator", "learner", "origin")
        )
        origin.post("/v1/policies", json={"version": 0, "digest": "d" * 64, "size_bytes": 1}).raise_for_status()
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
            verdict = {
                "submission": task["id"],
                "reason": None,
                "detail": "",
                "evidence": {},
                "content": f"{len(groups):064x}",
                "accepted_hash": "0" * 64,
                "groups": [{"reward_mean": 0.5, "useful": True, "tokens": 3}] * 2,
            }
            refused(validator.post("/v1/verdicts", json=verdict), 409, "store the accepted file")
            stored = validator.put(f"/v1/accepted/{task['id']}", content=b"accepted").raise_for_status().json()
            validator.post("/v1/verdicts", json=verdict | {"accepted_hash": stored["hash"]}).raise_for_status()
            owner = validator.get(f"/v1/contents/{verdict['content']}").json()
            assert owner == {"submission": task["id"]}
            groups += [{"submission": task["id"], "group": 0}, {"submission": task["id"], "group": 1}]
        batch = learner.get("/v1/batches/0").raise_for_status().json()
        assert batch["ready"] and batch["groups"] == groups
        assert learner.get(f"/v1/accepted/{groups[0]['submission']}").content == b"accepted"
        report = {"step": 0, "metrics": {"loss": 0.5}, "trained": [groups[0]["submission"]]}
        learner.post("/v1/steps", json=report).raise_for_status()
    (kept,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(kept)["loss"] == 0.5, "the step before the stop is kept too"
    with served(tmp_path) as url:  # and after a restart all of it is still there
        status = Status.model_validate_json(httpx.get(f"{url}/v1/status").content)
        assert (status.step, status.trained) == (1, 1)
        history = httpx.get(f"{url}/v1/history").json()
        assert history["metrics"][0]["loss"] == 0.5
        assert httpx.get(f"{url}/v1/history?after={history['cursor']}").json()["metrics"] == []
        refused(httpx.get(f"{url}/v1/history?after=-1"), 400, "is not a cursor")
        again = own.client(Identity.generate())
        again.base_url = httpx.URL(url)
        learner.base_url = httpx.URL(url)
        assert learner.get("/v1/batches/0").json() == batch


def test_what_was_sent_to_a_coordinator_before_its_restart_cannot_be_replayed_after_it(tmp_path: Path) -> None:
    auth = SignedAuth(Identity.generate(), RUN)
    with served(tmp_path) as url, httpx.Client() as client:
        request = next(auth.auth_flow(httpx.Request("POST", f"{url}/v1/claims")))
        refused(client.send(request), 403)
    with served(tmp_path) as url:
        refused(httpx.post(f"{url}/v1/claims", headers=request.headers), 401, "replayed")
