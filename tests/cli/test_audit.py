"""`shoal audit RUN`: its report and its exit statuses."""

import shutil
import socket
import sqlite3
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.arguments import USAGE
from shoal.cli.audit.commands import NOT_COMPARED
from shoal.cli.audit.run import BrokenError, open_run
from shoal.coordinator.pool import TABLE_NAMES
from shoal.ledger.chain import read_export
from shoal.protocol.invite import FILE as ADDRESS

from .audit.recorded import COORDINATOR, identity, record_run

QUICK = ["--rerun", "0", "--proofs", "0"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """Return a copy of the run that a test may change."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def test_an_unchanged_run_passes_with_status_0(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(recorded), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert f"coordinator {COORDINATOR.public}" in printed and "tables: as sealed" in printed
    *_, verdict, counts = printed.splitlines()
    assert verdict == "the audit found no broken link" and ", 0 no, " in counts


def test_the_coordinators_folder_of_a_run_passes_except_for_the_model(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(recorded / "coordinator"), *QUICK]) == NOT_COMPARED
    printed = capsys.readouterr().out
    assert "metrics.jsonl, evaluations.jsonl: as recorded" in printed
    assert "NOT COMPARED: 1 trained models" in printed and "could not compare all that matters" in printed


def lose_a_file(run: Path) -> str:
    path = next((run / "coordinator" / "store" / "accepted").rglob("*.parquet"))
    path.unlink()
    return "BROKEN accepted file of "


def lose_the_ledger(run: Path) -> str:
    (run / "coordinator" / "pool.sqlite").unlink()
    (run / "coordinator" / ADDRESS).write_text('{"url": "http://127.0.0.1:9", "run": "r"}')
    return f"BROKEN {run / 'coordinator' / 'pool.sqlite'}: missing"


def change_a_table(run: Path) -> str:
    with sqlite3.connect(run / "coordinator" / "pool.sqlite") as pool:
        pool.execute("UPDATE nodes SET missed = 0.5 WHERE name = 'alice'")
    return "BROKEN table nodes: "


def change_an_entry(run: Path) -> str:
    with sqlite3.connect(run / "coordinator" / "pool.sqlite") as pool:
        for (name,) in pool.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            pool.execute(f"DROP TRIGGER {name}")
        pool.execute("UPDATE ledger SET body = replace(body, 'alice', 'alisa') WHERE seq = 6")
    return "BROKEN ledger entry 6: "


@pytest.mark.parametrize("tamper", [lose_a_file, lose_the_ledger, change_a_table])
def test_the_audit_names_what_is_broken_and_exits_with_status_1(
    run: Path, capsys: pytest.CaptureFixture[str], tamper: Callable[[Path], str]
) -> None:
    link = tamper(run)
    assert main(["audit", str(run), *QUICK]) == 1
    *_, broken, counts = capsys.readouterr().out.splitlines()
    assert broken.startswith(link) and ", 1 no, " in counts


@pytest.mark.parametrize(
    ("more", "status", "verdict"),
    [
        (["--key", COORDINATOR.public], 0, "the audit found no broken link"),
        (["--key", identity(99).public], 1, "BROKEN "),
        (["--head", "3:" + "0" * 64], 1, "BROKEN ledger entry 3: "),
    ],
)
def test_a_key_or_head_that_the_auditor_gives_must_match_the_ledger(
    recorded: Path, capsys: pytest.CaptureFixture[str], more: list[str], status: int, verdict: str
) -> None:
    assert main(["audit", str(recorded), *QUICK, *more]) == status
    assert capsys.readouterr().out.splitlines()[-2].startswith(verdict)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--key", "deadbeef"], "'deadbeef' is not a public key, which has 64 hex digits"),
        (["--head", "foo"], "--head: 'foo' is not a head: write SEQ:DIGEST"),
    ],
)
def test_a_text_that_is_no_key_or_head_is_a_usage_error(
    recorded: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert main(["audit", str(recorded), *more]) == USAGE
    assert words in capsys.readouterr().err


def test_an_unfinished_run_passes_the_audit_only_with_unsealed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["audit", str(run), "--export", str(run / "whole.jsonl")])
    cut = (run / "whole.jsonl").read_text().splitlines(keepends=True)[:-1]
    (run / "cut.jsonl").write_text("".join(cut))
    audit = ["audit", str(run), *QUICK, "--ledger", str(run / "cut.jsonl")]
    assert main(audit) == 1 and "BROKEN ledger entry" in capsys.readouterr().out
    assert main([*audit, "--unsealed"]) == 0 and "tables: not compared" in capsys.readouterr().out


def test_tables_that_were_not_read_are_not_called_sealed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["audit", str(run), "--export", str(run / "whole.jsonl")])
    (run / "coordinator" / "pool.sqlite").unlink()
    assert main(["audit", str(run), *QUICK, "--ledger", str(run / "whole.jsonl")]) == NOT_COMPARED
    printed = capsys.readouterr().out
    assert "tables: as sealed" not in printed and f"NOT COMPARED: {len(TABLE_NAMES)} tables" in printed
    assert "not compared: 2 copies of the config and the metrics" in printed


def test_a_folder_without_a_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == USAGE
    assert f"{tmp_path} is neither the folder of a run nor of a coordinator" in capsys.readouterr().err


def test_an_export_is_the_whole_chain(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(recorded), "--export", str(tmp_path / "ledger.jsonl")]) == 0
    entries = list(read_export(tmp_path / "ledger.jsonl"))
    last = f"{entries[-1].seq}:{entries[-1].digest}"
    assert capsys.readouterr().out == f"{len(entries)} entries, signed by {COORDINATOR.public}; head {last}\n"


def test_a_changed_entry_is_named_by_the_audit_and_by_the_export(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = change_an_entry(run)
    assert main(["audit", str(run), *QUICK]) == 1
    assert capsys.readouterr().out.splitlines()[-2].startswith(link)
    assert main(["audit", str(run), "--export", str(run / "ledger.jsonl")]) == 1
    assert "ledger entry 6" in capsys.readouterr().err


def test_a_folder_whose_server_asks_for_the_auditors_password_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
    monkeypatch.setenv("PGPASSWORD", "secret")
    answers: list[bytes] = []

    def ask(server: socket.socket) -> None:
        with server.accept()[0] as client:
            client.recv(4096)  # the client's name and database
            client.sendall(b"R" + struct.pack(">ii", 8, 3))  # request a password in the clear
            answers.append(client.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"postgresql://shoal@127.0.0.1:{server.getsockname()[1]}/shoal?sslmode=disable&gssencmode=disable"
        (tmp_path / "config.toml").write_text(f'[coordinator]\ndatabase = "{url}"\n')
        asking = threading.Thread(target=ask, args=[server])
        asking.start()
        with pytest.raises(BrokenError, match="cannot use the database"):
            open_run(tmp_path)
        asking.join()
    assert answers == [b""]
