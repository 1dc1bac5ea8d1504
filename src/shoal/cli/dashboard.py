"""Commands to look at a run in a browser: `shoal dashboard`, `shoal report`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from shoal.cli.arguments import Commands, add_command, port, say

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
        "write a run as one HTML file that opens from disk, and the curves of runs as a picture",
        "runs/quickstart",
    )
    report_.add_argument(
        "runs",
        metavar="RUN",
        type=Path,
        nargs="+",
        help="its folder; the curves of further runs are drawn beside its own",
    )
    report_.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first folder")
    report_.add_argument(
        "--metrics", nargs="+", default=[], metavar="NAME", help="in the picture (default: the essential ones)"
    )


def dashboard(arguments: argparse.Namespace) -> None:
    from shoal.cli.launch import process

    stop = process.begin("dashboard", threads=1)
    from shoal.watch.page.server import LOOPBACK, Dashboard, serve
    from shoal.watch.run import open_run

    others = [open_run(other) for other in arguments.compare]
    for other in others:
        other.look()
    page = Dashboard(open_run(arguments.run), others, public=arguments.public)
    listener = process.listen(arguments.host, arguments.port, "the dashboard")
    host, taken = listener.getsockname()[:2]
    say(f"dashboard: http://{host}:{taken}/ (Ctrl-C ends it)")
    hosts = () if arguments.public else (*LOOPBACK, arguments.host)
    asyncio.run(serve(page, listener, hosts, stop.is_set))


def report(arguments: argparse.Namespace) -> None:
    from shoal.watch.page.report import write_report

    for path in write_report(arguments.runs, arguments.metrics, arguments.out or arguments.runs[0] / "report.html"):
        say(f"{path}: {path.stat().st_size / 1000:.0f} kB")
