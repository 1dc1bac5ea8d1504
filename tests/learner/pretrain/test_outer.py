"""A trainer among several sites, in one process: when rounds are due, delayed results, healing, and places in the data."""

import json
import threading
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import ConfigError, load, parse
from shoal.diloco.agreed import Agreed
from shoal.diloco.meeting import Meeting
from shoal.learner.pretrain.outer import Outer, terms_of
from shoal.learner.pretrain.trainer import CheckpointError, Pretraining, Saved, read, write
from tests.diloco.direct import Direct

LOCK = threading.Lock()
ABOUT = {"model": "m"}
SHAPES = {"layers.0.w": (30, 3), "layers.1.w": (30, 3), "embed": (40, 2)}


class Shared(Direct):
    """The meeting is called by one thread at a time, as its server does."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("offer", "outcome", "state", "join", "take", "deal", "leave"):
            return found

        def call(*arguments: Any) -> Any:
            with LOCK:
                return found(*arguments)

        return call


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=draw) for name, shape in SHAPES.items()}


def config(**sites: Any) -> Any:
    return parse({"pretrain": {"steps": 24}, "sites": {"inner_steps": 4, "give_up_s": 30.0, "wait_s": 20.0} | sites})


class Trainee:
    def __init__(self, name: str, meeting: Meeting, settings: Any, folder: Path) -> None:
        self.name, self.folder, self.tensors = name, folder / name, tensors()
        self.folder.mkdir(exist_ok=True)
        link = Shared(meeting, name)
        terms = terms_of(settings, self.tensors)
        self.outer = Outer(name, settings.sites, terms, link, self.tensors, self.folder, lambda: False)
        self.resets, self.rounds, self.digests = 0, 0, []  # type: ignore[var-annotated]

    def begin(self) -> int:
        found = read(self.folder)
        progress = found or Saved()
        for name, tensor in self.tensors.items() if found else ():
            tensor.copy_(progress.tensors[f"model.{name}"])
        progress = self.outer.begin(ABOUT, progress, resumed=found is not None)
        self.place = progress.place
        return progress.step

    def train(self, step: int, until: int, *, spoil_at: int | None = None) -> int:
        while step < until:
            draw = torch.Generator().manual_seed(step * 10 + ord(self.name[-1]))
            for tensor in self.tensors.values():
                tensor += torch.randn(tensor.shape, generator=draw) * 0.01
            step += 1
            if step == spoil_at:
                self.tensors["embed"][0, 0] = float("nan")
            self.place = {"share": step, "document": 0, "token": 0}
            step, outcome = self.outer.after(step, self.place, self._reset)
            if outcome:
                self.digests.append(outcome.digest)
        return step

    def keep(self, step: int) -> None:
        held = {f"model.{name}": tensor for name, tensor in self.tensors.items()} | self.outer.state()
        write(self.folder, Saved(step=step, place=self.place, round=self.outer.site.round, tensors=held))

    def _reset(self) -> None:
        self.resets += 1


def meeting_of(folder: Path, settings: Any) -> Meeting:
    terms = terms_of(settings, tensors())
    return Meeting(folder / "meet", terms, ABOUT, "run", lambda: Agreed.of(tensors(), terms.fragments))


def all_train(trainees: list[Trainee], until: int = 24, **options: Any) -> None:
    threads = [
        threading.Thread(target=lambda each=each: each.train(each.begin(), until, **options)) for each in trainees
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize(
    "sites", [{}, {"fragments": 2}, {"fragments": 2, "delay": 1, "keep": 0.5}, {"delay": 3, "kind": "int4"}]
)
def test_every_site_lands_on_the_same_parameters_in_every_round(sites: dict[str, Any], tmp_path: Path) -> None:
    settings = config(sites=3, **sites)
    meeting = meeting_of(tmp_path, settings)
    trainees = [Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "abc"]
    all_train(trainees)
    assert meeting.over and meeting.round == 6 * settings.sites.fragments
    assert {tuple(each.digests) for each in trainees} == {tuple(trainees[0].digests)}
    assert len(trainees[0].digests) == meeting.round
    for each in trainees[1:]:  # all end with what is agreed, whichever fragment came last
        assert all(torch.equal(trainees[0].tensors[name], each.tensors[name]) for name in SHAPES)


def test_a_site_whose_parameters_broke_goes_on_with_new_moments(tmp_path: Path) -> None:
    settings = config(sites=3)
    meeting = meeting_of(tmp_path, settings)
    trainees = [Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "abc"]
    threads = [
        threading.Thread(target=lambda e=each, at=at: e.train(e.begin(), 24, spoil_at=at))
        for each, at in zip(trainees, (None, None, 7), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [each.resets for each in trainees] == [0, 0, 1]
    assert {tuple(each.digests) for each in trainees} == {tuple(trainees[0].digests)}
    assert meeting.outcomes[5].kept == ["site-a", "site-b", "site-c"]


def test_a_killed_site_comes_back_where_its_last_accepted_offer_ended(tmp_path: Path) -> None:
    settings = config(sites=1)
    meeting = meeting_of(tmp_path, settings)
    first = Trainee("site-a", meeting, settings, tmp_path)
    assert first.train(first.begin(), 5) == 5
    first.keep(5)  # in the middle of round 1
    first.train(5, 10)  # round 1 is accepted, then it is killed
    again = Trainee("site-a", meeting, settings, tmp_path)
    assert again.begin() == 8  # at the start of round 2
    assert again.place == {"share": 8, "document": 0, "token": 0}  # what round 1 was trained on is not trained again
    assert again.outer.site.agreed.digests == meeting.agreed.digests
    again.train(8, 24)
    assert meeting.over


def test_a_site_that_returns_in_the_same_round_goes_on_exactly(tmp_path: Path) -> None:
    results = []
    for number, killed in enumerate((False, True)):
        settings, folder = config(sites=1), tmp_path / str(number)
        folder.mkdir()
        meeting = meeting_of(folder, settings)
        trainee = Trainee("site-a", meeting, settings, folder)
        step = trainee.train(trainee.begin(), 6)
        if killed:
            trainee.keep(6)
            trainee = Trainee("site-a", meeting, settings, folder)
            step = trainee.begin()
            assert step == 6 and trainee.place == {"share": 6, "document": 0, "token": 0}
        trainee.train(step, 24)
        results.append(meeting.agreed.digests)
    assert results[0] == results[1]


def test_a_site_that_returns_from_an_older_checkpoint_owes_nothing_for_the_offers_after_it(tmp_path: Path) -> None:
    settings = config(sites=1, fragments=2, kind="int4")
    meeting = meeting_of(tmp_path, settings)
    first = Trainee("site-a", meeting, settings, tmp_path)
    assert first.train(first.begin(), 5) == 5
    first.keep(5)  # after two rounds
    owed = [feedback.left.clone() for feedback in first.outer.site.feedback]
    first.train(5, 6)  # an offer of the first fragment is accepted, then it is killed
    again = Trainee("site-a", meeting, settings, tmp_path)
    assert again.begin() == 6
    first_left, second_left = (feedback.left for feedback in again.outer.site.feedback)
    assert owed[0].any() and not first_left.any()
    assert torch.equal(second_left, owed[1])


def test_a_site_that_slept_through_a_round_is_healed_and_said_so(tmp_path: Path) -> None:
    settings = config(sites=2, wait_s=0.01)
    meeting = meeting_of(tmp_path, settings)
    a, b = (Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "ab")
    a.begin()
    b.begin()
    a.train(0, 12)  # b sleeps for three rounds
    assert b.train(0, 4) == 12
    assert list(meeting.healed) == ["site-b"] and "round 0 is over" in meeting.healed["site-b"]
    assert b.outer.site.agreed.digests == a.outer.site.agreed.digests


def test_a_site_that_missed_one_round_records_that_it_was_healed(tmp_path: Path) -> None:
    settings = config(sites=2, wait_s=0.01)
    meeting = meeting_of(tmp_path, settings)
    a, b = (Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "ab")
    a.begin()
    b.begin()
    a.train(0, 4)
    recorded: list[int] = []
    trainer = SimpleNamespace(
        step=4,
        net=SimpleNamespace(pull=lambda: None, push=lambda: None, reset=lambda: None),
        record=lambda **figures: recorded.append(figures["round"]),
        computed_s=0.0,
        started_s=0.0,
        _place=lambda: None,
    )
    Pretraining.meet(trainer, b.outer)  # type: ignore[arg-type]
    assert trainer.step == 4 and recorded == [1] and list(meeting.healed) == ["site-b"]


def test_a_sites_checkpoint_with_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    held = tensors() | {"count": torch.tensor(3), "half": torch.ones(3, dtype=torch.bfloat16)}
    path = write(tmp_path, Saved(step=5, updates=7, place={"share": 1}, tensors=held))
    whole = path.read_bytes()
    found = read(tmp_path)
    assert found is not None and found.updates == 7 and torch.equal(found.tensors["embed"], held["embed"])
    for at in (8, whole.index(b'"updates') + 12, whole.index(b"embed"), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"step-00000005\.safetensors is damaged .*go on from an older one"):
            read(tmp_path)


def test_the_config_has_the_outer_step_that_was_measured_as_best_for_its_rounds() -> None:
    root = Path(__file__).parents[3]
    sites = load(root / "configs" / "pretrain.toml").sites
    measured: dict[tuple[float, float, int], list[float]] = {}
    for run in json.loads((root / "benchmarks" / "results" / "diloco_momentum.json").read_text())["runs"]:
        of = run["setting"]
        if of["inner_steps"] == sites.inner_steps and of["inner_scale"] == 1.0:
            measured.setdefault((of["lr"], of["momentum"], of["warmup"]), []).append(run["perplexity"])
    best = min(measured, key=lambda setting: mean(measured[setting]))
    assert (sites.lr, sites.momentum, 0) == best


def test_steps_that_would_reach_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pretrain\.steps = 24 is not a multiple of sites\.inner_steps = 5"):
        terms_of(config(inner_steps=5), tensors())


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ({"fragments": 3}, "must be a multiple"),
        ({"delay": 4}, "must be below"),
        ({"quorum": 3}, "exceeds sites.sites"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(sites: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**sites)
