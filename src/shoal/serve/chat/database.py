"""The page's SQLite database: users, sessions, conversations and their messages.

Invariant: every query names its user; a conversation of another user is as absent as one that never was.
Opened by `service`: one connection for the event loop's thread, in transactions of a millisecond, and one for a thread that
only reads, and may take longer.
"""

import shutil
import sqlite3
from pathlib import Path

from shoal.errors import ShoalError
from shoal.web.guard import RefusedError

FORMAT = 2
RESERVE_BYTES = 1 << 30  # of the disk, which a run may need, too
SCHEMA = f"""
PRAGMA user_version = {FORMAT};
CREATE TABLE IF NOT EXISTS user(
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE COLLATE NOCASE, password TEXT NOT NULL, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS session(
    token BLOB PRIMARY KEY, user INTEGER NOT NULL REFERENCES user ON DELETE CASCADE, csrf TEXT NOT NULL,
    created_s REAL NOT NULL, seen_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS device(
    token BLOB PRIMARY KEY, user INTEGER NOT NULL REFERENCES user ON DELETE CASCADE, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS conversation(
    id TEXT PRIMARY KEY, user INTEGER NOT NULL REFERENCES user ON DELETE CASCADE, title TEXT NOT NULL,
    leaf TEXT, created_s REAL NOT NULL, changed_s REAL NOT NULL, size_bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS conversation_user ON conversation(user, changed_s);
CREATE TABLE IF NOT EXISTS message(
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL REFERENCES conversation ON DELETE CASCADE, parent TEXT,
    role TEXT NOT NULL, content TEXT NOT NULL, facts TEXT NOT NULL, proof TEXT, created_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS message_conversation ON message(conversation, created_s);
"""


class FormatError(ShoalError):
    """A database of another version of Shoal."""


def connect(path: Path) -> sqlite3.Connection:
    """The database in this file, readable by its owner alone. `:memory:` is none. Raises FormatError."""
    if str(path) != ":memory:":
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    [written] = db.execute("PRAGMA user_version").fetchone()
    if written != FORMAT and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        db.close()
        raise FormatError(f"{path} is in format {written}, and this version reads {FORMAT}; move it away to begin anew")
    db.executescript(SCHEMA)
    return db


def check_room(db: sqlite3.Connection) -> None:
    """Raises RefusedError where little of the disk is left."""
    path = db.execute("PRAGMA database_list").fetchone()["file"]
    if path and shutil.disk_usage(Path(path).parent).free < RESERVE_BYTES:
        raise RefusedError(507, "this server's disk is full; ask whoever runs it to make room")
