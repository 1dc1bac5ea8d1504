"""A trainer among several sites, in one process: when rounds are due, healing, and places in the data."""

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
from shoal.learner.pretrain.trainer import CheckpointError, OuterSteps, Pretraining, Saved, read, terms_of, write
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
        terms = terms_of(settings, self.tensors)
        self.outer = OuterSteps(
            name, settings.sites, terms, Shared(meeting, name), self.tensors, self.folder, lambda: False
        )
        self.resets, self.records, self.place = 0, [], None  # type: ignore[var-annotated]
        self.trainer: Any = SimpleNamespace(  # what of a `Pretraining` a round needs
            net=SimpleNamespace(pull=lambda: None, push=lambda: None, reset=self._reset),
            record=lambda **figures: self.records.append(figures),
            computed_s=0.0,
            started_s=0.0,
            _place=lambda: self.place,
        )

    def begin(self) -> int:
        found = read(self.folder)
        progress = found or Saved()
        for name, tensor in self.tensors.items() if found else ():
            tensor.copy_(progress.tensors[f"model.{name}"])
        progress = self.outer.begin(ABOUT, progress)
        self.place = progress.place  # type: ignore[assignment]
        return progress.step

    def train(self, step: int, until: int, *, spoil_at: int | None = None) -> int:
        while step < until:
            draw = torch.Generator().manual_seed(step * 10 + ord(self.name[-1]))
            for tensor in self.tensors.values():
                tensor += torch.randn(tensor.shape, generator=draw) * 0.01
            step += 1
            if step == spoil_at:
                self.tensors["embed"][0, 0] = float("nan")
            self.place = {"share": step, "document": 0, "token": 0}  # type: ignore[assignment]
            if step == self.outer.due:
                self.trainer.step = step
                Pretraining.meet(self.trainer, self.outer)
                step = self.trainer.step
        return step

    def keep(self, step: int) -> None:
        held = {f"model.{name}": tensor for name, tensor in self.tensors.items()} | self.outer.state()
        write(self.folder, Saved(step=step, place=self.place, round=self.outer.site.round, tensors=held))

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(each["digest"] for each in self.records)

    def _reset(self) -> None:
        self.resets += 1


def meeting_of(folder: Path, settings: Any) -> Meeting:
    terms = terms_of(settings, tensors())
    return Meeting(folder / "meet", terms, ABOUT, "run", lambda: Agreed.of(tensors(), terms.shapes))


def all_train(trainees: list[Trainee], until: int = 24, spoil: dict[str, int] | None = None) -> None:
    def run(each: Trainee) -> None:
        each.train(each.begin(), until, spoil_at=(spoil or {}).get(each.name))

    threads = [threading.Thread(target=run, args=(each,)) for each in trainees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("sites", [{}, {"kind": "int4"}])
def test_every_site_lands_on_the_same_parameters_in_every_round(sites: dict[str, Any], tmp_path: Path) -> None:
    settings = config(sites=3, **sites)
    meeting = meeting_of(tmp_path, settings)
    trainees = [Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "abc"]
    all_train(trainees)
    assert meeting.over and meeting.round == 6 == len(trainees[0].digests)
    assert {each.digests for each in trainees} == {trainees[0].digests}
    for each in trainees[1:]:
        assert all(torch.equal(trainees[0].tensors[name], each.tensors[name]) for name in SHAPES)


def test_a_site_whose_parameters_broke_goes_on_with_new_moments(tmp_path: Path) -> None:
    settings = config(sites=3)
    meeting = meeting_of(tmp_path, settings)
    trainees = [Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "abc"]
    all_train(trainees, spoil={"site-c": 7})
    assert [each.resets for each in trainees] == [0, 0, 1]
    assert {each.digests for each in trainees} == {trainees[0].digests}
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
    assert again.outer.site.agreed.digest == meeting.agreed.digest
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
        results.append(meeting.agreed.digest)
    assert results[0] == results[1]


def test_a_site_that_returns_from_an_older_checkpoint_owes_nothing_for_the_offers_after_it(tmp_path: Path) -> None:
    settings = config(sites=1, kind="int4")
    meeting = meeting_of(tmp_path, settings)
    first = Trainee("site-a", meeting, settings, tmp_path)
    assert first.train(first.begin(), 5) == 5
    first.keep(5)  # after one round
    assert first.outer.site.feedback.left.any()
    first.train(5, 8)  # another offer is accepted, then it is killed
    again = Trainee("site-a", meeting, settings, tmp_path)
    assert again.begin() == 8
    assert not again.outer.site.feedback.left.any()


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_site_that_slept_through_rounds_is_healed_and_records_it(rounds: int, tmp_path: Path) -> None:
    settings = config(sites=2, wait_s=0.01)
    meeting = meeting_of(tmp_path, settings)
    a, b = (Trainee(f"site-{name}", meeting, settings, tmp_path) for name in "ab")
    a.begin()
    b.begin()
    a.train(0, 4 * rounds)
    assert b.train(0, 4) == 4 * rounds
    assert list(meeting.healed) == ["site-b"] and "round 0 is over" in meeting.healed["site-b"]
    assert b.outer.site.agreed.digest == a.outer.site.agreed.digest
    assert [(each["round"], each["quorum"]) for each in b.records] == [(rounds, None)]


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


def test_a_quorum_of_more_sites_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exceeds sites\.sites"):
        config(quorum=3)
