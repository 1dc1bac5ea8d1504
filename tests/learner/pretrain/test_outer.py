"""Several pretraining sites in one process agree after every round. A site that was killed or late resumes."""

import json
import threading
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import ConfigError, load, parse
from shoal.diloco.agreed import Agreed, Shapes
from shoal.diloco.meeting import Meeting
from shoal.learner.checkpoint import LearnerProgress
from shoal.learner.pretrain.trainer import Pretraining, TextSite, terms_of
from shoal.learner.ranks import Ranks
from tests.diloco.support import Direct, at_once

LOCK = threading.Lock()
ABOUT = {"model": "m"}
SHAPES = {"layers.0.w": (30, 3), "layers.1.w": (30, 3), "embed": (40, 2)}


class Shared(Direct):
    """Calls the meeting from only one thread at a time, as the meeting's server does."""

    def __getattribute__(self, name: str) -> Any:
        result = super().__getattribute__(name)
        if name not in ("offer", "outcome", "state", "join", "take", "deal", "leave"):
            return result

        def call(*arguments: Any) -> Any:
            with LOCK:
                return result(*arguments)

        return call


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()}


def config(**sites: Any) -> Any:
    return parse({"pretrain": {"steps": 24}, "sites": {"inner_steps": 4, "wait_s": 20.0} | sites})


class Trainee:
    """A site that trains by adding random numbers to its tensors."""

    def __init__(self, name: str, meeting: Meeting, settings: Any, folder: Path) -> None:
        self.name, self.folder, self.tensors = name, folder / name, tensors()
        self.folder.mkdir(exist_ok=True)
        self.moments: dict[str, int] = {}
        policy: Any = SimpleNamespace(
            ranks=Ranks(),
            masters=self.tensors,
            before_update=lambda: None,
            round=lambda: None,
            optimizer=SimpleNamespace(state=self.moments),
        )
        terms = terms_of(settings, Shapes.of(self.tensors))
        link = Shared(meeting, name)
        self.site = TextSite(name, policy, terms, link, settings.sites, self.folder, threading.Event())
        self.records: list[dict[str, Any]] = []
        self.place: dict[str, int] | None = None
        self.trainer: Any = SimpleNamespace(  # the part of `Pretraining` that a round needs
            about=ABOUT,
            record=lambda **figures: self.records.append(figures),
            computed_s=0.0,
            started_s=0.0,
            _place=lambda: self.place,
        )

    def begin(self, saved: LearnerProgress | None = None) -> int:
        progress = saved or LearnerProgress()
        self.site.begin(ABOUT, progress)
        self.place = progress.place
        return progress.step

    def train(self, step: int, until: int, *, spoil_at: int | None = None) -> int:
        while step < until:
            draw = torch.Generator().manual_seed(step * 10 + ord(self.name[-1]))
            for tensor in self.tensors.values():
                tensor += torch.randn(tensor.shape, generator=draw) * 0.01
            step += 1
            self.moments["w"] = step
            if step == spoil_at:
                self.tensors["embed"][0, 0] = float("nan")
            self.place = {"share": step, "document": 0, "token": 0}
            if step == self.site.due:
                self.trainer.step = step
                Pretraining.meet(self.trainer, self.site, 1.0)
                step = self.trainer.step
        return step

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(each["digest"] for each in self.records)

    @property
    def agreed(self) -> str:
        assert self.site.leader is not None
        return self.site.leader.site.agreed.digest


def meeting_of(folder: Path, settings: Any) -> Meeting:
    terms = terms_of(settings, Shapes.of(tensors()))
    return Meeting(folder / "meet", terms, ABOUT, "run", lambda: Agreed.of(tensors(), terms.shapes))


def all_train(trainees: list[Trainee], until: int = 24, spoil: dict[str, int] | None = None) -> None:
    def run(each: Trainee) -> None:
        each.train(each.begin(), until, spoil_at=(spoil or {}).get(each.name))

    at_once(*(partial(run, each) for each in trainees))


