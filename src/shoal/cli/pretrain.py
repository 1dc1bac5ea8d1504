"""`shoal pretrain CONFIG`: training on plain text. With --join it is one of several sites, which meet at
`shoal meet CONFIG`.

It prints one line to standard output, the finished model's folder. Progress goes to the log. Called by `cli`.
"""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

from shoal import config as config_module
from shoal.cli.arguments import threads
from shoal.config import Config, ConfigError
from shoal.errors import ShoalError
from shoal.launch import process
from shoal.protocol.invite import Invite, read_invite


class StoppedError(ShoalError):
    """Training was interrupted. The message says how to resume it."""


def pretrain_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    parser.add_argument(
        "--out", type=Path, help="folder for checkpoints, metrics.jsonl and the model; an existing folder is resumed"
    )
    parser.add_argument("--join", metavar="INVITE", help="train as one of several sites: an invite of `shoal meet`")


def config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a TOML file, see configs/pretrain.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    parser.add_argument("--threads", type=threads, default=0, help="cores to compute on (default: all)")


def run_pretrain(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raises StoppedError after SIGINT or SIGTERM."""
    config = config_module.load(arguments.config, arguments.overrides)
    stop = process.begin("pretrain", threads=arguments.threads)
    out = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    model = _train(config, out, arguments.join, stop)
    if model is None:
        raise StoppedError(f"stopped before the last step; add --out {out} to resume")
    sys.stdout.write(f"{model}\n")


def _train(config: Config, out: Path, invite: str | None, stop: threading.Event) -> Path | None:
    from shoal.launch.prepare import model_folder
    from shoal.model import dtype
    from shoal.model.load import load_tokenizer
    from shoal.pretrain.about import about
    from shoal.pretrain.stream import Stream, heldout
    from shoal.pretrain.text import Corpus
    from shoal.pretrain.trainer import Pretraining

    settings = config.pretrain
    folder = model_folder(config.model.name)
    corpus, tokenizer = Corpus(settings.data, settings.field), load_tokenizer(folder)
    kept = heldout(corpus, tokenizer, settings.heldout, settings.tokens)
    model = model_of(folder, config)
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    outer = _outer(config, model, out, read_invite(invite), stop) if invite else None
    take = outer.roster.take if outer else None
    stream = Stream(corpus, tokenizer, first=settings.heldout, share=settings.share, take=take)
    training = Pretraining(model, tokenizer, stream, kept, config, out, autocast=picked == "bfloat16", outer=outer)
    return training.run(about(config, folder, corpus, sites=outer is not None), stop)


def _outer(config: Config, model: Any, out: Path, invite: Invite, stop: threading.Event) -> Any:
    from shoal.diloco.remote import Remote
    from shoal.pretrain.outer import Outer, named, terms_of

    settings, tensors = config.sites, named(model)
    terms = terms_of(config, tensors)
    remote = Remote(invite, out, terms, patience_s=settings.give_up_s, authority=path_of(settings.tls_ca), stop=stop)
    return Outer(remote.name, settings, terms, remote, remote, tensors, out, stop.is_set)


def path_of(text: str) -> Path | None:
    return Path(text) if text else None


def model_of(folder: Path, config: Config) -> Any:
    """The model to train. Raises ConfigError for a device other than the CPU."""
    from shoal.model.plain import plain_model

    if config.model.device != "cpu":
        raise ConfigError(f'shoal pretrain computes on the CPU: set model.device = "cpu", not "{config.model.device}"')
    return plain_model(folder, config.run.seed if config.pretrain.init == "random" else None)
