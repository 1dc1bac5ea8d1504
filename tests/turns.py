"""Conversations of a tiny random llama that often ends its turn with an environment that often answers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config
from shoal.tasks import Task
from shoal.tasks.environments import ENVIRONMENTS, Environment

from . import workers

EOS, USER, ASSISTANT = 1, 2, 3
ENDS = (EOS, *range(20, 28))  # about one token in seven ends a turn
MAX_TOKENS, MAX_TURNS = 48, 4


class Echo(Environment):
    """Answer with a number derived from all arguments. End the conversation after a turn of at least five characters."""

    def respond(self, task: Task, seed: int, turns: Sequence[str]) -> str | None:
        if len(turns[-1]) >= 5:
            return None
        return str((seed + sum(map(len, turns)) + len(task.question)) % 1000)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let configs name the environment `echo`."""
    monkeypatch.setitem(ENVIRONMENTS, "echo", lambda _: Echo())


def config(environment: str = "echo", **sections: Any) -> Config:
    """Like `workers.config`, but with several turns."""
    base: dict[str, Any] = {
        "tasks": {"sources": [{"generator": "arithmetic", "environment": environment}], "length_targets": [8, 16]},
        "sampling": {"max_tokens": MAX_TOKENS, "max_turns": MAX_TURNS, "group_size": 4},
    }
    return workers.config(**{name: base.get(name, {}) | sections.get(name, {}) for name in {*base, *sections}})


def make_talkative(folder: Path, to: Path) -> Path:
    """Copy a tiny model's folder, and declare many tokens as end tokens."""
    shutil.copytree(folder, to)
    path = to / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(ENDS)}))
    return to
