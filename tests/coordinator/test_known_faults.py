"""Faults of the protocol testnet that must not return. A state without exit is in `test_states`."""

import ast
from pathlib import Path

import pytest

from shoal.protocol.messages import Heartbeat, Reason, Stats

from .support import ALICE, BOB, Harness

COORDINATOR = Path(__file__).parents[2] / "src" / "shoal" / "coordinator"


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
