"""Start each role that computes: check the device, join the pool, get config and tasks, build the role and run it.

Invariants: each `run_*` returns how the run ended. Only the functions that compute import torch, so that commands start
fast. Origin and relay are in `origin_and_relay`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config import Config, ConfigError, EngineName
from shoal.errors import UserError
from shoal.files import lock
from shoal.protocol.invite import Invite
from shoal.protocol.messages import Capability
from shoal.protocol.node import Node

if TYPE_CHECKING:
    from shoal.engine.protocol import Compute, Engine
    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import Ranks
    from shoal.model.dtype import DtypeName
    from shoal.tasks import TaskSet

LOCK = "node.lock"  # in a node's folder
TASKS = "tasks"  # in a node's folder: the fetched part of the task set
LEADER_TIMEOUT_S = 7 * 86_400.0  # limit of waiting for the leader's next batch, because a pool may be idle long

log = logging.getLogger(__name__)


# --- joining ---------------------------------------------------------------------------------------------------------


def join(
    invite: Invite, folder: Path, threads: int, stop: threading.Event, device: str = "", engine: str = "torch"
) -> tuple[Node, Config, DtypeName]:
    """Join the pool. Return the node, the run's config with this node's device, and the dtype for this machine.

    `device`: where to compute; "": the config's device.
    Raise UserError if another process uses the folder, RefusedError, DeviceError.
    """
    from shoal.model import dtype
    from shoal.model.dtype import set_threads

    folder.mkdir(parents=True, exist_ok=True)
    if not lock(folder / LOCK):
        raise UserError(f"another process uses {folder}: stop it first, or choose another --dir")
    set_threads(threads)
    node = Node.join(invite, folder, stop=stop, capability=capability(engine))
    config = node.config()
    if device:
        config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    return node, config, picked


def capability(engine: str = "torch") -> Capability:
    """Return what this machine reports about itself: its best device, and its engine."""
    import torch

    return Capability(device="cuda" if torch.cuda.is_available() else "cpu", engine=engine)


def task_set(node: Node, config: Config, folder: Path) -> TaskSet:
    """Return the pool's task set, which fetches tasks when they are needed. Raise TasksNotFoundError, RefusedError."""
    from shoal import tasks

    def fetch(sha256: str, most_bytes: int) -> bytes:
        return node.get_bytes(f"/v1/tasks/{sha256}", max_bytes=most_bytes)

    return tasks.join(config.tasks, folder / TASKS, fetch)


def fingerprinter(config: Config, dtype: DtypeName) -> Callable[[Any], str]:
    """Return a function that computes a model's fingerprint. Nodes send it in heartbeats to claim an exactness class.

    The fingerprint is "" if the numerics are fast or the machine fails the self-test, which runs at the first call.
    """
    from shoal.engine import selftest
    from shoal.engine.selftest import fingerprint
    from shoal.model import numerics

    passed: bool | None = None  # the self-test's result; None before it has run

    def fingerprint_of(model: Any) -> str:
        nonlocal passed
        if numerics.of(model) != "exact":
            return ""
        if passed is None:
            passed = selftest.passes(model, dtype, config.model.device)
            log.info("results on this machine %s on batch shapes", "do not depend" if passed else "depend")
        return fingerprint(model) if passed else ""

    return fingerprint_of


# --- worker, validator, evaluator ------------------------------------------------------------------------------------


def run_worker(
    invite: Invite,
    folder: Path,
    threads: int,
    stop: threading.Event,
    producer_type: type | None = None,
    engine: EngineName = "torch",
    device: str = "",
) -> str:
    """Follow the newest weights and generate rollouts. `producer_type`: `Producer`, or a dishonest one for tests."""
    from shoal.worker.loop import OneThread, Worker, follow
    from shoal.worker.produce import Producer

    node, config, dtype = join(invite, folder, threads, stop, device, engine)
    compute = OneThread()
    with node.heartbeats(), opened_engine(engine, config, dtype, threads, compute) as (opened, kind, fingerprint):
        publisher = node.wait_for_key("origin", stop)
        tasks = task_set(node, config, folder)
        producer = (producer_type or Producer)(config, node.invite.run, node.identity, opened, tasks, kind, compute)
        with closing(producer), follow(node, config, folder / "weights", publisher) as follower:
            return Worker(node, producer, fingerprint, compute).run(follower, stop)


@contextmanager
def opened_engine(
    name: EngineName, config: Config, dtype: DtypeName, threads: int, compute: Compute | None = None
) -> Iterator[tuple[Engine, str, Callable[[], str]]]:
    """Yield the engine, its kind in the headers of rollout files, and a function that returns its weights' fingerprint.

    `compute`: runs the torch engine's steps; None: the calling thread runs them.
    vLLM's results depend on its batches, so it claims no exactness class. Raise ShoalError.
    """
    device = config.model.device
    if name == "vllm":
        from shoal.engine.vllm.client import VllmEngine

        with closing(VllmEngine(dtype, threads)) as vllm:
            yield vllm, f"{name}/{device.partition(':')[0]}", lambda: ""
        return
    from shoal.engine.protocol import run_inline
    from shoal.engine.torch_engine import TorchEngine
    from shoal.model import numerics

    picked = numerics.pick(config.model.numerics, dtype, device)
    engine = TorchEngine(dtype, device, picked, compute=compute or run_inline)
    fingerprint_of = fingerprinter(config, dtype)
    yield engine, "", lambda: fingerprint_of(engine.model)


