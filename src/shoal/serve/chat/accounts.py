"""Users, passwords and sessions, and the SQLite database that holds them and the conversations.

    register or log in -> open a session -> put a random token in a cookie; store its digest and a CSRF token

Invariant: passwords, session tokens and device tokens are stored only as hashes. Each login opens a new session. A
session ends by logout, age, or idleness. Wrong passwords are rate-limited by address and by name. A browser that has
logged in before has a device token. Such a token has its own limit, so that an attacker cannot lock the user out.
Left out: email, password recovery, second factors, deleting an account.
"""

import hashlib
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from shoal.errors import ShoalError, UserError
from shoal.serve.threads import FairThreadPool
from shoal.watch.page.guard import HttpError, RateLimit

FORMAT = 2
RESERVE_BYTES = 1 << 30  # this much disk space stays free, because a run may need it
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


def connect(path: Path) -> sqlite3.Connection:
    """Open the database. If its file is missing, create one that only its owner can read. Raise ShoalError."""
    if str(path) != ":memory:":
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version != FORMAT and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        db.close()
        raise ShoalError(f"{path} has format {version}, not {FORMAT}; move it away to start with an empty database")
    db.executescript(SCHEMA)
    return db


def _file(db: sqlite3.Connection) -> str:
    """Return the path of the database; "" if it is in memory."""
    return str(db.execute("PRAGMA database_list").fetchone()["file"])


def check_disk_space(db: sqlite3.Connection) -> None:
    """Raise HttpError if the disk is nearly full."""
    path = _file(db)
    if path and shutil.disk_usage(Path(path).parent).free < RESERVE_BYTES:
        raise HttpError(507, "this server's disk is full; ask its operator to free space")


NAME = re.compile(r"[\w.@+-]{2,64}", re.ASCII)
MIN_PASSWORD, MAX_PASSWORD = 10, 256  # characters
SESSION_S, IDLE_S = 14 * 86_400.0, 3 * 86_400.0
SEEN_EVERY_S = 60.0
MAX_BROWSERS = 50  # sessions per user, and device tokens per user
LOCAL = "local"  # the user of `--open`, who has no password; nobody can register this name
WRONG = "name or password is wrong"


@dataclass(frozen=True)
class Session:
    user: int
    name: str
    csrf: str


@dataclass(frozen=True)
class NewSession:
    """A new session with the secrets that go into cookies."""

    token: str
    device: str
    session: Session


