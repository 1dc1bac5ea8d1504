"""Commands to look at a run in a browser: `shoal dashboard`, `shoal report`."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, add_command, port, say

if TYPE_CHECKING:
    from shoal.dashboard.watched import Watched

PORT = 8600


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    dashboard_ = add_command(commands, "dashboard", "watch a live or finished run in a browser", "runs/quickstart")
    dashboard_.add_argument("run", metavar="RUN|URL", help="the folder of a run or coordinator, or a coordinator's URL")
    dashboard_.add_argument(
        "--compare", action="append", default=[], metavar="RUN", help="draw this run's curves too; may be repeated"
    )
    dashboard_.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    dashboard_.add_argument("--port", type=port, default=PORT, help=f"default: {PORT}; 0: any that is free")
    dashboard_.add_argument(
        "--public", action="store_true", help="for strangers: no address, no machine, any host name in front of it"
    )
    dashboard_.add_argument("--socket", type=int, metavar="FD", help=argparse.SUPPRESS)  # of `shoal run`

    report_ = add_command(
        commands,
        "report",
        "write a run as one HTML file that opens from disk, and its charts as PNGs",
        "runs/quickstart",
    )
    report_.add_argument("run", metavar="RUN", type=Path, help="the folder of a run or coordinator")
    report_.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in that folder")


def dashboard(arguments: argparse.Namespace) -> None:
    from shoal.cli.launch import process

    stop = process.begin("dashboard", threads=1)
    if arguments.socket is not None:
        parent = os.getppid()
        process.follow(lambda: os.getppid() == parent)
    from shoal.cli.launch.door import listen
    from shoal.dashboard.server import LOOPBACK, Dashboard, serve
    from shoal.dashboard.watched import watch

    page = Dashboard(
        watch(arguments.run), [_looked(watch(other)) for other in arguments.compare], public=arguments.public
    )
    if arguments.socket is not None:
        listener = socket.socket(fileno=arguments.socket)
    else:
        listener = listen(arguments.host, arguments.port)
        host, taken = listener.getsockname()[:2]
        say(f"dashboard: http://{host}:{taken}/ (Ctrl-C ends it)")
    hosts = () if arguments.public else (*LOOPBACK, arguments.host)
    asyncio.run(serve(page, listener, hosts, stop.is_set))


def _looked(run: Watched) -> Watched:
    run.look()
    return run


def report(arguments: argparse.Namespace) -> None:
    from shoal.dashboard.report import write_report
    from shoal.dashboard.watched import WatchedFolder

    out = arguments.out or arguments.run / "report.html"
    size_bytes, pictures = write_report(WatchedFolder(arguments.run), out)
    say(f"{out}: {size_bytes / 1000:.0f} kB; {len(pictures)} charts as PNGs in {pictures[0].parent}")