def run_validator(invite: Invite, folder: Path, threads: int, stop: threading.Event, device: str = "") -> str:
    from shoal.validator.service import Validator, Witness

    node, config, dtype = join(invite, folder, threads, stop, device)
    with node.heartbeats():
        publisher = node.wait_for_key("origin", stop)
        tasks = task_set(node, config, folder)
        fingerprint_of, witness = fingerprinter(config, dtype), Witness(node, folder)
        return Validator(node, config, folder / "weights", publisher, dtype, tasks, fingerprint_of, witness).run(stop)


def run_evaluator(invite: Invite, folder: Path, threads: int, stop: threading.Event, device: str = "") -> str:
    """Measure the held-out accuracy of published versions."""
    from shoal.engine.torch_engine import TorchEngine
    from shoal.evals.heldout import Evaluator
    from shoal.model import numerics

    node, config, dtype = join(invite, folder, threads, stop, device)
    with node.heartbeats():
        publisher = node.wait_for_key("origin", stop)

        def new_engine() -> TorchEngine:
            picked = numerics.pick(config.model.numerics, dtype, config.model.device)
            return TorchEngine(dtype, config.model.device, picked)

        tasks = task_set(node, config, folder)
        with closing(Evaluator(node, config, new_engine, folder / "weights", publisher, tasks)) as evaluator:
            return evaluator.run(stop)


# --- learner ---------------------------------------------------------------------------------------------------------


def run_learner(invite: Invite, folder: Path, threads: int, stop: threading.Event, site: Invite | None = None) -> str:
    """Load the policy and train it. Under torchrun, every rank runs this. Raise ShoalError.

    `site`: this site's invite, if the learner has several sites.
    """
    import torch

    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import RANKS_TIMEOUT_S, Ranks
    from shoal.model import numerics
    from shoal.model.sources import resolve

    ranks = Ranks.start(RANKS_TIMEOUT_S, LEADER_TIMEOUT_S)
    with _leading(invite, folder, threads, ranks, stop) as (node, config, dtype):
        _check_site(config, site)
        torch.manual_seed(config.run.seed)
        model = resolve(config.model.name)
        device = config.model.device
        picked = numerics.pick(config.model.numerics, dtype, device)
        policy = Policy(model, config.learner, dtype, device, config.sampling.temperature, ranks, picked)
        if ranks.leads:
            every = config.learner.steps_between_checkpoints(policy.trained)
            what = "%.0f million trained parameters on %d rank(s); a checkpoint every %d step(s)"
            log.info(what, policy.trained / 1e6, ranks.size, every)
        if site is None:
            learner = Learner(node, config, policy, folder)
        else:
            learner = _at_site(node, config, policy, folder, site, stop)
        ended = learner.run(stop)
    ranks.stop()
    return ended


def _check_site(config: Config, site: Invite | None) -> None:
    if config.learner.sites and site is None:
        why = "this run's learner is spread over several sites: add --site INVITE, which `shoal pool meet` writes"
        raise ConfigError(why)
    if site is not None and not config.learner.sites:
        why = "this run's learner is at one site, because its config has learner.sites = 0: leave out --site"
        raise ConfigError(why)


def _at_site(
    node: Node | None, config: Config, policy: Policy, folder: Path, site: Invite, stop: threading.Event
) -> Learner:
    from shoal.diloco.messages import name_of
    from shoal.diloco.remote import Remote
    from shoal.diloco.site import GIVE_UP_S
    from shoal.learner.sites import SiteLearner, learner_terms

    if node is None:
        return SiteLearner(None, config, policy, folder, name_of(site), None)
    terms = learner_terms(config, policy)
    remote = Remote(site, folder, terms, patience_s=GIVE_UP_S, stop=stop)
    return SiteLearner(node, config, policy, folder, remote.name, remote)


@contextmanager
def _leading(
    invite: Invite, folder: Path, threads: int, ranks: Ranks, stop: threading.Event
) -> Iterator[tuple[Node | None, Config, DtypeName]]:
    """On the leader, join the pool and broadcast config and dtype. On other ranks, receive them; the node is None.

    If the leader cannot join, all ranks raise ShoalError.
    """
    from shoal.learner.ranks import config_from_leader
    from shoal.model.dtype import set_threads

    if not ranks.leads:
        set_threads(threads)  # on the leader, `join` does
    node: Node | None = None
    with ExitStack() as stack:

        def read() -> tuple[Config, DtypeName]:
            nonlocal node
            node, config, dtype = join(invite, folder, threads, stop)
            stack.enter_context(node.heartbeats())  # also while the leader waits for the other ranks
            node.doing("loading the model")
            return config, dtype

        config, dtype = config_from_leader(ranks, read)
        yield node, config, dtype
