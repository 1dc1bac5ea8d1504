"""What trains: `shoal run`, `shoal sft`, `shoal pretrain`.

`shoal run` is everything on this machine. sft and pretrain print one line to standard output, the finished model's folder;
progress goes to the log. Under torchrun several ranks act as one: rank 0 leads, and the others need only the model. With
--join, `shoal pretrain` is one of several sites.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import config as config_module
from shoal.cli.arguments import (
    Commands,
    add_command,
    read_config,
    run_name,
    say,
    takes_config,
    takes_dashboard,
    takes_threads,
)
from shoal.cli.launch import process
from shoal.config import Config
from shoal.errors import ShoalError, UserError
from shoal.protocol.invite import Invite, read_invite

if TYPE_CHECKING:
    from shoal.learner.pretrain.net import Net
    from shoal.learner.pretrain.trainer import OuterSteps


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    _add_run(commands)
    _add_sft(commands)
    _add_pretrain(commands)


def _add_run(commands: Commands[argparse.ArgumentParser]) -> None:
    run_ = add_command(commands, "run", "run everything on this machine", "quickstart --set run.steps=20")
    takes_config(run_, required=False)
    run_.add_argument("--resume", type=Path, metavar="RUN", help="resume the run in this folder (instead of a config)")
    run_.add_argument("--seed", type=int, help="overrides run.seed")
    run_.add_argument("--out", type=Path, metavar="RUN", help="folder of this run (default: runs/CONFIG-TIME)")
    takes_dashboard(run_)


def run(arguments: argparse.Namespace) -> int:
    if bool(arguments.resume) == bool(arguments.config):
        raise UserError("name a config, or the folder of a run to resume: shoal run --resume RUN")
    if arguments.resume and arguments.out:
        raise UserError(f"a resumed run stays in its folder {arguments.resume}; leave --out out")
    if arguments.resume:
        arguments.config = arguments.resume / "config.toml"
        if not arguments.config.is_file():
            raise UserError(f"{arguments.resume} is not the folder of a run: no config.toml there")
    if arguments.seed is not None:
        arguments.overrides.append(f"run.seed={arguments.seed}")
    config = read_config(arguments)
    if arguments.resume:
        _check_model(config, arguments.resume)
    from shoal.cli.launch.members import stopped_run
    from shoal.cli.launch.swarm import Swarm

    if arguments.resume:
        name, address = stopped_run(arguments.resume)
        return Swarm(config, name, arguments.resume, address, dashboard=arguments.dashboard).run()
    stem = arguments.config.stem
    name = run_name(f"{stem}-{config.run.seed}", "rename the config file, after which the run is called")
    out = arguments.out or Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Swarm(config, name, out, dashboard=arguments.dashboard).run()


def _check_model(config: Config, folder: Path) -> None:
    """Raise UserError if the run in this folder trains another model: its checkpoints fit no other."""
    held = config_module.load(folder / "config.toml").model.name
    if config.model.name != held:
        raise UserError(f"the run in {folder} trains {held}, not {config.model.name}: start a new run for that model")


def _add_sft(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "sft",
        "fine-tune on conversations; without a config: make bundled:tiny",
        "configs/sft.toml --out runs/sft",
    )
    takes_config(parser, required=False)
    takes_threads(parser)
    parser.add_argument(
        "--out", type=Path, help="folder for checkpoints, metrics.jsonl and the model; an existing folder is resumed"
    )


def run_sft(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raises ShoalError after SIGINT or SIGTERM."""
    model = _tiny() if arguments.config is None else _finetune(arguments)
    if model is not None:
        say(f"{model}")


def _tiny() -> Path:
    from shoal.cli.launch.prepare import model_folder
    from shoal.model.sources import TINY

    process.log_lines("sft")
    return model_folder(TINY)


