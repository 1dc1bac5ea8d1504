"""`shoal dashboard`: a run in a browser, live or finished, or in one HTML file."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from shoal.cli.arguments import Commands, add_command, port, say

PORT = 8600


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    what = "watch a live or finished run in a browser, or write it as one HTML file"
    parser = add_command(commands, "dashboard", what, "runs/quickstart")
    parser.add_argument("run", metavar="RUN|URL", help="the folder of a run or coordinator, or a coordinator's URL")
    parser.add_argument(
        "--compare", action="append", default=[], metavar="RUN", help="draw this run's curves too; may be repeated"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: this machine only)")
    parser.add_argument("--port", type=port, default=PORT, help=f"default: {PORT}; 0: any that is free")
    parser.add_argument("--public", action="store_true", help="answer under any host name, for a proxy in front of it")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="serve nothing; write a page that opens from disk",
    )


def dashboard(arguments: argparse.Namespace) -> None:
    if arguments.out:
        from shoal.watch.page.report import write_page

        write_page(Path(arguments.run), [Path(other) for other in arguments.compare], arguments.out)
        say(f"{arguments.out}: {arguments.out.stat().st_size / 1000:.0f} kB")
        return
    from shoal.cli.launch import process

    stop = process.begin("dashboard", threads=1)
    from shoal.watch.page.server import LOOPBACK, Dashboard, serve
    from shoal.watch.run import open_run

    others = [open_run(other) for other in arguments.compare]
    for other in others:
        other.look()
    page = Dashboard(open_run(arguments.run), others)
    listener = process.listen(arguments.host, arguments.port, "the dashboard")
    host, taken = listener.getsockname()[:2]
    say(f"dashboard: http://{host}:{taken}/ (Ctrl-C ends it)")
    hosts = () if arguments.public else (*LOOPBACK, arguments.host)
    asyncio.run(serve(page, listener, hosts, stop.is_set))
