"""A pool's operator: `shoal pool ACTION` and `shoal coordinator`. Stakes have a file of their own."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.cli.arguments import (
    Commands,
    add_command,
    port,
    read_config,
    real,
    run_name,
    say,
    takes_config,
    takes_dashboard,
    takes_pool,
    takes_threads,
)
from shoal.cli.nodes import ROLES, begin
from shoal.cli.pool import stake
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.protocol.messages import Capability, RunOffer

NAME_IT = "name it with --run NAME"
DRAINED = "gets no new tasks; its process ends once it has uploaded what it holds"
STEERING: dict[str, tuple[Literal["ban", "readmit"], str, str]] = {  # action -> event, help, what follows
    "readmit": (
        "readmit",
        "give tasks again to a worker that was dismissed or has left",
        "gets tasks again; if its process has ended, start it",
    ),
    "evict": ("ban", "remove a relay from a pool, for good", "is evicted: nodes stop asking it within seconds"),
}


def add_commands(commands: Commands) -> None:
    new = "quickstart --dir pool --url http://10.0.0.1:8700"
    pool = add_command(commands, "pool", None, "set up and operate a pool of several machines", f"init {new}")
    actions = pool.add_subparsers(required=True, metavar="ACTION")
    action = partial(add_command, actions, title="shoal pool")

    what = "make the coordinator's folder and an invite for every node of its config"
    parser = action("init", init_pool, what, new)
    takes_config(parser)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="the coordinator's new folder")
    add("--url", required=True, help="how nodes reach it: http://HOST:PORT")
    add("--run", default="", help="name of the run (default: the config's name)")

    parser = action("up", up_pool, "start every trusted role of a pool on this machine, on one screen", "pool")
    takes_pool(parser)
    takes_dashboard(parser)

    add = action("status", status, "show the state of any pool", "http://10.0.0.1:8700 --watch").add_argument
    watched = "the URL of a coordinator or of a sites' meeting, or the folder of a run or coordinator"
    add("pool", metavar="RUN|URL", help=watched)
    add("--watch", action="store_true", help="keep showing it until the run ends")

    parser = action("invite", invite, "make an invite for one node, or for strangers", "pool --role worker --name w-7")
    takes_pool(parser)
    add = parser.add_argument
    add("--role", required=True, choices=list(ROLES))
    add("--name", required=True, help="the node's name in this run: a to z, 0 to 9 and -")
    add("--url", help="how the node reaches the coordinator (default: the pool's URL)")
    add("--open", action="store_true", help="for any worker that has staked what the run requires")
    add("--publish", action="store_true", help="with --open: list it for `shoal pool discover`")
    add("--days", type=real(0.01, 3650), default=7.0, help="until the invite expires (default: 7)")
    add("--out", type=Path, metavar="FILE", help="write the invite there, mode 0600 (default: print it)")

    add = action("drain", drain, "let a worker finish its task and leave, without penalty", "pool w-7").add_argument
    add("dir", type=Path, metavar="POOL", help="the pool's folder; with --join: the worker's own")
    add("name", nargs="?", help="the worker's name, as `shoal pool status` shows it")
    add("--join", metavar="INVITE", help="on the worker's machine: the invite that it joined with")
    for name, (event, what, then) in STEERING.items():
        parser = action(name, partial(steer, event, then), what, "pool w-7")
        takes_pool(parser)
        parser.add_argument("name", help="the node's name, as `shoal pool status` shows it")

    parser = action("meet", meet, "where the sites of one training meet", "configs/pretrain.toml --dir meet")
    takes_config(parser)
    takes_threads(parser)
    parser.add_argument("--dir", type=Path, required=True, help="folder for the key, the invites and what is agreed")

    what = "which run is at this address, and may this machine join it?"
    add = action("discover", discover, what, "http://pool.example:8700").add_argument
    add("url", metavar="URL", help="of a coordinator")
    add("--key", default="", help="the coordinator's key, as its operator told you: no other is believed")
    add("--out", type=Path, metavar="FILE", help="write the run's open invite there")

    what = "stake on a worker; for operators: book stakes, or put them on a chain"
    stake.add_actions(action("stake", stake.stake, what, "book pool stake KEY 1000"))

    parser = add_command(commands, "coordinator", coordinator, "the control plane of a pool", "--dir pool")
    takes_config(parser, required=False)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="its own folder: key, databases, rollouts")
    add("--run", default="", help="name of the run (default: the config's name)")
    add("--port", type=port, help="overrides the port of coordinator.listen")
    add("--record", type=Path, metavar="RUN", help="folder of the metrics (default: --dir)")
    add("--no-report", action="store_true", help="write no summary and picture at the end")
    takes_threads(parser)


def init_pool(arguments: argparse.Namespace) -> None:
    config = read_config(arguments)
    from shoal.cli.launch.prepare import check_length
    from shoal.coordinator.operating import check_empty, create_pool
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
    from shoal.coordinator.operating import open_pool

    config, address = open_pool(arguments.dir)
    return PoolSwarm(arguments.dir, config, address, dashboard=arguments.dashboard).run()


def coordinator(arguments: argparse.Namespace) -> None:
    stop = begin("coordinator", arguments)
    from shoal.cli.launch.prepare import check_length
    from shoal.coordinator.http.serving import serve_forever
    from shoal.coordinator.operating import CONFIG, open_pool
    from shoal.coordinator.state import KEY, PoolFolderError
    from shoal.protocol.identity import Identity
    from shoal.protocol.invite import run_id
    from shoal.tasks.compiling import build_tasks

    url = ""
    if arguments.config is None:
        if arguments.overrides or arguments.overlays or arguments.run:
            raise UserError(f"the pool in {arguments.dir} has its config and name: edit {arguments.dir / CONFIG}")
        try:
            config, address = open_pool(arguments.dir)
        except PoolFolderError as error:
            raise UserError(str(error)) from error
        name, url = address.run, address.url
    elif (arguments.dir / CONFIG).exists():
        how = f"start it with: shoal coordinator --dir {arguments.dir}"
        raise UserError(f"{arguments.dir} has a config of its own; {how}")
    else:
        config, name = read_config(arguments), run_name(arguments.run or arguments.config.stem, NAME_IT)
        name = run_id(name, Identity.load_or_create(arguments.dir / KEY).public)
    check_length(config)
    config, _ = build_tasks(config, arguments.dir / "tasks")
    serving = config.coordinator.port if arguments.port is None else arguments.port
    more = {"record_to": arguments.record, "url": url, "reports": not arguments.no_report}
    serve_forever(config, name, arguments.dir, serving, stop, **more)


def invite(arguments: argparse.Namespace) -> None:
    from shoal.coordinator.operating import create_invite
    from shoal.coordinator.state import OPEN_INVITE

    if arguments.publish:
        if not arguments.open or arguments.out or arguments.url:
            raise UserError("--publish goes with --open, and without --out and --url: it offers the invite as it is")
        arguments.out = arguments.dir / OPEN_INVITE
        arguments.out.unlink(missing_ok=True)  # the new one takes its place
    if arguments.out and arguments.out.exists():
        raise UserError(f"{arguments.out} exists; choose another file, so that no invite is lost")
    name, url, days = arguments.name, arguments.url, arguments.days
    made = create_invite(arguments.dir, arguments.role, name, url, days, open=arguments.open)
    if arguments.out:
        made.save(arguments.out)
    else:
        say(made.encode())


def steer(event: Literal["ban", "drain", "readmit"], then: str, arguments: argparse.Namespace) -> None:
    from shoal.coordinator import operating

    operating.apply_event(arguments.dir, arguments.name, event)
    say(f"{arguments.name} {then}")


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

    from shoal.protocol.history import UnreachableError
    from shoal.protocol.invite import find_coordinator
    from shoal.watch.run import PoolRun
    from shoal.watch.summary import SUMMARY
    from shoal.watch.terminal.live import Terminal, show, watch

    with httpx.Client(timeout=5) as client:
        url = find_coordinator(arguments.pool)
        look = watch if arguments.watch else show
        try:
            look(PoolRun(url, client, Path(arguments.pool)), Terminal())
        except UnreachableError as error:
            if not (Path(arguments.pool) / SUMMARY).exists():
                raise
            ended = f"the run in {arguments.pool} has ended: see {Path(arguments.pool) / SUMMARY} and reward.png there"
            raise UnreachableError(ended) from error


def meet(arguments: argparse.Namespace) -> None:
    from shoal.cli.pool.meeting import meet as serve_meeting

    serve_meeting(arguments)


def discover(arguments: argparse.Namespace) -> None:
    if arguments.out and arguments.out.exists():
        raise UserError(f"{arguments.out} exists; choose another file, so that no invite is lost")
    import httpx

    from shoal.cli.roles import capability
    from shoal.protocol.history import find_run, open_invite
    from shoal.watch.figures import clean

    with httpx.Client(timeout=10) as client:
        offer = find_run(arguments.url, client, arguments.key)
    if arguments.out:
        open_invite(offer).save(arguments.out)
        say(
            f"{arguments.out} is an open invite to {clean(offer.run)}: stake on this machine's key, then "
            f"`shoal worker --join {arguments.out} --dir DIR`"
        )
    else:
        for line in _offer_lines(arguments.url, offer, capability()):
            say(clean(line))  # the offer is a stranger's: one line of it is one line here


def _offer_lines(url: str, offer: RunOffer, machine: Capability) -> list[str]:
    """The run, what this machine lacks for it, and what only its work and its stake will show."""
    from shoal.config.sections import RequirementsSection
    from shoal.coordinator.members import missing_requirement

    wants = RequirementsSection.model_validate(offer.requirements)
    state = f"step {min(offer.step + 1, offer.steps)} of {offer.steps}" if offer.state == "running" else "finished"
    places = "" if offer.places_free is None else f", {offer.places_free} places free"
    joining = "open to stake" if offer.invite else "invited only"
    missing = missing_requirement(machine, wants)
    lines = [
        f"{offer.run}, key {offer.key}",
        f"{offer.model}, {state}, {joining}, {offer.workers} workers{places}",
        f"this machine lacks {missing}" if missing else "this machine meets its requirements",
    ]
    if offer.invite:
        lines.append(f"open to anyone who stakes {max(1, wants.stake)}: shoal pool discover {url} --out worker.invite")
    return lines
