"""Servers that the tests share: no test changes `api`; tests add users to `page`, so each file has a new one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.files import copy_tree
from shoal.serve.versions import LoadedModel, Offer, load

from .support import CHEAP, Running, User, engine, serving


@pytest.fixture(scope="session")
def api(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tiny_folder, tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tiny_folder, tmp_path_factory.mktemp("page"), hasher=CHEAP) as running:
        yield running


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> LoadedModel:
    return load(Offer("tiny", None, tiny_folder), engine())


@pytest.fixture(scope="module")
def ada(page: Running) -> User:
    return User.registered(page, "ada")


@pytest.fixture(scope="module")
def run_folder(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with length targets. Its base model is tiny, and version 3 is another tiny model."""
    folder = tmp_path_factory.mktemp("run") / "steps"
    (folder / "learner" / "versions").mkdir(parents=True)
    copy_tree(tiny_folders[1], folder / "learner" / "versions" / "v000003")
    (folder / "config.toml").write_text(
        f'[model]\nname = "{tiny_folders[0]}"\n[tasks]\nsystem = "short"\nprompt = "{{question}}="\n'
        'length_targets = [4, 8]\n[[tasks.sources]]\ngenerator = "arithmetic"\n[sampling]\nmax_tokens = 32\n'
    )
    return folder
