"""Changes that an attacker can make to a run's folder without its members' keys, each with the link the audit must name.

Every column of every table is changed. Rows and ledger entries are deleted and doubled. Ledger entries are also
swapped, and the last ones are cut off. A file of each kind is changed in one bit, cut short, made longer, deleted, or
swapped with another.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shoal.coordinator.pool import TABLE_NAMES
from shoal.ledger.chain import Entry

DATABASE = "coordinator/pool.sqlite"
Change = Callable[[Path, Random], None]

# By kind of file: its glob pattern, and a pattern of the link that the audit names if such a file was changed.
FILES = {
    "submission": ("coordinator/store/submissions/*.parquet", "submission file of|store file submissions"),
    "accepted": ("coordinator/store/accepted/*.parquet", "accepted file of|store file accepted"),
    "task": ("coordinator/tasks/" + "[0-9a-f]" * 64, "task file"),
    "manifest": ("origin/store/v*/manifest.json", "manifest of version|ledger entry"),
    "full shard": ("origin/store/v*/full/*.shard", r"shard \d+ \(full\)"),
    "delta shard": ("origin/store/v*/delta/*.shard", r"shard \d+ \(delta\)"),
    "weights": ("learner/versions/v*/model.safetensors", "learner/versions"),
    "beside weights": ("learner/versions/v*/config.json", "learner/versions"),
    "model": ("model/*", "model"),
    "checkpoint": ("learner/checkpoints/*/*.safetensors", "learner/checkpoints"),
    "progress": ("learner/checkpoints/*/progress.json", "learner/checkpoints"),
    "signed": ("learner/checkpoints/*/signed.json", "learner/checkpoints"),
    "head": ("validator/head.json", "validator/head.json"),
    "metrics": ("metrics.jsonl", "metrics.jsonl"),
    "evaluations": ("evaluations.jsonl", "evaluations.jsonl"),
    "config": ("config.toml", "config.toml"),
    "database": (DATABASE, "pool.sqlite|ledger|table"),
}
TEXT = ("config",)  # a flipped bit may be in a comment, so a value is changed instead
MAY_GO = ("head",)  # deleting it breaks nothing, because the ledger has the same content


@dataclass(frozen=True)
class Tampering:
    name: str
    link: str  # pattern of the broken link (a file, table or ledger entry) that the audit must name
    change: Change


def tamperings(run: Path) -> Iterator[Tampering]:
    """Yield all changes of the run's folder, in a fixed order."""
    for table in TABLE_NAMES:
        with closing(sqlite3.connect(run / DATABASE)) as database:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            is_empty = not database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        if is_empty:
            continue
        for column in columns:
            yield Tampering(f"{table}.{column}", f"table {table}$", set_column(table, column))
        yield Tampering(f"{table}: row deleted", f"table {table}$", delete_row(table))
        yield Tampering(f"{table}: row doubled", f"table {table}$", double_row(table))
    for column in Entry.model_fields:
        for number in range(3):
            yield Tampering(f"ledger.{column} {number}", r"ledger entry \d+$", set_column("ledger", column))
    for number in range(6):
        yield Tampering(f"ledger: entry deleted {number}", r"ledger entry \d+$", delete_row("ledger"))
        yield Tampering(f"ledger: entries swapped {number}", r"ledger entry \d+$", swap_rows)
        yield Tampering(f"ledger: {number + 1} cut off", r"ledger entry \d+$", cut_off(number + 1))
        yield Tampering(f"ledger: entry doubled {number}", r"ledger entry \d+$", double_row("ledger"))
    for kind, (pattern, link) in FILES.items():
        if kind in TEXT:
            yield Tampering(f"{kind}: value changed", link, edit_file(pattern, change_value))
        else:
            for number in range(1 if kind == "database" else 4):
                edit = cut_short if kind == "database" else flip_bit
                yield Tampering(f"{kind}: bit flipped {number}", link, edit_file(pattern, edit))
        if kind not in ("database", *TEXT):
            yield Tampering(f"{kind}: cut short", link, edit_file(pattern, cut_short))
            yield Tampering(f"{kind}: made longer", link, edit_file(pattern, lambda data, random: data + b"{}"))
        if kind not in MAY_GO:
            yield Tampering(f"{kind}: deleted", ".*" if kind == "database" else link, delete_file(pattern))
        if len(list(run.glob(pattern))) > 1 and kind != "beside weights":
            yield Tampering(f"{kind}: two swapped", link, swap_files(pattern))


