"""Where the sites of one training meet: `shoal pool meet`.

`shoal pool meet` writes an invite for each site and serves until the last round is over and every site has left: with
`learner.sites` those of a run's learner, else those that train on plain text.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import read_config
from shoal.cli.launch import process
from shoal.config import Config
from shoal.protocol.identity import Identity
from shoal.protocol.invite import run_id

if TYPE_CHECKING:
    from shoal.diloco.meeting import Meeting

VERSIONS = "versions"  # in the meeting's folder; the origin watches it

log = logging.getLogger(__name__)


def meet(arguments: argparse.Namespace) -> None:
    """Serve the sites' meeting until the last round, or until SIGINT or SIGTERM."""
    config = read_config(arguments)
    stop = process.begin("meet", threads=arguments.threads)
    asyncio.run(_meet(config, arguments.dir, arguments.config.stem, stop))


async def _meet(config: Config, folder: Path, name: str, stop: threading.Event) -> None:
    from shoal.diloco.messages import site_invite
    from shoal.diloco.serve import MeetingServer, serve
    from shoal.protocol.node import KEY
    from shoal.shardcast.server import url_of

    identity = Identity.load_or_create(folder / KEY)
    run = run_id(name, identity.public)
    open_meeting = learner_meeting if config.learner.sites else _pretraining_meeting
    meeting, settings = open_meeting(config, folder, run), config.sites
    server = MeetingServer(meeting, identity)
    runner, port = await serve(server, settings.host, port=settings.port, listening=folder / "port")
    try:
        url = settings.url or url_of(settings.host, port)
        for number in range(settings.sites):
            site_invite(identity, url, run, f"site-{number}").save(folder / "invites" / f"site-{number}.invite")
        log.info("listening at %s; invites for %d sites are in %s", url, settings.sites, folder / "invites")
        await server.live(stop.is_set)
    finally:
        await runner.cleanup()
    log.info("%s after round %d of %d", "over" if meeting.over else "stopped", meeting.round, meeting.terms.rounds)


def _pretraining_meeting(config: Config, folder: Path, run: str) -> Meeting:
    from shoal.cli.launch.prepare import model_folder
    from shoal.diloco.agreed import Agreed, Shapes
    from shoal.diloco.meeting import Meeting
    from shoal.learner.pretrain.trainer import about, terms_of
    from shoal.model.load import load_model

    where = model_folder(config.model.name)
    seed = config.run.seed if config.pretrain.init == "random" else None
    tensors = dict(load_model(where, seed=seed).named_parameters())
    terms = terms_of(config, Shapes.of(tensors))
    wanted = about(config, where, None, sites=True)
    return Meeting(folder, terms, wanted, run, lambda: Agreed.of(tensors, terms.shapes))


def learner_meeting(config: Config, folder: Path, run: str) -> Meeting:
    """Return the meeting of a learner's sites, opened with the run's model; it writes each agreed state as a policy version.

    Version v is what all sites hold before step v. Raises MeetingError if the folder holds another run's meeting.
    """
    import torch

    from shoal.diloco.agreed import Agreed
    from shoal.diloco.meeting import Meeting
    from shoal.learner.policy import Policy
    from shoal.learner.sites import Publisher, about_of, learner_terms
    from shoal.model.sources import resolve

    section = config.learner
    section = section.model_copy(update={"loss": section.loss.model_copy(update={"beta": 0.0})})  # no reference
    torch.manual_seed(config.run.seed)  # adapters begin with random numbers: those of a learner at one site
    policy = Policy(resolve(config.model.name), section, "float32", "cpu", config.sampling.temperature)
    terms = learner_terms(config, policy)
    publisher = Publisher(policy, terms.shapes, folder / VERSIONS, section.keep_versions)
    first = Agreed.of(policy.masters, terms.shapes)
    return Meeting(folder, terms, about_of(config.sites, policy), run, lambda: first, publish=publisher)
