"""README and docs/ match the code and the raw files of benchmarks: links, commands, paths, rooms, checks, figures."""

import argparse
import importlib.util
import json
import re
import shlex
import statistics
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.cli.main import command_line
from shoal.config import Config, parse
from shoal.config.loading import field_paths
from shoal.tasks.sources.schemas import SCHEMAS
from shoal.validator import checks
from shoal.validator.checks import EXACT

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "shoal"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

README_LIMIT_BYTES = 6_000  # not counting comments
RESULTS = ROOT / "benchmarks" / "results"
RUN_FILES = {"summary.json"}  # pages name these JSON files, although no benchmark wrote them
MEASURED = pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution has no benchmarks/results")


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
FIGURE = re.compile(r"(\d+(?:\.\d+)?)( %| MB| GiB|)<!-- ([\w-]+\.json): (.+?) -->")
UNITS = {"": 1.0, "%": 100.0, "MB": 1e-6, "GiB": 2.0**-30}
REDUCE: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "sum": sum, "max": max, "min": min}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the flags of a command and of its actions (such as `init` of `shoal pool`)."""
    own = set(parser._option_string_actions)
    return own.union(*(options(action) for action in subparsers(parser).values()))


def fenced_commands(text: str) -> list[str]:
    """Return every `shoal ...` line of the shell blocks, without comments and redirections."""
    lines = []
    for language, block in FENCE.findall(text):
        if language in ("", "sh", "bash", "console"):
            lines += block.replace("\\\n", " ").splitlines()
    matches = [re.search(r"(?:^|-m )(shoal .*)", line) for line in lines]
    return [re.sub(r"\s+(#|>).*", "", match[1]).strip() for match in matches if match]


def inline_commands(text: str) -> list[str]:
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]
    return [span for span in spans if span.startswith("shoal ")]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(text: str, head: str) -> list[list[str]]:
    """Return the rows of the table whose header line begins with `head`."""
    lines = text[text.index(head) :].splitlines()[2:]
    rows = lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_readme_fits_one_page() -> None:
    visible = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text())
    assert len(visible.encode()) <= README_LIMIT_BYTES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_has_a_target(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_and_flag_exists(page: Path) -> None:
    text, known = page.read_text(), subparsers(command_line())
    for command in fenced_commands(text) + inline_commands(text):
        name, *words = shlex.split(command)[1:]
        flags = {word.split("=")[0] for word in words if re.match(r"--\w", word)}
        if name.startswith("-"):
            assert name in command_line()._option_string_actions, command
            continue
        for alternative in name.split("|"):
            assert alternative in known, f"no such command: {command}"
            assert flags <= options(known[alternative]), f"{flags} of: {command}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_in_a_block_can_be_parsed(page: Path) -> None:
    for command in fenced_commands(page.read_text()):
        words = shlex.split(command)[1:]
        try:
            command_line().parse_args(words)
        except SystemExit:
            pytest.fail(f"the parser refuses: {command}")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_named_source_file_exists(page: Path) -> None:
    spans = SPAN.findall(FENCE.sub("", page.read_text()))
    paths = [span for span in spans if re.fullmatch(r"[\w./*-]+/[\w.*-]+\.(py|toml|c)", span)]
    missing = [path for path in paths if not any(list(base.glob(path)) for base in (ROOT, SRC))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_named_benchmark_and_make_target_exists(page: Path) -> None:
    text = page.read_text()
    scripts = set(re.findall(r"python -m (benchmarks\.[\w.]+)", " ".join(text.split())))
    assert {script for script in scripts if not source_of(script)} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [line for _, block in FENCE.findall(text) for line in block.splitlines()] + SPAN.findall(text)
    assert {match[1] for line in commands if (match := re.match(r"make ([a-z-]+)", line))} <= targets


def source_of(module: str) -> str:
    """Return the source of the module `benchmarks.FOLDER.NAME`, or of all modules of a package; "" if there is none."""
    path = ROOT / module.replace(".", "/")
    files = [path.with_suffix(".py")] if not path.is_dir() else sorted(path.glob("*.py"))
    return "".join(file.read_text() for file in files if file.exists())


def raw_files(text: str) -> list[Path]:
    """Return the files in benchmarks/results that a page names, in order."""
    named = re.findall(
        r"`((?:[\w-]+\.json)|(?:calibration-[\w-]+/))`|<!-- ([\w-]+\.json): |/benchmarks/results/([\w-]+\.json)", text
    )
    names = ["".join(groups) for groups in named]
    return [RESULTS / name for name in names if name not in RUN_FILES]


def fault(path: Path, history: list[str]) -> str | None:
    """Return why the figures of a raw file are not from a commit of this repository, or None if they are."""
    commits = [word for named in re.findall(r'"commit": "([^"]*)"', path.read_text()) for word in named.split()]
    hashes = [word for word in commits if re.match(r"[0-9a-f]{7}", word)]
    if not hashes:
        return f"{path.name} names no commit"
    if dirty := [word for word in hashes if word.endswith("-dirty")]:
        return f"{path.name} is from a tree with local changes: {dirty[0]}"
    unknown = [word for word in hashes if not any(known.startswith(word) for known in history)]
    return f"{path.name} is from a commit that this repository lacks: {unknown[0]}" if unknown else None


@pytest.fixture(scope="module")
def history() -> list[str]:
    """Return all commits, newest first."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so the commits of raw files are unknown")

    def git(*argv: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *argv], capture_output=True, text=True, check=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a shallow clone, so the commits of raw files are unknown")
    return git("rev-list", "HEAD").split()


