"""`shoal meet CONFIG --dir DIR`: where the sites of one training meet. It writes an invite for each site, and serves until
the last round is over and every site has left.

The config says what is trained: with `learner.sites` a run's learner, else plain text.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, add_command, read_config, takes_config, takes_threads
from shoal.cli.launch import process
from shoal.cli.pretrain import model_of
from shoal.config import Config
from shoal.protocol.identity import Identity
from shoal.protocol.invite import run_id

if TYPE_CHECKING:
    from shoal.diloco.meeting import Meeting

log = logging.getLogger(__name__)


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(commands, "meet", "where the sites of one training meet", "configs/pretrain.toml --dir meet")
    takes_config(parser)
    takes_threads(parser)
    parser.add_argument("--dir", type=Path, required=True, help="folder for the key, the invites and what is agreed")


def run_meet(arguments: argparse.Namespace) -> None:
    """Serve the sites' meeting until the last round, or until SIGINT or SIGTERM."""
    config = read_config(arguments)
    stop = process.begin("meet", threads=arguments.threads)
    asyncio.run(_meet(config, _opener(config), arguments.dir, arguments.config.stem, stop))


def _opener(config: Config) -> Callable[[Config, Path, str], Meeting]:
    """What opens the meeting, by what is trained, in a folder for a run of that name."""
    if config.learner.sites:
        from shoal.cli.roles import learner_meeting

        return learner_meeting
    return _pretraining


def _pretraining(config: Config, folder: Path, run: str) -> Meeting:
    from shoal.cli.launch.prepare import model_folder
    from shoal.diloco.agreed import Agreed
    from shoal.diloco.meeting import Meeting
    from shoal.learner.pretrain.about import about
    from shoal.learner.pretrain.outer import named, terms_of

    where = model_folder(config.model.name)
    tensors = named(model_of(where, config))
    terms = terms_of(config, tensors)
    wanted = about(config, where, None, sites=True)
    return Meeting(folder, terms, wanted, run, lambda: Agreed.of(tensors, terms.fragments))


async def _meet(
    config: Config,
    open_meeting: Callable[[Config, Path, str], Meeting],
    folder: Path,
    name: str,
    stop: threading.Event,
) -> None:
    from shoal.diloco.messages import site_invite
    from shoal.diloco.serve import Server, serve
    from shoal.protocol.node import KEY
    from shoal.shardcast.server import url_of

    identity = Identity.load_or_create(folder / KEY)
    run = run_id(name, identity.public)
    meeting, settings = open_meeting(config, folder, run), config.sites
    server = Server(meeting, identity)
    runner, port = await serve(server, settings.host, port=settings.port, tls=None, listening=folder / "port")
    try:
        url = settings.url or url_of(settings.host, port, tls=False)
        for number in range(settings.sites):
            site_invite(identity, url, run, f"site-{number}").save(folder / "invites" / f"site-{number}.invite")
        log.info("listening at %s; invites for %d sites are in %s", url, settings.sites, folder / "invites")
        await server.live(stop.is_set)
    finally:
        await runner.cleanup()
    log.info("%s after round %d of %d", "over" if meeting.over else "stopped", meeting.round, meeting.terms.rounds)
