"""Checks without tolerance: what one flipped bit in a worker or a validator causes, and a lie within a class.

The models are tiny and computed in float32 with exact numerics, so no figure depends on this machine. The
fingerprints that define a class are made up here; tests/engine/test_selftest.py tests real ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.engine.selftest import fingerprint
from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.messages import HARD, Claim, Fingerprint, Reason, Verdict
from shoal.store.rollouts import Rollout
from shoal.validator.case import Case
from shoal.validator.checks import exact_proofs, exact_tokens, replay, sampling
from shoal.validator.service import RELOAD_SHARE, Validator
from shoal.worker.produce import Producer

from ..model.exactness import NEEDS_EXACT
from ..workers import ALICE, RUN, produced, signed
from .support import ASSIGNMENT, case_of, claim, config, make_validator

pytestmark = [NEEDS_EXACT, pytest.mark.usefixtures("one_thread")]
ONE, TWO = "1" * 64, "2" * 64
SETTINGS = config(model={"numerics": "exact"})


def exact_producer(folder: Path) -> Producer:
    producer = Producer(SETTINGS, RUN, ALICE, TorchEngine("float32", numerics="exact"))
    producer.load(folder, 2)
    return producer


@pytest.fixture(scope="module")
def worker(one_thread: None, tiny_folder: Path) -> Producer:
    return exact_producer(tiny_folder)


@pytest.fixture(scope="module")
def rows(worker: Producer) -> list[Rollout]:
    return produced(worker, ASSIGNMENT)


def make(folder: Path, settings: Any = SETTINGS, own: Callable[[Any], str] = lambda model: ONE) -> Validator:
    return make_validator(folder, settings, fingerprint=own)


@pytest.fixture
def validator(one_thread: None, tiny_folder: Path) -> Iterator[Validator]:
    validator = make(tiny_folder)
    with validator.judge:
        yield validator


def judged(validator: Validator, worker: Producer, rows: list[Rollout], fingerprint: str = ONE) -> Verdict:
    """Return the verdict on the rows of a worker that reports this fingerprint."""
    given: Claim = claim(ASSIGNMENT).model_copy(update={"fingerprint": fingerprint})
    validator.node.files[ASSIGNMENT.id] = signed(worker, ASSIGNMENT, rows)  # type: ignore[attr-defined]
    return validator.check([given])[0]


# --- bitwise equality ------------------------------------------------------------------------------------------------


def test_honest_work_is_bitwise_equal(validator: Validator, worker: Producer, rows: list[Rollout]) -> None:
    verdict = judged(validator, worker, rows)
    assert verdict.reason is None, verdict.detail
    assert verdict.opinion.replay is not None and verdict.opinion.replay.mismatched == 0
    assert verdict.opinion.replay.tokens == sum(len(row.logprobs) for row in rows)


def off_by_one_bit(rows: list[Rollout]) -> list[Rollout]:
    """Change the last bit of the first logprob of rollout 3."""
    first, *others = rows[3].logprobs
    near = float(torch.nextafter(torch.tensor(first), torch.tensor(0.0)))
    return [*rows[:3], replace(rows[3], logprobs=[near, *others]), *rows[4:]]


def test_a_logprob_off_by_one_bit_is_inexact_only_in_the_validators_class(
    validator: Validator, worker: Producer, rows: list[Rollout]
) -> None:
    verdict = judged(validator, worker, off_by_one_bit(rows))
    assert verdict.reason is Reason.INEXACT not in HARD
    assert "1 of" in verdict.detail and "rollout 3" in verdict.detail
    for claimed in ("", TWO):
        verdict = judged(validator, worker, off_by_one_bit(rows), claimed)
        assert verdict.reason is None and verdict.opinion.replay is None


def test_a_validator_reloads_its_weights_for_inexact_work_only_rarely(
    validator: Validator, worker: Producer, rows: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each inexact submission cost a reload, a worker could block all checks of a large model."""
    clock, loads = [1000.0], []
    monkeypatch.setattr("shoal.validator.service.time.monotonic", lambda: clock[0])

    def reload() -> None:
        loads.append(clock[0])
        clock[0] += 60.0

    monkeypatch.setattr(validator, "reload", reload)
    for wait_s in (0.0, 0.0, 60.0 / RELOAD_SHARE - 61.0, 2.0):
        clock[0] += wait_s
        assert judged(validator, worker, off_by_one_bit(rows)).reason is Reason.INEXACT
    assert loads == [1000.0, 1000.0 + 60.0 / RELOAD_SHARE + 1.0]
    lie = replace(rows[3], logprobs=[logprob - 9.0 for logprob in rows[3].logprobs])
    assert judged(validator, worker, [*rows[:3], lie, *rows[4:]]).reason is Reason.LOGPROBS
    assert len(loads) == 3, "a lie must always cause a reload"


