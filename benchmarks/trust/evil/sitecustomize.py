"""Patches that turn a run's learner or validator into a liar. Python imports this file first if its folder is in PYTHONPATH.

EVIL names the lie. Its first word is the role whose code is patched. A learner that lies also claims another machine,
so that an audit cannot expect the same bits.
"""

import os
from dataclasses import replace
from typing import Any

LIE = os.environ.get("EVIL", "")


def lie() -> None:
    from shoal.learner import report, updates
    from shoal.learner.policy import Policy
    from shoal.validator import judge

    published, train, rewards, logprobs = Policy.published, updates.train, judge.Judge.accepted_file, judge._logprobs
    if LIE.startswith("learner"):
        report._machine = lambda device: "x86_64, AVX2, another CPU"

    def scaled(policy: Any) -> Any:
        return ((name, tensor * (0.9 if policy.updates else 1.0)) for name, tensor in published(policy))

    def count(policy: Any) -> None:
        policy.before_update()
        policy.updates += 1

    if LIE == "learner scales":
        Policy.published = scaled  # type: ignore[method-assign]
    if LIE == "learner does not train":
        Policy._update_masters = count  # type: ignore[method-assign]
    if LIE == "learner trains half":
        updates.train = lambda policy, groups, config: train(policy, groups[: len(groups) // 2], config)
    if LIE == "learner trains less":
        Policy._warmed_up = lambda policy: policy.config.lr / 2  # type: ignore[method-assign]
    if LIE == "validator rewards":
        judge.Judge.accepted_file = lambda self, case, identity: rewards(  # type: ignore[method-assign]
            self, replace(case, rewards=[1.0 - reward for reward in case.rewards]), identity
        )
    if LIE == "validator prompts":
        judge.Judge.accepted_file = (
            lambda self, case, identity: rewards(  # type: ignore[method-assign]
                self, replace(case, prompts=[[*prompt[:-1], prompt[0]] for prompt in case.prompts]), identity
            )
        )
    if LIE == "validator logprobs":
        judge._logprobs = lambda case: [[value - 1.0 for value in row] for row in logprobs(case)]


if LIE:
    lie()
