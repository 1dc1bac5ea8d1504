"""Which versions a source offers, and which versions stay in memory while a run continues."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import Config
from shoal.errors import UserError
from shoal.files import copy_tree, discard
from shoal.model import load as model_load
from shoal.serve.errors import NoSlotError, UnknownVersionError
from shoal.serve.versions import ModelSource, Versions, digest, label_of, source_of

from .support import engine


@pytest.fixture
def source(tiny_folders: tuple[Path, Path], tmp_path: Path) -> ModelSource:
    (tmp_path / "versions").mkdir()
    for version in (1, 2):
        copy_tree(tiny_folders[version - 1], tmp_path / "versions" / f"v{version:06d}")
    return ModelSource("run", tmp_path / "versions", None)


def test_a_version_in_use_stays_and_the_least_recently_used_one_is_evicted(
    source: ModelSource, tiny_folder: Path
) -> None:
    assert source.folder is not None
    copy_tree(tiny_folder, source.folder / "v000003")

    async def main() -> None:
        versions = Versions(source, engine, max_loaded=2)
        await versions.poll()
        async with versions.borrow("run@1") as one:
            with pytest.raises(NoSlotError, match="in use"):
                async with versions.borrow("run@2"):
                    pass
            before = one.engine.model.lm_head.weight.clone()
        async with versions.borrow("run@2") as two:
            assert not versions.is_loaded("run@1") and versions.is_loaded("run@3")
            assert two.engine is one.engine  # the new version reuses the evicted version's memory
            assert not torch.equal(two.engine.model.lm_head.weight, before)
            assert two.digest != one.digest
        versions.close()

    asyncio.run(main())


@pytest.mark.parametrize("while_it_loads", [False, True])
def test_only_the_request_for_a_removed_version_fails(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch, while_it_loads: bool
) -> None:
    assert source.folder is not None
    removed = source.folder / "v000001"

    def load_tokenizer(folder: Path) -> Any:
        tokenizer = model_load.load_tokenizer(folder)
        if folder == removed:
            discard(folder)
        return tokenizer

    async def main() -> None:
        versions = Versions(source, engine)
        await versions.poll()
        if while_it_loads:
            monkeypatch.setattr("shoal.serve.versions.load_tokenizer", load_tokenizer)
        else:
            discard(removed)
        with pytest.raises(UnknownVersionError, match="run@1"):
            async with versions.borrow("run@1"):
                pass
        async with versions.borrow("run") as newest:
            assert newest.id == "run@2"
        versions.close()

    asyncio.run(main())


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_digest_covers_weights_and_template_but_not_the_path(tmp_path: Path) -> None:
    one, same = model(tmp_path / "a"), model(tmp_path / "b")
    assert digest(one) == digest(same)
    (same / "model.safetensors").write_bytes(b"weighty")
    assert digest(one) != digest(same)
    before = digest(one)
    (one / "chat_template.jinja").write_text("x")
    assert digest(one) != before
    kept = digest(one)
    (one / "README.md").write_text("x")
    assert digest(one) == kept


def test_labels_are_short_unless_ambiguous() -> None:
    assert label_of("org/name", ["org/name"]) == "name"
    assert label_of("bundled:tiny", ["bundled:tiny"]) == "bundled:tiny"
    assert label_of("runs/a/", ["runs/a/", "runs/b"]) == "a"
    assert label_of("a/model", ["a/model", "b/model"]) == "a/model"


def test_a_source_is_a_run_or_a_folder_of_versions(run_folder: Path) -> None:
    source = source_of(str(run_folder))
    assert isinstance(source.config, Config)
    assert [offer.version for offer in source.offers()] == [3, 0]
    fetched = source_of(str(run_folder / "learner" / "versions"))
    assert [offer.id for offer in fetched.offers()] == ["versions@3"]
    with pytest.raises(UserError, match="neither a run"):
        source_of(str(run_folder / "learner"))
