"""Test doubles: an engine whose completions follow from prompt and seed, tasks in a file, a console without a terminal."""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

from shoal.engine.protocol import Completion
from shoal.engine.protocol import Sampling as EngineSampling
from shoal.evals.completions import Answer, Asked, Key
from shoal.evals.evaluate import Contestant, Entry
from shoal.evals.samplers import Done, Sampling
from shoal.evals.suites import Suite
from shoal.tasks.task import Task

SUITE = Suite("Sums", "for tests", "org/sums", ("test",), "Q: {question}", "number", 2, 1.0, 8)
END = 0


class Killed(BaseException):
    """Stands for kill -9: nothing in the code may catch it."""


@dataclass
class FakeSampler:
    """Answers in chunks of three. Right where the seed says so; dies before the chunk numbered `dies_at`."""

    right: float = 0.5  # share of seeds
    dies_at: int | None = None
    asked: list[Key] = field(default_factory=list)

    def answer(self, asked: Sequence[Asked], sampling: Sampling, known: Container[Key], done: Done) -> None:
        waiting = [one for one in asked if one.key not in known]
        for number, start in enumerate(range(0, len(waiting), 3)):
            if number == self.dies_at:
                raise Killed
            chunk = waiting[start : start + 3]
            self.asked += [one.key for one in chunk]
            done([(one, self._answer(one)) for one in chunk])

    def _answer(self, asked: Asked) -> Answer:
        gold = int(asked.message.split()[-1]) + 1
        draw = (asked.seed % 1000) / 1000
        if draw > 0.95:
            return Answer("no idea", 2, ended=True)
        return Answer(f"I say {gold if draw < self.right else gold + 1}", 4, ended=draw < 0.9)


class FakeEngine:
    """Token t of a completion is a hash of prompt, seed, and t. Remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []  # seeds
        self.settings: list[EngineSampling] = []

    def load(self, folder: Path) -> None:
        self.folder = folder

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: EngineSampling
    ) -> list[list[Completion]]:
        self.batches.append([seed for group in seeds for seed in group])
        self.settings.append(sampling)
        return [
            [self._completion(prompt, seed, sampling) for seed in group]
            for prompt, group in zip(prompts, seeds, strict=True)
        ]

    def _completion(self, prompt: Sequence[int], seed: int, sampling: EngineSampling) -> Completion:
        tokens = [5 + (sum(prompt) + seed + t) % 50 for t in range(seed % sampling.max_tokens)]
        tokens = [*tokens, sampling.eos_ids[0]] if seed % 2 else (tokens or [5])
        return Completion(tokens, [0.0] * len(tokens), torch.zeros(len(tokens), 1))


def tasks(n: int) -> list[Task]:
    """`5` has the answer 6."""
    return [
        Task(id=f"Sums/{number:016x}", question=str(number), answer=str(number + 1), source="Sums")
        for number in range(n)
    ]


def entry(n: int = 4, k: int = 2, suite: Suite = SUITE, temperature: float = 1.0) -> Entry:
    return Entry(suite, tasks(n), k, Sampling(temperature, 8), path="sums.jsonl")


def contestant(sampler: FakeSampler, label: str = "m", digest: str = "d") -> Contestant:
    return Contestant(label, {"digest": digest}, lambda: sampler)


def quiet() -> Console:
    return Console(file=StringIO(), width=200)


def written(console: Console) -> str:
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
