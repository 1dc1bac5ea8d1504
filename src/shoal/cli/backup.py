"""`shoal backup DIR COPY`: a copy of a coordinator's folder, taken while it runs, that can take its place."""

from __future__ import annotations

import argparse
from pathlib import Path

from shoal.cli.arguments import Commands, say


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("backup", help="copy a coordinator's folder while it runs, to start from elsewhere")
    parser.add_argument("dir", type=Path, help="the coordinator's folder")
    parser.add_argument("copy", type=Path, help="the new folder; as secret as the first, because the key is in it")


def backup(arguments: argparse.Namespace) -> None:
    from shoal.coordinator.operating import back_up

    size_bytes = back_up(arguments.dir, arguments.copy)
    start = f"shoal coordinator --dir {arguments.copy}"
    say(f"{arguments.copy}: {size_bytes / 1e6:.1f} MB; start it with: {start}")
