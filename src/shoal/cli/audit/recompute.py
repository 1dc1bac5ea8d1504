"""Recompute parts of a run: judge submissions with a validator's code, and train a step with the learner's code.

    submissions   a sample of the accepted ones, and every hard rejection, if the folder still has the version's weights.
                  What the learner reads of an accepted one is compared with the results
    a step        from a checkpoint that the learner signed, or from the run's first model. The weights before and after
                  the step must have the digests in the learner's record, and the checkpoint after the step, if kept,
                  must hold the same state

Another machine may compute other bits. There, the recorded update (weights after minus before) must be within TOLERANCE of
the one here, in lengths of the latter. The learner's claims about its machine can only make the comparison stricter.

Invariants: a submission is judged whole, by a validator's code and limits, with weights whose digest is in the ledger. A
hard rejection stands if a validator on this machine would also slash for that file, for any hard reason. The weights
before a step are compared to the last bit on every machine, because they are only restored and rounded.
Left out: exactness classes, so files are judged by the wider limits in [validator]; rewards that another machine may give
differently, and those of groups in no batch; learners with several sites, whose checkpoints do not hold the whole
state; a step on another machine if the weights after it are gone.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal import tasks
from shoal.cli.audit.pay import Accepted, AuditState
from shoal.cli.audit.run import AuditedRun, BrokenError, checking
from shoal.cli.audit.walk import gather_step, read_accepted_file
from shoal.config import Config
from shoal.files import file_digest
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.report import computed
from shoal.model import numerics
from shoal.model.dtype import DeviceError, DtypeName, check_device, use_threads
from shoal.model.load import WEIGHTS
from shoal.model.sources import resolve
from shoal.protocol.messages import HARD
from shoal.shardcast import delta
from shoal.shardcast.manifest import version_name
from shoal.shardcast.store import ShardStore
from shoal.tasks import versions
from shoal.validator.by_hand import find_weights, offline_assignment
from shoal.validator.case import Case, Finding
from shoal.validator.checks import logprobs
from shoal.validator.judge import Judge

CHECKPOINT = "step-{:06d}"
TOLERANCE = 0.2  # honest machines differ by up to 0.06, in float32 and bfloat16; without any training it is 1


@dataclass(frozen=True)
class Rerun:
    """A step that was trained again."""

    before: Path  # folder of the version before the step
    dtype: DtypeName  # the learner's
    outcome: str  # in words
    compared: bool
    state_compared: bool = False  # also the optimizer's state after the step


def rerunnable_steps(run: AuditedRun, state: AuditState) -> list[int]:
    """Return the trained steps whose starting state still exists: a checkpoint, or the run's first model."""
    folders = (run.folder / "learner" / "checkpoints").glob("step-*")
    kept = {0, *(int(path.name.removeprefix("step-")) for path in folders)}
    return [step for step in sorted(kept) if step < len(state.records) and not state.configs[step].learner.sites]


@contextmanager
def rerun(run: AuditedRun, state: AuditState, step: int, scratch: Path) -> Iterator[Rerun]:
    """Train the step again and compare its weights, then yield the result. Raise BrokenError."""
    record, config = state.records[step], state.configs[step]
    section = config.learner.model_copy(update={"keep_versions": 2})
    config = _possible(config).model_copy(update={"learner": section})
    dtype = record.computed.dtype
    if step:
        kept = scratch / "checkpoints" / CHECKPOINT.format(step)
        kept.parent.mkdir(parents=True)
        kept.symlink_to((run.folder / "learner" / "checkpoints" / kept.name).resolve(), target_is_directory=True)
    with checking(f"step {step + 1}"), use_threads(record.computed.threads):
        torch.manual_seed(config.run.seed)
        picked = numerics.pick(config.model.numerics, dtype, config.model.device)
        folder, temperature = resolve(config.model.name), config.sampling.temperature
        policy = Policy(folder, section, dtype, config.model.device, temperature, Ranks(), picked)
        learner = Learner(None, config, policy, scratch)
        progress = learner.checkpoints.restore()
        learner.publish(progress)
        before = learner.versions / version_name(step)
        if file_digest(before / WEIGHTS) != record.before:
            raise BrokenError(f"step {step + 1}", f"its starting state does not give the weights of version {step}")
        masters = {name: master.detach().clone() for name, master in policy.masters.items()}
        if groups := gather_step(run, state, step).groups:  # without any, the learner skipped the step
            learner.train(groups)
        progress.advance([])
        learner.publish(progress)
        exact, here = computed(policy) == record.computed, learner.versions / version_name(step + 1)
        outcome, distance = f"version {step + 1} is the same to the last bit", 0.0
        if not (same := file_digest(here / WEIGHTS) == record.after):
            recorded = _recorded(run, step + 1, record.after, before)
            distance = _distance(policy, masters, here, recorded) if recorded else math.nan
            outcome = f"other bits result here; beyond rounding, the updates differ by {distance:.2g} of their length"
            if not recorded:
                outcome = f"other bits result here, and the weights of version {step + 1} are gone"
            if exact or recorded and not distance <= TOLERANCE:
                why = f"training it again does not give the published weights of version {step + 1}: {outcome}"
                raise BrokenError(f"step {step + 1}", why)
        compared, after = not math.isnan(distance), run.folder / "learner" / "checkpoints" / CHECKPOINT.format(step + 1)
        with_state, on_cpu = compared and after.is_dir(), policy.device.type == "cpu"  # on a GPU, fp32 may vary
        tolerance = 0 if same and exact and on_cpu else TOLERANCE
        if name := with_state and learner.checkpoints.difference(after, masters, tolerance):
            why = f"training it again does not give the state in the checkpoint {after.name}: {name} differs"
            raise BrokenError(f"step {step + 1}", why)
    yield Rerun(before, dtype, outcome, compared, with_state)


