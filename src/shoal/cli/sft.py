"""`shoal sft CONFIG`: supervised fine-tuning. Without a config it trains `bundled:tiny`.

It prints one line to standard output, the finished model's folder. Progress goes to the log.
Called by `cli`.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from shoal import config as config_module
from shoal.cli.arguments import threads
from shoal.errors import ShoalError
from shoal.launch import process


class StoppedError(ShoalError):
    """Training was interrupted. The message says how to resume it."""


def sft_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, nargs="?", help="a TOML file, see configs/sft.toml (default: train bundled:tiny)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    parser.add_argument(
        "--out", type=Path, help="folder for checkpoints, metrics.jsonl and the model; an existing folder is resumed"
    )
    parser.add_argument("--threads", type=threads, default=0, help="cores to compute on (default: all)")


def run_sft(arguments: argparse.Namespace) -> None:
    """Train and print the model's folder. Raises StoppedError after SIGINT or SIGTERM."""
    sys.stdout.write(f"{_tiny() if arguments.config is None else _finetune(arguments)}\n")


def _tiny() -> Path:
    from shoal.sft.tiny import train_tiny

    logging.basicConfig(level=logging.INFO, format="%(asctime)s sft: %(message)s", datefmt="%H:%M:%S")
    return train_tiny()


def _finetune(arguments: argparse.Namespace) -> Path:
    config = config_module.load(arguments.config, arguments.overrides)
    stop = process.begin("sft", threads=arguments.threads)
    from shoal.launch.prepare import model_folder
    from shoal.model import dtype
    from shoal.model.load import load_tokenizer
    from shoal.sft.batch import load_data
    from shoal.sft.trainer import Sft, open_policy

    folder = model_folder(config.model.name)
    data = load_data(load_tokenizer(folder), folder, config)
    picked, _ = dtype.pick(config.model.dtype, config.model.device)
    out = arguments.out or Path("runs") / f"{arguments.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    model = Sft(open_policy(folder, config, picked), data, config, out).run(stop)
    if model is None:
        next_step = (
            f"add --out {out} to resume" if config.sft.checkpoint_every else "there is no checkpoint to resume from"
        )
        raise StoppedError(f"stopped before the end of the last epoch; {next_step}")
    return model
