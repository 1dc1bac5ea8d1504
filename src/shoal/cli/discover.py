"""`shoal discover URL`: the runs at one address, which of them this machine may join, and an open invite to one of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import Commands, UsageError, say

if TYPE_CHECKING:
    from shoal.protocol.discovery import FoundRuns
    from shoal.protocol.messages import Capability, RunOffer


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("discover", help="which runs are at this address, and may this machine join them?")
    parser.add_argument("url", metavar="URL", help="of a coordinator, or of one of its runs")
    parser.add_argument("--key", default="", help="the listener's key, as its operator told you: no other is believed")
    parser.add_argument("--join", metavar="NAME", help="take the open invite of this run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the invite there (default: print it)")
    parser.add_argument("--json", action="store_true", help="the list as JSON")


def discover(arguments: argparse.Namespace) -> None:
    if arguments.out and not arguments.join:
        raise UsageError("--out goes with --join NAME")
    if arguments.out and arguments.out.exists():
        raise UsageError(f"{arguments.out} exists; choose another file, so that no invite is lost")
    import httpx

    from shoal.protocol.discovery import find_runs

    with httpx.Client(timeout=10) as client:
        found = find_runs(arguments.url, client, arguments.key)
    if arguments.join is not None:
        _join(found, arguments.join, arguments.out)
    elif arguments.json:
        say(json.dumps({"key": found.key} | found.runs.model_dump(), indent=2))
    else:
        from shoal.cli.roles import capability
        from shoal.view.figures import clean

        lines = _lines(found, capability())
        for line in lines:
            say(clean(line))  # the list is a stranger's: one line of it is one line here


def _join(found: FoundRuns, name: str, out: Path | None) -> None:
    invite = found.invite(name)
    if out is None:
        say(invite.encode())
        return
    invite.save(out)
    say(
        f"{out} is an open invite to {invite.run}: stake on this machine's key, then `shoal worker --join {out} --dir DIR`"
    )


def _lines(found: FoundRuns, machine: Capability) -> list[str]:
    lines = [f"{found.url}, key {found.key}"]
    for offer in found.runs.runs:
        state = f"step {offer.step} of {offer.steps}" if offer.state == "running" else "finished"
        places = "" if offer.places_free is None else f", {offer.places_free} places free"
        joining = "open to stake" if offer.invite else "invited only"
        lines += ["", f"{offer.place or offer.run}: {offer.model}, {state}, {joining}, {offer.workers} workers{places}"]
        lines += [f"    {line}" for line in _about(offer, machine)]
    lines += [line for closed in found.runs.closed for line in ("", f"{closed.place}: closed, {closed.why}")]
    return lines


def _about(offer: RunOffer, machine: Capability) -> list[str]:
    """What this machine lacks for the run, and what only its work and its stake will show."""
    from shoal.config.checking import RequirementsSection
    from shoal.coordinator.members import lacks

    wants = RequirementsSection.model_validate(offer.requirements)
    missing = lacks(machine, wants)
    lines = [f"this machine lacks {missing}" if missing else "this machine meets its requirements"]
    if wants.tokens_per_s:
        lines.append(f"at least {wants.tokens_per_s:g} tokens/s, measured by its work")
    if offer.invite:
        name, stake = offer.place or offer.run, max(1, wants.stake)
        lines.append(f"open to anyone who stakes {stake}: shoal discover {offer.url} --join {name} --out {name}.invite")
    return lines
