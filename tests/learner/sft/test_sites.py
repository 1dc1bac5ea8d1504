"""Fine-tuning at several sites: alone it is plain fine-tuning; together every update is made once."""

import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config, ConfigError
from shoal.config.sites import SitesSection
from shoal.diloco.agreed import Agreed
from shoal.diloco.meeting import Meeting
from shoal.learner.sft.batch import plan
from shoal.learner.sft.sites import SiteSft, sft_about, sft_terms, shared
from shoal.learner.sft.trainer import open_policy
from tests.learner.test_sites import Quiet

from .test_trainer import NEVER, config, data_of, make, metrics, rows

__all__ = ["rows"]
pytestmark = pytest.mark.usefixtures("one_thread")


def at(rows: Path, **sites: Any) -> Config:
    wanted = {"kind": "fp64", "lr": 1.0, "momentum": 0.0, "inner_steps": 1, "sites": 1, "wait_s": 60.0}
    changed: Config = config(rows, batch=2).model_copy(update={"sites": SitesSection(**wanted | sites)})
    return changed


def meeting_of(model: Path, folder: Path, of: Config) -> Meeting:
    policy, data = open_policy(model, of, "float32"), data_of(model, of)
    terms = sft_terms(plan([len(each.tokens) for each in data.train], of.sft, of.run.seed), of, policy)
    first = Agreed.of(policy.masters, terms.fragments)
    return Meeting(folder, terms, sft_about(data, of, policy, model), "m", lambda: first)


def site(model: Path, out: Path, of: Config, meeting: Meeting, name: str) -> SiteSft:
    way, policy, data = Quiet(meeting, name), open_policy(model, of, "float32"), data_of(model, of)
    return SiteSft(policy, data, of, out / name, sft_about(data, of, policy, model), name, way, way)


def test_one_site_is_plain_fine_tuning_bit_for_bit(tiny_folder: Path, rows: Path, tmp_path: Path) -> None:
    of = at(rows, inner_steps=3)
    plain = make(tiny_folder, tmp_path / "plain", of).run(NEVER)
    found = site(tiny_folder, tmp_path, of, meeting_of(tiny_folder, tmp_path / "meet", of), "site-0").run(NEVER)
    assert plain and found
    assert (found / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert metrics(tmp_path / "site-0", "loss") == metrics(tmp_path / "plain", "loss")


def test_two_sites_make_every_update_once_and_end_with_the_same_model(
    tiny_folder: Path, rows: Path, tmp_path: Path
) -> None:
    of = at(rows, sites=2, inner_steps=2)
    meeting = meeting_of(tiny_folder, tmp_path / "meet", of)
    sites = [site(tiny_folder, tmp_path, of, meeting, f"site-{i}") for i in range(2)]
    threads = [threading.Thread(target=each.run, args=(NEVER,)) for each in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    models = {(each.folder / "model" / "model.safetensors").read_bytes() for each in sites}
    assert len(models) == 1
    made = [set(metrics(each.folder, "loss")) for each in sites]
    assert made == [{1, 3, 5, 7}, {2, 4, 6, 8}]


def test_a_site_without_an_update_in_the_last_round_does_not_count_in_it(tiny_folder: Path, rows: Path) -> None:
    of, names = at(rows, sites=2, inner_steps=2), ["site-0", "site-1"]
    terms = sft_terms(range(9), of, open_policy(tiny_folder, of, "float32"))
    assert terms.rounds == 3
    for round in range(3):
        made = shared(round, 9, 4, names)
        assert [terms.weight(round, name, names) for name in names] == [len(made[name]) for name in names]
    assert [terms.weight(2, name, names) for name in names] == [1, 0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_update_is_made_twice_and_none_is_left_out(count: int) -> None:
    names = [f"site-{i}" for i in range(count)]
    made = [number for round in range(3) for each in shared(round, 17, 6, names).values() for number in each]
    assert sorted(made) == list(range(17))


def test_what_only_pretraining_can_is_refused(tiny_folder: Path, rows: Path) -> None:
    of = at(rows, inner_steps=2, fragments=2)
    with pytest.raises(ConfigError, match=r"sites\.fragments = 1"):
        sft_terms([1], of, open_policy(tiny_folder, of, "float32"))
