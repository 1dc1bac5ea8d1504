"""What the commands share: the parser, bounded numbers, the arguments that several of them take, and how they print.

Invariant: nothing heavy is imported, so `--help` answers at once. Each module of commands holds their
arguments next to what they do.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from shoal import config as config_module
from shoal.config import Config
from shoal.errors import UserError, printable

USAGE = 2
RUN_NAME = re.compile("[!-~]{1,100}")
Commands = argparse._SubParsersAction  # what `add_subparsers` returns; argparse has no public name for it


Action = Callable[[argparse.Namespace], int | None]  # what a command calls
AddAction = Callable[
    [str, Action, str, str], argparse.ArgumentParser
]  # name, what it calls, its line of help, an example


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, as every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message.removeprefix('argument ')} (usage: {self.prog} --help)\n")


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, what: str, example: str, title: str = "shoal"
) -> argparse.ArgumentParser:
    """Add a command with one line of help and one example, which a test parses."""
    return commands.add_parser(name, help=what, description=what, epilog=f"example: {title} {name} {example}".rstrip())


def takes_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="POOL", help="the pool's folder, which is its coordinator's")


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: a whole number in this range."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return value

    return read


def real(least: float, most: float) -> Callable[[str], float]:
    """A type for argparse: a number in this range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:  # nan is in no range
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
        return value

    return read


def run_name(text: str, hint: str) -> str:
    """`text`, if requests and rollout files can carry it as a run's name. Raises UserError."""
    if not RUN_NAME.fullmatch(text):
        raise UserError(f"{text[:100]!r} cannot name a run: use 1 to 100 ASCII characters without spaces; {hint}")
    return text


port = whole(0, 65535)
threads = whole(0, 4096)
days = real(0.01, 3650)


def takes_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "config",
        type=Path,
        nargs=None if required else "?",
        help="a TOML file, or the name of one that comes with Shoal, such as quickstart",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides", help="override one key"
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        dest="overlays",
        help="apply another TOML file on top of the config",
    )


def takes_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=threads, default=0, help="cores to compute on (default: all)")


def takes_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dashboard", type=port, default=0, metavar="PORT", help="of the page that shows the run (default: any)"
    )
    parser.add_argument("--no-dashboard", dest="dashboard", action="store_const", const=None, help="open no such page")


def read_config(arguments: argparse.Namespace) -> Config:
    """The config that `takes_config` asked for. Raises ConfigError."""
    return config_module.load(arguments.config, arguments.overrides, arguments.overlays)


def need(arguments: argparse.Namespace, names: list[str], given: str) -> None:
    """Raise UserError unless all of these were given."""
    if missing := [name for name in names if not getattr(arguments, name)]:
        raise UserError(f"with {given}, {arguments.command_name} also needs {' and '.join(missing)}")


def say(text: str, to: TextIO | None = None) -> None:
    """Print lines at once, into a pipe too; by default to standard output. Every command prints by this.

    Names, errors and texts may be other machines': what is not printable is not printed.
    """
    to = to or sys.stdout
    to.write(printable(text) + "\n")
    to.flush()
