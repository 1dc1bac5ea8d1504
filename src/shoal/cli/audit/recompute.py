"""Recompute parts of a run: judge submissions with a validator's code, and train a step with the learner's code.

    submissions   a sample of the accepted ones, and every hard rejection, if the folder still has the version's weights.
                  What the learner reads of an accepted one is compared with the results
    a step        from a checkpoint that the learner signed, or from the run's first model. The weights before and after
                  the step must have the digests in the learner's record. If the checkpoint after the step is kept
                  and a CPU trained, it must hold the same state

Invariants: a submission is judged whole, by a validator's code and limits, with weights whose digest is in the ledger. A
hard rejection stands if a validator on this machine would also slash for that file, for any hard reason. Weights are
compared only on a machine that computes the same bits as the learner's (`record.computed`).
Left out: exactness classes, so files are judged by the wider limits in [validator]; rewards that another machine may give
differently, and those of groups in no batch; learners with several ranks or sites, because their checkpoints do not
hold the whole state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

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
from shoal.model.dtype import DtypeName, use_threads
from shoal.model.load import WEIGHTS
from shoal.model.sources import resolve
from shoal.protocol.messages import HARD, Computed
from shoal.shardcast.manifest import version_name
from shoal.tasks import versions
from shoal.validator.by_hand import find_weights, offline_assignment
from shoal.validator.case import Case, Finding
from shoal.validator.checks import logprobs
from shoal.validator.judge import Judge

CHECKPOINT = "step-{:06d}"


@dataclass(frozen=True)
class Rerun:
    """A step that was trained again. Its weights were compared if this machine computes the same bits as the learner's."""

    step: int
    versions: Path  # holds the folders of the versions before and after the step
    here: Computed
    learner: Computed
    state_compared: bool = False  # also the optimizer's state after the step

    @property
    def compared(self) -> bool:
        return self.here == self.learner

    @property
    def before(self) -> Path:
        return self.versions / version_name(self.step)


def rerunnable_steps(run: AuditedRun, state: AuditState) -> list[int]:
    """Return the trained steps whose starting state still exists: a checkpoint, or the run's first model."""
    folders = (run.folder / "learner" / "checkpoints").glob("step-*")
    kept = {0, *(int(path.name.removeprefix("step-")) for path in folders)}
    trained = [step for step in sorted(kept) if step < len(state.records) and not state.configs[step].learner.sites]
    return [step for step in trained if state.records[step].computed.ranks == 1]


@contextmanager
def rerun(run: AuditedRun, state: AuditState, step: int, scratch: Path) -> Iterator[Rerun]:
    """Train the step again and compare its weights, then yield the result. Raise BrokenError."""
    record, config = state.records[step], state.configs[step]
    section = config.learner.model_copy(update={"keep_versions": 2})
    config = config.model_copy(update={"learner": section})
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
        result = Rerun(step, scratch / "versions", computed(policy), record.computed)
        learner = Learner(None, config, policy, scratch)
        progress = learner.checkpoints.restore()
        learner.publish(progress)
        _compare(result, step, record.before)
        if groups := gather_step(run, state, step).groups:  # without any, the learner skipped the step
            learner.train(groups)
        progress.advance([])
        learner.publish(progress)
        _compare(result, step + 1, record.after)
        after = run.folder / "learner" / "checkpoints" / CHECKPOINT.format(step + 1)
        if result.compared and after.is_dir() and policy.device.type == "cpu":  # on a GPU, fp32 gradients may vary
            if name := learner.checkpoints.difference(after):
                why = f"training it again does not give the state in the checkpoint {after.name}: {name} differs"
                raise BrokenError(f"step {step + 1}", why)
            result = replace(result, state_compared=True)
    yield result


def _compare(result: Rerun, version: int, digest: str) -> None:
    if result.compared and file_digest(result.versions / version_name(version) / WEIGHTS) != digest:
        why = f"training it again does not give the published weights of version {version}"
        raise BrokenError(f"step {result.step + 1}", why)


# --- submissions judged again ----------------------------------------------------------------------------------------


def judge_again(run: AuditedRun, state: AuditState, sample: list[Accepted], weights: Path, dtype: DtypeName) -> None:
    """Judge accepted submissions of one version with its weights, and compare the validators' files with the results.

    Each is judged by the config that was in force when it was accepted, because a restart may change [validator].
    Raise BrokenError for a submission that is rejected, and for a false accepted file. Count rewards that cannot be
    compared in `state.unproven`.
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
        state.unproven["rewards: the validator's graders have other versions than those here"] += len(trained)
        return ""
    for row, reward, grade in trained:
        if not grade.certain:
            state.unproven["rewards: another machine may give others"] += 1
        elif row.reward != float(np.float32(reward)):  # files hold rewards as float32
            return f"a reward of {row.reward:g} in group {row.group}, but the grader gives {reward:g}"
    return ""


def judge_rejections(run: AuditedRun, state: AuditState, *, limit: int) -> str:
    """Judge every hard rejection, unless `limit` is 0. Raise BrokenError if a validator would not slash for it.

    Return a line for the report, or "" if there is no hard rejection. Count rejections that cannot be judged in
    `state.unproven`.
    """
    hard = {id: each for id, each in state.rejected.items() if each.reason in HARD}
    judged, weights = 0, _verified_weights(run, state) if limit else {}
    for id, rejected in hard.items():
        version, link = rejected.body["version"], f"rejection of {id}"
        if version not in weights:
            why = f"the weights of version {version} are gone" if limit else "not requested (--proofs 0)"
            state.unproven[f"hard rejections: {why}"] += 1
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
    return f"hard rejections: {judged} of {len(hard)} judged again" if hard else ""


def _verified_weights(run: AuditedRun, state: AuditState) -> dict[int, Path]:
    """Return, by version, the folders whose weights have the digest that the learner recorded."""
    folders = {}
    digests = [record.before for record in state.records[:1]] + [record.after for record in state.records]
    for version, digest in enumerate(digests):
        try:
            folder = find_weights(run.folder, version)
        except FileNotFoundError:
            folder = run.folder / "model"  # the newest version of a finished run
        path = folder / WEIGHTS
        if path.is_file() and file_digest(path) == digest:
            folders[version] = folder
    return folders


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

    with TemporaryDirectory() as scratch:
        loaded = tasks.join(config.tasks, Path(scratch) / "tasks", fetch) if config.tasks.digest else None
        with Judge(config, run.run, dtype, loaded) as judge:
            yield judge
