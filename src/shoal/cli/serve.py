"""Pages and endpoints: `shoal dashboard RUN` shows a run in a browser or as one HTML file; `shoal serve RUN|MODEL`
serves an OpenAI-compatible endpoint and a chat page. `audit_reply` is the part of `shoal audit` that checks a reply.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from shoal.cli.arguments import USAGE, Commands, add_command, add_threads, port, say
from shoal.errors import UserError


def add_commands(commands: Commands) -> None:
    what = "watch a live or finished run in a browser, or write it as one HTML file"
    add = add_command(commands, "dashboard", dashboard, what, "runs/quickstart").add_argument
    add("run", metavar="RUN|URL", help="the folder of a run or coordinator, or a coordinator's URL")
    compare = "also plot this run's curves; may be repeated"
    add("--compare", action="append", default=[], metavar="RUN", help=compare)
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=port, default=8600, help="port to listen on; 0: any free port (default: 8600)")
    add("--public", action="store_true", help="answer requests for any host name; needed behind a proxy")
    add("--out", type=Path, metavar="FILE", help="write the page to a file instead of serving it")

    what = "serve a run or a model: an OpenAI-compatible endpoint and a chat page"
    parser = add_command(commands, "serve", serve, what, "runs/quickstart --open")
    add = parser.add_argument
    weights = "a model's name, or the folder of a model, a run (live or finished) or fetched versions"
    add("what", metavar="RUN|MODEL", help=weights)
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=port, default=8000, help="port to listen on; 0: any free port (default: 8000)")
    add("--dir", type=Path, help="folder for API keys and conversations (default: RUN/serve, or runs/serve)")
    add("--open", action="store_true", help="require no login and no API key; only for this machine")
    add("--api-only", action="store_true", help="serve no chat page")
    add("--no-registration", action="store_true", help="let nobody register on the chat page")
    add("--https", action="store_true", help="send cookies over HTTPS only; needs a proxy that speaks HTTPS")
    host = "answer only requests for this host name; may be repeated"
    add("--name", action="append", default=[], dest="names", metavar="HOST", help=host)
    add_threads(parser)


def dashboard(arguments: argparse.Namespace) -> None:
    if arguments.out:
        if urls := [name for name in (arguments.run, *arguments.compare) if "://" in name]:
            raise UserError(f"--out needs the folder of a run, not a URL such as {urls[0][:80]}")
        from shoal.watch.page.report import write_page

        write_page(Path(arguments.run), [Path(other) for other in arguments.compare], arguments.out)
        say(f"{arguments.out}: {arguments.out.stat().st_size / 1000:.0f} kB")
        return
    from shoal.cli.launch import process

    stop = process.begin("dashboard", threads=1)
    from shoal.shardcast.connections import PATIENCE, Listener
    from shoal.shardcast.server import url_of
    from shoal.watch.page.files import host_name
    from shoal.watch.page.server import CONNECTIONS, LOOPBACK, PER_ADDRESS, Dashboard
    from shoal.watch.page.server import serve as serve_page
    from shoal.watch.run import open_run

    others = [open_run(other) for other in arguments.compare]
    for other in others:
        other.refresh()
    page = Dashboard(open_run(arguments.run), others)
    process.listen(arguments.host, arguments.port, "the dashboard").close()  # names the options if the port is taken
    per_address = CONNECTIONS if arguments.host in LOOPBACK else PER_ADDRESS  # a proxy has one address for all readers
    listener = Listener(arguments.host, arguments.port, PATIENCE, per_address=per_address, total=CONNECTIONS)
    listener.listen()  # clients that read the next line can connect
    host, bound = listener.getsockname()[:2]
    say(f"dashboard: {url_of(host, bound)}/ (Ctrl-C ends it)")
    named = host_name(url_of(arguments.host, bound).removeprefix("http://"))  # as in a Host header
    hosts = () if arguments.public else (*LOOPBACK, named)
    asyncio.run(serve_page(page, listener, hosts, stop.is_set))


def serve(arguments: argparse.Namespace) -> None:
    from shoal.cli.launch import process
    from shoal.serve.versions import source_of

    if arguments.open and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        raise UserError("--open has no login, so it serves this machine only; leave out --host or --open")
    stop = process.begin("serve", threads=arguments.threads)
    source = source_of(arguments.what)
    # fail on a taken port before loading weights
    process.listen(arguments.host, arguments.port, "the endpoint").close()
    from shoal.model.dtype import set_threads
    from shoal.serve.service import Settings, serve_forever

    set_threads(arguments.threads)
    settings = Settings(
        folder=arguments.dir or (Path(arguments.what) if source.config else Path("runs")) / "serve",
        host=arguments.host,
        port=arguments.port,
        open=arguments.open,
        chat=not arguments.api_only,
        registration=not arguments.no_registration,
        secure_cookies=arguments.https,
        hosts=frozenset(name.lower() for name in arguments.names),
    )
    if not serve_forever(source, settings, stop, say):
        sys.stdout.flush()
        os._exit(0)  # do not wait for an abandoned forward pass


def audit_reply(data: bytes, model: str, threads: int) -> int:
    """Recompute a reply file of the chat page or the API with the weights of `model`. Return the exit status."""
    from shoal.serve.versions import source_of

    source = source_of(model)
    from shoal.model.dtype import set_threads
    from shoal.serve import proof
    from shoal.serve.errors import ReplyError
    from shoal.serve.service import engine_of
    from shoal.serve.versions import load

    set_threads(threads)
    try:
        reply = proof.Reply.read(data)
    except ReplyError as error:
        say(f"unreadable: {error}")
        return USAGE
    offers = source.offers()
    offer = next((offer for offer in offers if offer.version == reply.version), offers[0] if len(offers) == 1 else None)
    if offer is None:
        raise UserError(f"{model} no longer has version {reply.version}; name that version's folder")
    verdict = proof.verify(reply, load(offer, engine_of(source)()), source.config)
    say("\n".join(verdict.lines()))
    return 0 if verdict.passed else 1
