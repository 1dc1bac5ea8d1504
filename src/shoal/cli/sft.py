"""`shoal sft CONFIG`: supervised fine-tuning. Without a config it trains `bundled:tiny`.

It prints one line to standard output, the finished model's folder. Progress goes to the log.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shoal.cli.arguments import Commands, StoppedError, add_command, read_config, say, takes_config, takes_threads
from shoal.cli.launch import process


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
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
    """Train and print the model's folder. Raises StoppedError after SIGINT or SIGTERM."""
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

    ranks, config, picked = start(config)
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
        raise StoppedError(f"stopped before the end of the last epoch; {next_step}")
    return model
