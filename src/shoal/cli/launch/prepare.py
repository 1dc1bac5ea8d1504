"""What a run needs before it starts: the model in the cache, tasks, a chat template, a device, a dtype for this machine.

Invariant: what can be found wrong without starting the pool is found wrong here, with one clear error.
`main` is what `shoal run` runs as a child process: it never imports torch itself. It prints what `prepare` returns as JSON.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from shoal.cli.arguments import Parser, read_config, say, takes_config, takes_threads
from shoal.cli.main import answer
from shoal.cli.preflight.cost import measure
from shoal.cli.preflight.estimate import SAMPLE, mean_prompt
from shoal.cli.preflight.problems import check_length, load_tasks
from shoal.config import Config
from shoal.model import dtype, sources
from shoal.model.dtype import compute_on
from shoal.model.load import eos_ids, load_tokenizer
from shoal.tasks.compiling import build_tasks
from shoal.tasks.prompt import TurnFrame


def prepare(config: Config, task_folder: Path | None = None) -> dict[str, Any]:
    """Build the task set, fetch, convert or train the model and pick the dtype.

    Returns the model's folder and size, the dtype and the GFLOP/s, the machine's speed in that dtype, the length of prompts,
    the task set's digest and what is in it. The set is kept in `task_folder`, if one is given. Raises ConfigError,
    DeviceError, ModelNotFoundError, UnsupportedModelError, ChatTemplateError.
    """
    dtype.check_device(config.model.device)
    picked, gflops = dtype.pick(config.model.dtype, config.model.device)
    if task_folder is not None:
        config, _ = build_tasks(config, task_folder)
    loaded = load_tasks(config, task_folder)
    check_length(config, fetch=True)
    folder = model_folder(config.model.name)
    tokenizer = load_tokenizer(folder)
    prompt = mean_prompt(tokenizer, config, loaded.heldout[:SAMPLE])
    if config.sampling.max_turns > 1:
        TurnFrame(tokenizer, eos_ids(folder))
    machine = measure(picked, config.model.device)  # a second time, seconds later: other work may slow one of the two
    machine["flops"] = max(machine["flops"], 1e9 * gflops.get(picked, 0.0))
    return {
        "folder": str(folder),
        "parameters": count_parameters(folder),
        "dtype": picked,
        "tasks": {"digest": loaded.digest, "notes": list(loaded.notes)},
        "prompt_tokens": prompt,
        "machine": machine,
        "gflops": {name: round(speed, 1) for name, speed in gflops.items()},
    }


def main(argv: list[str]) -> int:
    parser = Parser(prog="shoal prepare")
    takes_config(parser)
    takes_threads(parser)
    parser.add_argument("--tasks", type=Path, metavar="DIR", help="keep the task set there (default: nowhere)")
    parser.set_defaults(command_name="prepare")

    def call(arguments: argparse.Namespace) -> None:
        config = read_config(arguments)
        compute_on(arguments.threads)
        say(json.dumps(prepare(config, arguments.tasks)))

    return answer(call, parser.parse_args(argv))


def model_folder(name: str) -> Path:
    """The folder of model `name`. `bundled:tiny` is trained first if it does not exist yet."""
    if name == sources.TINY:
        from shoal.learner.sft.tiny import tiny

        return tiny()
    return sources.resolve(name)


def count_parameters(folder: Path) -> int:
    """Parameters in the folder's safetensors files, read from their headers."""
    return sum(_parameters_in(file) for file in folder.glob("*.safetensors"))


def _parameters_in(file: Path) -> int:
    """The format's header: its length as 8 bytes, then JSON with the shape of each tensor."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
