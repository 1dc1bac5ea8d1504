"""Commands at a shell: exit statuses, one-line errors, help, and a start without torch."""

import argparse
import errno
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from shoal import __version__, tasks
from shoal.cli.arguments import run_name
from shoal.cli.main import DONE, FAILED, GROUPS, INTERRUPTED, USAGE, command_line, main
from shoal.cli.nodes import ROLES
from shoal.config import load
from shoal.config.tasks import SourceSection, TaskSection
from shoal.errors import UserError
from shoal.evals.suites import Suite, read_tasks
from shoal.learner.pretrain import text
from shoal.learner.sft import conversations
from shoal.model import sources
from shoal.protocol.messages import Role
from shoal.protocol.signing import AUDIENCE
from shoal.store.rollouts import Header

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.toml")


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text('[run]\nsteps = 3\n[sampling]\nmax_tokens = 64\n[[tasks.sources]]\ngenerator = "arithmetic"\n')
    return str(path)


def test_config_prints_the_resolved_values(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.toml").write_text(f"[validator]\ncount = {number}\n")
    overlays = ["--with", str(tmp_path / "1.toml"), "--with", str(tmp_path / "2.toml")]
    overrides = ["--set", "learner.loss.beta=0.5", "--set", "model.name=./nowhere"]
    assert main(["config", small, *overlays, *overrides]) == DONE, (
        "`shoal config` must not check values against this machine"
    )
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    config = load(printed)
    assert (config.run.steps, config.learner.loss.beta, config.model.name) == (3, 0.5, "./nowhere")
    assert config.validator.count == 2, "the last overlay must win"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "{small}", "--set", "learner.lrr=1"], "did you mean 'learner.lr'?"),
        (["run"], "shoal run --resume RUN"),
        (["run", "{small}", "--set", "run.seed=-1"], "run.seed: "),
        (["run", "{small}", "--with", "over.toml"], "no config at over.toml"),
        (["run", "--resume", "{small}.d", "--out", "x"], "leave out --out"),
        (["run", "--resume", "nowhere"], "nowhere is not the folder of a run: it has no config.toml"),
        (["coordinator", "{small}", "--dir", "x", "--run", "two words"], "'two words' cannot name a run"),
        (["config", "--explain", "learner.lrr"], "did you mean 'learner.lr'?"),
        (["config", "{small}", "--explain"], "leave the config out"),
        (["config", "--set", "run.steps=3"], "--set needs a config"),
        (["check", "--with", "{small}"], "--with needs a config"),
        (["sft", "--out", "x"], "--out needs a config"),
        (["calibrate", "{small}", "--set", "sampling.max_tokens=8192"], "share its 8192 positions"),
        (["pool", "status", "nowhere"], "'nowhere' is neither a folder nor a coordinator's URL"),
        (["pool", "status", "ftp://pool:1"], "write http://HOST:PORT"),
        (["pool", "invite", "{small}.d", "--role", "worker", "--name", "w"], "is not the folder of a coordinator"),
        (["worker", "--join", "{small}", "--dir", "w"], "small.toml: not an invite"),
        (["audit", "nowhere.parquet", "--run", "x"], "no such file or folder: nowhere.parquet"),
        (["audit", "{small}", "--run", "nowhere"], "nowhere is not a run's folder: it has no config.toml"),
        (
            ["dashboard", "http://h:1", "--out", "x.html"],
            "--out needs the folder of a run, not a URL such as http://h:1",
        ),
    ],
)
def test_wrong_arguments_give_one_line_of_error_and_exit_status_2(
    small: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("{small}", small) for argument in arguments]) == USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"shoal {arguments[0]}: ") and words in printed.err
    assert len(printed.err.splitlines()) == 1


WRONG = {  # for each command, arguments that name something missing or of the wrong kind
    "run": "nowhere.toml",
    "pool": "up nowhere",
    "coordinator": "--dir nowhere",
    "learner": "--join nowhere --dir new",
    "worker": "--join nowhere --dir new",
    "validator": "--join nowhere --dir new",
    "evaluator": "--join nowhere --dir new",
    "origin": "nowhere",
    "relay": "--upstream http://127.0.0.1:9 --key none",
    "fetch": "http://127.0.0.1:9 --key none --out new",
    "check": "nowhere.toml",
    "config": "nowhere.toml",
    "calibrate": "nowhere.toml",
    "audit": "nowhere",
    "dashboard": "nowhere",
    "filter": "nowhere.toml --out new",
    "sft": "nowhere.toml",
    "pretrain": "nowhere.toml",
    "eval": "nosuch --model ./nowhere",
    "serve": "./nowhere",
}


