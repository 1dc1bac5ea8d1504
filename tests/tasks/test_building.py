"""The task set in a coordinator's folder: built once, the same for the whole run, served to members by hash."""

from pathlib import Path

import pytest

from shoal.config import ConfigError, load, parse
from shoal.tasks.compiling import build_tasks, read_built

CONFIG = parse({"tasks": {"heldout": 64}, "evaluator": {"n": 8}})


def test_a_pool_keeps_its_tasks_for_its_whole_life(tmp_path: Path) -> None:
    config, notes = build_tasks(CONFIG, tmp_path / "tasks")
    assert notes == ["arithmetic: 836 tasks to train on, 64 held out"]
    assert build_tasks(config, tmp_path / "tasks")[0] == build_tasks(CONFIG, tmp_path / "tasks")[0] == config
    with pytest.raises(ConfigError, match="no file or folder at"):
        build_tasks(parse({"tasks": {"sources": [{"path": "nowhere.jsonl"}]}}), tmp_path / "other")
    changed = parse({"tasks": {"heldout": 65}, "evaluator": {"n": 8}})
    with pytest.raises(ConfigError, match=f"tasks.digest is {config.tasks.digest}, but the sources give .* whole run"):
        build_tasks(changed, tmp_path / "tasks")
    built = read_built(tmp_path / "tasks")
    assert built is not None and built.digest == config.tasks.digest


def test_a_pool_is_founded_with_its_tasks(tmp_path: Path) -> None:
    from shoal.cli.main import DONE, main

    rows = tmp_path / "some.jsonl"
    rows.write_text("".join(f'{{"text": "{n} + 1", "gold": {n + 1}}}\n' for n in range(30)))
    path = tmp_path / "sums.toml"
    path.write_text(
        '[model]\nname = "bundled:tiny"\n[sampling]\nmax_tokens = 8\n[evaluator]\nn = 8\n'
        "[tasks]\nheldout = 8\n"
        '[[tasks.sources]]\npath = "some.jsonl"\nfields = { question = "text", answer = "gold" }\n'
        '[[tasks.sources]]\ngenerator = "arithmetic"\noptions = { operand_max = 9 }\nweight = 3\n'
    )
    assert main(["pool", "init", str(path), "--dir", str(tmp_path / "pool"), "--url", "http://127.0.0.1:8700"]) == DONE
    config = load(tmp_path / "pool" / "config.toml")
    built = read_built(tmp_path / "pool" / "tasks")
    assert built is not None and config.tasks.digest == built.digest
    assert [child.name for child in tmp_path.iterdir() if child.name.startswith(".")] == [], "nothing is left beside it"
    rows.unlink()
    assert build_tasks(config, tmp_path / "pool" / "tasks")[0] == config, "its coordinator reads no source again"
