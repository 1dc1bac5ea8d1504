"""The evaluator measures the versions that are due, and skips only those that relays may have dropped."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import parse
from shoal.engine.protocol import Completion, Respond, Sampling
from shoal.evals.heldout import Evaluator
from shoal.model.load import load_tokenizer
from shoal.model.support import UnsupportedModelError
from shoal.protocol.history import History
from shoal.protocol.messages import Evaluation, HeartbeatAnswer, Ok
from shoal.shardcast import FetchError
from shoal.shardcast.fetch import RefusedVersionError

from ..turns import EOS, config

CONFIG = parse({"run": {"steps": 9}, "evaluator": {"n": 1, "every": 4}})


@dataclass
class Site:
    """A node whose heartbeats report the versions in `newest` one by one. Then the run ends."""

    newest: list[int]
    gone: set[int] = field(default_factory=set)  # versions that no relay serves
    posted: list[tuple[int, bool]] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)  # each version, and the newest version at that time
    newest_at_post: list[int] = field(default_factory=list)
    reported: int = -1

    def access(self, publisher: str, config: object) -> None:
        return None

    def doing(self, what: str, *, waiting: bool = False) -> None:
        pass

    def get(self, path: str, answer: type[History]) -> History:
        return History(cursor=0, metrics=[], evaluations=[], samples=[])

    def beat(self) -> HeartbeatAnswer:
        if not self.newest:
            return HeartbeatAnswer(state="finished", newest_version=9, relays=["http://r"])
        self.reported = self.newest.pop(0)
        return HeartbeatAnswer(state="running", newest_version=self.reported, relays=["http://r"])

    def post(self, path: str, message: Evaluation, answer: type[Ok]) -> Ok:
        self.posted.append((message.version, message.final))
        self.newest_at_post.append(self.reported)
        return Ok()

    def fetch(self, version: int) -> Path:
        if version in self.gone:
            raise FetchError(f"no relay gave a valid manifest of version {version}")
        self.fetched.append((version, self.reported))
        return Path()

    def evaluate(self, version: int, folder: Path, final: bool) -> Evaluation:
        return Evaluation(version=version, greedy=0.5, sampled=0.5, n=1, final=final)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr("shoal.evals.heldout.IDLE_S", 0)
        node: Any = self
        evaluator = Evaluator(node, CONFIG, lambda: None, Path(), "")  # type: ignore[arg-type,return-value]
        evaluator.fetch = self.fetch  # type: ignore[method-assign]
        evaluator.evaluate = self.evaluate  # type: ignore[method-assign]
        return evaluator.run(threading.Event())


def test_the_first_every_nth_and_the_last_version_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site([0, 1, 2, 4, 5, 9, 9])
    assert site.run(monkeypatch) == "finished"
    assert site.posted == [(0, False), (4, False), (9, True)]


def test_the_first_version_is_fetched_at_once_and_evaluated_after_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier evaluation would slow down workers on the same machine."""
    site = Site([0, 0, 1, 9, 9])
    assert site.run(monkeypatch) == "finished"
    assert site.fetched[0] == (0, 0) and site.posted[0] == (0, False) and site.newest_at_post[0] == 1


def test_a_late_evaluator_skips_a_first_version_that_relays_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it waited, it would never reach the last version, and the run would never finish."""
    site = Site([6, 9, 9], gone={0})
    assert site.run(monkeypatch) == "finished"
    assert site.posted == [(9, True)]


@pytest.mark.parametrize(("newest", "gone"), [(2, 0), (9, 9)])
def test_a_version_that_relays_must_have_is_not_skipped(
    newest: int, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site([newest, newest], gone={gone})
    with pytest.raises(FetchError):
        site.run(monkeypatch)


class Caller:
    """An engine that calls the calculator and then repeats the answer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def load(self, folder: Path) -> None:
        return None

    def generate(self, prompts: Any, seeds: Any, sampling: Sampling, respond: Respond) -> list[list[Completion]]:
        groups = []
        for group, prompt in enumerate(prompts):
            question = self.tokenizer.decode(prompt, skip_special_tokens=True).removesuffix("=")
            call = [*self.tokenizer.encode(f"calc({question})"), EOS]
            response = respond(group, 0, call, [])
            assert response is not None
            answer = self.tokenizer.encode(self.tokenizer.decode(response, skip_special_tokens=True))
            tokens = [*call, *response, *answer, EOS]
            sampled = len(tokens) - len(response)
            groups.append([Completion(tokens, [-1.0] * sampled, torch.zeros(sampled, 1), [len(call), len(response)])])
        return groups


def test_an_environment_answers_and_the_last_turn_is_graded(tiny_folder: Path) -> None:
    settings = config("calculator", tasks={"length_targets": []}, sampling={"max_tokens": 60}, evaluator={"n": 8})
    node: Any = Counting()
    engine: Any = Caller(load_tokenizer(tiny_folder))
    evaluation = Evaluator(node, settings, lambda: engine, Path(), "").evaluate(0, tiny_folder, final=False)
    assert (evaluation.greedy, evaluation.sampled, evaluation.n) == (1.0, 1.0, 8)
    assert 0 < node.tokens < 2 * 8 * 40, "the calculator's tokens were counted, too"


class RecordsPrompts:
    """An engine without a model that records the prompts as text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.prompts = tokenizer, list[str]()

    def load(self, folder: Path) -> None:
        return None

    def generate(self, prompts: Any, seeds: Any, sampling: Sampling, respond: Respond) -> list[list[Completion]]:
        self.prompts += [self.tokenizer.decode(prompt) for prompt in prompts]
        return [[Completion([EOS], [-1.0], torch.zeros(1, 1))] for _ in prompts]


def test_held_out_prompts_cycle_through_the_target_lengths_of_training(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node: Any = Counting()
    monkeypatch.setattr("shoal.evals.heldout.EVALUATED_AT_ONCE", 3)
    engine: Any = RecordsPrompts(load_tokenizer(tiny_folder))
    Evaluator(node, config("calculator", evaluator={"n": 5}), lambda: engine, Path(), "").evaluate(
        0, tiny_folder, False
    )
    lengths = ["for 8" if "for 8" in prompt else "for 16" if "for 16" in prompt else "" for prompt in engine.prompts]
    assert lengths == ["for 8", "for 16", "for 8", "for 16", "for 8"] * 2, (
        "the greedy and the sampled pass must both cycle through the lengths"
    )


@dataclass
class Counting:
    tokens: int = 0

    def access(self, publisher: str, config: object) -> None:
        return None

    def doing(self, what: str) -> None:
        return None


@pytest.mark.parametrize(
    "error", [RefusedVersionError("it holds 'tk.py'"), UnsupportedModelError("it needs its own code")]
)
def test_a_version_that_cannot_be_used_is_refused_and_the_evaluator_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, refused = Site([0, 1, 4, 9, 9]), []

    def fail(version: int, *more: Any) -> Any:
        if version == 4 and bool(more) == isinstance(error, UnsupportedModelError):
            raise error
        return Path() if not more else Evaluation(version=version, greedy=0.5, sampled=0.5, n=1, final=more[1])

    site.refuse = lambda version, error: refused.append(version)  # type: ignore[attr-defined]
    site.fetch = site.evaluate = fail  # type: ignore[method-assign,assignment]
    assert site.run(monkeypatch) == "finished"
    assert refused == [4] and site.posted == [(0, False), (9, True)]
