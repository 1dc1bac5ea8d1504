"""`shoal pool discover URL`: the run at an address, whether this machine may join it, and an open invite to it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.arguments import AddAction, UsageError, say

if TYPE_CHECKING:
    from shoal.protocol.messages import Capability, RunOffer


def add_action(action: AddAction) -> None:
    what = "which run is at this address, and may this machine join it?"
    parser = action("discover", discover, what, "http://pool.example:8700")
    parser.add_argument("url", metavar="URL", help="of a coordinator")
    parser.add_argument(
        "--key", default="", help="the coordinator's key, as its operator told you: no other is believed"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the run's open invite there")
    parser.add_argument("--json", action="store_true", help="the offer as JSON")


def discover(arguments: argparse.Namespace) -> None:
    if arguments.out and arguments.out.exists():
        raise UsageError(f"{arguments.out} exists; choose another file, so that no invite is lost")
    import httpx

    from shoal.cli.roles import capability
    from shoal.protocol.discovery import find_run, open_invite
    from shoal.watch.figures import clean

    with httpx.Client(timeout=10) as client:
        offer = find_run(arguments.url, client, arguments.key)
    if arguments.out:
        open_invite(offer).save(arguments.out)
        say(
            f"{arguments.out} is an open invite to {clean(offer.run)}: stake on this machine's key, then "
            f"`shoal worker --join {arguments.out} --dir DIR`"
        )
    elif arguments.json:
        say(json.dumps(offer.model_dump(), indent=2))
    else:
        for line in _lines(arguments.url, offer, capability()):
            say(clean(line))  # the offer is a stranger's: one line of it is one line here


def _lines(url: str, offer: RunOffer, machine: Capability) -> list[str]:
    """The run, what this machine lacks for it, and what only its work and its stake will show."""
    from shoal.config.checking import RequirementsSection
    from shoal.coordinator.members import lacks

    wants = RequirementsSection.model_validate(offer.requirements)
    state = f"step {offer.step} of {offer.steps}" if offer.state == "running" else "finished"
    places = "" if offer.places_free is None else f", {offer.places_free} places free"
    joining = "open to stake" if offer.invite else "invited only"
    missing = lacks(machine, wants)
    lines = [
        f"{offer.run}, key {offer.key}",
        f"{offer.model}, {state}, {joining}, {offer.workers} workers{places}",
        f"this machine lacks {missing}" if missing else "this machine meets its requirements",
    ]
    if wants.tokens_per_s:
        lines.append(f"at least {wants.tokens_per_s:g} tokens/s, measured by its work")
    if offer.invite:
        lines.append(f"open to anyone who stakes {max(1, wants.stake)}: shoal pool discover {url} --out worker.invite")
    return lines