# --- the database ----------------------------------------------------------------------------------------------------


@contextmanager
def opened(run: Path) -> Iterator[sqlite3.Connection]:
    """Yield the run's database, without the triggers that forbid changes of the ledger."""
    database = sqlite3.connect(run / DATABASE, isolation_level=None)
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        database.execute(f"DROP TRIGGER {name}")
    yield database
    database.close()


def drawn_row(database: sqlite3.Connection, table: str, random: Random) -> int:
    return int(random.choice(database.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall())[0])


def set_column(table: str, column: str) -> Change:
    def change(run: Path, random: Random) -> None:
        with opened(run) as database:
            row = drawn_row(database, table, random)
            (value,) = database.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (row,)).fetchone()
            new = other(value, random)
            assert database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row)).rowcount == 1

    return change


def other(value: object, random: Random) -> object:
    if value is None:
        return 1
    if isinstance(value, int):
        return value + 1000  # no other row has this key
    if isinstance(value, float):
        return value + 0.5
    assert isinstance(value, str)
    at = random.randrange(len(value)) if value else 0
    return value[:at] + ("b" if value[at : at + 1] != "b" else "c") + value[at + 1 :]


def delete_row(table: str) -> Change:
    def change(run: Path, random: Random) -> None:
        with opened(run) as database:
            database.execute(f"DELETE FROM {table} WHERE rowid = ?", (drawn_row(database, table, random),))

    return change


def double_row(table: str) -> Change:
    """Insert a row again, with other keys where keys must differ."""

    def change(run: Path, random: Random) -> None:
        with opened(run) as database:
            info = database.execute(f"PRAGMA table_info({table})").fetchall()
            drawn = drawn_row(database, table, random)
            row = list(database.execute(f"SELECT * FROM {table} WHERE rowid = ?", (drawn,)).fetchone())
            for at, (_, name, *_) in enumerate(info):
                if isinstance(row[at], int) and name in ("seq", "step", "version"):
                    row[at] += 5000
                elif isinstance(row[at], str):
                    row[at] += "x"
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    return change


def swap_rows(run: Path, random: Random) -> None:
    """Swap two ledger entries."""
    with opened(run) as database:
        length = database.execute("SELECT max(seq) FROM ledger").fetchone()[0]
        first, second = sorted(random.sample(range(1, length + 1), 2))
        for old, new in ((first, -1), (second, first), (-1, second)):
            database.execute("UPDATE ledger SET seq = ? WHERE seq = ?", (new, old))


def cut_off(count: int) -> Change:
    def change(run: Path, random: Random) -> None:
        with opened(run) as database:
            database.execute("DELETE FROM ledger WHERE seq > (SELECT max(seq) FROM ledger) - ?", (count,))

    return change


# --- files -----------------------------------------------------------------------------------------------------------


def drawn_file(run: Path, pattern: str, random: Random) -> Path:
    return random.choice(sorted(run.glob(pattern)))


def edit_file(pattern: str, edit: Callable[[bytes, Random], bytes]) -> Change:
    def change(run: Path, random: Random) -> None:
        path = drawn_file(run, pattern, random)
        path.write_bytes(edit(path.read_bytes(), random))

    return change


def flip_bit(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def cut_short(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def change_value(data: bytes, random: Random) -> bytes:
    return data.replace(b"group_size = 2", b"group_size = 3")


def delete_file(pattern: str) -> Change:
    return lambda run, random: drawn_file(run, pattern, random).unlink()


def swap_files(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        first, second = random.sample(sorted(run.glob(pattern)), 2)
        contents = first.read_bytes(), second.read_bytes()
        assert contents[0] != contents[1], f"{first} and {second} are equal"
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])

    return change
