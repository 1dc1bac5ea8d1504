"""Users, passwords and sessions, and the SQLite database that holds them and the conversations.

    register or log in -> a new session: a random token in a cookie, its digest in the database, a CSRF token beside it

Invariant: the database holds no password and no token that could be used; a session begins with a new token and ends by
logging out, by age, or by being idle. Every query names its user, so another user's conversation is as absent as one that
never was. Wrong passwords are counted by address and by name. Others cannot lock a user out of a browser where the user has
logged in before: that browser holds a device token, and its attempts are counted apart.
Left out: mail, password recovery, second factors.
"""

import hashlib
import hmac
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

from shoal.errors import ShoalError
from shoal.serve.threads import Threads
from shoal.watch.page.guard import Allowance, HttpError

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


def connect(path: Path) -> sqlite3.Connection:
    """The database in this file, readable by its owner alone. `:memory:` is none. Raises ShoalError."""
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
        raise ShoalError(f"{path} is in format {written}, and this version reads {FORMAT}; move it away to begin anew")
    db.executescript(SCHEMA)
    return db


def check_room(db: sqlite3.Connection) -> None:
    """Raises HttpError where little of the disk is left."""
    path = db.execute("PRAGMA database_list").fetchone()["file"]
    if path and shutil.disk_usage(Path(path).parent).free < RESERVE_BYTES:
        raise HttpError(507, "this server's disk is full; ask whoever runs it to make room")


NAME = re.compile(r"[\w.@+-]{2,64}", re.ASCII)
SHORTEST, LONGEST = 10, 256  # characters of a password
SESSION_S, IDLE_S = 14 * 86_400.0, 3 * 86_400.0
SEEN_EVERY_S = 60.0
BROWSERS = 50  # of one user: sessions, and browsers that are known
LOCAL = "local"  # the user of `--open`, without a password
WRONG = "name or password is wrong"


@dataclass(frozen=True)
class Session:
    user: int
    name: str
    csrf: str


@dataclass(frozen=True)
class OpenedSession:
    """A new session's secrets, for the cookies."""

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
        self._nobody = self.hasher.hash(secrets.token_hex(16))  # so that an unknown name takes as long as a known one
        self.hashing = Threads("passwords", 2)  # each costs 64 MiB and a tenth of a second of a core
        self._of_address = Allowance(20, 600, monotonic)
        self._of_name = Allowance(30, 3600, monotonic)
        self._of_device = Allowance(10, 600, monotonic)
        self._registered = Allowance(10, 3600, monotonic)

    async def register(self, name: str, password: str, address: str) -> OpenedSession:
        """Raises HttpError."""
        if not NAME.fullmatch(name):
            raise HttpError(400, "a name has 2 to 64 characters: letters, digits and . _ - + @")
        if not SHORTEST <= len(password) <= LONGEST:
            raise HttpError(400, f"a password has {SHORTEST} to {LONGEST} characters")
        check_room(self.db)
        self._registered.take(address, "new accounts from this address")
        hashed = await self.hashing.run(address, lambda: self.hasher.hash(password))
        try:
            found = self.db.execute(
                "INSERT INTO user(name, password, created_s) VALUES(?, ?, ?)", (name, hashed, self.clock())
            )
        except sqlite3.IntegrityError:
            raise HttpError(409, "this name is taken") from None
        return self._open(int(found.lastrowid or 0), name)

    async def log_in(self, name: str, password: str, address: str, device: str = "", old: str = "") -> OpenedSession:
        """`old`: the token of a session that this one replaces. Raises HttpError."""
        if len(password) > LONGEST or len(name) > 64:
            raise HttpError(401, WRONG)
        row = self.db.execute("SELECT id, name, password FROM user WHERE name = ?", (name,)).fetchone()
        known = bool(row and device) and bool(
            self.db.execute(
                "SELECT 1 FROM device WHERE token = ? AND user = ?", (_digest(device), row["id"])
            ).fetchone()
        )
        counters = (
            [(self._of_device, device)] if known else [(self._of_address, address), (self._of_name, name.lower())]
        )
        for counter, key in counters:  # counted before the password is checked: many at once get no free guesses
            counter.take(key, "attempts")
        hashed = row["password"] if row else self._nobody
        right = await self.hashing.run(
            f"device {device}" if known else address, lambda: self._matches(hashed, password)
        )
        if not right or row is None:
            raise HttpError(401, WRONG)
        for counter, key in counters:
            counter.give_back(key)
        self.log_out(old)
        return self._open(row["id"], row["name"])

    def log_out(self, token: str) -> None:
        if token:
            self.db.execute("DELETE FROM session WHERE token = ?", (_digest(token),))

    def session(self, token: str) -> Session | None:
        """Whose session this is; None for one that is unknown, too old or idle for too long."""
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

    def none_yet(self) -> bool:
        """Whether nobody has registered."""
        return self.db.execute("SELECT 1 FROM user WHERE name != ? LIMIT 1", (LOCAL,)).fetchone() is None

    def local(self) -> OpenedSession:
        """A session of the one user of `--open`."""
        self.db.execute("INSERT OR IGNORE INTO user(name, password, created_s) VALUES(?, '', ?)", (LOCAL, self.clock()))
        return self._open(self.db.execute("SELECT id FROM user WHERE name = ?", (LOCAL,)).fetchone()["id"], LOCAL)

    async def delete(self, session: Session, password: str, address: str) -> None:
        """The user and all that is theirs. Raises HttpError."""
        self._of_address.take(address, "attempts")
        row = self.db.execute("SELECT password FROM user WHERE id = ?", (session.user,)).fetchone()
        if not row or not await self.hashing.run(address, lambda: self._matches(row["password"], password)):
            raise HttpError(401, "the password is wrong")
        self.db.execute("DELETE FROM user WHERE id = ?", (session.user,))

    def _open(self, user: int, name: str) -> OpenedSession:
        token, device, csrf = (secrets.token_urlsafe(32) for _ in range(3))
        now_s = self.clock()
        self.db.execute("DELETE FROM session WHERE created_s < ?", (now_s - SESSION_S,))
        self.db.execute("INSERT INTO session VALUES(?, ?, ?, ?, ?)", (_digest(token), user, csrf, now_s, now_s))
        self.db.execute("INSERT INTO device VALUES(?, ?, ?)", (_digest(device), user, now_s))
        for table in ("session", "device"):
            self.db.execute(
                f"DELETE FROM {table} WHERE user = ?1 AND token NOT IN "
                f"(SELECT token FROM {table} WHERE user = ?1 ORDER BY created_s DESC, rowid DESC LIMIT ?2)",
                (user, BROWSERS),
            )
        return OpenedSession(token, device, Session(user, name, csrf))

    def _matches(self, hashed: str, password: str) -> bool:
        try:
            return self.hasher.verify(hashed, password)
        except (VerificationError, InvalidHashError):
            return False


def same(one: str, other: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
