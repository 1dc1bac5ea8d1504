"""The folder of a training without a pool: which training it holds, and its metrics.

    run.json       what the training follows from, by name        metrics.jsonl    one line per step or measurement
    checkpoints/   the trainer's own                              model/           the result

Invariant: a folder holds one training, and what something else left there is never overwritten. Called by `sft` and
`pretrain`.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from shoal.config import ConfigError
from shoal.files import keep_lines, write_file

RUN, METRICS = "run.json", "metrics.jsonl"
WRITTEN = (METRICS, "checkpoints", "model")


def claim(folder: Path, about: Mapping[str, str], differs: str = "") -> None:
    """Mark `folder` as this training's. `differs` says, in place of the name and both values, what may differ.

    Raises ConfigError if the folder holds another training, or files of something else that this one would overwrite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN
    if not path.exists():
        if taken := [name for name in WRITTEN if (folder / name).exists()]:
            raise ConfigError(f"{folder} holds {taken[0]} of something else; choose another --out")
        write_file(path, (json.dumps(about, indent=1) + "\n").encode())
        return
    held = json.loads(path.read_text())
    for key in sorted({*held, *about}):
        if held.get(key) != about.get(key):
            what = differs or f"{key} = {held.get(key)}, not {about.get(key)}"
            raise ConfigError(
                f"{folder} holds a run with {what}: restore it to resume that run, or choose another --out"
            )


def drop_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be repeated, and an incomplete last line."""
    keep_lines(path, lambda line: step > 0 and line["step"] <= step)
