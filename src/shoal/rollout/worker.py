"""The worker: takes a task, generates, proves, signs, hands in. Untrusted, outbound only.

Invariant: everything in a submission follows from its assignment and the weights; the worker chooses nothing.
Called by `shoal worker`. It meets the rest of the system only through messages and files.
Left out: several submissions in flight, and engines other than torch.
"""

import threading
from pathlib import Path
from typing import Any

from shoal import tasks, toploc
from shoal.config import Config
from shoal.messages import Assignment, Stored
from shoal.model.load import eos_ids, load_tokenizer
from shoal.node import Node, RefusedError
from shoal.rollout.engine import Completion, Engine, Sampling
from shoal.shardcast import Client, FetchError, Manifest
from shoal.shardcast.follow import Follower
from shoal.store.rollouts import SCHEMA_VERSION, Header, Rollout, write_submission
from shoal.tasks.derive import GroupPlan, plan_groups
from shoal.tasks.prompt import completion_text, prompt_tokens, reward

IDLE_S = 0.1
PROOF_CHUNK_TOKENS = 32


class Worker:
    def __init__(self, node: Node, config: Config, engine: Engine) -> None:
        self.node = node
        self.config = config
        self.engine = engine
        self.tasks = tasks.load(config.tasks)
        self.tokenizer: Any = None
        self.sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, ())

    def run(self, follower: Follower, stop: threading.Event) -> str:
        """Work until the run ends, this worker is evicted, or `stop`. Returns which."""
        while not stop.is_set():
            self.take_weights(follower.newest())
            answer = self.node.beat(wants_task=True)
            if answer.state != "running":
                return answer.state
            if answer.assignment is None:
                self.node.doing(follower.last_error or answer.waiting_for, waiting=True)
                stop.wait(IDLE_S)
                continue
            self.node.doing(f"generating for step {answer.assignment.step}")
            rollouts = self.generate(answer.assignment)
            self.hand_in(answer.assignment, rollouts)
        return "stopped"

    def take_weights(self, newest: tuple[Path, Manifest] | None) -> None:
        """Swap in a newer version, between two submissions."""
        if newest is None or newest[1].version == self.node.policy_version:
            return
        folder, manifest = newest
        self.node.doing(f"loading version {manifest.version}")
        self.engine.load(folder)
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(folder)
            self.sampling = Sampling(self.sampling.temperature, self.sampling.max_tokens, eos_ids(folder))
        self.node.policy_version = manifest.version

    def generate(self, assignment: Assignment) -> list[Rollout]:
        """Every rollout of the submission, in order, with its proofs."""
        plans = self.plan(assignment)
        prompts = [self._prompt(plan) for plan in plans]
        groups = self.engine.generate(prompts, [plan.seeds for plan in plans], self.sampling)
        completions = [completion for group in groups for completion in group]
        proofs = toploc.build_many([c.hidden_TH for c in completions], chunk_tokens=PROOF_CHUNK_TOKENS)
        self.node.tokens += sum(len(c.tokens) for c in completions)
        rollouts: list[Rollout] = []
        for number, plan in enumerate(plans):
            for seed, completion in zip(plan.seeds, groups[number], strict=True):
                rollouts.append(self._rollout(number, plan, seed, completion, proofs[len(rollouts)]))
        return rollouts

    def hand_in(self, assignment: Assignment, rollouts: list[Rollout]) -> None:
        """Sign and upload. A refusal (too late, evicted) costs this submission only."""
        header = Header(
            schema_version=SCHEMA_VERSION,
            run=self.node.invite.run,
            step=assignment.step,
            policy_version=assignment.policy_version,
            policy_digest=assignment.policy_digest,
            worker=self.node.identity.public,
            submission=assignment.number,
            signer=self.node.identity.public,
        )
        self.upload(assignment, write_submission(header, rollouts, self.node.identity))

    def upload(self, assignment: Assignment, data: bytes) -> None:
        try:
            self.node.put(assignment.upload_path, data, Stored)
        except RefusedError as refusal:
            if refusal.status != 409:
                raise
            self.node.doing(f"dropping {assignment.id}: {refusal}")

    def plan(self, assignment: Assignment) -> list[GroupPlan]:
        return plan_groups(
            run=self.node.invite.run,
            step=assignment.step,
            policy_digest=assignment.policy_digest,
            worker=self.node.identity.public,
            submission=assignment.number,
            groups=assignment.groups,
            group_size=self.config.sampling.group_size,
            n_tasks=len(self.tasks.train),
            length_targets=self.config.tasks.length_targets,
        )

    def _prompt(self, plan: GroupPlan) -> list[int]:
        task = self.tasks.train[plan.task_index]
        return prompt_tokens(self.tokenizer, self.config.tasks, task, plan.target_length)

    def _rollout(self, group: int, plan: GroupPlan, seed: int, completion: Completion, proofs: list[bytes]) -> Rollout:
        task = self.tasks.train[plan.task_index]
        grade = self.tasks.grade(task, completion_text(self.tokenizer, completion.tokens))
        alpha = self.config.tasks.length_penalty
        return Rollout(
            group=group,
            task=task.id,
            target_length=plan.target_length,
            seed=seed,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            reward=reward(grade, len(completion.tokens), plan.target_length, alpha),
            proofs=proofs,
        )


def follow(node: Node, config: Config, cache: Path, publisher: str) -> Follower:
    """A follower of the relays that the coordinator names in its heartbeat answers."""

    def wanted() -> int | None:
        return node.answer.newest_version if node.answer and node.answer.relays else None

    def client() -> Client:
        relays = node.answer.relays if node.answer else []
        if not relays:  # they were there when `wanted` looked
            raise FetchError("no relay is up at the moment")
        return Client(relays, public_key=publisher, cache=cache, run=node.invite.run)

    return Follower(wanted, client)
