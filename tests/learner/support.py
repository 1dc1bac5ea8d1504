"""Makes policies, groups, accepted files and stubs of the pool for the learner's tests."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.config import Config, parse
from shoal.config.recipe import LearnerSection, LossSection
from shoal.diloco.messages import name_of
from shoal.diloco.remote import Remote
from shoal.learner.batch import MicroBatch, micro_batches
from shoal.learner.groups import Group
from shoal.learner.loop import Learner
from shoal.learner.policy import Policy
from shoal.learner.ranks import Ranks
from shoal.learner.sites import SiteLearner, learner_terms
from shoal.model.dtype import DtypeName
from shoal.model.numerics import Numerics
from shoal.protocol.identity import Identity
from shoal.protocol.invite import read_invite
from shoal.protocol.messages import Batch, BatchGroup, Ok, StepReport
from shoal.store.rollouts import SCHEMA_VERSION, AcceptedRollout, Header, write_accepted

VALIDATOR, STRANGER = Identity.generate(), Identity.generate()
LEARNER = Identity(Ed25519PrivateKey.from_private_bytes(bytes([3]) * 32))  # the same in every process of a test


def make_policy(
    folder: Path,
    *,
    loss: dict[str, Any] | None = None,
    temperature: float = 1.0,
    dtype: DtypeName = "float32",
    ranks: Ranks | None = None,
    device: str = "cpu",
    numerics: Numerics = "fast",
    **changed: Any,
) -> Policy:
    """Make a policy with the weights in `folder`.

    By default it has a learning rate of 1e-3 without warm-up, and neither a KL penalty nor an entropy bonus.
    """
    settings = {"lr": 1e-3, "warmup_steps": 0, "grad_clip": 1.0} | changed
    section = LearnerSection(**settings, loss=LossSection(**{"beta": 0.0, "entropy": 0.0} | (loss or {})))
    return Policy(folder, section, dtype, device, temperature, ranks, numerics=numerics)


def make_groups() -> list[Group]:
    """Make three groups, each of four completions of different lengths."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number in range(3):
        completions = [torch.randint(4, 60, (n,), generator=draw).tolist() for n in (3, 5, 4, 2)]
        behaviour = [[-4.0] * len(tokens) for tokens in completions]
        made.append(Group(f"s{number}", 0, [2, 10 + number, 20], completions, behaviour, [0.0, 1.0, 0.0, 1.0]))
    return made


N_TOKENS = sum(group.n_tokens for group in make_groups())


def batches(row_tokens: int = 64) -> list[MicroBatch]:
    """Pack the groups of `make_groups` into rows."""
    return micro_batches(make_groups(), row_tokens=row_tokens, normalize_std=False)


def masters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in policy.masters.items()}


