"""The page's SQLite database: users, sessions, conversations and their messages.

Invariant: every query names its user; a conversation of another user is as absent as one that never was.
Opened by `routes`; used in the event loop's thread only, in transactions of a millisecond.
"""

import sqlite3
from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS user(
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE COLLATE NOCASE, password TEXT NOT NULL, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS session(
    token BLOB PRIMARY KEY, user INTEGER NOT NULL REFERENCES user ON DELETE CASCADE, csrf TEXT NOT NULL,
    created_s REAL NOT NULL, seen_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS device(
    token BLOB PRIMARY KEY, user INTEGER NOT NULL REFERENCES user ON DELETE CASCADE, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS conversation(
    id TEXT PRIMARY KEY, user INTEGER NOT NULL REFERENCES user ON DELETE CASCADE, title TEXT NOT NULL,
    leaf TEXT, created_s REAL NOT NULL, changed_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS conversation_user ON conversation(user, changed_s);
CREATE TABLE IF NOT EXISTS message(
    id TEXT PRIMARY KEY, conversation TEXT NOT NULL REFERENCES conversation ON DELETE CASCADE, parent TEXT,
    role TEXT NOT NULL, content TEXT NOT NULL, facts TEXT NOT NULL, proof TEXT, created_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS message_conversation ON message(conversation, created_s);
"""


def connect(path: Path) -> sqlite3.Connection:
    """The database in this file, readable by its owner alone. `:memory:` is none."""
    if str(path) != ":memory:":
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    db.executescript(SCHEMA)
    return db
