"""The judge takes the bytes of a file and its assignment. It returns a finding, or the accepted file.

It uses no network, and it uses a clock only for time limits.

    open     turns a file into a Case, or a Finding if it is not a rollout file with a valid signature
    examine  checks each file, prefills all cases that passed together, checks the prefill, then the answers, and grades

Invariant: the judge accepts only what it has recomputed. So the accepted file has the validator's own prompts, rewards
and logprobs. The exception is a case accepted after a spot check. Only a few of its rollouts were prefilled, so its
file keeps the worker's logprobs and says so. The learner then computes its own logprobs.
Grading comes after the prefill, even where grading is cheaper, because a reward or an environment may run a program
from a completion. A prefill shows that the run's own model wrote that program. Without a prefill, the worker may be its
author. So a case that got only a spot check is graded for at most as long as a prefill of the whole case would take. If
its grading takes longer, the case is prefilled whole and graded again. After a whole prefill, each case gets an equal
share of `grading_s`. All grades of a group that is not graded in that time are grader errors: no batch takes the group,
and its worker is not blamed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from random import SystemRandom
from typing import Any, Self

import torch

from shoal import tasks
from shoal.config import Config
from shoal.config.sections import ROW_TOKENS
from shoal.engine.selftest import vocabulary_of
from shoal.model import numerics
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids, load_model, load_tokenizer, load_weights_
from shoal.model.sampling import LOWEST_LOGPROB
from shoal.model.sources import check_max_tokens
from shoal.model.turns import last_turn, model_tokens
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, Reason
from shoal.sandbox import Budget
from shoal.store.columns import BadSignatureError, RolloutFileError
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import SCHEMA_VERSION, AcceptedRollout, Header, write_accepted
from shoal.tasks import Grade, TaskSet
from shoal.tasks.budget import reward
from shoal.tasks.derive import max_rollouts, plan_submission
from shoal.tasks.environments import Conversation, close, environments_of
from shoal.tasks.prompt import completion_text, prompt_tokens
from shoal.validator.case import Case, Finding
from shoal.validator.checks import ANSWERS, EXACT, EXPENSIVE, FILE, Check, Rules, run
from shoal.validator.prefill import prefill

SPOT_ROLLOUTS = 2  # number of rollouts in a spot check; they are drawn after the upload
MIN_GRADING_S = 1.0  # shortest time limit for grading after a spot check, because processes need time to start
LATE = Grade(0.0, "grader_error", "not graded within the validator's time limit", repeatable=False)


@dataclass(frozen=True)
class Examined:
    """The result of the checks of a case."""

    case: Case  # with its rewards and its prefill, if they were computed
    finding: Finding | None  # None: the case is accepted
    evidence: dict[str, float] = field(default_factory=dict)  # figures of the checks that ran


class Judge:
    def __init__(
        self,
        config: Config,
        run: str,
        dtype: DtypeName,
        task_set: TaskSet | None = None,
        grading_s: float = math.inf,
        row_tokens: int = ROW_TOKENS,
    ) -> None:
        """`task_set`: the pool's tasks. If it is None, they are built from the config's sources.

        `grading_s`: time limit for grading all cases of one `examine`.
        """
        self.choose: Callable[[Sequence[int], int], list[int]] = SystemRandom().sample  # unpredictable to workers
        self.grading_s = grading_s
        self.row_tokens = row_tokens  # tokens in a row of a prefill
        self.budget = Budget()
        self.position_s = 0.0  # seconds per token in the last prefill of whole cases
        self.config = config
        self.run = run
        self.dtype = dtype
        self.tasks = task_set or tasks.load(config.tasks)
        self.graders = tasks.Graders(config.tasks, files=self.tasks.files, budget=self.budget)
        self.quarantine = Quarantine(max_rollouts(config), config.sampling.max_tokens)
        self.environments = environments_of(config, self.tasks.files)
        for environment in self.environments.values():
            environment.set_budget(self.budget)
        self.model: Any = None
        self._rules: Rules | None = None  # None before `load`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.quarantine.close()
        self.graders.close()
        close(self.environments)

    def load(self, folder: Path) -> None:
        """Load the weights of the version in `folder`. Raise ShoalError if its context is too short for the run."""
        check_max_tokens(folder, self.config.sampling.max_tokens)
        if self.model is not None:
            load_weights_(self.model, folder)
            return
        settings = self.config.model
        self.model = load_model(
            folder, self.dtype, settings.device, numerics.pick(settings.numerics, self.dtype, settings.device)
        )
        tokenizer, ends = load_tokenizer(folder), eos_ids(folder)
        self._rules = Rules(
            config=self.config,
            run=self.run,
            tokenizer=tokenizer,
            eos_ids=ends,
            conversation=Conversation(self.config, self.environments, tokenizer, ends),
            special_ids=frozenset(tokenizer.all_special_ids) - frozenset(ends),
            vocabulary=vocabulary_of(self.model),
            budget=self.budget,
        )

    def open(self, assignment: Assignment, worker: str, data: bytes) -> Case | Finding:
        """Read a file in the quarantine process. A bad file gives a Finding, never an exception."""
        try:
            file = self.quarantine.read(data, assignment.groups * self.config.sampling.group_size)
        except BadSignatureError as error:
            return Finding(Reason.SIGNATURE, str(error))
        except RolloutFileError as error:
            return Finding(Reason.UNREADABLE, str(error))
        plans = plan_submission(self.config, self.run, assignment, worker, self.tasks)
        chosen = [self.tasks.train[plan.task_index] for plan in plans]
        return Case(
            assignment=assignment,
            worker=worker,
            header=file.header,
            rows=file.rows,
            plans=plans,
            tasks=chosen,
            prompts=[
                prompt_tokens(self.tokenizer, self.config.tasks, task, plan.target_length)
                for task, plan in zip(chosen, plans, strict=True)
            ],
        )

    def examine(self, cases: Sequence[Case], *, cheaply: Sequence[bool] | None = None) -> list[Examined]:
        """Run the checks on each case of the loaded version. `cheaply`: for each case, whether a spot check is enough.

        If the spot check fails, a logprob is impossible, or grading takes too long, the whole case is prefilled after
        all. That prefill then decides.
        """
        examined = [self._check(FILE, Examined(case, None)) for case in cases]
        share_s = self.grading_s / max(len(cases), 1)
        cheap = [n for n, result in enumerate(examined) if result.finding is None and cheaply and cheaply[n]]
        done = set()
        for n, passed in zip(cheap, self._spot_checked([cases[n] for n in cheap]), strict=True):
            if passed:
                graded, in_time = self._graded(examined[n], min(self._prefill_s(cases[n]), share_s / 4))
                if in_time:
                    examined[n] = graded
                    done.add(n)
        waiting = [n for n, result in enumerate(examined) if result.finding is None and n not in done]
        for n, case in zip(waiting, self._prefilled_whole([cases[n] for n in waiting]), strict=True):
            examined[n] = self._check(_expensive(case), replace(examined[n], case=case))
        for n in waiting:
            examined[n], _ = self._graded(examined[n], share_s)
        return examined

    def _spot_checked(self, cases: Sequence[Case]) -> list[bool]:
        """Draw and prefill a few rollouts of each case. Return, for each case, whether these rollouts pass and all the
        case's logprobs are plausible."""
        spots = [self._some_rollouts(case) for case in cases]
        checked = [run(_expensive(spot), self.rules, spot) for spot in self.prefill(spots)]
        return [plausible(case) and outcome.finding is None for case, outcome in zip(cases, checked, strict=True)]

    def _some_rollouts(self, case: Case) -> Case:
        chosen = sorted(self.choose(range(len(case.rows)), min(SPOT_ROLLOUTS, len(case.rows))))
        return replace(case, rows=[case.rows[number] for number in chosen])

    def examine_cheaply(self, case: Case) -> Examined:
        """Run the checks that need no prefill, those of the file and of the environment's answers, and grade."""
        return self._graded(self._check(FILE, Examined(case, None)), self.grading_s)[0]

    def _graded(self, result: Examined, timeout_s: float) -> tuple[Examined, bool]:
        """Query the environment again, and grade. Also return whether `timeout_s` was enough."""
        self.budget.start(timeout_s)
        try:
            result = self._check(ANSWERS, result)
            if result.finding is None:
                result = replace(result, case=self.grade(result.case))
            return result, not self.budget.over
        finally:
            self.budget.stop()

    def _prefill_s(self, case: Case) -> float:
        """Estimate the time of a prefill of the whole case."""
        return max(self.position_s * _positions(case), MIN_GRADING_S)

    def _prefilled_whole(self, cases: Sequence[Case]) -> list[Case]:
        start_s = self.budget.clock()
        prefilled = self.prefill(cases)
        if cases:
            self.position_s = (self.budget.clock() - start_s) / sum(map(_positions, cases))
        return prefilled

    def _check(self, checks: Sequence[Check], result: Examined) -> Examined:
        if result.finding:
            return result
        outcome = run(checks, self.rules, result.case)
        return replace(result, finding=outcome.finding, evidence={**result.evidence, **outcome.evidence})

    def grade(self, case: Case) -> Case:
        """Return the case with rewards recomputed from its last turns. Raise GradeError.

        The case must have passed `bounds`. If the time budget ends before a group is graded, all its rollouts get the
        grade LATE.
        """
        grades: list[Grade] = []
        for group, members in groupby(case.rows, key=lambda row: row.group):
            texts = [completion_text(self.tokenizer, last_turn(row.turns, row.tokens)) for row in members]
            graded = [] if self.budget.over else self.graders.grade([case.tasks[group]] * len(texts), texts)
            grades += [LATE] * len(texts) if self.budget.over else graded
        rewards = [
            reward(
                grade.score,
                model_tokens(row.turns, len(row.tokens)),
                case.plans[row.group].target_length,
                self.config.tasks,
            )
            for grade, row in zip(grades, case.rows, strict=True)
        ]
        return replace(case, rewards=rewards, grades=grades)

    def prefill(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases with the results of one forward pass of the loaded version over all of them."""
        if not cases:
            return []
        cases = [replace(case, rows=list(case.rows)) for case in cases]  # they are read many times from here on
        results = prefill(self.model, cases, temperature=self.config.sampling.temperature, row_tokens=self.row_tokens)
        return [replace(case, prefill=result) for case, result in zip(cases, results, strict=True)]

    def accepted_file(self, case: Case, identity: Identity) -> bytes:
        """Return the accepted case as a file for the learner, signed by the validator."""
        rows = [
            AcceptedRollout(
                group=row.group,
                task=case.tasks[row.group].id,
                prompt=case.prompts[row.group],
                tokens=row.tokens,
                logprobs=logprobs,
                reward=reward,
                turns=row.turns,
            )
            for row, logprobs, reward in zip(case.rows, _logprobs(case), case.rewards, strict=True)
        ]
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=self.run,
            step=case.assignment.step,
            policy_version=case.assignment.policy_version,
            policy_digest=case.assignment.policy_digest,
            worker=case.worker,
            submission=case.assignment.number,
            nonce=case.assignment.nonce,
            groups=case.assignment.groups,
            signer=identity.public,
            graded_with=tasks.versions(),
            prefilled=case.prefill is not None,
        )
        return write_accepted(header, rows, identity)

    @property
    def tokenizer(self) -> Any:
        return self.rules.tokenizer

    @property
    def rules(self) -> Rules:
        if self._rules is None:
            raise RuntimeError("load() must run before a file can be judged")
        return self._rules


def _expensive(case: Case) -> list[Check]:
    return [*EXPENSIVE, *EXACT] if case.exact else EXPENSIVE


def _positions(case: Case) -> int:
    """Return the number of tokens that a prefill of the case processes."""
    groups = {row.group for row in case.rows}
    return sum(len(row.tokens) for row in case.rows) + sum(len(case.prompts[group]) for group in groups)


def plausible(case: Case) -> bool:
    """Return whether sampling could give every logprob. The learner would drop a group with an impossible logprob."""
    return all(logprob >= LOWEST_LOGPROB for row in case.rows for logprob in row.logprobs)


def _logprobs(case: Case) -> list[list[float]]:
    if case.prefill is None:
        return [row.logprobs for row in case.rows]
    return [part.tolist() for part in torch.split(case.prefill.logprobs_N, case.prefill.lengths)]