@torch.no_grad()
def _distance(policy: Policy, masters: Mapping[str, Tensor], here: Path, kept: Path) -> float:
    """Return how far the update that gives the version in `kept` is from the policy's, in lengths of the policy's.

    `masters`: before the step. `here`: the version that the policy gives.
    Rounding to bf16 may turn a tiny difference of two masters into a large one. So a published weight does not count as
    different if the master need only move by TOLERANCE of its own update.
    """
    theirs, ours = load_file(kept / WEIGHTS), load_file(here / WEIGHTS)
    form, theirs_form = ({name: (each.shape, each.dtype) for name, each in file.items()} for file in (ours, theirs))
    if form != theirs_form:
        return math.inf
    square = length = 0.0
    for name, tensor in ours.items():
        if name not in masters:  # frozen
            if not torch.equal(theirs[name], tensor):
                return math.inf
            continue
        before, after = masters[name].cpu(), policy.masters[name].cpu()
        away = theirs[name].float() - tensor.float()
        moved = (after + TOLERANCE * (after - before).abs() * away.sign()).bfloat16().float() - tensor.float()
        square += float(away[~(away.abs() <= moved.abs())].double().square().sum())
        length += float((tensor.float() - before.bfloat16().float()).double().square().sum())
    return math.sqrt(square / length) if length else math.inf if square else 0.0


# --- submissions judged again ----------------------------------------------------------------------------------------


def judge_again(run: AuditedRun, state: AuditState, sample: list[Accepted], weights: Path, dtype: DtypeName) -> None:
    """Judge accepted submissions of one version with its weights, and compare the validators' files with the results.

    Each is judged by the config that was in force when it was accepted, because a restart may change [validator].
    Raise BrokenError for a submission that is rejected, and for a false accepted file. Count rewards that cannot be
    compared in `state.checks`.
    """
    for config, submissions in groupby(sample, key=lambda each: each.config):
        with _judging(run, config, dtype) as judge:
            judge.load(weights)
            for submission in submissions:
                link = f"proofs of {submission.id}"
                with checking(link):
                    judged = _judge(judge, run, submission.id, submission.worker, submission.file)
                if isinstance(judged, Finding):
                    raise BrokenError(link, f"a validator would reject the file ({judged.reason}): {judged.detail}")
                link = f"accepted file of {submission.id}"
                with checking(link):
                    fault = _false_figures(run, state, submission, judge, judged)
                if fault:
                    raise BrokenError(link, f"the validator {state.names[submission.validator]} signed {fault}")


def _false_figures(run: AuditedRun, state: AuditState, submission: Accepted, judge: Judge, case: Case) -> str:
    """Compare a validator's file with this machine's results for the same rollouts. Describe a difference, or return "".

    Rewards must be equal if every machine gives the same (`Grade.certain`) and the group is in a batch: others may come
    from a grader that failed. Logprobs must be within the limits, or the worker's own if the file says so.
    """
    file = read_accepted_file(run, submission.config, submission.accepted)
    pairs = list(zip(case.rows, file.rows, strict=True))
    if any((row.task, row.prompt) != (case.tasks[row.group].id, case.prompts[row.group]) for row in file.rows):
        return "prompts that are not those of the tasks, or other tasks"
    if any(len(own.logprobs) != len(row.logprobs) for own, row in pairs):
        return "a wrong number of logprobs"
    if file.header.prefilled:
        signed = replace(case, rows=[replace(own, logprobs=row.logprobs) for own, row in pairs])
        if finding := logprobs(judge.rules, signed).finding:
            return f"false logprobs: {finding.detail}"
    elif any(own.logprobs != row.logprobs for own, row in pairs):
        return "logprobs that are not the worker's, in a file that was not prefilled whole"
    results = zip(file.rows, case.rewards, case.grades, strict=True)
    trained = [each for each in results if (submission.id, each[0].group) in state.batched]
    if file.header.graded_with != versions():
        state.checks.unproven["rewards: the validator's graders have other versions than those here"] += len(trained)
        return ""
    for row, reward, grade in trained:
        if not grade.certain:
            state.checks.unproven["rewards: another machine may give others"] += 1
        elif row.reward != float(np.float32(reward)):  # files hold rewards as float32
            return f"a reward of {row.reward:g} in group {row.group}, but the grader gives {reward:g}"
    return ""


