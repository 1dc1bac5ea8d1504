"""Which versions the evaluator measures, and what happens when one cannot be fetched. No weights, no network."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.config import parse
from shoal.evals.heldout import Evaluator
from shoal.protocol.messages import Evaluation, HeartbeatAnswer, History, Ok
from shoal.shardcast import FetchError

CONFIG = parse({"run": {"steps": 9}, "relays": {"keep": 3}, "evaluator": {"n": 1, "every": 4}})


@dataclass
class Site:
    """A node whose heartbeats report these newest versions, one after the other, until the last ends the run."""

    newest: list[int]
    gone: set[int] = field(default_factory=set)  # versions that no relay serves
    posted: list[tuple[int, bool]] = field(default_factory=list)

    def access(self, publisher: str, config: object) -> None:
        return None

    def doing(self, what: str, *, waiting: bool = False) -> None:
        pass

    def get(self, path: str, answer: type[History]) -> History:
        return History(cursor=0, metrics=[], evaluations=[], samples=[])

    def beat(self) -> HeartbeatAnswer:
        if not self.newest:
            return HeartbeatAnswer(state="finished", newest_version=9, relays=["http://r"])
        return HeartbeatAnswer(state="running", newest_version=self.newest.pop(0), relays=["http://r"])

    def post(self, path: str, message: Evaluation, answer: type[Ok]) -> Ok:
        self.posted.append((message.version, message.final))
        return Ok()

    def evaluate(self, version: int, final: bool) -> Evaluation:
        if version in self.gone:
            raise FetchError(f"no relay gave a valid manifest of version {version}")
        return Evaluation(version=version, greedy=0.5, sampled=0.5, n=1, final=final)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setattr("shoal.evals.heldout.IDLE_S", 0)
        node: Any = self
        evaluator = Evaluator(node, CONFIG, lambda: None, Path(), "")  # type: ignore[arg-type,return-value]
        evaluator.evaluate = self.evaluate  # type: ignore[method-assign]
        return evaluator.run(threading.Event())


def test_the_first_every_nth_and_the_last_version_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site([0, 1, 2, 4, 5, 9, 9])
    assert site.run(monkeypatch) == "finished"
    assert site.posted == [(0, False), (4, False), (9, True)]


def test_a_late_evaluator_leaves_out_the_first_version_that_relays_no_longer_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would never reach the last one, and the run never finish."""
    site = Site([3, 9, 9], gone={0})
    assert site.run(monkeypatch) == "finished"
    assert site.posted == [(9, True)]


@pytest.mark.parametrize(("newest", "gone"), [(2, 0), (9, 9)])
def test_a_version_that_relays_must_hold_is_not_left_out(
    newest: int, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site([newest, newest], gone={gone})
    with pytest.raises(FetchError):
        site.run(monkeypatch)
