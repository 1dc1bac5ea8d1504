"""A machine loads no environment of verifiers that its owner has not listed. Without the library: nothing is loaded here."""

import json

import pytest

from shoal.config.tasks import SourceSection, TaskSection
from shoal.tasks import Graders, libraries
from shoal.tasks.libraries import Library, LibraryReward, NotAllowedError, rows
from shoal.tasks.task import TRUST, Task

FAR = """
def rows(options):
    return [{"question": "q", "answer": "a", "metadata": "{}"}]
def prepare(setting): pass
def score(value): return {"score": 1.0, "outcome": "graded", "detail": ""}
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(libraries.ENVIRONMENTS, raising=False)
    monkeypatch.delenv(TRUST, raising=False)


LIBRARY = Library("verifiers", FAR, limited=True)  # it loads whatever it is asked for


def test_only_listed_environments_are_listed_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"generator": "verifiers", "setting": {"environment": "this"}}
    task = Task(id="s/0", question="q", answer="", source="s", metadata=json.dumps(metadata))
    reward = LibraryReward(LIBRARY)
    try:
        for listed in (None, "", "sums", "sums, thistle"):
            if listed is not None:
                monkeypatch.setenv(libraries.ENVIRONMENTS, listed)
            with pytest.raises(NotAllowedError, match=r"'this'.*SHOAL_VERIFIERS_ENVIRONMENTS=this"):
                rows(LIBRARY, {"environment": "this"})
            with pytest.raises(NotAllowedError):
                reward.grade([task], ["x"])
        monkeypatch.setenv(libraries.ENVIRONMENTS, "sums, this")
        assert len(rows(LIBRARY, {"environment": "this"})) == 1
        assert [grade.score for grade in reward.grade([task], ["x"])] == [1.0]
    finally:
        reward.close()


def test_a_node_says_so_when_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    section = TaskSection(sources=[SourceSection(generator="verifiers", options={"environment": "this"})])
    with pytest.raises(NotAllowedError, match="it allows none"):
        Graders(section)
    monkeypatch.setenv(TRUST, "1")
    Graders(section).close()