@MEASURED
def test_every_figure_has_its_raw_file() -> None:
    named = raw_files((ROOT / "docs" / "results.md").read_text())
    assert len(named) > 30
    assert [path.name for path in named if not path.exists()] == []


@MEASURED
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_are_from_clean_commits_or_the_page_says_that_they_are_not(page: Path, history: list[str]) -> None:
    text = " ".join(page.read_text().partition("\n## Older\n")[0].split())
    lists = re.findall(r"((?:`[\w-]+\.json`[, and]*)+) do(?:es)? not come from a clean commit", text)
    admitted = {name for names in lists for name in re.findall(r"[\w-]+\.json", names)}
    named = sorted({path for path in raw_files(text) if path.exists()})  # pages also name files of a run
    wrong = {path.name: why for path in named if (why := fault(path, history))}
    assert set(wrong) == admitted, list(wrong.values())


def value(raw: Any, path: str) -> float:
    """Return the number at `a/b/c` in a raw file. `*` matches all entries, and a word before the path combines them."""
    reduce, keys = path.split(" ", 1) if path.split(" ")[0] in REDUCE else ("", path)
    values = [raw]
    for key in keys.split("/"):
        if key == "*":
            values = [inner for outer in values for inner in (outer.values() if isinstance(outer, dict) else outer)]
        else:
            values = [outer[int(key)] if isinstance(outer, list) else outer[key] for outer in values]
    numbers = [float(number) for number in values if number is not None]
    assert reduce or len(numbers) == 1, f"{path}: {len(numbers)} numbers; write one of {', '.join(REDUCE)} before it"
    return REDUCE[reduce](numbers) if reduce else numbers[0]


@MEASURED
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_marked_figures_equal_their_raw_files(page: Path) -> None:
    """A marked figure is `8.6<!-- trl-sums.json: median measurement a/runs/*/median_step_s -->`, rounded as written."""
    for written, unit, name, path in FIGURE.findall(page.read_text()):
        measured = value(json.loads((RESULTS / name).read_text()), path) * UNITS[unit.strip()]
        digits = len(written.partition(".")[2])
        assert round(measured, digits) == float(written), (
            f"{page.name}: {written}{unit}, but {name}, {path}: {measured}"
        )


def test_readme_and_results_have_marked_figures() -> None:
    marked = {name_of(page): len(FIGURE.findall(page.read_text())) for page in PAGES}
    assert marked["README.md"] >= 2 and marked["docs/results.md"] >= 8
    for page in PAGES:
        marks = re.findall(r"[^`]<!-- [\w-]+\.json", page.read_text())  # marks in backticks are examples
        assert len(FIGURE.findall(page.read_text())) == len(marks), f"a mark of {page.name} is malformed"


@MEASURED
def test_the_number_of_honest_submissions_equals_the_raw_files() -> None:
    claims = (ROOT / "docs" / "results.md").read_text().partition("\n## Older\n")[0]
    raw = [json.loads(path.read_text()) for path in dict.fromkeys(raw_files(claims))]
    runs = [run for file in raw for run in file.get("runs", []) if isinstance(run, dict) and "accepted" in run]

    def by_honest(run: dict[str, Any], what: str) -> int:
        return sum(number for worker, number in run[what].items() if not worker.startswith("cheater"))

    assert [by_honest(run, "rejected") for run in runs] == [0] * len(runs)
    accepted = sum(by_honest(run, "accepted") for run in runs)
    exact = sum(min(by_honest(run, "accepted"), run.get("exact", {}).get("submissions", 0)) for run in runs)
    counts = (
        f"{len(runs)} whole runs",
        f"{accepted:,} submissions",
        f"{exact:,} were equal in every bit",
        f"{accepted - exact:,} (",
    )
    assert all(count in claims for count in counts), counts
    assert f"{accepted:,} honest submissions" in (ROOT / "README.md").read_text()


@MEASURED
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_flags_of_benchmark_commands_exist(page: Path) -> None:
    """Only the reader's own folders need not exist: `$SHOAL_DATA/...`, `runs/...`, names in capitals."""
    text = page.read_text()
    lines = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCE.sub("", text))]
    for line in [line for line in lines + spans if line.startswith(("python -m benchmarks.", "python examples/"))]:
        words = shlex.split(line.replace(" -m ", " "))
        inputs = [word for before, word in zip(words, words[1:], strict=False) if before not in (">", "--out")]
        named = [word for word in inputs if re.match(r"(configs|benchmarks|examples)/", word) or word.endswith(".toml")]
        assert [word for word in named if not list(ROOT.glob(word))] == [], line
        source = source_of(words[1]) or (ROOT / words[1]).read_text()
        assert [flag for flag in re.findall(r" (--(?!help)[a-z][\w-]*)", line) if f'"{flag}"' not in source] == [], line


def test_every_benchmark_that_writes_figures_names_its_commit() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
    writers = {name: text for name, text in texts.items() if re.search(r"common\.machine import .*\bsave\b", text)}
    assert len(writers) > 40
    assert [name for name, text in writers.items() if not re.search(r"\b(about|describe|commit)\(", text)] == []


def test_the_list_of_benchmarks_names_every_script() -> None:
    folder = ROOT / "benchmarks"
    rows = table((folder / "README.md").read_text(), "| script |")
    scripts = [path for path in folder.rglob("*.py") if "argparse.ArgumentParser(" in path.read_text()]
    modules = {path.relative_to(folder).with_suffix("").as_posix().removesuffix("/__main__") for path in scripts}
    assert sorted(name.strip("`") for name, *_ in rows) == sorted(module.replace("/", ".") for module in modules)
    for name, _, arguments, *_ in rows:
        source = source_of("benchmarks." + name.strip("`"))
        assert [flag for flag in re.findall(r"--[a-z][\w-]*", arguments) if f'"{flag}"' not in source] == [], name


def test_the_architecture_lists_the_rooms_and_their_imports() -> None:
    rows = table((ROOT / "docs" / "architecture.md").read_text(), "| room |")
    written = {room.strip("`"): imports for room, _, imports in rows}
    rooms = load(ROOT / "tests" / "test_layout.py").ROOMS
    assert list(written) == list(rooms)
    for room, imports in rooms.items():
        assert written[room] == (", ".join(imports) or "–"), f"docs/architecture.md must list the imports of `{room}`"


def test_the_places_that_the_table_of_questions_names_exist() -> None:
    rows = table((ROOT / "docs" / "architecture.md").read_text(), "| question | place |")
    assert len(rows) >= 10
    for question, place in rows:
        file, name = re.findall(r"`([^`]+)`", place)
        source = (ROOT / "src" / "shoal" / file).read_text()
        assert all(
            re.search(rf"^\s*((async )?def|class) {part}\b|^{part}\b", source, re.MULTILINE) for part in name.split(".")
        ), question


def test_the_list_of_checks_has_the_validators_checks_in_order() -> None:
    rows = table((ROOT / "docs" / "trust.md").read_text(), "| check |")
    written = [name.split("`")[1] for name, *_ in rows if name.startswith("`")]
    assert written == [check.__name__ for check in (*checks.FILE, *checks.EXPENSIVE, *EXACT, *checks.ANSWERS)]


def test_the_table_of_attacks_names_tests_that_exist_or_says_open() -> None:
    rows = table((ROOT / "docs" / "trust.md").read_text(), "| party: thing |")
    assert len(rows) >= 30
    for thing, *_, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert named or tests == "open", f"{thing}: name a test, or say open"
        for file, function in named:
            assert re.search(rf"def {function}\(", (ROOT / "tests" / file).read_text()), f"{thing}: {file}::{function}"


def test_the_page_on_tasks_lists_the_schemas_that_are_recognised() -> None:
    listed = table((ROOT / "docs" / "tasks.md").read_text(), "| schema | columns")
    assert [row[0] for row in listed] == [schema.name for schema in SCHEMAS]
    for row, schema in zip(listed, SCHEMAS, strict=True):
        assert set(schema.needs) <= set(SPAN.findall(row[1])), row[0]


def test_every_term_of_another_library_maps_to_a_field() -> None:
    rows = table((ROOT / "docs" / "library.md").read_text(), "| theirs")
    assert rows and {field.strip("`") for _, field in rows} <= set(field_paths(Config))


def test_the_examples_for_users_of_other_libraries_are_valid_configs() -> None:
    fences = FENCE.findall((ROOT / "docs" / "library.md").read_text())
    blocks = [block for language, block in fences if language == "toml"]
    assert len(blocks) == 2
    for block in blocks:
        parse(tomllib.loads(block))
