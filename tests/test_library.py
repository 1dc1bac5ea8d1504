"""Every code block of docs/library.md runs by itself, as a reader would paste it, in a folder with its model."""

import re
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "library.md"
SECTIONS = re.findall(r"^## (.+?)$.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
NEEDS_A_MODEL = "The engine"


def test_the_page_has_a_block_for_every_part_that_can_be_used_alone() -> None:
    titles = ["TOPLOC proofs", "Losses", "Seeded sampling", "Rewards and the sandbox", "SHARDCAST", NEEDS_A_MODEL]
    assert [title for title, _ in SECTIONS] == titles
    assert len(re.findall(r"^```python", PAGE.read_text(), re.MULTILINE)) == len(SECTIONS)


@pytest.mark.parametrize(("title", "block"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_a_block_runs_as_it_stands(
    title: str, block: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if title == NEEDS_A_MODEL:
        (tmp_path / "model").symlink_to(tiny_folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, f"{PAGE.name}: {title}", "exec"), ModuleType("block").__dict__)  # noqa: S102
