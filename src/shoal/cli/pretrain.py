"""`shoal pretrain CONFIG`: training on plain text. With --join it is one of several sites, which meet at
`shoal meet CONFIG`. Under torchrun several ranks act as one: rank 0 leads, and the others need only the model.

It prints one line to standard output, the finished model's folder. Progress goes to the log.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import Commands, StoppedError, add_command, read_config, say, takes_config, takes_threads
from shoal.cli.launch import process
from shoal.config import Config
from shoal.protocol.invite import Invite, read_invite

if TYPE_CHECKING:
    from shoal.learner.pretrain.net import Net
    from shoal.learner.pretrain.outer import Outer


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
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
    parser.add_argument("--join", metavar="INVITE", help="train as one of several sites: an invite of `shoal meet`")


def run_pretrain(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raises StoppedError after SIGINT or SIGTERM."""
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
            raise StoppedError(f"stopped before the last step; add --out {out} to resume")
        say(f"{model}")
    net.ranks.stop()


def _net(config: Config) -> tuple[Net, Config, Path]:
    """The model on this rank, the leader's config, and the model's folder."""
    from shoal.cli.launch.prepare import model_folder
    from shoal.learner.pretrain.net import Net
    from shoal.learner.started import start

    ranks, config, dtype = start(config)
    folder, autocast = model_folder(config.model.name), dtype == "bfloat16"
    net = Net(model_of(folder, config), config.pretrain, ranks, device=config.model.device, autocast=autocast)
    return net, config, folder


def _train(net: Net, config: Config, folder: Path, out: Path, invite: str | None, stop: threading.Event) -> Path | None:
    from shoal.learner.pretrain.about import about
    from shoal.learner.pretrain.stream import Stream, heldout
    from shoal.learner.pretrain.text import Corpus
    from shoal.learner.pretrain.trainer import Pretraining
    from shoal.model.load import load_tokenizer

    settings = config.pretrain
    corpus, tokenizer = Corpus(settings.data, settings.field), load_tokenizer(folder)
    kept = heldout(corpus, tokenizer, settings.heldout, settings.tokens)
    outer = _outer(config, net, out, read_invite(invite), stop) if invite else None
    take = outer.roster.take if outer else None
    stream = Stream(corpus, tokenizer, first=settings.heldout, share=settings.share, take=take)
    training = Pretraining(net, tokenizer, stream, kept, config, out, outer)
    return training.run(about(config, folder, corpus, sites=outer is not None), stop)


def _outer(config: Config, net: Net, out: Path, invite: Invite, stop: threading.Event) -> Outer:
    from shoal.diloco.remote import Remote
    from shoal.learner.pretrain.outer import Outer, terms_of

    settings, tensors = config.sites, net.tensors
    terms = terms_of(config, tensors)
    remote = Remote(invite, out, terms, patience_s=settings.give_up_s, stop=stop)
    return Outer(remote.name, settings, terms, remote, remote, tensors, out, stop.is_set)


def path_of(text: str) -> Path | None:
    return Path(text) if text else None


def model_of(folder: Path, config: Config) -> Any:
    """The model to train, on the CPU."""
    from shoal.model.load import plain_model

    return plain_model(folder, config.run.seed if config.pretrain.init == "random" else None)