@pytest.fixture
def computed(validator: Validator, worker: Producer, rows: list[Rollout]) -> Case:
    """Return honest work with its prefill."""
    return validator.judge.prefill([case_of(validator.judge, ASSIGNMENT, signed(worker, ASSIGNMENT, rows))])[0]


def flipped(proof: bytes) -> bytes:
    """Flip one bit of the lowest coefficient. TOPLOC's thresholds accept that, because the values differ little."""
    return proof[:3] + bytes([proof[3] ^ 1]) + proof[4:]


@pytest.mark.parametrize("change", [lambda proofs: [], lambda proofs: [flipped(proofs[0]), *proofs[1:]]])
def test_a_missing_proof_or_one_with_a_flipped_bit_is_inexact(
    validator: Validator, computed: Case, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    assert exact_proofs(validator.judge.rules, computed).finding is None
    first, *others = computed.rows
    other = replace(computed, rows=[replace(first, proofs=change(first.proofs)), *others])
    assert exact_proofs(validator.judge.rules, other).finding is not None


def test_another_token_within_the_limits_is_inexact(validator: Validator, computed: Case) -> None:
    """The tolerances allow this lie: where two scores nearly tie, the worker chose the other token."""
    margins_N = computed.computed().margins_N.clone()
    margins_N[5] = 1e-6
    near = replace(computed, exact=True, prefill=replace(computed.computed(), margins_N=margins_N))
    assert sampling(validator.judge.rules, near).finding is None
    finding = exact_tokens(validator.judge.rules, near).finding
    assert finding is not None and finding.reason is Reason.INEXACT and "token 5 of rollout 0" in finding.detail
    assert replay(near).mismatched == 1


def test_if_the_config_requires_exact_work_nothing_is_tolerated_whatever_class_is_claimed(
    tiny_folder: Path, worker: Producer, rows: list[Rollout]
) -> None:
    validator = make(tiny_folder, config(model={"numerics": "exact"}, validator={"classes": "exact"}))
    with validator.judge:
        for claimed in ("", TWO, ONE):
            assert judged(validator, worker, off_by_one_bit(rows), claimed).reason is Reason.INEXACT


def test_a_validator_without_a_fingerprint_uses_tolerances(
    tiny_folder: Path, worker: Producer, rows: list[Rollout]
) -> None:
    validator = make(tiny_folder, own=lambda model: "")
    with validator.judge:
        assert validator.node.fingerprint is None
        verdict = judged(validator, worker, rows)
    assert verdict.reason is None and verdict.opinion.replay is None, (
        "tolerances must be used if arithmetic depends on batches"
    )


# --- faults of a machine ---------------------------------------------------------------------------------------------


def flip_(model: Any, bit: int) -> None:
    """Flip one bit of one weight of the model in memory."""
    with torch.no_grad():
        words = model.base_model.layers[0].mlp.down_proj.weight.view(torch.int32)
        words[0, 0] ^= 1 << bit


def test_work_with_a_faked_fingerprint_is_inexact_and_not_slashed(validator: Validator, tiny_folder: Path) -> None:
    """A machine of another kind claims the validator's class. Scaled weights simulate its different rounding."""
    other = exact_producer(tiny_folder)
    with torch.no_grad():
        other.engine.model.base_model.layers[0].mlp.down_proj.weight.mul_(1 + 2**-20)  # type: ignore[attr-defined]
    rows = produced(other, ASSIGNMENT)
    assert judged(validator, other, rows, TWO).reason is None, "the work must be accepted if it claims another class"
    verdict = judged(validator, other, rows, ONE)
    assert verdict.reason is Reason.INEXACT and verdict.opinion.replay is not None


def test_a_worker_with_a_changed_library_is_not_slashed_and_its_fingerprint_changes(
    validator: Validator, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that sums in another order simulates the new library."""
    from shoal.model import exact

    updated = exact_producer(tiny_folder)
    before = fingerprint(updated.engine.model)  # type: ignore[attr-defined]
    attention = exact.attention

    def other_order(query: Any, key: Any, value: Any, hidden: Any, *more: Any) -> Any:
        """Compute the same formula, but sum over the keys from the last to the first."""
        output, sums = attention(query, key, value, hidden, *more)
        scores = torch.bmm(query, key.transpose(1, 2))
        hidden.apply_(scores)
        return torch.bmm(torch.softmax(scores, -1).flip(-1), value.flip(1)), sums

    monkeypatch.setattr(exact, "attention", other_order)
    rows = produced(updated, ASSIGNMENT)
    changed = fingerprint(updated.engine.model)  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert changed != before
    verdict = judged(validator, updated, rows)
    assert verdict.reason is Reason.INEXACT
    assert judged(validator, updated, rows, changed).reason is None, "the work must be accepted in its own class"


def test_work_is_inexact_after_a_bit_of_a_weight_flipped_until_the_worker_reloads(
    validator: Validator, worker: Producer, tiny_folder: Path
) -> None:
    faulty = exact_producer(tiny_folder)
    flip_(faulty.engine.model, 14)  # type: ignore[attr-defined]
    verdict = judged(validator, faulty, produced(faulty, ASSIGNMENT))
    assert verdict.reason is Reason.INEXACT
    assert fingerprint(faulty.engine.model) != fingerprint(worker.engine.model)  # type: ignore[attr-defined]
    faulty.load(tiny_folder, 2)
    assert fingerprint(faulty.engine.model) == fingerprint(worker.engine.model)  # type: ignore[attr-defined]
    assert judged(validator, faulty, produced(faulty, ASSIGNMENT)).reason is None


@pytest.mark.parametrize("bit", [14, 30])
def test_a_flipped_bit_in_a_validators_weight_harms_no_worker(
    validator: Validator, worker: Producer, rows: list[Rollout], bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With bit 14 flipped, honest work is inexact. With bit 30 flipped, a bit of the exponent, it looks like a lie."""
    flip_(validator.judge.model, bit)
    [case] = [validator.judge.open(ASSIGNMENT, ALICE.public, signed(worker, ASSIGNMENT, rows))]
    finding = validator.judge.examine([replace(case, exact=True)])[0].finding  # type: ignore[type-var]
    assert finding is not None and (finding.reason in HARD) == (bit == 30)
    verdict = judged(validator, worker, rows)
    assert verdict.reason is None, "the validator must reload its weights before it rejects"
    assert "this machine's memory" in caplog.text


def test_a_lie_beyond_the_limits_is_rejected_for_a_hard_reason_in_any_class(
    validator: Validator, worker: Producer, rows: list[Rollout]
) -> None:
    lied = [replace(row, logprobs=[logprob - 0.7 for logprob in row.logprobs]) for row in rows]
    verdict = judged(validator, worker, lied)
    assert verdict.reason is Reason.LOGPROBS and verdict.reason in HARD


def test_a_reload_verifies_the_files_again(
    validator: Validator, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit on the disk, like one in memory, would make honest work look like a lie."""
    done: list[Any] = []
    fetch = validator.fetch
    monkeypatch.setattr("shoal.validator.service.forget_verified", lambda folder: done.append(folder))
    held = SimpleNamespace(held=lambda *wanted: done.append(wanted))  # the cached files are damaged
    monkeypatch.setattr(validator, "_cache", lambda: held)
    monkeypatch.setattr(validator, "fetch", lambda *wanted: done.append("fetched") or fetch(*wanted))
    validator.reload()
    assert done == [tiny_folder, (2, "0" * 64), "fetched"]


def test_a_validator_computes_a_new_fingerprint_with_reloaded_weights(tiny_folder: Path) -> None:
    validator = make(tiny_folder, own=fingerprint)
    with validator.judge:
        honest = validator.node.fingerprint
        flip_(validator.judge.model, 14)
        assert fingerprint(validator.judge.model) != honest.value  # type: ignore[union-attr]
        validator.reload()
        assert validator.node.fingerprint == honest == Fingerprint(version=2, value=fingerprint(validator.judge.model))
