"""Judges files: bytes and an assignment in, a verdict and the accepted file out. No network, no clock.

    open     a file becomes a Case, or a Finding where it is no rollout file under a good signature
    examine  cheap checks of each case, one prefill of all that passed, dear checks of each

Invariant: it accepts nothing that it has not recomputed; the accepted file holds its own prompts, rewards and logprobs
(but for those that it was told not to prefill: their logprobs are the worker's).
Called by the validator's service, `shoal verify`, `shoal calibrate` and the attack matrix.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from shoal import tasks
from shoal.config import Config
from shoal.model.dtype import DtypeName
from shoal.model.load import eos_ids, load_model, load_tokenizer, load_weights_
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, GroupResult, Reason, Sample
from shoal.store.quarantine import Quarantine
from shoal.store.rollouts import (
    SCHEMA_VERSION,
    AcceptedRollout,
    BadSignatureError,
    Header,
    RolloutFileError,
    read_submission,
    write_accepted,
)
from shoal.tasks.derive import plan_groups
from shoal.tasks.prompt import completion_text, prompt_tokens, rewards_differ
from shoal.validator.case import Case, Finding
from shoal.validator.checks import CHEAP, DEAR, Rules, first
from shoal.validator.prefill import prefill

SAMPLE_CHARACTERS = 2_000  # of a prompt or a completion that people are shown


class Judge:
    def __init__(self, config: Config, run: str, dtype: DtypeName) -> None:
        self.config = config
        self.run = run
        self.dtype = dtype
        self.tasks = tasks.load(config.tasks)
        max_rows = config.workers.groups_per_submission * config.sampling.group_size
        self.quarantine = Quarantine(max_rows, config.sampling.max_tokens)
        self.model: Any = None
        self.rules: Rules | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.quarantine.close()

    def load(self, folder: Path) -> None:
        """Hold the weights of the version in `folder`."""
        if self.model is not None:
            load_weights_(self.model, folder)
            return
        self.model = load_model(folder, self.dtype, self.config.model.device)
        tokenizer, ends = load_tokenizer(folder), eos_ids(folder)
        self.rules = Rules(
            config=self.config,
            run=self.run,
            tasks=self.tasks,
            tokenizer=tokenizer,
            eos_ids=ends,
            special_ids=frozenset(tokenizer.all_special_ids) - frozenset(ends),
            vocabulary=self.model.config.vocab_size,
        )

    def open(self, assignment: Assignment, worker: str, data: bytes) -> Case | Finding:
        """Read a file, first in quarantine. Raises nothing for a bad one."""
        size = self.config.sampling.group_size
        try:
            self.quarantine.check(data)
            file = read_submission(data, max_rows=assignment.groups * size, max_tokens=self.config.sampling.max_tokens)
        except BadSignatureError as error:
            return Finding(Reason.SIGNATURE, str(error))
        except RolloutFileError as error:
            return Finding(Reason.UNREADABLE, str(error))
        plans = plan_groups(
            run=self.run,
            step=assignment.step,
            policy_digest=assignment.policy_digest,
            worker=worker,
            submission=assignment.number,
            groups=assignment.groups,
            group_size=size,
            n_tasks=len(self.tasks.train),
            length_targets=self.config.tasks.length_targets,
        )
        chosen = [self.tasks.train[plan.task_index] for plan in plans]
        tokenizer = self._rules().tokenizer
        return Case(
            assignment=assignment,
            worker=worker,
            header=file.header,
            rows=file.rows,
            plans=plans,
            tasks=chosen,
            prompts=[
                prompt_tokens(tokenizer, self.config.tasks, task, plan.target_length)
                for task, plan in zip(chosen, plans, strict=True)
            ],
        )

    def examine(self, cases: Sequence[Case], *, cheaply: Sequence[bool] | None = None) -> list[Finding | None]:
        """A finding for each case, None where it is accepted. `cheaply`: which ones to accept without a prefill.

        All must be of the version that was loaded.
        """
        if not cases:
            return []
        rules = self._rules()
        found = [first(CHEAP, rules, case) for case in cases]
        dear = [n for n, finding in enumerate(found) if finding is None and not (cheaply and cheaply[n])]
        if dear:
            self.prefill([cases[n] for n in dear])
        for n in dear:
            found[n] = first(DEAR, rules, cases[n])
        return found

    def prefill(self, cases: Sequence[Case]) -> None:
        prefill(
            self.model,
            cases,
            temperature=self.config.sampling.temperature,
            row_tokens=self.config.validator.row_tokens,
        )

    def accepted_file(self, case: Case, identity: Identity) -> bytes:
        """What the learner reads of an accepted case, under the validator's signature."""
        rows = [
            AcceptedRollout(
                group=row.group,
                task=row.task,
                prompt=case.prompts[row.group],
                tokens=row.tokens,
                logprobs=logprobs,
                reward=reward,
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
            signer=identity.public,
        )
        return write_accepted(header, rows, identity)

    @property
    def tokenizer(self) -> Any:
        return self._rules().tokenizer

    def _rules(self) -> Rules:
        if self.rules is None:
            raise RuntimeError("load() must run before a file can be judged")
        return self.rules


def group_results(case: Case, tokenizer: Any) -> list[GroupResult]:
    """Each group of an accepted case as recomputed, with its first completion for people to read."""
    size = case.group_size
    results = []
    for start in range(0, len(case.rows), size):
        rewards = case.rewards[start : start + size]
        row = case.rows[start]
        sample = Sample(
            task=row.task[:200],
            prompt=_cut(completion_text(tokenizer, case.prompts[row.group])),
            completion=_cut(completion_text(tokenizer, row.tokens)),
            reward=rewards[0],
            tokens=len(row.tokens),
        )
        results.append(
            GroupResult(
                reward_mean=sum(rewards) / size,
                useful=rewards_differ(rewards),
                tokens=sum(len(row.tokens) for row in case.rows[start : start + size]),
                sample=sample,
            )
        )
    return results


def _cut(text: str) -> str:
    """At most SAMPLE_CHARACTERS of a text: its beginning and its end."""
    if len(text) <= SAMPLE_CHARACTERS:
        return text
    half = (SAMPLE_CHARACTERS - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def _logprobs(case: Case) -> list[list[float]]:
    if case.prefill is None:
        return [row.logprobs for row in case.rows]
    return [part.tolist() for part in torch.split(case.prefill.logprobs_N, case.prefill.lengths)]
