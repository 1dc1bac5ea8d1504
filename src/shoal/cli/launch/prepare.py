"""Prepare a run: check the device, choose a dtype, build the task set, fetch the model, and check that they fit together.

Invariant: a problem that can be found without starting the pool is reported here, with one clear error. Only the
functions that compute import torch. `shoal run` itself never imports torch, because it calls `main` in a child process.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from shoal import tasks
from shoal.cli.arguments import Parser, add_config, add_threads, read_config, say
from shoal.cli.main import answer
from shoal.config import Config, ConfigError
from shoal.errors import check_extra
from shoal.model import sources
from shoal.tasks.compiling import build_tasks
from shoal.tasks.environments import try_out
from shoal.tasks.prompt import TurnFrame, prompt_tokens
from shoal.tasks.task import GradeError
from shoal.tasks.taskset import TaskSet

SAMPLE = 64  # prompts whose length is measured


def prepare(config: Config, task_folder: Path | None = None) -> dict[str, Any]:
    """Build the task set, and write it to `task_folder` if given. Fetch, convert or train the model. Pick the dtype.

    Return the model's folder and number of parameters, the picked dtype, the speed of each dtype tried, the
    mean length of prompts, and the task set's digest and notes. Raise UserError.
    """
    from shoal.model import dtype

    check_packages(config)
    dtype.check_device(config.model.device)
    picked, gflops = dtype.pick(config.model.dtype, config.model.device)
    if task_folder is not None:
        config, _ = build_tasks(config, task_folder)
    loaded = load_tasks(config, task_folder)
    check_length(config, fetch=True)
    folder = model_folder(config.model.name)
    prompt, parameters = check_model(config, folder, loaded)
    return {
        "folder": str(folder),
        "parameters": parameters,
        "dtype": picked,
        "tasks": {"digest": loaded.digest, "notes": list(loaded.notes)},
        "prompt_tokens": prompt,
        "gflops": {name: round(speed, 1) for name, speed in gflops.items()},
    }


def main(argv: list[str]) -> int:
    """Print what `prepare` returns, as JSON."""
    parser = Parser(prog="shoal prepare")
    add_config(parser)
    add_threads(parser)
    parser.add_argument("--tasks", type=Path, metavar="DIR", help="where to write the task set (default: nowhere)")
    parser.set_defaults(command_name="prepare")

    def call(arguments: argparse.Namespace) -> None:
        from shoal.model.dtype import set_threads

        config = read_config(arguments)
        set_threads(arguments.threads)
        say(json.dumps(prepare(config, arguments.tasks)))

    return answer(call, parser.parse_args(argv))


def check_packages(config: Config) -> None:
    """Raise UserError if a setting needs a package that is not installed. vLLM may be in another environment."""
    tracker = config.run.tracker
    needed = [
        ("coordinator.database", config.coordinator.database, "postgres"),
        ("store.url", config.store.url, "s3"),
        ("ledger.contract", config.ledger.contract, "evm"),
        (f'run.tracker = "{tracker}"', tracker != "none", tracker),
    ]
    for setting, wanted, extra in needed:
        if wanted:
            check_extra(extra, setting)


def check_length(config: Config, *, fetch: bool = False) -> None:
    """Raise ConfigError if completions of `sampling.max_tokens` exceed the model's positions.

    A model that is not on this machine is checked only with `fetch`, which downloads a hub model's config.json. Raise
    ModelNotFoundError.
    """
    positions = sources.positions(sources.read_config(config.model.name, fetch=fetch))
    if positions is not None and config.sampling.max_tokens >= positions:
        raise ConfigError(
            f"sampling.max_tokens = {config.sampling.max_tokens} does not fit {config.model.name}: prompt and completion "
            f"share its {positions} positions; lower sampling.max_tokens"
        )


def check_model(config: Config, folder: Path, loaded: TaskSet) -> tuple[int, int]:
    """Check that the model in `folder` can be trained on these tasks, without loading its weights.

    Return the mean length of prompts in tokens, and the number of parameters. Raise ConfigError, UnsupportedModelError,
    ChatTemplateError.
    """
    from shoal.model.load import check_weights, eos_ids, load_config, load_tokenizer
    from shoal.model.support import check_config

    model = load_config(folder)
    check_config(model, folder)
    parameters = check_weights(folder)
    tokenizer = load_tokenizer(folder)
    lengths = [len(prompt_tokens(tokenizer, config.tasks, task, 0)) for task in loaded.heldout[:SAMPLE]]
    positions, longest = sources.positions(model.to_dict()), max(lengths)
    if positions is not None and longest + config.sampling.max_tokens > positions:
        raise ConfigError(
            f"a prompt of {longest} tokens and a completion of up to {config.sampling.max_tokens} do not fit the model's "
            f"{positions} positions; lower sampling.max_tokens, or shorten or remove long questions"
        )
    if config.sampling.max_turns > 1:
        TurnFrame(tokenizer, eos_ids(folder))
    return round(statistics.fmean(lengths)), parameters


def load_tasks(config: Config, folder: Path | None = None) -> TaskSet:
    """Return the task set, written to `folder` if given; try its rewards and environments. Raise ConfigError."""
    try:
        loaded = tasks.load(config.tasks, folder)
        with tasks.Graders(config.tasks, files=loaded.files) as graders:
            graders.try_out(loaded.samples)
        try_out(config, loaded)
    except (ValueError, GradeError) as error:
        raise ConfigError(str(error)) from error
    return loaded


def model_folder(name: str) -> Path:
    """Return the folder of model `name`; train `bundled:tiny` first if it does not exist yet."""
    if name == sources.TINY:
        from shoal.learner.sft.tiny import tiny

        return tiny()
    return sources.resolve(name)
