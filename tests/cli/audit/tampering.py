"""What a tamperer can do to a run's folder without its members' keys: one change each, and the link that it breaks.

Every column of every table, rows taken out, doubled and exchanged, ledger entries likewise and cut off; every kind of file
with a flipped bit, cut short, made longer, taken away, and exchanged with another of its kind.
"""

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shoal.coordinator.pool import TABLE_NAMES
from shoal.ledger.chain import Entry

DATABASE = "coordinator/pool.sqlite"
Change = Callable[[Path, Random], None]

# Pattern of the files of a kind, and of the link that names a break of one.
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
TEXT = ("config",)  # a bit of a comment says nothing: a value is changed instead
MAY_GO = ("head",)  # a copy that its validator keeps: the ledger has it too


@dataclass(frozen=True)
class Tampering:
    name: str
    link: str  # pattern of what the audit must name
    change: Change


def tamperings(run: Path) -> Iterator[Tampering]:
    """All of them, in an order that does not change."""
    for table in TABLE_NAMES:
        if not rows(run, table):  # nothing of this run is in it
            continue
        for column in columns(run, table):
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
            yield Tampering(f"{kind}: value changed", link, change_value(pattern))
        else:
            for number in range(1 if kind == "database" else 4):
                change = cut_short(pattern) if kind == "database" else flip_bit(pattern)
                yield Tampering(f"{kind}: bit flipped {number}", link, change)
        if kind not in ("database", *TEXT):
            yield Tampering(f"{kind}: cut short", link, cut_short(pattern))
            yield Tampering(f"{kind}: made longer", link, make_longer(pattern))
        if kind not in MAY_GO:
            yield Tampering(f"{kind}: deleted", ".*" if kind == "database" else link, delete_file(pattern))
        if len(list(run.glob(pattern))) > 1 and kind != "beside weights":
            yield Tampering(f"{kind}: two swapped", link, swap_files(pattern))


# --- the database ----------------------------------------------------------------------------------------------------


def columns(run: Path, table: str) -> list[str]:
    with sqlite3.connect(run / DATABASE) as database:
        return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def rows(run: Path, table: str) -> int:
    with sqlite3.connect(run / DATABASE) as database:
        return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def opened(run: Path) -> sqlite3.Connection:
    database = sqlite3.connect(run / DATABASE, isolation_level=None)
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        database.execute(f"DROP TRIGGER {name}")
    return database


def drawn_row(database: sqlite3.Connection, table: str, random: Random) -> int:
    return int(random.choice(database.execute(f"SELECT rowid FROM {table} ORDER BY rowid").fetchall())[0])


def set_column(table: str, column: str) -> Change:
    def change(run: Path, random: Random) -> None:
        database = opened(run)
        row = drawn_row(database, table, random)
        (value,) = database.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (row,)).fetchone()
        changed = database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (other(value, random), row))
        assert changed.rowcount == 1
        database.close()

    return change


def other(value: object, random: Random) -> object:
    if value is None:
        return 1
    if isinstance(value, int):
        return value + 1000  # no key that another row has
    if isinstance(value, float):
        return value + 0.5
    assert isinstance(value, str)
    at = random.randrange(len(value)) if value else 0
    return value[:at] + ("b" if value[at : at + 1] != "b" else "c") + value[at + 1 :]


def delete_row(table: str) -> Change:
    def change(run: Path, random: Random) -> None:
        database = opened(run)
        database.execute(f"DELETE FROM {table} WHERE rowid = ?", (drawn_row(database, table, random),))
        database.close()

    return change


def double_row(table: str) -> Change:
    """A row again, where keys must differ with other keys."""

    def change(run: Path, random: Random) -> None:
        database = opened(run)
        info = database.execute(f"PRAGMA table_info({table})").fetchall()
        row = list(
            database.execute(f"SELECT * FROM {table} WHERE rowid = ?", (drawn_row(database, table, random),)).fetchone()
        )
        for at, (_, name, *_) in enumerate(info):
            if isinstance(row[at], int) and name in ("seq", "step", "version"):
                row[at] += 5000
            elif isinstance(row[at], str):
                row[at] += "x"
        database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        database.close()

    return change


def swap_rows(run: Path, random: Random) -> None:
    """Two entries in each other's place."""
    database = opened(run)
    length = database.execute("SELECT max(seq) FROM ledger").fetchone()[0]
    first, second = sorted(random.sample(range(1, length + 1), 2))
    for old, new in ((first, -1), (second, first), (-1, second)):
        database.execute("UPDATE ledger SET seq = ? WHERE seq = ?", (new, old))
    database.close()


def cut_off(count: int) -> Change:
    def change(run: Path, random: Random) -> None:
        database = opened(run)
        database.execute("DELETE FROM ledger WHERE seq > (SELECT max(seq) FROM ledger) - ?", (count,))
        database.close()

    return change


# --- files -----------------------------------------------------------------------------------------------------------


def drawn_file(run: Path, pattern: str, random: Random) -> Path:
    return random.choice(sorted(run.glob(pattern)))


def flip_bit(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        path = drawn_file(run, pattern, random)
        data = bytearray(path.read_bytes())
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(bytes(data))

    return change


def cut_short(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        path = drawn_file(run, pattern, random)
        data = path.read_bytes()
        path.write_bytes(data[: random.randrange(len(data))])

    return change


def make_longer(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        path = drawn_file(run, pattern, random)
        path.write_bytes(path.read_bytes() + b"{}")

    return change


def delete_file(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        drawn_file(run, pattern, random).unlink()

    return change


def swap_files(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        first, second = random.sample(sorted(run.glob(pattern)), 2)
        one, two = first.read_bytes(), second.read_bytes()
        assert one != two, f"{first} and {second} are equal"
        first.write_bytes(two)
        second.write_bytes(one)

    return change


def change_value(pattern: str) -> Change:
    def change(run: Path, random: Random) -> None:
        path = drawn_file(run, pattern, random)
        path.write_text(path.read_text().replace("group_size = 2", "group_size = 3"))

    return change
