"""The ledger refuses everything but appends, and verification finds every change in a copy."""

import json
import sqlite3
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from shoal.ledger import table as table_module
from shoal.ledger.chain import (
    GENESIS,
    Entry,
    LedgerError,
    canonical_json,
    entry_digest,
    next_entry,
    read_export,
    verify_chain,
    write_export,
)
from shoal.ledger.connection import SqliteConnection, open_sqlite
from shoal.ledger.table import Ledger
from shoal.protocol.identity import Identity

COORDINATOR = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
OTHER = Identity(Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32))


def open_ledger(path: str | Path = ":memory:", identity: Identity = COORDINATOR) -> tuple[Ledger, Any]:
    connection = sqlite3.connect(path, isolation_level=None)
    ticks: Iterator[int] = count(1_700_000_000)
    return Ledger(SqliteConnection(connection), identity, clock=lambda: next(ticks) + 0.5), connection


def some_entries(length: int = 5, identity: Identity = COORDINATOR) -> list[Entry]:
    ledger, _ = open_ledger(identity=identity)
    return [ledger.append("accepted", {"step": step}) for step in range(length)]


def first_bad(entries: list[Entry], key: str = COORDINATOR.public) -> int | None:
    with pytest.raises(LedgerError) as caught:
        verify_chain(entries, key)
    return caught.value.seq


ENTRY = some_entries(2)[1].model_dump_json().encode()
DOUBLE = ENTRY.replace(b'"kind":', b'"kind":"a lie","kind":') + b"\n"
SPACED = ENTRY.replace(b'"kind":', b'"kind": ') + b"\n"


@pytest.mark.parametrize(
    "body", ['{"a":1,"a":2}', '{"a": 1}', '{"b":1,"a":2}', '{"a":NaN}', "[]", "1", "{", "[" * 9999]
)
def test_verification_finds_a_signed_body_with_two_readings(body: str) -> None:
    digest = entry_digest(1, 0, "accepted", body, GENESIS)
    signature = COORDINATOR.sign(bytes.fromhex(digest), domain="ledger")
    entry = Entry(seq=1, time_s=0, kind="accepted", body=body, previous=GENESIS, digest=digest, signature=signature)
    with pytest.raises(LedgerError, match="its body is not a JSON object in canonical form"):
        verify_chain([entry], COORDINATOR.public)


def test_an_entry_has_a_known_digest_and_signature() -> None:
    ledger, _ = open_ledger()
    entry = ledger.append("registered", {"b": [1, 2.5, None], "a": "ü"})
    assert entry == Entry(
        seq=1,
        time_s=1_700_000_000,
        kind="registered",
        body='{"a":"\\u00fc","b":[1,2.5,null]}',
        previous=GENESIS,
        digest="2d060e11cbb6e94f64e571abe13d07ff042d330f167beb69e7312b62b13dc72b",
        signature=COORDINATOR.sign(bytes.fromhex(entry.digest), domain="ledger"),
    )


def test_appended_entries_are_read_back_in_order_and_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "PAGE_ROWS", 2)
    ledger, _ = open_ledger()
    assert ledger.head() is None and list(ledger.entries()) == []
    appended = [ledger.append(kind, {}) for kind in ("accepted", "rejected", "accepted", "accepted", "slashed")]
    assert list(ledger.entries()) == appended
    assert ledger.head() == appended[-1]
    verify_chain(ledger.entries(), COORDINATOR.public)
    assert [entry.seq for entry in ledger.entries(since=1)] == [2, 3, 4, 5]
    assert [entry.seq for entry in ledger.entries(kind="accepted")] == [1, 3, 4]
    assert [entry.seq for entry in ledger.entries(since=1, kind="accepted")] == [3, 4]


