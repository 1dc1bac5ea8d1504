"""Produces the submission for an assignment: one signed Parquet file with completions and proofs.

Invariant: everything in a submission follows from its assignment and the weights; the worker chooses nothing. It needs
only the tasks' prompts, so a pool's worker has no answers and no rewards.
Several threads may produce at once. They generate together, and do everything else one at a time. There are no network
requests here. A worker could lie in each method; each lie in `benchmarks/trust/adversary` overrides one of them.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal import tasks, toploc
from shoal.config import Config
from shoal.engine.protocol import Completion, Compute, Engine, Respond, Sampling, run_inline
from shoal.model.load import eos_ids, load_tokenizer
from shoal.model.sources import check_max_tokens
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment
from shoal.store.columns import PROOF_CHUNK_TOKENS
from shoal.store.rollouts import SCHEMA_VERSION, Header, Rollout, prompts_digest, write_submission
from shoal.tasks import TaskSet
from shoal.tasks.derive import GroupPlan, plan_submission
from shoal.tasks.environments import Conversation, close, environments_of
from shoal.tasks.prompt import prompt_tokens


class Producer:
    def __init__(
        self,
        config: Config,
        run: str,
        identity: Identity,
        engine: Engine,
        task_set: TaskSet | None = None,
        kind: str = "",
        compute: Compute = run_inline,
    ) -> None:
        """`task_set`: the pool's tasks. If it is None, they are built from the config's sources.

        `kind`: ENGINE/DEVICE for the files' headers, or "" for the torch engine. `compute` runs the computation of
        proofs.
        """
        self.compute = compute
        self.config = config
        self.run = run
        self.identity = identity
        self.engine = engine
        self.kind = kind
        self.tasks = task_set or tasks.load(config.tasks)
        self.environments = environments_of(config, self.tasks.files)
        self.tokenizer: Any = None
        self.conversation: Conversation | None = None
        self.sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, ())
        self.tokens = 0  # number of tokens generated so far
        self._lock = threading.Lock()  # guards tokenizer and counters

    def load(self, folder: Path, version: int) -> int | None:
        """Load a version's weights. Return the version to report to the coordinator, or None if not ready for tasks.

        Raise ShoalError if the model's context is too short for the run's completions.
        """
        check_max_tokens(folder, self.config.sampling.max_tokens)
        # Read the folder before the engine loads it. Loading may take long, and the folder may be removed meanwhile.
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(folder)
            self.sampling = replace(self.sampling, eos_ids=eos_ids(folder))
            tokenizer = load_tokenizer(folder)  # other threads use the first one meanwhile
            self.conversation = Conversation(self.config, self.environments, tokenizer, self.sampling.eos_ids)
        self.engine.load(folder)
        return version

    def close(self) -> None:
        """End the processes of environments."""
        close(self.environments)

    def submission(self, assignment: Assignment) -> bytes:
        """Return the signed file."""
        with self._lock:
            plans = self.plan(assignment)
            prompts = [self.prompt(plan) for plan in plans]
        groups = self.complete(prompts, plans)
        with self._lock:
            self.tokens += sum(len(completion.logprobs) for group in groups for completion in group)
            return self.sign(assignment, prompts, self.rollouts(plans, groups))

    def plan(self, assignment: Assignment) -> list[GroupPlan]:
        return plan_submission(self.config, self.run, assignment, self.identity.public, self.tasks)

    def prompt(self, plan: GroupPlan) -> list[int]:
        task = self.tasks.train[plan.task_index]
        return prompt_tokens(self.tokenizer, self.config.tasks, task, plan.target_length)

    def complete(self, prompts: Sequence[Sequence[int]], plans: Sequence[GroupPlan]) -> list[list[Completion]]:
        return self.engine.generate(prompts, [plan.seeds for plan in plans], self.sampling, self.responder(plans))

    def responder(self, plans: Sequence[GroupPlan]) -> Respond:
        """Return the engine's `Respond` function for these groups. It returns the answer of a task's environment."""

        def respond(group: int, number: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
            return self.reply(plans[group], plans[group].seeds[number], tokens, turns)

        return respond

    def reply(self, plan: GroupPlan, seed: int, tokens: Sequence[int], turns: Sequence[int]) -> list[int] | None:
        assert self.conversation is not None, "load() must run first"
        return self.conversation.reply(self.tasks.train[plan.task_index], seed, tokens, turns)

    def rollouts(self, plans: Sequence[GroupPlan], groups: Sequence[Sequence[Completion]]) -> list[Rollout]:
        """Return the file's rows, group by group, with proofs."""
        proofs = iter(self.compute(lambda: self.prove([completion for group in groups for completion in group])))
        return [
            Rollout(
                group=number,
                target_length=plan.target_length,
                seed=seed,
                tokens=completion.tokens,
                logprobs=completion.logprobs,
                proofs=next(proofs),
                turns=completion.turns,
            )
            for number, (plan, group) in enumerate(zip(plans, groups, strict=True))
            for seed, completion in zip(plan.seeds, group, strict=True)
        ]

    def prove(self, completions: Sequence[Completion]) -> list[list[bytes]]:
        return toploc.build_many([c.hidden_TH for c in completions], chunk_tokens=PROOF_CHUNK_TOKENS)

    def sign(self, assignment: Assignment, prompts: Sequence[Sequence[int]], rollouts: list[Rollout]) -> bytes:
        """Return the file. Its signature binds the rows to run, step, policy, worker, submission and prompts."""
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=self.run,
            step=assignment.step,
            policy_version=assignment.policy_version,
            policy_digest=assignment.policy_digest,
            worker=self.identity.public,
            submission=assignment.number,
            nonce=assignment.nonce,
            groups=assignment.groups,
            signer=self.identity.public,
            prompts=prompts_digest(prompts),
            engine=self.kind,
        )
        return write_submission(header, rollouts, self.identity)
