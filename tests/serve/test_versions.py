"""Which versions a source offers, and which versions stay in memory while a run continues."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import Config
from shoal.engine.torch_engine import TorchEngine
from shoal.errors import UserError
from shoal.files import copy_tree, discard
from shoal.model import load as model_load
from shoal.serve.errors import NoSlotError, UnknownVersionError
from shoal.serve.versions import LoadedModel, ModelSource, Offer, Versions, digest, label_of, load, source_of
from shoal.watch.page.guard import HttpError, RateLimit

from .support import engine


@pytest.fixture
def source(tiny_folders: tuple[Path, Path], tmp_path: Path) -> ModelSource:
    (tmp_path / "versions").mkdir()
    for version in (1, 2):
        copy_tree(tiny_folders[version - 1], tmp_path / "versions" / f"v{version:06d}")
    return ModelSource("run", tmp_path / "versions", None)


def publish(source: ModelSource, version: int, folder: Path) -> None:
    assert source.folder is not None
    copy_tree(folder, source.folder / f"v{version:06d}")


def test_a_version_in_use_stays_and_the_least_recently_used_one_is_evicted(
    source: ModelSource, tiny_folders: tuple[Path, Path]
) -> None:
    async def main() -> None:
        versions = Versions(source, engine, max_loaded=3)
        await versions.poll()
        async with versions.borrow("run", "ada"):  # version 2, which stays in use
            publish(source, 3, tiny_folders[0])
            await versions.poll()
            async with versions.borrow("run", "ada") as three:
                before = three.engine.model.lm_head.weight.clone()
            publish(source, 4, tiny_folders[0])
            await versions.poll()
            publish(source, 5, tiny_folders[1])
            await versions.poll()
            assert not versions.is_loaded("run@3") and versions.is_loaded("run@2")
        async with versions.borrow("run", "ada") as five:
            assert five.engine is three.engine  # the new version reuses the evicted version's memory
            assert not torch.equal(five.engine.model.lm_head.weight, before)
            assert five.digest != three.digest
        versions.close()

    asyncio.run(main())


def test_requests_to_older_versions_leave_a_slot_for_each_new_version(source: ModelSource, tiny_folder: Path) -> None:
    publish(source, 3, tiny_folder)

    async def main() -> None:
        versions = Versions(source, engine, max_loaded=3)
        await versions.poll()
        async with versions.borrow("run@2", "ada"):
            pass  # it stays in memory, so the next request for it loads nothing
        async with versions.borrow("run@1", "eve") as older, versions.borrow("run@1", "ada") as same:
            assert same is older
            for version in (4, 5):
                with pytest.raises(NoSlotError, match="run@1 are running, so no other older version fits"):
                    async with versions.borrow("run@2", "eve"):
                        pass
                assert versions.is_loaded("run@2") == (version == 4)  # a refused request loads nothing
                publish(source, version, tiny_folder)
                await versions.poll()
                async with versions.borrow("run", "ada") as newest:
                    assert newest.id == f"run@{version}" and not versions.failure
        versions.close()

    asyncio.run(main())


def test_a_version_that_becomes_the_newest_is_not_loaded_again(source: ModelSource) -> None:
    async def main() -> None:
        versions = Versions(source, engine)
        await versions.poll()
        async with versions.borrow("run@1", "ada") as older:
            discard(source.folder / "v000002")  # type: ignore[operator]
            await versions.poll()
            assert versions.newest is older
        versions.close()

    asyncio.run(main())


def test_callers_load_older_versions_in_turn(
    source: ModelSource, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(3, 7):
        publish(source, version, tiny_folder)
    loaded = list[str]()

    def counted(offer: Offer, engine: TorchEngine) -> LoadedModel:
        loaded.append(offer.id)
        return load(offer, engine)

    async def main() -> None:
        versions = Versions(source, engine)
        await versions.poll()
        monkeypatch.setattr("shoal.serve.versions.load", counted)

        async def ask(id: str, caller: str) -> None:
            async with versions.borrow(id, caller):
                pass

        await asyncio.gather(*(ask(f"run@{version}", "eve") for version in range(1, 5)), ask("run@5", "ada"))
        versions.close()

    asyncio.run(main())
    assert loaded == ["run@1", "run@2", "run@5", "run@3", "run@4"]


def test_users_of_the_page_load_a_limited_number_of_older_versions(
    source: ModelSource, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RateLimit.__init__, "__defaults__", (lambda: 0.0,))  # no time passes, so no use is refilled
    monkeypatch.setattr("shoal.serve.versions.USER_LOADS", 2)
    monkeypatch.setattr("shoal.serve.versions.PAGE_LOADS", 3)
    for version in range(3, 8):
        publish(source, version, tiny_folder)

    async def main() -> None:
        versions = Versions(source, engine, max_loaded=3)
        await versions.poll()

        async def ask(version: int, caller: str, *, page: bool = True) -> None:
            async with versions.borrow(f"run@{version}", caller, page=page):
                pass

        for version in (1, 2, 1):  # the third request loads nothing
            await ask(version, "eve")
        with pytest.raises(HttpError, match="for you; try again in"):
            await ask(3, "eve")
        await ask(3, "ada")
        with pytest.raises(HttpError, match="for this page"):
            await ask(4, "ada")
        await ask(7, "eve")
        for version in (4, 5, 6):
            await ask(version, "key", page=False)
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
            async with versions.borrow("run@1", "ada"):
                pass
        async with versions.borrow("run", "ada") as newest:
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
