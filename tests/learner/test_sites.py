"""Learners at one or two sites share each batch. A site that died returns, and the other one goes on."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import Config, ConfigError, parse
from shoal.diloco.agreed import Agreed, Shapes
from shoal.diloco.meeting import Meeting
from shoal.diloco.messages import Figures, Greeting, RoundOutcome, Terms
from shoal.diloco.site import SilenceError
from shoal.learner import sites
from shoal.learner.groups import Fetched
from shoal.learner.policy import Policy
from shoal.learner.sites import (
    Publisher,
    SiteLearner,
    about_of,
    learner_terms,
    shares,
    site_metrics,
    without_lost_sites,
)
from shoal.protocol.identity import Signed
from shoal.protocol.messages import BatchGroup, StepRecord
from tests.diloco.support import Clock
from tests.learner.pretrain.test_outer import Shared

from .support import GROUPS, RUN, SETTINGS, Pool, SitePool, make_groups, make_learner, run_config, step_file, submission

pytestmark = pytest.mark.usefixtures("one_thread")


class Quiet(Shared):
    """A link that sleeps before each query of an outcome, so that the other thread can work."""

    def outcome(self, round: int) -> Any:
        time.sleep(0.01)
        return super().outcome(round)


def sites_config(steps: int, sites: int, **changed: Any) -> Config:
    return run_config(steps, changed | {"sites": sites})


def policy(model: Path, config: Config) -> Policy:
    torch.manual_seed(config.run.seed)
    return Policy(model, config.learner, "float32", "cpu", config.sampling.temperature)


def meeting_of(model: Path, folder: Path, config: Config, clock: Clock | None = None) -> Meeting:
    own, settings = policy(model, config), config.sites
    terms = learner_terms(config, own)
    publisher = Publisher(own, terms.shapes, folder / "versions", keep=99)
    first = Agreed.of(own.masters, terms.shapes)
    return Meeting(folder, terms, about_of(settings, own), "m", lambda: first, clock or Clock(), publish=publisher)


def site(model: Path, out: Path, pool: Pool, meeting: Meeting, config: Config, name: str) -> SiteLearner:
    link = Quiet(meeting, name)
    return SiteLearner(pool, config, policy(model, config), out / name, name, link)  # type: ignore[arg-type]


def versions(folder: Path) -> dict[str, bytes]:
    return {path.name: (path / "model.safetensors").read_bytes() for path in (folder / "versions").iterdir()}


def records(pool: Pool) -> dict[int, StepRecord]:
    """Return the first record of each step, because the coordinator keeps only that one."""
    result: dict[int, StepRecord] = {}
    for report in pool.reports:
        signed = Signed.model_validate_json(report.record)
        result.setdefault(
            report.step, StepRecord.model_validate_json(signed.open(pool.identity.public, domain="trained"))
        )
    return result


@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapters"])
def test_one_site_with_one_update_per_step_equals_the_plain_learner_bit_for_bit(tiny_folder, tmp_path, lora):
    files = [step_file(step) for step in range(2)]
    make_learner(tiny_folder, tmp_path / "plain", Pool(*files), steps=2, **lora).run(threading.Event())
    config, pool = sites_config(2, 1, **lora), SitePool(*files)
    assert config.learner.optimizer_steps_per_step == 1
    meeting = meeting_of(tiny_folder, tmp_path / "meet", config)
    assert (meeting.terms.shapes.size < 60_000) == bool(lora), "with LoRA, only the adapters must be transferred"
    assert site(tiny_folder, tmp_path, pool, meeting, config, "site-0").run(threading.Event()) == "finished"
    plain, merged = versions(tmp_path / "plain"), "model/model.safetensors"
    assert plain == versions(tmp_path / "site-0") == versions(tmp_path / "meet")
    assert plain["v000000"] != plain["v000002"]
    assert (tmp_path / "plain" / merged).read_bytes() == (tmp_path / "site-0" / merged).read_bytes()
    assert [report.step for report in pool.reports] == [0, 1]
    for report in pool.reports:
        assert report.metrics["sites/kept"] == report.metrics["sites/site-0/kept"] == 1.0
        assert report.metrics["sites/site-0/loss"] == report.metrics["loss"]
        assert report.metrics["sites/site-0/computed_s"] > 0 < report.metrics["sites/site-0/sent_bytes"]


def test_if_a_site_dies_only_its_share_of_one_batch_is_lost_and_it_can_return(tiny_folder, tmp_path):
    steps, clock, stop = 4, Clock(), threading.Event()
    config, pool = sites_config(steps, 2), SitePool(*(step_file(step) for step in range(steps)))
    meeting = meeting_of(tiny_folder, tmp_path / "meet", config, clock)
    a, b, again = (site(tiny_folder, tmp_path, pool, meeting, config, name) for name in ("site-0", "site-1", "site-1"))
    back = threading.Event()

    class Killed(BaseException):
        pass

    shared: list[list[int]] = []

    def dies(groups: Any) -> dict[str, float]:
        shared.append([group.number for group in groups])
        if len(shared) == 2:
            raise Killed
        return SiteLearner.train(b, groups)

    def waits(step: int, *words: Any) -> Any:
        assert step < 3 or back.wait(60)
        return wait(step, *words)

    def returns(*words: Any) -> None:
        SiteLearner.take_over(again, *words)
        back.set()

    b.train, b.place.leave = dies, lambda: None  # type: ignore[method-assign]
    wait = a.incoming.wait
    a.incoming.wait, again.take_over = waits, returns  # type: ignore[method-assign]
    other = threading.Thread(target=a.run, args=(stop,), daemon=True)
    other.start()
    with pytest.raises(Killed):
        b.run(stop)
    while meeting.round < 3:  # in round 1 the first site waits for the dead one
        clock.now_s += 10.0 * (meeting.round == 1 and len(meeting.offers) == 1)
        time.sleep(0.01)
    assert again.run(stop) == "finished"
    other.join(60)
    assert not other.is_alive()
    assert shared == [[1, 3], [1, 3]]
    assert [meeting.terms.weight(0, name, ["site-0", "site-1"]) for name in ("site-0", "site-1")] == [3, 2]
    assert versions(tmp_path / "meet") == versions(tmp_path / "site-0") and len(versions(tmp_path / "meet")) == 5
    assert versions(tmp_path / "site-1").items() <= versions(tmp_path / "meet").items()
    assert meeting.members.unfinished() == 1
    trained = {step: [group.group for group in record.groups] for step, record in records(pool).items()}
    assert trained == {0: [0, 1, 2, 3, 4], 1: [0, 2, 4], 2: [0, 1, 2, 3, 4], 3: [0, 1, 2, 3, 4]}
    chain = [records(pool)[step] for step in range(steps)]
    assert all(now.after == then.before for now, then in zip(chain, chain[1:], strict=False))


def test_the_wait_for_a_share_has_a_deadline_and_names_the_missing_sites(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "GIVE_UP_S", 0.0)
    config, stop = sites_config(1, 2), threading.Event()
    meeting = meeting_of(tiny_folder, tmp_path / "meet", config)
    waiting = site(tiny_folder, tmp_path, SitePool(), meeting, config, "site-0")
    waiting.place.enter(waiting.about, "it joins")
    with pytest.raises(SilenceError, match="round 0 waited 0 s for more sites: start missing sites"):
        waiting.place.deal(stop)
    meeting.join("site-1", Greeting(about=waiting.about, placed=True))
    meeting.leave("site-0")
    assert meeting.deal("site-1", 0) == ["site-1"]
    with pytest.raises(SilenceError, match="round 0 waited 0 s for site-1, which share its work"):
        waiting.place.deal(stop)


def test_an_unreported_step_is_reported_by_the_site_that_returns(tiny_folder, tmp_path):
    config, pool = sites_config(2, 1), SitePool(*(step_file(step) for step in range(2)))
    meeting = meeting_of(tiny_folder, tmp_path / "meet", config)
    first = site(tiny_folder, tmp_path, pool, meeting, config, "site-0")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    first.report = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run(threading.Event())
    assert pool.reports == [] and meeting.round == 1
    assert site(tiny_folder, tmp_path, pool, meeting, config, "site-0").run(threading.Event()) == "finished"
    assert [report.step for report in pool.reports] == [0, 1]
    assert len(records(pool)[0].groups) == GROUPS and records(pool)[0].after == records(pool)[1].before


def test_the_metrics_include_each_sites_outcome_and_figures():
    figures = {"a": Figures(loss=0.5, computed_s=3.0, sent_bytes=7), "b": Figures(loss=None)}
    outcome = RoundOutcome(
        round=0, kept=["a"], left_out={"b": "not finite"}, missing=["c"], dealt=["a", "b", "c"], figures=figures,
        digest="0" * 64,
    )  # fmt: skip
    result = site_metrics(outcome)
    assert (result["sites/kept"], result["sites/lost"]) == (1.0, 2.0)
    assert (result["sites/a/kept"], result["sites/a/left_out"], result["sites/a/loss"]) == (1.0, 0.0, 0.5)
    assert (result["sites/a/computed_s"], result["sites/a/sent_bytes"]) == (3.0, 7.0)
    assert (result["sites/b/kept"], result["sites/b/left_out"]) == (0.0, 1.0) and "sites/b/loss" not in result
    assert (result["sites/c/kept"], result["sites/c/left_out"]) == (0.0, 0.0) and "sites/c/computed_s" not in result


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_every_group_belongs_to_exactly_one_site(count):
    groups = [BatchGroup(submission=submission(i // 4), group=i % 4) for i in range(12)]
    sites = [f"site-{i}" for i in range(count)]
    result = shares(groups, sites)
    assert set(result) == {(group.submission, group.group) for group in groups} and len(result) == 12
    sizes = [list(result.values()).count(name) for name in sites]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == 12
    terms = Terms(Shapes({}), rounds=1, items=lambda _: 12)
    assert [terms.weight(0, name, sites) for name in sites] == sizes, (
        "the meeting must weight each site by its number of groups"
    )


def test_only_groups_of_sites_in_the_rounds_average_are_counted():
    groups = make_groups()
    members = [BatchGroup(submission=submission(i), group=0) for i in range(3)]
    named = [type(group)(**vars(group) | {"submission": submission(i)}) for i, group in enumerate(groups)]
    outcome = RoundOutcome(
        round=0, kept=["b"], left_out={"a": "not finite"}, missing=[], dealt=["a", "b"], digest="0" * 64
    )
    assert without_lost_sites(members, Fetched(named), outcome).groups == [named[1]]


def test_more_sites_than_groups_are_refused():
    learner = SETTINGS | {"sites": GROUPS + 1}
    with pytest.raises(ConfigError, match="a site would have no group"):
        parse(RUN | {"learner": learner})
