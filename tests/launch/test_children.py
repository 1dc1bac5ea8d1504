"""The processes of a run: forked from one that has imported everything, or new interpreters where forking is not safe."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shoal.launch.children import ENVIRONMENT, ChildError, Children

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(params=["cpu", "cuda"])
def children(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    for name in ENVIRONMENT:  # set for this process's children: taken back after the test
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return Children(tmp_path, 0, request.param)


def test_processes_that_use_cuda_are_not_forked(children: Children, request: pytest.FixtureRequest) -> None:
    wanted = {"cpu": "forkserver", "cuda": "spawn"}[request.node.callspec.params["children"]]
    assert children.context.get_start_method() == wanted


def test_a_command_runs_to_its_end_and_prints_to_its_log(children: Children, tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / ("x" * 200) / ("y" * 200)  # a line is given whole, however long
    shutil.copytree(tiny_folder, folder)
    last = children.run("prepare", ["prepare", str(CONFIGS / "tiny.toml"), "--set", f"model.name={folder}"])
    assert json.loads(last)["folder"] == str(folder)
    assert (tmp_path / "prepare.log").read_text().splitlines()[-1] == last


def test_a_command_that_fails_is_told_with_its_last_words(children: Children, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="nowhere.toml"):
        children.run("dry", ["run", str(tmp_path / "nowhere.toml"), "--dry-run"])


def test_what_does_not_stay_up_is_named(children: Children, tmp_path: Path) -> None:
    child = children.start("lost", ["relay", "--join", "no invite", "--dir", str(tmp_path / "lost")])
    assert child.process is not None
    child.process.join(60)
    with pytest.raises(ChildError, match=r"lost ended 1 times: .*invite"):
        children.revive(lambda line: None)
    children.stop_all()