def _finetune(arguments: argparse.Namespace) -> Path | None:
    """Return the model's folder; None on a rank that does not lead."""
    config = read_config(arguments)
    stop = process.begin("sft", threads=arguments.threads)
    from shoal.cli.launch.prepare import model_folder
    from shoal.learner.ranks import from_leader, start_ranks
    from shoal.learner.sft.trainer import Data, Sft, load_data, open_policy
    from shoal.model.load import load_tokenizer

    ranks, config, picked = start_ranks(config)
    out = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    out = from_leader(ranks, lambda: out, lambda path: str(path).encode(), lambda told: Path(told.decode()))
    folder = model_folder(config.model.name)
    data = from_leader(ranks, lambda: load_data(load_tokenizer(folder), folder, config), Data.to_bytes, Data.from_bytes)
    policy = open_policy(folder, config, picked, ranks)
    model = Sft(policy, data, config, out).run(stop)
    ranks.stop()
    if not ranks.leads:
        return None
    if model is None:
        next_step = (
            f"add --out {out} to resume"
            if config.sft.checkpoint_every
            else "no checkpoint was written: set sft.checkpoint_every above 0 and run it again"
        )
        raise ShoalError(f"stopped before the end of the last epoch; {next_step}")
    return model


def _add_pretrain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "pretrain",
        "train on plain text, alone or as one of several sites",
        "configs/pretrain.toml --out runs/text",
    )
    takes_config(parser)
    takes_threads(parser)
    parser.add_argument(
        "--out", type=Path, help="folder for checkpoints, metrics.jsonl and the model; an existing folder is resumed"
    )
    parser.add_argument(
        "--join", metavar="INVITE", help="train as one of several sites: an invite of `shoal pool meet`"
    )


def run_pretrain(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raises ShoalError after SIGINT or SIGTERM."""
    config = read_config(arguments)
    stop = process.begin("pretrain", threads=arguments.threads)
    out = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    net, config, folder = _net(config)
    if not net.ranks.leads:
        net.follow()
    else:
        try:
            model = _train(net, config, folder, out, arguments.join, stop)
        finally:
            net.end()
        if model is None:
            raise ShoalError(f"stopped before the last step; add --out {out} to resume")
        say(f"{model}")
    net.ranks.stop()


def _net(config: Config) -> tuple[Net, Config, Path]:
    """The model on this rank, the leader's config, and the model's folder."""
    from shoal.cli.launch.prepare import model_folder
    from shoal.learner.pretrain.net import Net
    from shoal.learner.ranks import start_ranks

    ranks, config, dtype = start_ranks(config)
    folder, autocast = model_folder(config.model.name), dtype == "bfloat16"
    net = Net(model_of(folder, config), config.pretrain, ranks, device=config.model.device, autocast=autocast)
    return net, config, folder


def _train(net: Net, config: Config, folder: Path, out: Path, invite: str | None, stop: threading.Event) -> Path | None:
    from shoal.learner.pretrain.text import Corpus, TokenStream, heldout
    from shoal.learner.pretrain.trainer import Pretraining, about
    from shoal.model.load import load_tokenizer

    settings = config.pretrain
    corpus, tokenizer = Corpus(settings.data, settings.field), load_tokenizer(folder)
    kept = heldout(corpus, tokenizer, settings.heldout, settings.tokens)
    outer = _outer(config, net, out, read_invite(invite), stop) if invite else None
    take = outer.link.take if outer else None
    stream = TokenStream(corpus, tokenizer, first=settings.heldout, share=settings.share, take=take)
    followed = about(config, folder, corpus, sites=outer is not None)
    return Pretraining(net, tokenizer, stream, kept, config, out, followed, outer).run(stop)


def _outer(config: Config, net: Net, out: Path, invite: Invite, stop: threading.Event) -> OuterSteps:
    from shoal.diloco.remote import Remote
    from shoal.learner.pretrain.trainer import OuterSteps, terms_of

    settings, tensors = config.sites, net.tensors
    terms = terms_of(config, tensors)
    remote = Remote(invite, out, terms, patience_s=settings.give_up_s, stop=stop)
    return OuterSteps(remote.name, settings, terms, remote, tensors, out, stop.is_set)


def model_of(folder: Path, config: Config) -> Any:
    """The model to train, on the CPU."""
    from shoal.model.load import plain_model

    return plain_model(folder, config.run.seed if config.pretrain.init == "random" else None)