def test_only_the_same_key_continues_the_chain_after_a_restart(tmp_path: Path) -> None:
    first, connection = open_ledger(tmp_path / "ledger.db")
    first.append("registered", {})
    connection.close()
    second, _ = open_ledger(tmp_path / "ledger.db")
    second.append("accepted", {})
    verify_chain(second.entries(), COORDINATOR.public)
    assert [entry.kind for entry in second.entries()] == ["registered", "accepted"]
    with pytest.raises(LedgerError, match="use the key that the ledger was started with"):
        open_ledger(tmp_path / "ledger.db", OTHER)


def test_an_append_is_part_of_the_callers_transaction(tmp_path: Path) -> None:
    ledger, connection = open_ledger(tmp_path / "ledger.db")
    connection.execute("CREATE TABLE credit (worker TEXT)")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO credit VALUES ('w')")
    ledger.append("accepted", {"worker": "w"})
    connection.execute("ROLLBACK")
    assert ledger.head() is None
    assert connection.execute("SELECT * FROM credit").fetchall() == []
    connection.execute("BEGIN IMMEDIATE")
    ledger.append("accepted", {})
    ledger.append("accepted", {})
    assert connection.in_transaction
    connection.execute("COMMIT")
    ledger.append("accepted", {})
    assert not connection.in_transaction, "an append on its own left its transaction open"
    assert [entry.seq for entry in open_ledger(tmp_path / "ledger.db")[0].entries()] == [1, 2, 3]


def test_a_failed_append_leaves_no_transaction_open() -> None:
    def broken_clock() -> float:
        raise OSError("no clock")

    connection = sqlite3.connect(":memory:", isolation_level=None)
    ledger = Ledger(SqliteConnection(connection), COORDINATOR, clock=broken_clock)
    with pytest.raises(OSError, match="no clock"):
        ledger.append("accepted", {})
    assert not connection.in_transaction


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1, 2}])
def test_a_body_that_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(LedgerError, match="must be JSON"):
        open_ledger()[0].append("accepted", {"a": value})


@pytest.mark.parametrize("kind", ["", "Accepted", "two words", "x" * 33])
def test_a_bad_kind_is_refused(kind: str) -> None:
    with pytest.raises(LedgerError, match="bad ledger kind"):
        open_ledger()[0].append(kind, {})


def test_a_connection_with_implicit_transactions_is_refused() -> None:
    with pytest.raises(ValueError, match="isolation_level=None"):
        SqliteConnection(sqlite3.connect(":memory:"))


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%41"])
def test_a_database_is_read_from_its_own_file_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "pool.sqlite"
    path.parent.mkdir()
    open_sqlite(path).set_format(7)
    assert open_sqlite(path, read_only=True).format == 7
    assert list(tmp_path.iterdir()) == [path.parent]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE ledger SET body = '{}' WHERE seq = 1",
        "DELETE FROM ledger WHERE seq = 2",
        "DELETE FROM ledger",
        "INSERT OR REPLACE INTO ledger SELECT 1, time_s, kind, '{}', previous, digest, signature FROM ledger",
        "INSERT INTO ledger SELECT 9, time_s, kind, body, previous, digest, signature FROM ledger LIMIT 1",
        "INSERT INTO ledger SELECT NULL, time_s, kind, body, previous, digest, signature FROM ledger LIMIT 1",
    ],
)
def test_the_database_refuses_everything_but_appends(statement: str) -> None:
    ledger, connection = open_ledger()
    before = [ledger.append("accepted", {"step": step}) for step in range(2)]
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    assert list(ledger.entries()) == before


@pytest.mark.parametrize(
    "changed",
    [
        {"seq": 7},
        {"time_s": 1},
        {"kind": "rejected"},
        {"body": '{"step":9}'},
        {"body": '{"step": 2}'},
        {"previous": GENESIS},
        {"digest": "0" * 64},
        {"digest": "not hex"},
        {"signature": "0" * 128},
        {"signature": "not hex"},
        {"signature": COORDINATOR.sign(bytes.fromhex(GENESIS), domain="ledger")},
    ],
)
def test_verification_finds_a_changed_entry(changed: dict[str, Any]) -> None:
    entries = some_entries()
    entries[2] = entries[2].model_copy(update=changed)
    assert first_bad(entries) == 3