@pytest.mark.parametrize("command", list(WRONG))
def test_every_command_reports_a_wrong_argument_in_one_line_and_creates_nothing(
    command: str, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *WRONG[command].replace("{small}", small).split()]) == USAGE
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"shoal {command}: ") and len(printed.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"], "the command must create nothing"


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (sources.resolve, "~no-such-user/model"),
        (conversations.find, "~no-such-user/chat.jsonl"),
        (text.find, "~no-such-user/*.txt"),
        (lambda name: read_tasks(Suite("sums", "", "sums", path=name), 0), "~no-such-user/suite"),
        (lambda name: tasks_of(path=name), "~no-such-user/sums.jsonl"),
        (lambda name: tasks_of(generator="arithmetic", keep=name), "~no-such-user/kept.json"),
        (lambda name: tasks_of(generator="arithmetic", reward=f"{name}:reward"), "~no-such-user/my_rewards.py"),
    ],
    ids=["model", "sft.data", "pretrain.data", "suite", "path", "keep", "reward"],
)
def test_the_home_folder_of_an_unknown_user_is_a_usage_error(read: Callable[[str], object], name: str) -> None:
    with pytest.raises(UserError, match=rf"^{re.escape(name)}: this home folder is unknown; write the full path"):
        read(name)


def tasks_of(**source: str) -> object:
    return tasks.load(TaskSection(sources=[SourceSection(**source)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["path", "keep", "reward"])
def test_a_config_with_the_home_folder_of_an_unknown_user_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (tmp_path / "home.toml").write_text(f'[[tasks.sources]]\n{key} = "~no-such-user/file.py:x"\n')
    assert main(["config", str(tmp_path / "home.toml")]) == USAGE
    assert "~no-such-user/file.py" in (err := capsys.readouterr().err) and "this home folder is unknown" in err


def test_a_missing_file_is_a_usage_error_only_if_the_arguments_name_it(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(path: Path) -> Callable[[object], int]:
        return lambda arguments: len(path.read_bytes())

    monkeypatch.setattr("shoal.cli.serve.dashboard", reads(tmp_path / "lost"))
    assert main(["dashboard", str(tmp_path)]) == FAILED
    assert main(["dashboard", str(tmp_path / "lost")]) == USAGE
    monkeypatch.setattr("shoal.cli.serve.dashboard", reads(tmp_path / "nowhere" / "lost"))
    assert main(["dashboard", str(tmp_path / "nowhere")]) == USAGE


def test_the_error_of_a_full_disk_names_the_file_and_the_next_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/head.json")

    monkeypatch.setattr("shoal.cli.serve.dashboard", full)
    assert main(["dashboard", "x"]) == FAILED
    why = "[Errno 28] No space left on device: 'run/head.json'; free space there, then start again"
    assert capsys.readouterr().err == f"shoal dashboard: {why}\n"


def test_serving_at_a_port_in_use_says_what_to_do(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "bundled:smollm2-135m-instruct", "--port", str(port)]) == USAGE
    where = f"shoal serve: the endpoint cannot listen at 127.0.0.1:{port}: "
    assert capsys.readouterr().err == f"{where}Address already in use; choose another port, or 0 for a free one\n"


@pytest.mark.parametrize(
    ("host", "why"), [("192.0.2.1", os.strerror(errno.EADDRNOTAVAIL)), ("nowhere.invalid", "no such host")]
)
def test_serving_at_an_address_of_another_machine_says_what_to_do(
    host: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "bundled:smollm2-135m-instruct", "--host", host, "--port", "0"]) == USAGE
    where = f"shoal serve: the endpoint cannot listen at {host}:0"
    assert capsys.readouterr().err == f"{where}: {why}; choose another host\n"


@pytest.mark.usefixtures("ipv6")
def test_the_dashboard_may_listen_on_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed: list[str] = []

    async def serve(page: object, listener: socket.socket, hosts: tuple[str, ...], stop: object) -> None:
        listener.close()
        allowed.extend(hosts)

    monkeypatch.setattr("shoal.watch.page.server.serve", serve)
    monkeypatch.setattr("shoal.watch.run.open_run", lambda what: None)
    monkeypatch.setattr("shoal.watch.page.server.Dashboard", lambda run, others: None)
    monkeypatch.setattr("shoal.cli.launch.process.begin", lambda name, threads: threading.Event())
    assert main(["dashboard", str(tmp_path), "--host", "0:0:0:0:0:0:0:1", "--port", "0"]) == DONE
    assert re.match(r"dashboard: http://\[::1\]:\d+/ ", capsys.readouterr().out)
    assert "[0:0:0:0:0:0:0:1]" in allowed


def test_a_run_that_never_started_or_has_another_model_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('[model]\nname = "bundled:tiny"\n')
    assert main(["run", "--resume", str(tmp_path)]) == USAGE
    assert f"{tmp_path} is neither the folder of a run nor of a coordinator that was started" in capsys.readouterr().err
    assert main(["run", "--resume", str(tmp_path), "--set", "model.name=./other"]) == USAGE
    words = (
        'model.name is "./other", but the work of this run so far was done with "bundled:tiny": set it back, or start'
    )
    assert capsys.readouterr().err == f"shoal run: {words} a new run\n"


@pytest.mark.parametrize("stem", ["two words", "größer", "x" * 99])
def test_a_config_whose_name_cannot_name_a_run_is_refused(
    stem: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run takes its config's name, which appears in signatures and in the headers of submissions."""
    path = Path(small).rename(tmp_path / f"{stem}.toml")
    assert main(["run", str(path), "--out", str(tmp_path / "out")]) == USAGE
    assert "cannot name a run: use 1 to 100 ASCII characters without spaces" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_longest_name_of_a_run_fits_into_requests_and_headers() -> None:
    text = "!~" * 50
    assert run_name(text, "") == text
    assert AUDIENCE.fullmatch(text)
    zero, numbers = "0" * 64, {"schema_version": 1, "step": 0, "policy_version": 0, "submission": 0}
    Header(run=text, policy_digest=zero, worker=zero, nonce=zero[:32], signer=zero, **numbers)


@pytest.mark.parametrize(
    "arguments",
    [
        "swim",
        "",
        "pool",
        "worker --dir x",
        "pool invite x --role king --name k",
        "pool invite x --role worker --name w --days -1",
        "pool invite x --role worker --name w --days nan",
        "pool invite x --role worker --name w --days 1e9",
        "worker --join x --dir y --threads -1",
        "worker --join x --dir y --threads 1.5",
        "coordinator --dir x --port 70000",
        "calibrate c.toml --submissions 0",
        "origin x --listen 127.0.0.1:70000",
        "origin x --listen 8080",
        "origin x --keep 0",
        "relay --join x --url relay.example:8720",
        "fetch http://h:1 --key k --out x --version -1",
        "fetch http://h:1 --key k --out x --wait -1",
        "check --foo",
        "pool invite x --role worker --name y --foo",
    ],
)
def test_wrong_usage_gives_one_line_of_error_and_exit_status_2(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == USAGE
    printed = capsys.readouterr().err
    assert "usage: shoal" in printed and len(printed.splitlines()) == 1
    if arguments.endswith("--foo"):
        command = "shoal pool invite" if "invite" in arguments else "shoal check"
        assert printed == f"{command}: unrecognized arguments: --foo (usage: {command} --help)\n"
    if arguments.endswith("--days -1"):
        assert "--days: '-1' is not a number from 0.01 to 3650" in printed


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == DONE
    assert capsys.readouterr().out == f"shoal {__version__}\n"


def test_a_field_a_section_or_all_fields_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", "learner.lr"]) == DONE
    one = capsys.readouterr().out
    assert "learner.lr\n" in one and "3e-07" in one and "INTELLECT-2" in one
    main(["config", "--explain", "learner"])
    section = capsys.readouterr().out
    main(["config", "--explain"])
    assert one in section and section.strip() in capsys.readouterr().out


def test_ctrl_c_has_its_own_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.serve.dashboard", interrupt)
    assert main(["dashboard", "x"]) == INTERRUPTED


def test_every_role_of_the_protocol_has_a_command() -> None:
    assert set(ROLES) == set(get_args(Role)) <= set(WRONG)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of every command and action."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from parsers(each)


def test_help_shows_every_command_in_a_group_with_its_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    listed = capsys.readouterr().out
    assert end.value.code == DONE
    assert {name for names in GROUPS.values() for name in names} == set(WRONG)
    for group, names in GROUPS.items():
        assert f"\n{group}:\n  {names[0]} " in listed
    assert [name for name in WRONG if not re.search(rf"\n  {name} +[a-z]", listed)] == []


def test_the_examples_in_the_help_can_be_parsed() -> None:
    examples = [parser.epilog.removeprefix("example: shoal ") for parser in parsers(command_line()) if parser.epilog]
    assert len(examples) > len(WRONG) == 20
    for example in examples:
        command_line().parse_args(shlex.split(example))


def test_an_unexpected_error_keeps_its_traceback(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.check.config", lambda arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["config", small])


def test_from_a_shell_there_is_no_traceback() -> None:
    command = [sys.executable, "-m", "shoal", "run", QUICKSTART, "--set", "lerner.lr=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == USAGE
    assert len(done.stderr.splitlines()) == 1 and "did you mean 'learner'?" in done.stderr


HELP = "import contextlib, shoal.cli\nwith contextlib.suppress(SystemExit):\n    shoal.cli.main({!r})"


@pytest.mark.parametrize(
    "script",
    [
        HELP.format(["--help"]),
        HELP.format(["coordinator", "--help"]),
        HELP.format(["config", QUICKSTART]),
        HELP.format(["pool", "status", "http://127.0.0.1:9"]),
        HELP.format(["worker", "--join", "missing.file", "--dir", "w"]),
        "import shoal.cli, shoal.cli.launch.swarm, shoal.watch.summary, shoal.watch.terminal.live",
        "import shoal.cli.origin_and_relay, shoal.protocol.node",
        "import shoal.coordinator.http.routes, shoal.coordinator.http.serving",
        "from shoal import tasks\ntasks.load(tasks.TaskSection()).train[0]",
    ],
    ids=["help", "coordinator-help", "config", "status", "no-invite", "swarm", "broadcast", "coordinator", "tasks"],
)
def test_a_process_that_does_not_compute_never_imports_torch(script: str) -> None:
    script += "\nimport sys\nsys.exit('torch' in sys.modules and 'torch was imported')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
