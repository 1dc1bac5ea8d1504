"""What the coordinator logs: one line for each event, with who and why."""

import logging

import pytest

from shoal.protocol.messages import Evaluation, Policy, Reason, StepReport

from .support import ALICE, BOB, VALIDATOR, open_pool, staffed_pool, verdict


def test_each_event_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.coordinator")
    harness = open_pool()
    for key, role in ((ALICE, "worker"), (BOB, "worker"), (VALIDATOR, "validator")):
        harness.join(key, role)
    harness.pool.learning.published(Policy(version=0, digest="d" * 64, size_bytes=2_500_000))
    harness.accepted()
    harness.accepted()
    lied = harness.upload(BOB)
    harness.claim()
    harness.judge(lied.id, Reason.PROOF)
    for _ in range(2):  # what is repeated after a restart is logged once
        harness.pool.learning.trained(StepReport(step=0, metrics={}, trained=[]))
        harness.pool.learning.evaluated(Evaluation(version=6, greedy=0.5, sampled=None, n=4, final=True))
    a, b = f"{ALICE[:16]}-00000", f"{BOB[:16]}-00000"
    assert [record.getMessage() for record in caplog.records] == [
        f"worker-a joined as worker, key {ALICE[:16]}",
        f"worker-b joined as worker, key {BOB[:16]}",
        f"validator-e joined as validator, key {VALIDATOR[:16]}",
        f"version 0 published, 2.5 MB, digest {'d' * 16}",
        f"{a}0 uploaded by worker-a",
        f"{a}0 by worker-a accepted, 2 groups",
        f"{a}1 uploaded by worker-a",
        f"{a}1 by worker-a accepted, 2 groups",
        "batch of step 1 of 6 is full",
        f"{b}0 uploaded by worker-b",
        f"{b}0 by worker-b rejected: proof: the proof is of other weights",
        f"worker-b slashed and evicted: proof in {b}0",
        "step 1 of 6 trained, mean reward 0.500",
        "version 6 evaluated on 4 held-out tasks: greedy 0.500",
        "run finished: all 6 steps trained, last version evaluated",
    ]
    assert {record.name for record in caplog.records} == {
        f"shoal.coordinator.{module}" for module in ("assignment", "batches", "judgement", "members")
    }


def test_a_detail_that_quotes_a_workers_file_stays_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal.coordinator")
    harness = staffed_pool(workers=(ALICE,), validators=())
    task = harness.upload()
    harness.claim()
    quoted = verdict(task.id, Reason.TASKS, (), None).model_copy(
        update={"detail": "task\n\x1b[2Jworker-b slashed" + "x" * 999}
    )
    harness.pool.judgement.judge(VALIDATOR, quoted)
    (line,) = [message for record in caplog.records if " rejected: " in (message := record.getMessage())]
    assert line.isprintable() and len(line) < 300
