"""`shoal sft CONFIG`: supervised fine-tuning. Without a config it trains `bundled:tiny`.

It prints one line to standard output, the finished model's folder. Progress goes to the log.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import StoppedError, UsageError, read_config, say, takes_config, takes_threads
from shoal.cli.launch import process

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.protocol.invite import Invite


def sft_arguments(parser: argparse.ArgumentParser) -> None:
    takes_config(parser, required=False)
    takes_threads(parser)
    parser.add_argument(
        "--out", type=Path, help="folder for checkpoints, metrics.jsonl and the model; an existing folder is resumed"
    )
    parser.add_argument("--join", metavar="INVITE", help="train as one of several sites: an invite of `shoal meet`")


def run_sft(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raises StoppedError after SIGINT or SIGTERM."""
    if arguments.config is None and arguments.join:
        raise UsageError("--join needs the config that the sites share")
    model = _tiny() if arguments.config is None else _finetune(arguments)
    if model is not None:
        say(f"{model}")


def _tiny() -> Path:
    from shoal.learner.sft.tiny import train_tiny

    process.log_lines("sft")
    return train_tiny()


def _finetune(arguments: argparse.Namespace) -> Path | None:
    """Returns the model's folder; None on a rank that does not lead."""
    config = read_config(arguments)
    stop = process.begin("sft", threads=arguments.threads)
    from shoal.cli.launch.prepare import model_folder
    from shoal.learner.sft.batch import Data, load_data
    from shoal.learner.sft.trainer import Sft, open_policy
    from shoal.learner.started import from_leader, start
    from shoal.model.load import load_tokenizer
    from shoal.protocol.invite import read_invite

    ranks, config, picked = start(config)
    out = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = from_leader(ranks, lambda: out, lambda path: str(path).encode(), lambda told: Path(told.decode()))
    folder = model_folder(config.model.name)
    data = from_leader(ranks, lambda: load_data(load_tokenizer(folder), folder, config), Data.to_bytes, Data.from_bytes)
    policy = open_policy(folder, config, picked, ranks)
    if arguments.join:
        training: Sft = _at_site(policy, data, config, folder, out, read_invite(arguments.join), stop)
    else:
        training = Sft(policy, data, config, out)
    model = training.run(stop)
    ranks.stop()
    if not ranks.leads:
        return None
    if model is None:
        resumable = config.sft.checkpoint_every or arguments.join
        next_step = (
            f"add --out {out} to resume"
            if resumable
            else "no checkpoint was written: set sft.checkpoint_every above 0 and run it again"
        )
        raise StoppedError(f"stopped before the end of the last epoch; {next_step}")
    return model


def _at_site(
    policy: Any, data: Any, config: Config, model: Path, out: Path, invite: Invite, stop: threading.Event
) -> Any:
    from shoal.diloco.invites import name_of
    from shoal.diloco.remote import Remote
    from shoal.learner.sft.batch import plan
    from shoal.learner.sft.sites import SiteSft, sft_about, sft_terms

    settings, about = config.sites, sft_about(data, config, policy, model)
    if not policy.ranks.leads:
        return SiteSft(policy, data, config, out, about, name_of(invite), None, None)
    updates = plan([len(example.tokens) for example in data.train], config.sft, config.run.seed)
    terms = sft_terms(updates, config, policy)
    authority = Path(settings.tls_ca) if settings.tls_ca else None
    remote = Remote(invite, out, terms, patience_s=settings.give_up_s, authority=authority, stop=stop)
    return SiteSft(policy, data, config, out, about, remote.name, remote, remote)