def test_verification_finds_signatures_by_another_key_or_for_another_purpose() -> None:
    entries = some_entries()
    digest = entry_digest(3, entries[2].time_s, "accepted", '{"step":9}', entries[2].previous)
    forged = {
        "body": '{"step":9}',
        "digest": digest,
        "signature": OTHER.sign(bytes.fromhex(digest), domain="ledger"),
    }
    entries[2] = entries[2].model_copy(update=forged)
    assert first_bad(entries) == 3
    assert first_bad(some_entries(identity=OTHER)) == 1, "another key's chain must fail at its first entry"
    wrong = COORDINATOR.sign(bytes.fromhex(some_entries()[0].digest), domain="manifest")
    assert first_bad([some_entries()[0].model_copy(update={"signature": wrong})]) == 1, (
        "a signature for another domain must fail"
    )


def test_an_entry_that_the_coordinator_rewrites_no_longer_fits_the_next_entry() -> None:
    ledger, _ = open_ledger()
    rewritten = [ledger.append("accepted", {"step": step}) for step in (0, 9)]
    assert first_bad([*rewritten, *some_entries()[2:]]) == 3


@pytest.mark.parametrize(
    ("order", "seq"),
    [
        pytest.param([0, 1, 1, 2, 3, 4], 3, id="inserted"),
        pytest.param([0, 1, 3, 4], 3, id="deleted"),
        pytest.param([1, 2, 3, 4], 1, id="beginning missing"),
        pytest.param([0, 2, 1, 3, 4], 2, id="swapped"),
    ],
)
def test_verification_finds_entries_out_of_order(order: list[int], seq: int) -> None:
    entries = some_entries()
    assert first_bad([entries[position] for position in order]) == seq


def test_an_export_can_be_verified_without_the_database_and_replaces_the_previous_one(tmp_path: Path) -> None:
    ledger, connection = open_ledger()
    write_export(ledger.entries(), tmp_path / "ledger.jsonl")
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""
    for step in range(3):
        ledger.append("accepted", {"step": step, "note": "ü\u2028\n"})
    before = list(ledger.entries())
    write_export(ledger.entries(), tmp_path / "ledger.jsonl")
    exported = (tmp_path / "ledger.jsonl").read_bytes()
    sent = [list(ledger.lines(since)) for since in (0, 2)]
    assert sent == [exported.splitlines(keepends=True), exported.splitlines(keepends=True)[2:]]
    connection.close()
    assert list(read_export(tmp_path / "ledger.jsonl")) == before
    verify_chain(read_export(tmp_path / "ledger.jsonl"), COORDINATOR.public)
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"], "a temporary file was left behind"


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"\xff\n", b'{"seq": "1"}\n', b"[1", DOUBLE, SPACED])
def test_the_error_for_an_export_names_the_line_that_is_not_an_entry(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(some_entries(1)[0].model_dump_json().encode() + b"\n" + line)
    with pytest.raises(LedgerError, match="line 2 of .*ledger.jsonl") as caught:
        list(read_export(path))
    assert caught.value.seq == 2


def test_the_error_for_a_damaged_row_names_its_seq() -> None:
    ledger, connection = open_ledger()
    ledger.append("accepted", {})
    connection.execute("DROP TRIGGER ledger_no_update")
    connection.execute("UPDATE ledger SET time_s = 'noon'")
    with pytest.raises(LedgerError, match="entry 1 is damaged"):
        list(ledger.entries())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_any_json_body_has_one_canonical_text_and_verifies(body: dict[str, Any]) -> None:
    text = canonical_json(body)
    assert canonical_json(dict(reversed(body.items()))) == text
    assert json.loads(text) == body
    entry = next_entry(None, "accepted", text, 0, COORDINATOR)
    assert entry.body == text
    verify_chain([Entry.model_validate_json(entry.model_dump_json())], COORDINATOR.public)
