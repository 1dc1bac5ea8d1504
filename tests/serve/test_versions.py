"""Which versions stay in memory while a run goes on."""

import asyncio
from pathlib import Path

import pytest
import torch

from shoal.files import copy_tree, discard
from shoal.serve.versions import NoPlaceError, Source, UnknownVersionError, Versions

from .support import engine


@pytest.fixture
def source(tiny_folders: tuple[Path, Path], tmp_path: Path) -> Source:
    assert (tmp_path / "versions").mkdir() is None
    for version in (1, 2):
        copy_tree(tiny_folders[version - 1], tmp_path / "versions" / f"v{version:06d}")
    return Source("run", tmp_path / "versions", None)


def test_a_version_in_use_stays_and_the_longest_unused_one_goes(source: Source, tiny_folder: Path) -> None:
    assert source.folder is not None
    copy_tree(tiny_folder, source.folder / "v000003")

    async def main() -> None:
        versions = Versions(source, engine, places=2)
        await versions.poll()
        async with versions.take("run@1") as one:
            with pytest.raises(NoPlaceError, match="in use"):
                async with versions.take("run@2"):
                    pass
            before = one.engine.model.lm_head.weight.clone()
        async with versions.take("run@2") as two:
            assert not versions.is_loaded("run@1") and versions.is_loaded("run@3")
            assert two.engine is one.engine  # its memory was used again
            assert not torch.equal(two.engine.model.lm_head.weight, before)
            assert two.digest != one.digest
        versions.close()

    asyncio.run(main())


def test_a_version_that_vanished_is_an_error_of_its_request_alone(source: Source) -> None:
    async def main() -> None:
        versions = Versions(source, engine)
        await versions.poll()
        assert source.folder is not None
        discard(source.folder / "v000001")
        with pytest.raises(UnknownVersionError, match="run@1"):
            async with versions.take("run@1"):
                pass
        async with versions.take("run") as newest:
            assert newest.id == "run@2"
        versions.close()

    asyncio.run(main())