class Accounts:
    def __init__(
        self,
        db: sqlite3.Connection,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        hasher: PasswordHasher | None = None,
    ) -> None:
        self.db, self.clock = db, clock
        self.hasher = hasher or PasswordHasher()
        # A login with an unknown name is checked against this hash, so that the response takes as long as any other.
        self._dummy_hash = self.hasher.hash(secrets.token_hex(16))
        self.hashing = FairThreadPool("passwords", 2)  # each hash takes 64 MiB and 0.1 s of a core
        self._by_address = RateLimit(20, 600, monotonic)
        self._by_name = RateLimit(30, 3600, monotonic)
        self._by_device = RateLimit(10, 600, monotonic)
        self._registrations = RateLimit(10, 3600, monotonic)

    async def register(self, name: str, password: str, address: str) -> NewSession:
        """Create an account and log in. Raise HttpError."""
        if not NAME.fullmatch(name):
            raise HttpError(400, "a name has 2 to 64 characters: letters, digits and . _ - + @")
        if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
            raise HttpError(400, f"a password has {MIN_PASSWORD} to {MAX_PASSWORD} characters")
        if name.casefold() == LOCAL:
            raise HttpError(409, "this name is reserved; choose another one")
        check_disk_space(self.db)
        self._registrations.take(address, "new accounts from this address")
        hashed = await self.hashing.run(address, lambda: self.hasher.hash(password))
        try:
            inserted = self.db.execute(
                "INSERT INTO user(name, password, created_s) VALUES(?, ?, ?)", (name, hashed, self.clock())
            )
        except sqlite3.IntegrityError:
            raise HttpError(409, "this name is taken") from None
        return self._new_session(int(inserted.lastrowid or 0), name)

    async def log_in(self, name: str, password: str, address: str, device: str = "", old: str = "") -> NewSession:
        """Check the password and open a session. `old` is the session token to replace. Raise HttpError."""
        if len(password) > MAX_PASSWORD or len(name) > 64:
            raise HttpError(401, WRONG)
        row = self.db.execute("SELECT id, name, password FROM user WHERE name = ?", (name,)).fetchone()
        is_known = bool(row and device) and bool(
            self.db.execute(
                "SELECT 1 FROM device WHERE token = ? AND user = ?", (_digest(device), row["id"])
            ).fetchone()
        )
        limits = (
            [(self._by_device, device)] if is_known else [(self._by_address, address), (self._by_name, name.lower())]
        )
        for limit, key in limits:  # charge before checking, so that parallel attempts are charged too
            limit.take(key, "attempts")
        hashed = row["password"] if row else self._dummy_hash
        correct = await self.hashing.run(
            f"device {device}" if is_known else address, lambda: self._matches(hashed, password)
        )
        if not correct or row is None:
            raise HttpError(401, WRONG)
        for limit, key in limits:
            limit.refund(key)
        self.log_out(old)
        return self._new_session(row["id"], row["name"])

    def log_out(self, token: str) -> None:
        if token:
            self.db.execute("DELETE FROM session WHERE token = ?", (_digest(token),))

    def session(self, token: str) -> Session | None:
        """Return the session of a token; None if it is unknown, expired or idle for too long."""
        now_s = self.clock()
        row = self.db.execute(
            "SELECT user, name, csrf, session.created_s, seen_s FROM session JOIN user ON user.id = user WHERE token = ?",
            (_digest(token),),
        ).fetchone()
        if row is None:
            return None
        if now_s - row["created_s"] > SESSION_S or now_s - row["seen_s"] > IDLE_S:
            self.log_out(token)
            return None
        if now_s - row["seen_s"] > SEEN_EVERY_S:
            self.db.execute("UPDATE session SET seen_s = ? WHERE token = ?", (now_s, _digest(token)))
        return Session(row["user"], row["name"], row["csrf"])

    def is_empty(self) -> bool:
        """Return whether nobody has registered."""
        return self.db.execute("SELECT 1 FROM user WHERE name != ? LIMIT 1", (LOCAL,)).fetchone() is None

    def local(self) -> NewSession:
        """Open a session for the user of `--open`. Raise UserError."""
        return self._new_session(self.local_user(), LOCAL)

    def local_user(self) -> int:
        """Return the id of the user of `--open`. Raise UserError if an older version let somebody register its name."""
        self.db.execute("INSERT OR IGNORE INTO user(name, password, created_s) VALUES(?, '', ?)", (LOCAL, self.clock()))
        row = self.db.execute("SELECT id, name, password FROM user WHERE name = ?", (LOCAL,)).fetchone()
        if row["password"]:
            raise UserError(
                f"somebody registered the name {row['name']!r} in {_file(self.db)} and could read the chats of --open; "
                "choose another folder with --dir"
            )
        return int(row["id"])

    def _new_session(self, user: int, name: str) -> NewSession:
        token, device, csrf = (secrets.token_urlsafe(32) for _ in range(3))
        now_s = self.clock()
        self.db.execute("DELETE FROM session WHERE created_s < ?", (now_s - SESSION_S,))
        self.db.execute("INSERT INTO session VALUES(?, ?, ?, ?, ?)", (_digest(token), user, csrf, now_s, now_s))
        self.db.execute("INSERT INTO device VALUES(?, ?, ?)", (_digest(device), user, now_s))
        for table in ("session", "device"):
            self.db.execute(
                f"DELETE FROM {table} WHERE user = ?1 AND token NOT IN "
                f"(SELECT token FROM {table} WHERE user = ?1 ORDER BY created_s DESC, rowid DESC LIMIT ?2)",
                (user, MAX_BROWSERS),
            )
        return NewSession(token, device, Session(user, name, csrf))

    def _matches(self, hashed: str, password: str) -> bool:
        try:
            return self.hasher.verify(hashed, password)
        except (VerificationError, InvalidHashError):
            return False


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
