"""Faults of the protocol testnet that must not return, one test each.

A state without exit is in `test_states`, a worker that is slow on purpose in `test_fitness`.
"""

import ast
from contextlib import ExitStack
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from pydantic import BaseModel

from shoal.coordinator.database import PoolError
from shoal.protocol import messages
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Heartbeat, Policy, Reason, Stats
from shoal.protocol.pace import Pace
from shoal.protocol.server import SLOT, Admission
from shoal.protocol.signing import SignatureError, sign_request

from .support import ALICE, BOB, VALIDATOR, Harness

COORDINATOR = Path(__file__).parents[2] / "src" / "shoal" / "coordinator"


class Remembering:
    def __init__(self) -> None:
        self.spent: set[tuple[str, str]] = set()

    def spend(self, key: str, nonce: str, created_s: int) -> bool:
        is_new = (key, nonce) not in self.spent
        self.spent.add((key, nonce))
        return is_new


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_no_signed_request_is_served_twice_reading_ones_included(method: str) -> None:
    identity, path = Identity.generate(), "/v1/batches/0"
    admission = Admission("r", Remembering(), lambda key: "learner", lambda: 1_000.0, Pace())
    signed = sign_request(
        identity, method=method, path=path, query="", body=b"", audience="r", created_s=1_000, nonce="n" * 16
    )

    def admit(method: str) -> str:
        request = make_mocked_request(method, path, headers=signed)
        with ExitStack() as request[SLOT]:
            return admission.admit(request, ["learner"], 100).key

    assert admit(method) == identity.public
    with pytest.raises(SignatureError, match="replayed"):
        admit(method)
    with pytest.raises(SignatureError, match="bad signature"):
        admit("POST" if method == "GET" else "GET")


def test_who_asks_is_whose_key_signed_and_nothing_in_a_body() -> None:
    """No message that a member sends has a field for its sender, and unknown fields are refused."""
    sent = ["Registration", "Heartbeat", "ClaimRequest", "Verdict", "Policy", "StepReport", "Evaluation"]
    for name in sent:
        kind: type[BaseModel] = getattr(messages, name)
        assert not {"key", "worker", "validator", "node", "sender", "address", "role"} & set(kind.model_fields), name
        assert kind.model_config["extra"] == "forbid", name


def test_no_silent_peer_can_block_the_coordinator_for_it_asks_nobody() -> None:
    clients = {"httpx", "requests", "urllib.request", "socket", "http.client", "web3", "ClientSession"}
    for path in COORDINATOR.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not clients & set(names), path


def test_what_a_worker_says_of_its_work_is_paid_nothing(harness: Harness) -> None:
    """Credit is what the validator counted: two groups of 10 tokens."""
    boast = Stats(tokens=10**12, busy_s=1e9)
    harness.pool.members.heartbeat(ALICE, Heartbeat(policy_version=0, stats=boast))
    harness.accepted(ALICE)
    harness.pool.members.heartbeat(ALICE, Heartbeat(policy_version=0, stats=boast))
    harness.pool.judgement.escrow.close()
    shown = {node.name: node for node in harness.status().nodes}["worker-a"]
    assert (shown.credited, harness.status().tokens_generated) == (20, 20)


def test_a_name_keeps_the_digest_that_it_was_given_first(harness: Harness) -> None:
    """A version's weights; a submission's file, by its worker and by anyone else; an accepted file."""
    harness.publish(0)
    assert harness.kinds().count("policy") == 1
    with pytest.raises(PoolError, match="another digest"):
        harness.pool.learning.published(Policy(version=0, digest="f" * 64, size_bytes=1))
    task = harness.upload(ALICE)
    for key in (ALICE, BOB):
        with pytest.raises(PoolError):
            harness.pool.assignments.uploaded(key, task.id, "7" * 64)
    assert harness.pool.judgement.hashes(task.id)[0] == "9" * 64
    harness.claim()
    harness.judge(task.id)
    with pytest.raises(PoolError):
        harness.pool.judgement.accepted_stored(VALIDATOR, task.id, "7" * 64)
    assert harness.pool.judgement.hashes(task.id)[1] == "8" * 64


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.PROOF])
def test_a_rejection_skips_no_work_that_is_valid(harness: Harness, reason: Reason) -> None:
    """Neither that of others, nor, unless it slashes, what was accepted of this worker before."""
    before = harness.accepted(BOB, useful=(True, False))
    bad, good = harness.upload(BOB), harness.upload(ALICE)
    harness.claim()
    harness.judge(bad.id, reason)
    claim = harness.claim()
    assert claim is not None and claim.assignment.id == good.id
    harness.judge(good.id)
    after = harness.accepted(ALICE)
    batch = harness.pool.batches.of_step(0)
    kept = [good.id, good.id, after.id]
    expected = [*kept, after.id] if reason is Reason.PROOF else [before.id, *kept]
    assert batch.ready and [group.submission for group in batch.groups] == expected


def test_work_that_nobody_checked_is_never_paid_however_old(harness: Harness) -> None:
    task = harness.upload(ALICE)
    harness.clock.now_s += 10 * 365 * 86_400
    harness.beat(ALICE, wants=False)
    harness.pool.judgement.escrow.close()  # the end of the run
    assert harness.state(task.id) == "uploaded"
    assert harness.pool.judgement.escrow.tokens_by_credit() == {} and "credited" not in harness.kinds()
