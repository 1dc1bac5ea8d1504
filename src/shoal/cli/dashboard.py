"""Commands to look at a run in a browser: `shoal dashboard`, `shoal report`."""

from __future__ import annotations

import argparse
import asyncio
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

    report_ = add_command(
        commands,
        "report",
        "write a run as one HTML file that opens from disk, and its charts as PNGs",
        "runs/quickstart",
    )
    report_.add_argument("run", metavar="RUN", type=Path, help="the folder of a run or coordinator")
    report_.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in that folder")

    plot_ = add_command(commands, "plot", "draw the metrics of runs side by side", "runs/one runs/two")
    plot_.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the folder of a finished or running run")
    plot_.add_argument("--out", type=Path, default=Path("plot.png"), help="the picture (default: plot.png)")
    plot_.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="(default: the essential ones)")


def dashboard(arguments: argparse.Namespace) -> None:
    from shoal.cli.launch import process

    stop = process.begin("dashboard", threads=1)
    from shoal.dashboard.server import LOOPBACK, Dashboard, serve
    from shoal.dashboard.watched import watch

    page = Dashboard(
        watch(arguments.run), [_looked(watch(other)) for other in arguments.compare], public=arguments.public
    )
    listener = process.listen(arguments.host, arguments.port, "the dashboard")
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


def plot(arguments: argparse.Namespace) -> None:
    from shoal.watch.plot import plot as draw

    drawn = draw(arguments.runs, arguments.metrics, arguments.out)
    say(f"{arguments.out}: {', '.join(drawn)}")
