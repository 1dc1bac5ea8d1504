"""The training commands: `shoal run`, `shoal sft`, `shoal pretrain`.

`shoal run` starts every role on this machine. sft and pretrain print the trained model's folder to standard output, and log
their progress. Under torchrun, rank 0 reads the data, and the other ranks need only the model. With --join,
`shoal pretrain` trains as one of several sites.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import config as config_module
from shoal.cli.arguments import (
    Commands,
    add_command,
    add_config,
    add_dashboard,
    add_threads,
    read_config,
    read_optional_config,
    run_name,
    say,
)
from shoal.cli.launch import process
from shoal.config import Config
from shoal.errors import ShoalError, UserError
from shoal.protocol.invite import Address, Invite, read_invite

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.learner.pretrain.trainer import Pretraining
    from shoal.learner.ranks import Ranks
    from shoal.model.dtype import DtypeName


def add_commands(commands: Commands) -> None:
    what = "train by RL, with all roles on this machine"
    parser = add_command(commands, "run", run, what, "quickstart --set run.steps=20")
    add_config(parser, required=False)
    resume = "resume the run in this folder (instead of a config)"
    parser.add_argument("--resume", type=Path, metavar="RUN", help=resume)
    parser.add_argument("--out", type=Path, metavar="RUN", help="folder of this run (default: runs/CONFIG-TIME)")
    add_dashboard(parser)

    out = "folder for checkpoints, metrics.jsonl and the model; training resumes from its checkpoints"
    what = "fine-tune a model on conversations; without a config, train bundled:tiny"
    parser = add_command(commands, "sft", run_sft, what, "configs/sft.toml --out runs/sft")
    add_config(parser, required=False)
    add_threads(parser)
    parser.add_argument("--out", type=Path, help=out)

    what = "train on plain text, alone or as one of several sites"
    parser = add_command(commands, "pretrain", run_pretrain, what, "configs/pretrain.toml --out runs/text")
    add_config(parser)
    add_threads(parser)
    parser.add_argument("--out", type=Path, help=out)
    invite = "train as one of several sites, with an invite that `shoal pool meet` writes"
    parser.add_argument("--join", metavar="INVITE", help=invite)


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.resume) == bool(arguments.config):
        raise UserError("give either a config, or the folder of a run to resume: shoal run --resume RUN")
    if arguments.resume and arguments.out:
        raise UserError(f"a resumed run stays in its folder {arguments.resume}; leave out --out")
    if arguments.resume:
        arguments.config = arguments.resume / "config.toml"
        if not arguments.config.is_file():
            raise UserError(f"{arguments.resume} is not the folder of a run: it has no config.toml")
    config = read_config(arguments)
    from shoal.cli.launch.swarm import Swarm

    if arguments.resume:
        config_module.check_resumed(arguments.config.read_text(), config)
        address = Address.read(arguments.resume)
        return Swarm(config, address.run, arguments.resume, address.url, dashboard=arguments.dashboard).run()
    stem = arguments.config.stem
    name = run_name(f"{stem}-{config.run.seed}", "rename the config file, because the run takes its name")
    out = arguments.out or Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Swarm(config, name, out, dashboard=arguments.dashboard).run()


def run_sft(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raise ShoalError after SIGINT or SIGTERM."""
    config = read_optional_config(arguments)
    if config is None:
        from shoal.learner.sft.tiny import tiny

        process.log_lines("sft")
        say(f"{tiny()}")
        return
    stop = process.begin("sft", threads=arguments.threads)
    from shoal.cli.launch.prepare import model_folder
    from shoal.learner.ranks import from_leader, start_ranks
    from shoal.learner.sft.trainer import Data, Sft, load_data, open_policy
    from shoal.model.load import load_tokenizer

    ranks, config, picked = start_ranks(config)
    out = _output_folder(arguments, ranks)
    folder = model_folder(config.model.name)
    data = from_leader(ranks, lambda: load_data(load_tokenizer(folder), folder, config), Data.to_bytes, Data.from_bytes)
    policy = open_policy(folder, config, picked, ranks)
    model = Sft(policy, data, config, out).run(stop)
    ranks.stop()
    if not ranks.leads:
        return
    if model is None:
        next_step = (
            f"add --out {out} to resume"
            if config.sft.checkpoint_every
            else "no checkpoint was written: set sft.checkpoint_every above 0 and run it again"
        )
        raise ShoalError(f"stopped before the end of the last epoch; {next_step}")
    say(f"{model}")


def run_pretrain(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raise ShoalError after SIGINT or SIGTERM."""
    config = read_config(arguments)
    stop = process.begin("pretrain", threads=arguments.threads)
    from shoal.learner.ranks import start_ranks

    ranks, config, picked = start_ranks(config)
    out, invite = _output_folder(arguments, ranks), read_invite(arguments.join) if arguments.join else None
    model = _pretraining(config, ranks, picked, out, invite, stop).run(stop)
    ranks.stop()
    if not ranks.leads:
        return
    if model is None:
        raise ShoalError(f"stopped before the last step; add --out {out} to resume")
    say(f"{model}")


def _output_folder(arguments: argparse.Namespace, ranks: Ranks) -> Path:
    """Return the leader's output folder, on every rank."""
    from shoal.learner.ranks import from_leader

    out = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return from_leader(ranks, lambda: out, lambda path: str(path).encode(), lambda data: Path(data.decode()))


def _pretraining(
    config: Config, ranks: Ranks, dtype: DtypeName, out: Path, invite: Invite | None, stop: threading.Event
) -> Pretraining:
    """Return this rank's `Pretraining`. The leader reads the text and talks to the sites' meeting."""
    from shoal.cli.launch.prepare import model_folder
    from shoal.diloco.agreed import Shapes
    from shoal.diloco.messages import name_of
    from shoal.diloco.remote import Remote
    from shoal.diloco.site import GIVE_UP_S
    from shoal.learner.pretrain.text import Corpus, TokenStream, heldout
    from shoal.learner.pretrain.trainer import Pretraining, TextSite, about, decode, encode, terms_of, text_policy
    from shoal.learner.ranks import from_leader
    from shoal.model.load import load_tokenizer

    settings, folder = config.pretrain, model_folder(config.model.name)
    stream, fixed_settings = None, {}

    def read() -> Tensor:
        nonlocal stream, fixed_settings
        corpus, tokenizer = Corpus(settings.data, settings.field), load_tokenizer(folder)
        stream = TokenStream(corpus, tokenizer, first=settings.heldout)
        fixed_settings = about(config, folder, corpus, sites=invite is not None)
        return heldout(corpus, tokenizer, settings.heldout, settings.tokens)

    kept = from_leader(ranks, read, encode, lambda data: decode(data, settings.tokens))
    policy = text_policy(folder, config, dtype, ranks)
    site = None
    if invite is not None:
        terms = terms_of(config, Shapes.of(policy.masters))
        remote = None
        if stream is not None:
            remote = Remote(invite, out, terms, patience_s=GIVE_UP_S, stop=stop)
            stream.take = remote.take
        site = TextSite(name_of(invite), policy, terms, remote, config.sites, out, stop)
    return Pretraining(policy, stream, kept, config, out, fixed_settings, site)
