"""Commands for a pool's operator: `shoal pool ACTION` and `shoal coordinator`. `shoal pool stake` is in `stake`.

`shoal pool meet` writes an invite for each site and serves the sites' meeting until the last round is over and every site
has left. With `learner.sites` these are the sites of a run's learner; otherwise they train on plain text.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.cli.arguments import (
    Commands,
    add_command,
    add_config,
    add_dashboard,
    add_pool,
    add_threads,
    port,
    read_config,
    real,
    run_name,
    say,
)
from shoal.cli.nodes import ROLES, begin
from shoal.cli.pool import stake
from shoal.config import Config
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.diloco.meeting import Meeting
    from shoal.protocol.messages import Capability, RunOffer

NAME_IT = "name it with --run NAME"
DRAINED = "gets no new tasks; its process ends once it has uploaded its current work"
STEERING: dict[str, tuple[Literal["ban", "readmit"], str, str, str]] = {  # action -> event, help, printed text, example
    "readmit": (
        "readmit",
        "give tasks again to a worker that was dismissed or that left",
        "gets tasks again; if its process has ended, start it",
        "pool w-7",
    ),
    "evict": (
        "ban",
        "remove a relay from a pool permanently",
        "is evicted: nodes stop using it within seconds",
        "pool relay-1",
    ),
}
VERSIONS = "versions"  # in the meeting's folder; the origin watches it

log = logging.getLogger(__name__)


def add_commands(commands: Commands) -> None:
    new = "quickstart --dir pool --url http://10.0.0.1:8700"
    pool = add_command(commands, "pool", None, "set up and operate a pool of several machines", f"init {new}")
    actions = pool.add_subparsers(required=True, metavar="ACTION")
    action = partial(add_command, actions, title="shoal pool")

    what = "create the coordinator's folder, and an invite for every node in the config"
    parser = action("init", init_pool, what, new)
    add_config(parser)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="the coordinator's new folder")
    add("--url", required=True, help="the coordinator's URL, as nodes reach it: http://HOST:PORT")
    add("--run", default="", help="name of the run (default: the config's name)")

    what = "start all trusted roles of a pool on this machine, and show them on one screen"
    parser = action("up", up_pool, what, "pool")
    add_pool(parser)
    add_dashboard(parser)

    add = action("status", status, "show the state of a pool", "http://10.0.0.1:8700 --watch").add_argument
    where = "the URL of a coordinator or of a sites' meeting, or the folder of a run or coordinator"
    add("pool", metavar="RUN|URL", help=where)
    add("--watch", action="store_true", help="update the display until the run ends")

    what = "create an invite for one node, or an open one for any worker with stake"
    parser = action("invite", invite, what, "pool --role worker --name w-7")
    add_pool(parser)
    add = parser.add_argument
    add("--role", required=True, choices=list(ROLES))
    add("--name", required=True, help="the node's name in this run: a to z, 0 to 9 and -")
    add("--url", help="the coordinator's URL, as this node reaches it (default: the pool's)")
    add("--open", action="store_true", help="make it valid for any worker that has staked enough for this run")
    add("--publish", action="store_true", help="with --open: publish it, so that `shoal pool discover` shows it")
    add("--days", type=real(0.01, 3650), default=7.0, help="how long the invite is valid (default: 7)")
    add("--out", type=Path, metavar="FILE", help="write the invite to this file, mode 0600 (default: print it)")

    add = action("drain", drain, "let a worker finish its task and leave, without penalty", "pool w-7").add_argument
    add("dir", type=Path, metavar="POOL", help="the pool's folder; with --join: the worker's own folder")
    add("name", nargs="?", help="the worker's name, as `shoal pool status` shows it")
    add("--join", metavar="INVITE", help="on the worker's machine: the invite that it joined with")
    for name, (event, what, outcome, example) in STEERING.items():
        parser = action(name, partial(steer, event, outcome), what, example)
        add_pool(parser)
        parser.add_argument("name", help="the node's name, as `shoal pool status` shows it")

    what = "serve the meeting at which sites average their weights, and write an invite for each site"
    parser = action("meet", meet, what, "configs/pretrain.toml --dir meet")
    add_config(parser)
    add_threads(parser)
    parser.add_argument("--dir", type=Path, required=True, help="folder for the key, the invites and the agreed states")

    what = "show a coordinator's run, and whether this machine meets its requirements"
    add = action("discover", discover, what, "http://pool.example:8700").add_argument
    add("url", metavar="URL", help="a coordinator's URL")
    add("--key", default="", help="the coordinator's key, if you know it; any other key is refused")
    add("--out", type=Path, metavar="FILE", help="write the run's open invite to this file")

    what = "stake on a worker; for operators, record stakes or manage the contract that holds them"
    stake.add_actions(action("stake", stake.stake, what, "book pool stake KEY 1000"))

    parser = add_command(commands, "coordinator", coordinator, "run the control plane of a pool", "--dir pool")
    add_config(parser, required=False)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="the coordinator's own folder: key, databases, rollouts")
    add("--run", default="", help="name of the run (default: the config's name)")
    add("--port", type=port, help="overrides the port of coordinator.listen")
    add("--record", type=Path, metavar="RUN", help="folder for the metrics (default: --dir)")
    add("--no-report", action="store_true", help="write no summary and no picture at the end")
    add_threads(parser)


def init_pool(arguments: argparse.Namespace) -> None:
    config = read_config(arguments)
    from shoal.cli.launch.prepare import check_length
    from shoal.coordinator.folder import check_empty, create_pool
    from shoal.tasks.compiling import build_tasks

    check_length(config)
    check_empty(arguments.dir)
    name = run_name(arguments.run or arguments.config.stem, NAME_IT)
    arguments.dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.dir.parent, prefix=".tasks-") as built:
        config, notes = build_tasks(config, Path(built) / "tasks")
        steps = create_pool(arguments.dir, config, name, arguments.url, task_data=Path(built) / "tasks")
    say("\n".join([*(f"tasks: {note}" for note in notes), *steps]))


def up_pool(arguments: argparse.Namespace) -> int:
    from shoal.cli.launch.swarm import PoolSwarm
    from shoal.coordinator.folder import open_pool

    config, address = open_pool(arguments.dir)
    return PoolSwarm(arguments.dir, config, address, dashboard=arguments.dashboard).run()


def coordinator(arguments: argparse.Namespace) -> None:
    stop = begin("coordinator", arguments)
    from shoal.cli.launch.prepare import check_length
    from shoal.coordinator.folder import CONFIG, KEY, PoolFolderError, open_pool
    from shoal.coordinator.http.serving import serve_forever
    from shoal.protocol.identity import Identity
    from shoal.protocol.invite import run_id
    from shoal.tasks.compiling import build_tasks

    url = ""
    if arguments.config is None:
        if arguments.overrides or arguments.overlays or arguments.run:
            raise UserError(f"{arguments.dir} already has a config and a name: edit {arguments.dir / CONFIG}")
        try:
            config, address = open_pool(arguments.dir)
        except PoolFolderError as error:
            raise UserError(str(error)) from error
        name, url = address.run, address.url
    elif (arguments.dir / CONFIG).exists():
        how = f"start it with: shoal coordinator --dir {arguments.dir}"
        raise UserError(f"{arguments.dir} already has a config; {how}")
    else:
        config, name = read_config(arguments), run_name(arguments.run or arguments.config.stem, NAME_IT)
        name = run_id(name, Identity.load_or_create(arguments.dir / KEY).public)
    check_length(config)
    config, _ = build_tasks(config, arguments.dir / "tasks")
    serving = config.coordinator.port if arguments.port is None else arguments.port
    more = {"record_to": arguments.record, "url": url, "reports": not arguments.no_report}
    serve_forever(config, name, arguments.dir, serving, stop, **more)


def invite(arguments: argparse.Namespace) -> None:
    from shoal.coordinator.folder import OPEN_INVITE, check_name, create_invite

    if not arguments.open:  # the name of an open invite is only the start of its workers' names
        check_name(arguments.dir, arguments.name)
    if arguments.publish:
        if not arguments.open or arguments.out or arguments.url:
            raise UserError("--publish needs --open, and cannot be combined with --out or --url")
        arguments.out = arguments.dir / OPEN_INVITE  # the new invite replaces the old one
    elif arguments.out and arguments.out.exists():
        raise UserError(f"{arguments.out} exists and may hold an invite; choose another file")
    name, url, days = arguments.name, arguments.url, arguments.days
    made = create_invite(arguments.dir, arguments.role, name, url, days, open=arguments.open)
    if arguments.out:
        made.save(arguments.out)
    else:
        say(made.encode())


def steer(event: Literal["ban", "drain", "readmit"], outcome: str, arguments: argparse.Namespace) -> None:
    from shoal.coordinator.folder import apply_event

    apply_event(arguments.dir, arguments.name, event)
    say(f"{arguments.name} {outcome}")


def drain(arguments: argparse.Namespace) -> None:
    if bool(arguments.name) == bool(arguments.join):
        raise UserError("give the worker's NAME and the coordinator's folder, or --join INVITE and the worker's folder")
    if arguments.name:
        steer("drain", DRAINED, arguments)
        return
    from shoal.protocol.identity import Identity
    from shoal.protocol.invite import read_invite
    from shoal.protocol.messages import Ok
    from shoal.protocol.node import KEY, Node

    Node.of(read_invite(arguments.join), Identity.load(arguments.dir / KEY)).post("/v1/drain", None, Ok)
    say(f"this worker {DRAINED}")


def status(arguments: argparse.Namespace) -> None:
    import httpx

    from shoal.protocol.invite import find_coordinator
    from shoal.watch.run import PoolRun
    from shoal.watch.terminal.live import Terminal, show, watch

    with httpx.Client(timeout=5) as client:
        url = find_coordinator(arguments.pool)
        view = watch if arguments.watch else show
        view(PoolRun(url, client, Path(arguments.pool)), Terminal())


def discover(arguments: argparse.Namespace) -> None:
    if arguments.out and arguments.out.exists():
        raise UserError(f"{arguments.out} exists and may hold an invite; choose another file")
    import httpx

    from shoal.cli.roles import capability
    from shoal.protocol.history import find_run, open_invite
    from shoal.watch.figures import clean

    with httpx.Client(timeout=10) as client:
        offer = find_run(arguments.url, client, arguments.key)
    if arguments.out:
        open_invite(offer).save(arguments.out)
        say(
            f"{arguments.out} is an open invite to {clean(offer.run)}: stake on this machine's key, then run "
            f"`shoal worker --join {arguments.out} --dir DIR`"
        )
    else:
        for line in _offer_lines(arguments.url, offer, capability()):
            say(clean(line))  # a stranger wrote the offer, so its text must not add lines


def _offer_lines(url: str, offer: RunOffer, machine: Capability) -> list[str]:
    """Return lines about the run, what this machine lacks for it, and how to join."""
    from shoal.config.sections import RequirementsSection
    from shoal.coordinator.members import missing_requirement

    requirements = RequirementsSection.model_validate(offer.requirements)
    state = f"step {min(offer.step + 1, offer.steps)} of {offer.steps}" if offer.state == "running" else "finished"
    places = "" if offer.places_free is None else f", {offer.places_free} places free"
    joining = "open to staked workers" if offer.invite else "by invite only"
    missing = missing_requirement(machine, requirements)
    lines = [
        f"{offer.run}, key {offer.key}",
        f"{offer.model}, {state}, {joining}, {offer.workers} workers{places}",
        f"this machine lacks {missing}" if missing else "this machine meets its requirements",
    ]
    if offer.invite:
        lines.append(
            f"open to anyone who stakes {max(1, requirements.stake)}: shoal pool discover {url} --out worker.invite"
        )
    return lines


# --- the sites' meeting ----------------------------------------------------------------------------------------------


def meet(arguments: argparse.Namespace) -> None:
    """Serve the meeting until the last round, or until SIGINT or SIGTERM."""
    from shoal.cli.launch import process
    from shoal.cli.launch.members import locked

    config = read_config(arguments)
    if not config.learner.sites and not config.pretrain.data:
        raise UserError(
            "the config has no sites: set learner.sites, or pretrain.data for sites that train on plain text"
        )
    stop = process.begin("meet", threads=arguments.threads)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    with locked(arguments.dir):
        asyncio.run(_meet(config, arguments.dir, arguments.config.stem, stop))


async def _meet(config: Config, folder: Path, name: str, stop: threading.Event) -> None:
    from shoal.diloco.messages import site_invite
    from shoal.diloco.serve import MeetingServer, serve
    from shoal.protocol.identity import Identity
    from shoal.protocol.invite import run_id
    from shoal.protocol.node import KEY
    from shoal.shardcast.server import url_of

    identity = Identity.load_or_create(folder / KEY)
    run = run_id(name, identity.public)
    open_meeting = _learner_meeting if config.learner.sites else _pretraining_meeting
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
    log.info("%s after round %d of %d", "finished" if meeting.over else "stopped", meeting.round, meeting.terms.rounds)


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
    expected = about(config, where, None, sites=True)
    return Meeting(folder, terms, expected, run, lambda: Agreed.of(tensors, terms.shapes))


def _learner_meeting(config: Config, folder: Path, run: str) -> Meeting:
    """Return the meeting of a learner's sites, which starts with the run's model.

    The meeting writes each agreed state as a policy version: version v is the state after v steps. Raise MeetingError
    if the folder holds another run's meeting.
    """
    import torch

    from shoal.diloco.agreed import Agreed
    from shoal.diloco.meeting import Meeting
    from shoal.learner.policy import Policy
    from shoal.learner.sites import Publisher, about_of, learner_terms
    from shoal.model.sources import resolve

    section = config.learner
    # with beta 0, no reference model is loaded
    section = section.model_copy(update={"loss": section.loss.model_copy(update={"beta": 0.0})})
    torch.manual_seed(config.run.seed)  # so that adapters start as they do without several sites
    policy = Policy(resolve(config.model.name), section, "float32", "cpu", config.sampling.temperature)
    terms = learner_terms(config, policy)
    publisher = Publisher(policy, terms.shapes, folder / VERSIONS, section.keep_versions)
    first = Agreed.of(policy.masters, terms.shapes)
    return Meeting(folder, terms, about_of(config.sites, policy), run, lambda: first, publish=publisher)
