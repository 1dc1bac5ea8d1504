"""A training run claims its folder, and never touches other files in it."""

import json

import pytest

from shoal.config import ConfigError
from shoal.learner.training import CHECKPOINTS, LOCK, METRICS, MODEL, claim, drop_after

from ..conftest import locked_elsewhere


def test_only_a_run_with_the_same_settings_can_claim_a_folder_again(tmp_path):
    claim(tmp_path / "new", {"model": "a", "lr": "1"})
    (tmp_path / "new" / "model").mkdir()  # the run may write its own model there
    claim(tmp_path / "new", {"lr": "1", "model": "a"})
    with pytest.raises(ConfigError, match="holds a run with lr = 1, not 2: use its settings"):
        claim(tmp_path / "new", {"model": "a", "lr": "2"})
    with pytest.raises(ConfigError, match="holds a run with another lr: use its settings"):
        claim(tmp_path / "new", {"model": "a"}, "another lr")


def test_of_two_processes_only_one_can_train_in_a_folder_with_its_settings(tmp_path):
    claim(tmp_path / "new", {"model": "a"})
    other = tmp_path / "other"
    other.mkdir()
    with (
        locked_elsewhere(other / LOCK),
        pytest.raises(ConfigError, match=f"another process trains in {other}: stop it first, or choose another --out"),
    ):
        claim(other, {"model": "a"})
    claim(other, {"model": "b"})


@pytest.mark.parametrize("name", [METRICS, CHECKPOINTS, MODEL])
def test_a_folder_with_files_but_no_run_json_is_refused_and_kept(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=f"holds {name} but no run.json: .*; choose another --out"):
        claim(tmp_path, {"model": "a"})
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize(("step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_lines_of_repeated_steps_and_incomplete_lines_are_dropped(tmp_path, step, kept):
    path = tmp_path / "metrics.jsonl"
    drop_after(path, step)
    assert not path.exists()
    path.write_text("".join(f'{{"step": {number}}}\n' for number in (1, 2, 3)) + '{"step": 4')
    drop_after(path, step)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept
