"""The wheel and the sdist contain what is needed and nothing else. The installed command runs in any folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from shoal import __version__
from shoal.config import load
from shoal.config.loading import PACKAGED

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with wheel and sdist, built without network access from a copy of the sources."""
    tree = tmp_path_factory.mktemp("tree")
    unwanted = shutil.ignore_patterns("__pycache__", "results")
    for name in ("src", "configs", "docs", "deploy"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=unwanted)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True, timeout=300)
    return tree / "dist"


def files(folder: Path, *patterns: str) -> set[str]:
    paths = (path for pattern in patterns for path in folder.rglob(pattern))
    return {str(path.relative_to(folder)) for path in paths if path.parent.name != "__pycache__"}


def test_the_wheel_contains_only_the_package_and_its_configs(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = files(ROOT / "src" / "shoal", "*.py", "py.typed", "stakes.*", "static/*", "shared/*")
    expected = {f"shoal/{name}" for name in sources}
    expected |= {f"shoal/configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert names == expected
    assert wheel.name == f"shoal-{__version__}-py3-none-any.whl"


def test_the_wheel_states_versions_extras_and_the_command(dist: Path) -> None:
    archive = zipfile.ZipFile(next(dist.glob("*.whl")))
    info = f"shoal-{__version__}.dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert f"Version: {__version__}\n" in metadata and "Requires-Python: >=3.11\n" in metadata
    for version in ("3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {version}\n" in metadata
    for extra in PROJECT["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "shoal = shoal.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def pins(path: Path) -> dict[str, str]:
    """Return versions by name, without markers and hashes."""
    lines = [
        re.split("[;\\\\]", line)[0].strip()
        for line in path.read_text().splitlines()
        if not line.startswith(("#", " "))
    ]
    return dict(line.split("==") for line in lines if line)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_locks_have_every_dependency_at_the_constraints_version(kind: str) -> None:
    path = ROOT / "deploy" / f"requirements-{kind}.txt"
    locked, constraints = pins(path), pins(ROOT / "constraints.txt")
    extras = [requirement for extra in ("s3", "postgres") for requirement in PROJECT["optional-dependencies"][extra]]
    named = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in [*PROJECT["dependencies"], *extras]}
    assert named <= set(locked) & set(constraints)
    assert [
        name for name in constraints if locked.get(name, constraints[name]).partition("+")[0] != constraints[name]
    ] == []
    assert locked["torch"].endswith("+cpu") is (kind == "cpu")
    assert bool([name for name in locked if name.startswith("nvidia-")]) is (kind == "cuda")
    assert "://" not in path.read_text() and "--index" not in path.read_text()


def test_the_sdist_contains_what_a_build_needs_and_the_docs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    links = [name for name, member in inside.items() if member.issym() or member.islnk()]
    assert links == []  # only in a checkout, `src/shoal/configs` is a link
    needed = {
        "pyproject.toml",
        "constraints.txt",
        "CHANGELOG.md",
        "src/shoal/configs/quickstart.toml",
        "docs/operate.md",
    }
    assert needed <= set(inside)
    assert not [name for name in inside if name.endswith(".pyc") or "/results/" in name]


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml", "configs/quickstart.toml"])
def test_a_packaged_config_is_found_by_its_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Path(name)) == load(ROOT / "configs" / "quickstart.toml")
    assert PACKAGED.resolve() == (ROOT / "configs").resolve()


def test_a_file_in_the_current_folder_comes_before_a_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text('run.steps = 77\n[[tasks.sources]]\ngenerator = "arithmetic"\n')
    assert load(Path("tiny.toml")).run.steps == 77
    assert load(Path("tiny")).run.steps != 77


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_wheel_runs_from_an_empty_folder(dist: Path, tmp_path: Path) -> None:
    """The new virtual environment uses the packages of this one, except Shoal, so nothing is downloaded."""
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    bin_ = venv / "bin"
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # Python does not read the .pth files in that folder
    pip = [sys.executable, "-m", "pip", "--python", bin_ / "python", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, next(dist.glob("*.whl"))], check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def shoal(*arguments: str) -> str:
        command = [bin_ / "shoal", *arguments]
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, timeout=1700)
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = [bin_ / "python", "-c", "import shoal; print(shoal.__file__)"]
    where = subprocess.run(script, env=env, capture_output=True, text=True)
    assert where.stdout.startswith(str(site))
    assert shoal("--version") == f"shoal {__version__}\n"
    assert "steps" in shoal("config", "quickstart")
    settings = ("run.steps=1", "coordinator.prompts_per_step=4", "evaluator.n=8", "tasks.heldout=8")
    shoal("run", "tiny", "--out", "out", *(word for setting in settings for word in ("--set", setting)))
    assert (empty / "out" / "summary.json").exists()
