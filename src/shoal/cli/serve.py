"""`shoal serve RUN|MODEL`: the OpenAI-compatible endpoint and the chat page, and what `shoal audit` asks of a reply."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shoal.cli.arguments import USAGE, Commands, add_command, port, say, takes_threads
from shoal.errors import UserError


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    serve_ = add_command(
        commands,
        "serve",
        "an OpenAI-compatible endpoint and a chat page for a run or a model",
        "runs/quickstart --open",
    )
    serve_.add_argument(
        "what",
        metavar="RUN|MODEL",
        help="a run's folder (live or finished), fetched versions, a model's name or folder",
    )
    serve_.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve_.add_argument("--port", type=port, default=8000, help="0: a free one (default: 8000)")
    serve_.add_argument(
        "--dir", type=Path, help="folder of API keys and conversations (default: RUN/serve, or runs/serve)"
    )
    serve_.add_argument("--open", action="store_true", help="one user on this machine: no login and no keys")
    serve_.add_argument("--api-only", action="store_true", help="no chat page")
    serve_.add_argument("--no-registration", action="store_true", help="nobody new may register on the page")
    serve_.add_argument(
        "--https", action="store_true", help="a proxy in front speaks HTTPS: cookies travel over it only"
    )
    serve_.add_argument(
        "--name",
        action="append",
        default=[],
        dest="names",
        metavar="HOST",
        help="answer only requests for this host name",
    )
    takes_threads(serve_)


def serve(arguments: argparse.Namespace) -> None:
    from shoal.cli.launch import process
    from shoal.serve.versions import source_of

    if arguments.open and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        raise UserError("--open has no login, so it serves this machine only; leave --host out, or --open")
    stop = process.begin("serve", threads=arguments.threads)
    source = source_of(arguments.what)
    process.listen(
        arguments.host, arguments.port, "the endpoint"
    ).close()  # one that is taken costs no loading of weights
    from shoal.model.dtype import compute_on
    from shoal.serve.service import Settings, serve_forever

    compute_on(arguments.threads)
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
        os._exit(0)  # not after a forward pass that nobody waits for


def audit_reply(data: bytes, model: str, threads: int) -> int:
    """Recompute a reply that the chat page or the API gave out, with the weights of `model`. Return the exit status."""
    from shoal.serve.versions import source_of

    source = source_of(model)
    from shoal.model.dtype import compute_on
    from shoal.serve import proof
    from shoal.serve.errors import ReplyError
    from shoal.serve.service import engine_of
    from shoal.serve.versions import load

    compute_on(threads)
    try:
        reply = proof.Reply.read(data)
    except ReplyError as error:
        say(f"unreadable: {error}")
        return USAGE
    offers = source.offers()
    offer = next((one for one in offers if one.version == reply.version), offers[0] if len(offers) == 1 else None)
    if offer is None:
        raise UserError(f"{model} no longer holds version {reply.version}; name that version's folder")
    verdict = proof.verify(reply, load(offer, engine_of(source)()), source.config)
    say("\n".join(verdict.lines()))
    return 0 if verdict.passed else 1
