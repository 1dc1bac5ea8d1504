"""Shared by all commands: the parser, bounded numbers, common arguments, and printing.

Invariant: this module imports nothing slow, so `--help` is instant. Each module that adds commands also defines their
arguments.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO, TypeAlias, TypeVar

from shoal import config as config_module
from shoal.config import Config
from shoal.errors import UserError, printable

USAGE = 2
RUN_NAME = re.compile("[!-~]{1,100}")
PUBLIC_KEY = re.compile("[0-9a-f]{64}")
# argparse has no public name for the type that `add_subparsers` returns
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Action = Callable[[argparse.Namespace], int | None]  # the function that runs a command
N = TypeVar("N", int, float)


class Parser(argparse.ArgumentParser):
    """Report wrong usage in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message.removeprefix('argument ')} (usage: {self.prog} --help)\n")


def add_command(
    commands: Commands, name: str, call: Action | None, what: str, example: str, title: str = "shoal"
) -> argparse.ArgumentParser:
    """Add a command with one line of help and one example, which a test parses.

    `call`: the function that runs it; None for a group, whose commands each have their own.
    """
    example = f"example: {title} {name} {example}".rstrip()
    parser = commands.add_parser(name, help=what, description=what, epilog=example)
    parser.set_defaults(call=call, prog=parser.prog)
    return parser


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type: an integer in [low, high]."""
    return _number(int, low, high, f"is not a whole number from {low} to {high}")


def real(low: float, high: float) -> Callable[[str], float]:
    """Return an argparse type: a number in [low, high]."""
    return _number(float, low, high, f"is not a number from {low:g} to {high:g}")


def _number(read: Callable[[str], N], low: N, high: N, refusal: str) -> Callable[[str], N]:
    def number(text: str) -> N:
        try:
            value = read(text)
            if low <= value <= high:  # false for nan
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} {refusal}")

    return number


def run_name(text: str, hint: str) -> str:
    """Return `text` if it is a valid run name, usable in requests and rollout files. Raise UserError."""
    if not RUN_NAME.fullmatch(text):
        raise UserError(f"{text[:100]!r} cannot name a run: use 1 to 100 ASCII characters without spaces; {hint}")
    return text


port = whole(0, 65535)


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    where = "a TOML file, or the name of a packaged config, such as quickstart"
    parser.add_argument("config", type=Path, nargs=None if required else "?", help=where)
    add = parser.add_argument
    add(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="override a key; repeat for more",
    )
    overlay = "apply another TOML file on top of the config"
    add("--with", action="append", default=[], type=Path, metavar="FILE", dest="overlays", help=overlay)


def add_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="POOL", help="the pool's folder, which `shoal pool init` made")


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=whole(0, 4096), default=0, help="cores to compute on (default: all)")


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    which = "port of the dashboard (default: any free port)"
    parser.add_argument("--dashboard", type=port, default=0, metavar="PORT", help=which)
    parser.add_argument("--no-dashboard", dest="dashboard", action="store_const", const=None, help="start no dashboard")


def read_config(arguments: argparse.Namespace) -> Config:
    """Load the config that the arguments of `add_config` name. Raise ConfigError."""
    return config_module.load(arguments.config, arguments.overrides, arguments.overlays)


def read_optional_config(arguments: argparse.Namespace) -> Config | None:
    """Return the config, or None if the arguments name none. Raise UserError if they change one without naming it."""
    if arguments.config is not None:
        return read_config(arguments)
    given = {"--set": arguments.overrides, "--with": arguments.overlays, "--out": getattr(arguments, "out", None)}
    if options := [option for option, value in given.items() if value]:
        raise UserError(f"{options[0]} needs a config: name a TOML file, or a packaged config such as quickstart")
    return None


def say(text: str, to: TextIO | None = None) -> None:
    """Print a text and flush; every command prints with this function. `to`: standard output if None.

    Unprintable characters are replaced, because names and errors may come from other machines.
    """
    to = to or sys.stdout
    to.write(printable(text) + "\n")
    to.flush()
