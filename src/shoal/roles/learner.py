"""`shoal learner`: joins as the learner, loads the policy and trains until the run ends. Under torchrun, on every rank; with
an invite of `shoal meet`, as one of several sites."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import config as config_module
from shoal.config import Config, ConfigError
from shoal.protocol.invite import Invite
from shoal.protocol.node import Node
from shoal.roles.joining import join

if TYPE_CHECKING:
    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import Ranks
    from shoal.model.dtype import DtypeName

log = logging.getLogger(__name__)

LEADER_TIMEOUT_S = 7 * 86_400.0  # a rank waits for the leader's next batch as long as a pool may be idle
RANKS_TIMEOUT_S = 1800.0  # and for another rank in a collective: longer than any row, load or file takes


def run_learner(invite: Invite, folder: Path, threads: int, stop: threading.Event, site: Invite | None = None) -> str:
    """Returns how the run ended. `site`: of the sites' meeting. Raises NodeError, DivergedError, OutOfMemoryError."""
    import torch

    from shoal.learner import footprint
    from shoal.learner.loop import Learner
    from shoal.learner.policy import Policy
    from shoal.learner.ranks import Ranks
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
        numerics.insist(config.model.numerics, policy.model)  # before anybody gets a version
        if ranks.leads:
            log.info("%s", "; ".join(footprint.lines(config, policy)))
        if site is None:
            learner = Learner(node, config, policy, folder)
        else:
            learner = _at_site(node, config, policy, folder, site, stop)
        ended = learner.run(stop)
    ranks.stop()
    return ended


def _check_site(config: Config, site: Invite | None) -> None:
    if config.learner.sites and site is None:
        raise ConfigError(
            "this run's learner is spread over several sites: add --site INVITE, which `shoal meet` writes"
        )
    if site is not None and not config.learner.sites:
        raise ConfigError(
            "this run's learner is at one site, because its config has no [learner.sites]: leave out --site"
        )


def _at_site(
    node: Node | None, config: Config, policy: Policy, folder: Path, site: Invite, stop: threading.Event
) -> Learner:
    from shoal.diloco.invites import name_of
    from shoal.diloco.remote import Remote
    from shoal.learner.sites import SiteLearner, learner_terms, settings_of

    if node is None:
        return SiteLearner(None, config, policy, folder, name_of(site), None, None)
    settings = settings_of(config)
    terms = learner_terms(config, policy)
    authority = Path(settings.tls_ca) if settings.tls_ca else None
    remote = Remote(site, folder, terms, patience_s=settings.give_up_s, authority=authority, stop=stop)
    return SiteLearner(node, config, policy, folder, remote.name, remote, remote)


@contextmanager
def _leading(
    invite: Invite, folder: Path, threads: int, ranks: Ranks, stop: threading.Event
) -> Iterator[tuple[Node | None, Config, DtypeName]]:
    """The leader joins the pool and broadcasts config and dtype to the other ranks, which have no node."""
    from shoal.model.threads import compute_on

    if not ranks.leads:
        compute_on(threads)
        received = json.loads(ranks.broadcast(None))
        yield None, config_module.parse(received["config"]), received["dtype"]
        return
    node, config, dtype = join(invite, folder, threads, stop)
    with node.heart():
        node.doing("loading the model")
        ranks.broadcast(json.dumps({"config": config.model_dump(exclude_none=True), "dtype": dtype}).encode())
        yield node, config, dtype
