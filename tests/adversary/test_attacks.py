"""Each attack in ATTACKS submits changed rows. Attacks that are detectable with any model are rejected for the expected
reason.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from benchmarks.trust.adversary.attacks import ATTACKS, Lab
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.cli.calibrate import RUN
from shoal.config import Config, parse
from shoal.engine.torch_engine import TorchEngine
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Reason
from shoal.store.rollouts import RolloutFile, read_submission
from shoal.validator.by_hand import offline_assignment
from shoal.validator.case import Case
from shoal.validator.judge import Judge

pytestmark = pytest.mark.usefixtures("one_thread")

ALICE, BOB = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2))
CONFIG = parse(
    {
        "tasks": {"heldout": 16, "prompt": "{question}=", "length_targets": [8, 16, 32]},
        "sampling": {"max_tokens": 40, "group_size": 4},
        "workers": {"groups_per_submission": 2},
        "evaluator": {"n": 16},
    }
)
ASSIGNMENT = offline_assignment(CONFIG, ALICE.public, 0)
REASONS = {  # for attacks that are detectable with any model
    "honest": None,
    "previous_version": Reason.PROOF,  # because these two versions have unrelated weights
    "version_5_steps_ago": Reason.PROOF,
    "other_model": Reason.PROOF,
    "other_system_prompt": Reason.PROOF,
    "easier_task": Reason.PROOF,
    "easier_task_retold": Reason.SAMPLING,
    "greedy": Reason.SAMPLING,
    "draft_tokens": Reason.SAMPLING,
    "truncated": Reason.TERMINATION,
    "padded": Reason.TERMINATION,
    "end_forced": Reason.SAMPLING,
    "forged_logprobs": Reason.LOGPROBS,
    "copied": Reason.PROOF,
    "replayed": Reason.TASKS,
    "other_rows_proofs": Reason.PROOF,
    "flipped_bit": Reason.PROOF,
    "constant_proofs": Reason.PROOF,
    "template_proofs": Reason.PROOF,
    "repeated_proof": Reason.PROOF,
    "null_proofs": Reason.PROOF,
    "missing_proofs": Reason.BOUNDS,
}
SUBTLE = {
    *("spends_tolerance", "spends_tolerance_down"),  # designed to pass the limits; see test_exact.py
    *("int8_weights", "int4_weights", "fp8_cache", "fp16_cache"),  # with few tokens they look like rounding
    "end_suppressed",  # one wrong token in 40 is within the limits, which are fractions of all tokens
}


def submissions(
    folders: tuple[Path, Path], names: Iterable[str], config: Config, engine: TorchEngine
) -> dict[str, bytes]:
    """Return each attacker's file for the same task. One engine generates them one after the other."""
    newest, other = folders
    lab, files = Lab([other] * 6 + [newest], BOB), {}
    for name in names:
        attacker = ATTACKS[name](config, RUN, ALICE, engine, lab)
        attacker.load(newest, 6)
        files[name] = attacker.submission(ASSIGNMENT)
    return files


@pytest.fixture(scope="module")
def files(tiny_folders: tuple[Path, Path]) -> dict[str, bytes]:
    return submissions(tiny_folders, ATTACKS, CONFIG, TorchEngine("float32"))


@pytest.fixture(scope="module")
def judge(tiny_folder: Path) -> Iterator[Judge]:
    with Judge(CONFIG, RUN, "float32") as judge:
        judge.load(tiny_folder)
        yield judge


def read(data: bytes) -> RolloutFile:  # type: ignore[type-arg]
    return read_submission(data, max_rows=8, max_tokens=40)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "honest"])
def test_every_attacker_signs_changed_rows_for_its_assigned_tasks(files: dict[str, bytes], name: str) -> None:
    lied, honest = read(files[name]), read(files["honest"])
    assert lied.header.signer == lied.header.worker == ALICE.public
    assert list(lied.rows) != list(honest.rows) or name.startswith("spends")
    if name != "replayed":
        assert (lied.header.prompts, lied.header.submission) == (honest.header.prompts, ASSIGNMENT.number)
        claims = [[(row.group, row.target_length, row.seed) for row in file.rows] for file in (lied, honest)]
        assert claims[0] == claims[1]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in SUBTLE])
def test_attacks_that_are_detectable_with_any_model_are_detected(
    files: dict[str, bytes], judge: Judge, name: str
) -> None:
    case = judge.open(ASSIGNMENT, ALICE.public, files[name])
    assert isinstance(case, Case), case
    finding = judge.examine([case])[0].finding
    # An attack that is not in REASONS samples differently. The check of sampling or that of termination detects it.
    expected = [REASONS[name]] if name in REASONS else [Reason.SAMPLING, Reason.TERMINATION]
    assert (finding and finding.reason) in expected, finding


def test_an_attack_leaves_the_engine_unchanged_for_the_next(
    tiny_folders: tuple[Path, Path], files: dict[str, bytes]
) -> None:
    names = ("fp8_cache", "top_k_5", "other_model", "honest")
    assert submissions(tiny_folders, names, CONFIG, TorchEngine("float32"))["honest"] == files["honest"]