def state(policy: Policy) -> dict[str, torch.Tensor]:
    """Copy everything that an update changes: masters, weights and optimizer state."""
    result = {f"model/{name}": parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    for name, master in policy.masters.items():
        result[name] = master.detach().clone()
        for key, value in policy.optimizer.state[master].items():
            result[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return result


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alone(folder: Path, out: Path, *, kind: str = "grpo", max_tokens: int = 16, **changed: Any) -> Learner:
    """Make a learner without a node. It can train on groups, but publishes nothing."""
    section: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 0} | changed
    section["loss"] = {"kind": kind, "beta": 0.0, "entropy": 0.0}
    batch = {"sampling": {"max_tokens": max_tokens}, "coordinator": {"prompts_per_step": 48}}
    config = parse({"learner": section} | batch)
    return Learner(None, config, Policy(folder, config.learner, "float32", "cpu", 1.0), out)


# --- accepted files ---------------------------------------------------------------------------------------------------


def submission(number: int) -> str:
    return f"{'a' * 16}-{number:06d}"


def rollouts(groups: int = 3, size: int = 2, task: str = "1+1") -> list[AcceptedRollout]:
    return [
        AcceptedRollout(group, task, [4 + group, 5], [10 * (group + 1) + i, 2], [-0.5, -0.25], float(i))
        for group in range(groups)
        for i in range(size)
    ]


def accepted(
    number: int = 0,
    *,
    version: int = 4,
    run: str = "run",
    worker: str = "a" * 64,
    rows: list[AcceptedRollout] | None = None,
    by: Identity = VALIDATOR,
    prefilled: bool = True,
) -> bytes:
    header = Header(
        schema_version=SCHEMA_VERSION,
        run=run,
        step=4,
        policy_version=version,
        policy_digest="0" * 64,
        worker=worker,
        submission=number,
        nonce="0" * 32,
        signer=by.public,
        prefilled=prefilled,
    )
    return write_accepted(header, rollouts(task=f"{number}+1") if rows is None else rows, by)


class Store:
    """A stub of the leader's node that has accepted files and the validators' keys."""

    def __init__(self, *files: bytes, validator: str = VALIDATOR.public) -> None:
        self.files = {f"/v1/accepted/{submission(i)}": data for i, data in enumerate(files)}
        self.invite = SimpleNamespace(run="run")
        self.validator = validator
        self.requests: list[str] = []

    def descriptor(self) -> Any:
        return SimpleNamespace(keys={"validator": [self.validator], "worker": [STRANGER.public]})

    def fetch_file(self, path: str, *, max_bytes: int) -> bytes:
        self.requests.append(path)
        return self.files[path]


# --- a run without a pool ---------------------------------------------------------------------------------------------

GROUPS, SIZE = 5, 4  # groups in a step's only file, and completions in a group
RUN = {
    "sites": {"kind": "fp64", "wait_s": 10.0},  # used if learner.sites is set
    "run": {"steps": 3},
    "coordinator": {"prompts_per_step": GROUPS, "async_level": 2},
    "workers": {"groups_per_submission": GROUPS},
    "sampling": {"group_size": SIZE, "max_tokens": 12},
}
SETTINGS = {
    "lr": 1e-3,
    "warmup_steps": 2,
    "grad_clip": 1.0,
    "row_tokens": 40,  # a row holds one group, so a step has five rows
    "optimizer_steps_per_step": 1,
    "keep_versions": 99,
    "keep_last": 99,
    "loss": {"beta": 0.01, "entropy": 0.001},
}


def run_config(steps: int, changed: dict[str, Any]) -> Config:
    return parse(RUN | {"run": {"steps": steps}, "learner": SETTINGS | changed})


def step_file(step: int) -> bytes:
    """Return the accepted file of a step: five groups, each of which fills a row."""
    draw = torch.Generator().manual_seed(step)
    rows = []
    for group in range(GROUPS):
        prompt = torch.randint(4, 60, (9,), generator=draw).tolist()
        for i in range(SIZE):
            length = 3 + int(torch.randint(0, 4, (1,), generator=draw))
            tokens = torch.randint(4, 60, (length,), generator=draw).tolist()
            rows.append(AcceptedRollout(group, "1+1", prompt, tokens, [-4.0] * length, float((i + group) % 3)))
    return accepted(step, version=step, rows=rows)


class Pool(Store):
    """A stub of the leader's node. The batch of step s holds the groups of file s. The stub keeps the reports."""

    def __init__(self, *files: bytes, validator: str = VALIDATOR.public) -> None:
        super().__init__(*files, validator=validator)
        self.policy_version: int | None = None
        self.identity = LEARNER
        self.reports: list[StepReport] = []
        self.activities: list[str] = []

    def doing(self, what: str, *, waiting: bool = False) -> None:
        self.activities.append(what)

    def get(self, path: str, kind: type[Batch]) -> Batch:
        step = int(path.removeprefix("/v1/batches/"))
        groups = [BatchGroup(submission=submission(step), group=group) for group in range(GROUPS)]
        return kind(step=step, ready=True, groups=groups)

    def post(self, path: str, message: StepReport, kind: type[Ok]) -> Ok:
        assert path == "/v1/steps"
        self.reports.append(message)
        return kind()


class SitePool(Pool):
    """A `Pool` that also tells sites how many steps have been reported."""

    def get(self, path: str, kind: Any) -> Any:
        if path == "/v1/status":
            return SimpleNamespace(trained=len({report.step for report in self.reports}))
        return super().get(path, kind)


def make_learner(
    model: Path,
    out: Path,
    pool: Pool | None,
    *,
    steps: int,
    dtype: DtypeName = "float32",
    ranks: Ranks | None = None,
    **changed: Any,
) -> Learner:
    """Make a learner as `shoal learner` does. `pool` is None on ranks other than the leader."""
    config = run_config(steps, changed)
    torch.manual_seed(config.run.seed)
    policy = Policy(model, config.learner, dtype, "cpu", config.sampling.temperature, ranks)
    return Learner(pool, config, policy, out)  # type: ignore[arg-type]


def make_site_learner(
    invite: Path, model: Path, out: Path, pool: Pool | None, *, steps: int, ranks: Ranks, **changed: Any
) -> SiteLearner:
    """Make the learner of the site that this invite names. It calls its meeting over HTTP."""
    plain = make_learner(model, out, pool, steps=steps, ranks=ranks, **changed)
    read, terms = read_invite(str(invite)), learner_terms(plain.config, plain.policy)
    link = Remote(read, out, terms, patience_s=60.0) if ranks.leads else None
    return SiteLearner(plain.node, plain.config, plain.policy, out, name_of(read), link)


class StopsAfter(threading.Event):
    """An event that counts as set after `n` calls of `is_set`. Training calls it once per step."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0