def judge_rejections(run: AuditedRun, state: AuditState, *, limit: int) -> str:
    """Judge every hard rejection, unless `limit` is 0. Raise BrokenError if a validator would not slash for it.

    Return a line for the report, or "" if there is no hard rejection. Count rejections that cannot be judged in
    `state.checks`.
    """
    hard = {id: each for id, each in state.rejected.items() if each.reason in HARD}
    judged, weights = 0, _verified_weights(run, state) if limit else {}
    for id, rejected in hard.items():
        version, link = rejected.body["version"], f"rejection of {id}"
        if version not in weights:
            why = f"the weights of version {version} are gone" if limit else "not requested (--proofs 0)"
            state.checks.unproven[f"hard rejections: {why}"] += 1
            continue
        dtype = state.records[min(version, len(state.records) - 1)].computed.dtype
        with _judging(run, rejected.config, dtype) as judge, checking(link):
            judge.load(weights[version])
            judged_again = _judge(judge, run, id, rejected.worker, rejected.body["file"])
        finding = judged_again if isinstance(judged_again, Finding) else None
        if finding is None or finding.reason not in HARD:
            instead = "accept the file" if finding is None else f"reject the file softly ({finding.reason})"
            who, reason = rejected.worker[:16], rejected.reason
            raise BrokenError(link, f"work of {who} was rejected as {reason}, but a validator would {instead}")
        judged += 1
    state.checks.passed += judged
    return f"hard rejections: {judged} of {len(hard)} judged again" if hard else ""


def _verified_weights(run: AuditedRun, state: AuditState) -> dict[int, Path]:
    """Return, by version, the folders whose weights have the digest that the learner recorded."""
    digests = [record.before for record in state.records[:1]] + [record.after for record in state.records]
    folders = {version: _verified(run, version, digest) for version, digest in enumerate(digests)}
    return {version: folder for version, folder in folders.items() if folder is not None}


def _recorded(run: AuditedRun, version: int, digest: str, before: Path) -> Path | None:
    """Return a folder with the weights of a version, made from the one before it and the origin's delta if necessary.

    Raise BrokenError if the delta, which `files` has compared with the ledger, gives weights with another digest.
    """
    store = ShardStore(run.folder / "origin" / "store")
    signed = store.signed(version)
    if (kept := _verified(run, version, digest)) or signed is None:
        return kept
    manifest, made, link = signed.unchecked(), before.with_name("published"), before.with_name("delta")
    if manifest.delta is None or manifest.delta.parent != version - 1:
        return None
    shards = manifest.delta.stream.entries()
    link.write_bytes(b"".join(store.shard_path(version, "delta", each.index).read_bytes() for each in shards))
    files = tuple((file.path, file.size_bytes) for file in manifest.files)
    delta.apply(before, [delta.Link(link, files)], made)
    if file_digest(made / WEIGHTS) != digest:
        raise BrokenError(f"version {version}", "the origin published weights that differ from the learner's record")
    return made


def _verified(run: AuditedRun, version: int, digest: str) -> Path | None:
    """Return the folder of a version, if it is kept and its weights have this digest."""
    try:
        folder = find_weights(run.folder, version)
    except FileNotFoundError:
        folder = run.folder / "model"  # the newest version of a finished run
    path = folder / WEIGHTS
    return folder if path.is_file() and file_digest(path) == digest else None


def _judge(judge: Judge, run: AuditedRun, id: str, worker: str, file: str) -> Case | Finding:
    """Judge a submission of the loaded version. Return the case with its results, or why a validator rejects it."""
    data = run.store.get("submissions", file)
    header = judge.quarantine.read(data).header  # the walk has compared it with the ledger
    assignment = offline_assignment(judge.config, worker, int(id[-6:]), header=header)
    case = judge.open(assignment, worker, data)
    if isinstance(case, Finding):
        return case
    examined = judge.examine([case])[0]
    return examined.finding or examined.case


@contextmanager
def _judging(run: AuditedRun, config: Config, dtype: DtypeName) -> Iterator[Judge]:
    def fetch(sha256: str, most_bytes: int) -> bytes:
        return (run.coordinator / "tasks" / sha256).read_bytes()

    config = _possible(config)
    with TemporaryDirectory() as scratch:
        loaded = tasks.join(config.tasks, Path(scratch) / "tasks", fetch) if config.tasks.digest else None
        with Judge(config, run.run, dtype, loaded) as judge:
            yield judge


def _possible(config: Config) -> Config:
    """Return the config with a device and numerics that this machine has. Results may then differ by rounding."""
    model = config.model.model_copy(update={"numerics": "fast" if config.model.numerics == "fast" else "auto"})
    try:
        check_device(model.device)
    except DeviceError:
        model = model.model_copy(update={"device": "cpu"})
    return config.model_copy(update={"model": model})
