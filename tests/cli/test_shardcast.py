"""SHARDCAST from the command line, without a pool: real processes on loopback."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.main import FAILED, LASTING, USAGE, command_line
from shoal.cli.nodes import run_origin
from shoal.errors import UserError
from shoal.shardcast import PublishError
from shoal.shardcast import origin as origin_module

Started = Callable[..., dict[str, Any]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Yield a function that starts a server command and returns its first line."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "shoal", *map(str, arguments)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        output = processes[-1].stdout
        assert output is not None
        first: dict[str, Any] = json.loads(output.readline())
        return first

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait(10) == 0


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(range(256)) * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_an_origin_without_files_is_refused_and_creates_no_key(tmp_path: Path) -> None:
    arguments = command_line().parse_args(["origin", f"{tmp_path}/nowhere", "--key-file", f"{tmp_path}/key"])
    with pytest.raises(
        UserError, match="no such file or folder: .*/nowhere; name a file, a folder, or a folder of versions"
    ):
        run_origin(arguments, threading.Event())
    assert not list(tmp_path.iterdir())


def test_a_folder_goes_from_origin_through_relay_to_client(
    tmp_path: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = started("origin", model(tmp_path / "model"), "--store", tmp_path / "o", "--key-file", tmp_path / "k")
    relay = started("relay", "--upstream", origin["url"], "--key", origin["key"], "--store", tmp_path / "r")
    urls = f"{relay['url']},{origin['url']}"
    status = main(["fetch", urls, "--key", origin["key"], "--out", str(tmp_path / "out"), "--wait", "20"])
    printed = capsys.readouterr()
    assert status == 0 and printed.out == f"{tmp_path / 'out' / 'v000000'}\n"
    assert "fetching version 0" in printed.err and relay["url"] in printed.err, (
        "the bar must name the version and the server"
    )
    assert (tmp_path / "out" / "v000000" / "weights").read_bytes() == (tmp_path / "model" / "weights").read_bytes()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "the store shardcast lies inside"),
        (["--store", "../store"], "the key file origin.pem lies inside"),
        (["--store", "../store", "--key-file", "../link/origin.pem"], "the key file ../link/origin.pem lies inside"),
    ],
    ids=["store", "key", "key through a link"],
)
def test_an_origin_creates_no_key_and_no_store_inside_the_published_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
) -> None:
    here = model(tmp_path / "model")
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(PublishError, match=reason):
        run_origin(command_line().parse_args(["origin", ".", *options]), stopped)
    assert sorted(path.name for path in here.iterdir()) == ["config.json", "weights"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model"]


# --- wrong arguments -------------------------------------------------------------------------------------------------

FETCH = ["fetch", "http://127.0.0.1:1", "--out", "out"]
KEY = ["--key", "a" * 64]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["origin"], USAGE, "without --join, origin also needs PATH"),
        (["relay"], USAGE, "without --join, relay also needs --upstream and --key"),
        (["relay", "--upstream", "http://127.0.0.1:1"], USAGE, "also needs --key"),
        (["origin", ".", "--url", "http://x:1"], USAGE, "--url applies only with --join"),
        (["origin", ".", "--dir", "d"], USAGE, "--dir applies only with --join"),
        (["origin", "--join", "x", "--dir", "d"], USAGE, "with --join, origin also needs --watch"),
        (["origin", ".", "--join", "x", "--dir", "d", "--watch", "w"], USAGE, "PATH applies only without --join"),
        (["origin", "--join", "x", "--key-file", "k"], USAGE, "--key-file applies only without --join"),
        (["relay", "--join", "x", "--dir", "d", "--store", "q", "--keep", "9"], USAGE, "--store applies only without"),
        (["relay", "--join", "x", "--dir", "d", "--keep", "9"], USAGE, "--keep applies only without --join"),
        (["relay", "--join", "x", "--dir", "d", "--upstream", "u"], USAGE, "--upstream applies only without --join"),
        ([*FETCH, *KEY, "--follow", "--version", "0"], USAGE, "--version cannot be combined with --follow"),
        ([*FETCH, *KEY, "--follow", "--wait", "3"], USAGE, "--wait cannot be combined with --follow"),
        ([*FETCH, *KEY], FAILED, "http://127.0.0.1:1"),
        ([*FETCH, "--key", "origin.pem"], USAGE, "'origin.pem' is not a public key, which has 64 hex digits"),
        (
            ["relay", "--upstream", "http://127.0.0.1:1", "--key", "origin.pem"],
            USAGE,
            "'origin.pem' is not a public key",
        ),
    ],
)
def test_a_missing_or_wrong_argument_is_named(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://host:99999", "http://host:0", "ftp://host", "host", "http://", "h ttp://x"]
)
def test_a_wrong_url_is_refused_in_one_line(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", url, *KEY, "--out", str(tmp_path / "out"), "--follow"]) == FAILED
    assert f"shoal fetch: {url!r} is not the URL of a server: write http://HOST:PORT\n" in capsys.readouterr().err
    assert main(["relay", "--upstream", url, *KEY, "--store", str(tmp_path / "store")]) == FAILED
    assert f"{url!r} is not the URL of a server" in capsys.readouterr().err


def test_a_wrong_url_of_a_proxy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://[::1")
    assert main(["fetch", "http://relay.invalid:1", *KEY, "--out", str(tmp_path / "out")]) == FAILED
    assert "the environment names a proxy that is not a URL" in capsys.readouterr().err


def test_a_fetch_of_a_version_that_exists_writes_nothing(tmp_path: Path, started: Started) -> None:
    origin = started("origin", model(tmp_path / "model"), "--store", tmp_path / "o", "--key-file", tmp_path / "k")
    out = tmp_path / "out"
    fetching = ["fetch", origin["url"], "--key", origin["key"], "--out", str(out), "--wait", "20"]
    assert main(fetching) == 0
    (out / ".lock").unlink(missing_ok=True)
    before = sorted(path.name for path in out.iterdir())
    assert main(fetching) == 0
    assert sorted(path.name for path in out.iterdir()) == before, "the second fetch must write nothing"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([f"{n}.txt" for n in range(10_001)], "10001 files, and a version has at most 10000; pack them into fewer"),
        (["README", "readme"], "'readme' and 'README' are one file where case is ignored; rename one"),
        (["a", "a."], "'a.' and 'a' are one file"),
        (["modèle"], "is not a plain relative path"),
        (["\udcff"], "is not a plain relative path"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{len(value)} {ascii(value[-1])}",
)
def test_a_folder_that_cannot_be_published_is_refused_before_a_file_is_read(
    tmp_path: Path, names: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    if len(list(folder.iterdir())) != len(names):
        pytest.skip("this file system treats two of these names as equal")
    monkeypatch.setattr(origin_module, "_entry", lambda *given: pytest.fail("a file was read"))
    files = ["--store", str(tmp_path / "o"), "--key-file", str(tmp_path / "k")]
    assert main(["origin", str(folder), *files]) == LASTING
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_a_fetch_from_a_server_that_accepts_and_never_answers_ends_at_its_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "shoal", "fetch", url, "--key", "0" * 64, "--out", str(tmp_path / "out")]
        ended = subprocess.run([*command, "--timeout", "0.5"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert f"no relay answered in time: {url}" in ended.stderr