@pytest.mark.parametrize("sites", [{}, {"kind": "int4"}])
def test_all_sites_have_the_same_parameters_after_every_round(sites, tmp_path):
    settings = config(sites=3, **sites)
    meeting = meeting_of(tmp_path, settings)
    trainees = [Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "abc"]
    all_train(trainees)
    assert meeting.over and meeting.round == 6 == len(trainees[0].digests)
    assert {each.digests for each in trainees} == {trainees[0].digests}
    for each in trainees[1:]:
        assert all(torch.equal(trainees[0].tensors[name], each.tensors[name]) for name in SHAPES)


def test_a_site_with_broken_parameters_continues_with_new_moments(tmp_path):
    settings = config(sites=3)
    meeting = meeting_of(tmp_path, settings)
    trainees = [Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "abc"]
    all_train(trainees, until=8, spoil={"site-c": 7})
    assert [each.moments for each in trainees] == [{"w": 8}, {"w": 8}, {}]
    assert {each.digests for each in trainees} == {trainees[0].digests}
    assert list(meeting.outcomes[1].left_out) == ["site-c"]


@pytest.mark.parametrize("saved", [None, LearnerProgress(step=5, place={"share": 5})])
def test_a_killed_site_resumes_after_its_last_accepted_offer(saved, tmp_path):
    settings = config(sites=1)
    meeting = meeting_of(tmp_path, settings)
    first = Trainee("site-a", meeting, settings, tmp_path)
    first.train(first.begin(), 10)  # the site is killed after round 1 is accepted
    again = Trainee("site-a", meeting, settings, tmp_path)
    assert again.begin(saved) == 8  # at the start of round 2
    assert again.place == {"share": 8, "document": 0, "token": 0}  # after the data of round 1
    assert again.agreed == meeting.agreed.digest and meeting.members.unfinished() == 0
    again.train(8, 24)
    assert meeting.over


def test_a_site_without_accepted_offers_resumes_at_its_checkpoint(tmp_path):
    settings = config(sites=1)
    meeting = meeting_of(tmp_path, settings)
    trainee = Trainee("site-a", meeting, settings, tmp_path)
    assert trainee.begin(LearnerProgress(step=3, place={"share": 3})) == 0
    assert trainee.place == {"share": 3}


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_site_that_missed_rounds_is_healed_with_the_agreed_state_and_records_that(rounds, tmp_path):
    settings = config(sites=2, wait_s=0.01)
    meeting = meeting_of(tmp_path, settings)
    a, b = (Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "ab")
    a.begin()
    b.begin()
    a.train(0, 4 * rounds)
    assert b.train(0, 4) == 4 * rounds
    assert list(meeting.healed) == ["site-b"] and "round 0 is over" in meeting.healed["site-b"]
    assert b.agreed == a.agreed
    assert [(each["round"], each["quorum"]) for each in b.records] == [(rounds, None)]


def test_the_config_has_the_outer_step_that_was_measured_as_best():
    root = Path(__file__).parents[3]
    sites = load(root / "configs" / "pretrain.toml").sites
    measured: dict[tuple[float, float, int], list[float]] = {}
    for run in json.loads((root / "benchmarks" / "results" / "diloco_momentum.json").read_text())["runs"]:
        used = run["setting"]
        if used["inner_steps"] == sites.inner_steps and used["inner_scale"] == 1.0:
            measured.setdefault((used["lr"], used["momentum"], used["warmup"]), []).append(run["perplexity"])
    best = min(measured, key=lambda setting: mean(measured[setting]))
    assert (sites.lr, sites.momentum, 0) == best


def test_incomplete_rounds_and_an_unreachable_quorum_are_refused():
    with pytest.raises(ConfigError, match=r"pretrain\.steps = 24 is not a multiple of sites\.inner_steps = 5"):
        terms_of(config(inner_steps=5), Shapes.of(tensors()))
    with pytest.raises(ConfigError, match=r"exceeds sites\.sites"):
        config(quorum=3)
