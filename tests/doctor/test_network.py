"""What the doctor asks of a pool, over a transport that needs no socket: what answers, whose word counts, which clock."""

import json
import time
from email.utils import formatdate

import httpx
import pytest

from shoal.config import Config, parse
from shoal.doctor import Targets, look
from shoal.protocol.identity import Identity, Signed
from shoal.protocol.invite import Invite, make_invite, run_id
from shoal.protocol.messages import VERSION, RunDescriptor

URL = "http://coordinator.example:8700"
NOW_S = 1_700_000_000.0
CONFIG = parse({"tasks": {"sources": [{"generator": "arithmetic"}]}, "requirements": {"memory_gib": 3}})


def invite(identity: Identity) -> Invite:
    run = run_id("r", identity.public)
    return make_invite(identity, url=URL, run=run, role="worker", name="w", expires_s=int(time.time()) + 60)


def pool(signer: Identity, run: str, asked: list[str], ahead_s: float = 0.0) -> httpx.Client:
    """A coordinator and one relay. The coordinator's clock is so far ahead."""
    descriptor = RunDescriptor(protocol=VERSION, run=run, config=CONFIG.model_dump(), keys={})
    signed = Signed.make(signer, descriptor.model_dump_json(), domain="run").model_dump_json()
    nodes = [
        node("relay-0", "relay", "http://relay.example:1"),
        node("gone", "relay", "http://gone.example:1", evicted=True),
    ]
    status = STATUS | {"run": run, "nodes": [*nodes, node("worker-0", "worker", None)]}

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        date = {"date": formatdate(NOW_S + ahead_s, usegmt=True)}
        if request.url.host == "relay.example":
            return httpx.Response(200, text="{}", headers=date)
        if request.url.host != "coordinator.example":
            raise httpx.ConnectError("refused")
        texts = {
            "/healthz": json.dumps({"run": run, "protocol": VERSION}),
            "/v1/run": signed,
            "/v1/status": json.dumps(status),
        }
        return httpx.Response(200, text=texts[request.url.path], headers=date)

    return httpx.Client(transport=httpx.MockTransport(answer))


STATUS = {
    "state": "running", "step": 0, "steps": 1, "have": 0, "need": 1, "newest_version": None, "started_s": 0.0, "now_s": 1.0,
    "trained": 0, "notices": [], "reject_reasons": {}, "slashed": [], "stale_groups": 0, "tokens_generated": 0,
}  # fmt: skip


def node(name: str, role: str, url: str | None, *, evicted: bool = False) -> dict[str, object]:
    return {
        "name": name, "role": role, "url": url, "policy_version": None, "seen_s": 0.0, "evicted": evicted, "accepted": 0,
        "rejected": 0, "stats": {},
    }  # fmt: skip


def seen(client: httpx.Client, targets: Targets) -> tuple[dict[str, str], Config | None, float]:
    reached, config = look(targets, client, clock=lambda: NOW_S)
    return {one.url: one.error for one in reached}, config, reached[0].behind_s if reached else 0.0


def test_an_invite_shows_the_coordinator_the_config_and_the_relays_and_registers_nobody() -> None:
    identity, asked = Identity.generate(), list[str]()
    mine = invite(identity)
    errors, config, _ = seen(pool(identity, mine.run, asked), Targets(URL, invite=mine))
    assert errors == {URL: "", "http://relay.example:1": ""}
    assert config is not None and config.requirements.memory_gib == 3
    assert not [url for url in asked if "register" in url or "gone" in url]


def test_another_key_than_the_invites_is_not_believed() -> None:
    identity = Identity.generate()
    mine = invite(identity)
    errors, config, _ = seen(pool(Identity.generate(), mine.run, []), Targets(URL, invite=mine))
    assert config is None
    assert "cannot be trusted" in errors[URL]


def test_another_run_than_the_invites_is_named() -> None:
    identity = Identity.generate()
    errors, config, _ = seen(pool(identity, "another", []), Targets(URL, invite=invite(identity)))
    assert config is None
    assert "serves the run another" in errors[URL]


def test_clocks_are_compared_within_what_whole_seconds_show() -> None:
    assert seen(pool(Identity.generate(), "r", [], ahead_s=0.4), Targets(URL))[2] == 0
    assert 58 <= seen(pool(Identity.generate(), "r", [], ahead_s=60), Targets(URL))[2] <= 61
    assert -61 <= seen(pool(Identity.generate(), "r", [], ahead_s=-60), Targets(URL))[2] <= -58


def test_an_address_where_nothing_answers_is_an_error_and_no_exception() -> None:
    errors, _, _ = seen(pool(Identity.generate(), "r", []), Targets("http://nobody.example", ["not a url"]))
    assert "refused" in errors["http://nobody.example"]
    assert errors["not a url"]


@pytest.mark.parametrize("body", ["[1]", "[" * 65_536])
def test_what_answers_in_another_form_is_no_coordinator(body: str) -> None:
    client = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=body)))
    errors, _, _ = seen(client, Targets(URL))
    assert errors[URL]
