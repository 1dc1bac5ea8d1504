"""Conversations as trees of messages. Editing or regenerating a message adds a sibling, so no message is lost.

Invariant: every method takes the user and raises 404 for another user's conversation. A conversation's row holds the total
size of its messages, and each addition is checked against the user's quota, so one user cannot fill the disk.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.serve.chat.accounts import check_disk_space
from shoal.serve.threads import FairThreadPool
from shoal.watch.page.guard import HttpError

MAX_CONVERSATIONS, MAX_MESSAGES = 2000, 2000
MESSAGE_CHARACTERS = 100_000
CONVERSATION_BYTES, USER_BYTES = 4_000_000, 64_000_000  # of texts, facts and proofs
ROW_BYTES = 300  # overhead of a message or conversation
TITLE_CHARACTERS = 80
MAX_LISTED = 500
NOT_FOUND = "there is no such conversation"

Result = TypeVar("Result")


class Conversations:
    def __init__(self, db: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self.db, self.clock = db, clock

    def create(self, user: int) -> str:
        """Create a conversation and return its id. Raise HttpError."""
        count = self.db.execute("SELECT count(*) FROM conversation WHERE user = ?", (user,)).fetchone()[0]
        if count >= MAX_CONVERSATIONS:
            raise HttpError(409, f"there are {count} conversations; delete some first")
        self.check_quota(user)
        id, now_s = secrets.token_hex(12), self.clock()
        self.db.execute("INSERT INTO conversation VALUES(?, ?, '', NULL, ?, ?, ?)", (id, user, now_s, now_s, ROW_BYTES))
        return id

    def check_quota(self, user: int, size_bytes: int = ROW_BYTES) -> None:
        """Raise HttpError if another `size_bytes` would exceed the user's quota."""
        check_disk_space(self.db)
        used = self.db.execute("SELECT sum(size_bytes) FROM conversation WHERE user = ?", (user,)).fetchone()[0] or 0
        if used + size_bytes > USER_BYTES:
            raise HttpError(409, "your conversations fill your quota; delete some first")

    def summaries(self, user: int) -> list[dict[str, Any]]:
        """Return the user's conversations, last changed first: the id, title, and time of the last change of each."""
        query = "SELECT id, title, changed_s FROM conversation WHERE user = ? ORDER BY changed_s DESC LIMIT ?"
        return [dict(row) for row in self.db.execute(query, (user, MAX_LISTED))]

    def read(self, user: int, id: str) -> dict[str, Any]:
        """Return a conversation with all messages. Raise HttpError."""
        conversation = self._owned(user, id)
        rows = self.db.execute(
            "SELECT id, parent, role, content, facts, proof IS NOT NULL AS proven, created_s FROM message "
            "WHERE conversation = ? ORDER BY created_s, rowid",
            (id,),
        )
        messages = [dict(row) | {"facts": json.loads(row["facts"]), "proven": bool(row["proven"])} for row in rows]
        return {"id": id, "title": conversation["title"], "leaf": conversation["leaf"], "messages": messages}

    def check(self, user: int, id: str, message: str) -> None:
        """Raise HttpError if the conversation has no such message."""
        self._owned(user, id)
        if not self.db.execute("SELECT 1 FROM message WHERE conversation = ? AND id = ?", (id, message)).fetchone():
            raise HttpError(404, "there is no such message")

    def path(self, user: int, id: str, leaf: str) -> list[dict[str, Any]]:
        """Return role and content of the messages from the root to `leaf`. Raise HttpError."""
        self.check(user, id, leaf)
        rows = self.db.execute(
            "WITH RECURSIVE path(id, parent, role, content, depth) AS ("
            "SELECT id, parent, role, content, 0 FROM message WHERE conversation = ?1 AND id = ?2 "
            "UNION ALL SELECT m.id, m.parent, m.role, m.content, depth + 1 FROM message m JOIN path ON m.id = path.parent "
            "WHERE m.conversation = ?1) SELECT role, content FROM path ORDER BY depth DESC",
            (id, leaf),
        )
        return [dict(row) for row in rows]

    def add(
        self,
        user: int,
        id: str,
        parent: str | None,
        role: str,
        content: str,
        facts: dict[str, Any] | None = None,
        proof: str | None = None,
    ) -> str:
        """Add a message, make it the leaf, and return its id. If it does not fit, store nothing and raise HttpError."""
        conversation = self._owned(user, id)
        if len(content) > MESSAGE_CHARACTERS and role == "user":
            raise HttpError(413, f"a message has at most {MESSAGE_CHARACTERS} characters")
        facts_json = json.dumps(facts or {})
        size_bytes = ROW_BYTES + sum(len(part.encode()) for part in (content, facts_json, proof or ""))
        [count] = self.db.execute("SELECT count(*) FROM message WHERE conversation = ?", (id,)).fetchone()
        if count >= MAX_MESSAGES or conversation["size_bytes"] + size_bytes > CONVERSATION_BYTES:
            raise HttpError(409, f"this conversation is full ({count} messages); start another")
        self.check_quota(user, size_bytes)
        new, now_s = secrets.token_hex(12), self.clock()
        title = conversation["title"] or " ".join(content.split())[:TITLE_CHARACTERS]
        with self.db:
            self.db.execute("BEGIN")
            self.db.execute(
                "UPDATE conversation SET leaf = ?, title = ?, changed_s = ?, size_bytes = size_bytes + ? WHERE id = ?",
                (new, title, now_s, size_bytes, id),
            )
            self.db.execute(
                "INSERT INTO message VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                (new, id, parent, role, content, facts_json, proof, now_s),
            )
        return new

    def select_leaf(self, user: int, id: str, leaf: str) -> None:
        """Make this message the leaf of the branch that the page shows. Raise HttpError."""
        self.check(user, id, leaf)
        self.db.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, id))

    def proof(self, user: int, id: str, message: str) -> str:
        """Return a reply file. Raise HttpError."""
        self._owned(user, id)
        row = self.db.execute("SELECT proof FROM message WHERE conversation = ? AND id = ?", (id, message)).fetchone()
        if row is None or row["proof"] is None:
            raise HttpError(404, "this message has no proof")
        return str(row["proof"])

    def delete(self, user: int, id: str) -> None:
        """Delete a conversation. Raise HttpError."""
        self._owned(user, id)
        self.db.execute("DELETE FROM conversation WHERE id = ?", (id,))

    def _owned(self, user: int, id: str) -> sqlite3.Row:
        row: sqlite3.Row | None = self.db.execute(
            "SELECT title, leaf, size_bytes FROM conversation WHERE id = ? AND user = ?", (id, user)
        ).fetchone()
        if row is None:
            raise HttpError(404, NOT_FOUND)
        return row


class ConversationReader:
    """Read in a thread, because reading megabytes would block the event loop. The thread has its own connection."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._conversations, self._threads = Conversations(db), FairThreadPool("reader", 1)

    async def run(self, user: int, query: Callable[[Conversations], Result]) -> Result:
        """Run a read-only query in the thread. Raise HttpError or BusyError."""
        return await self._threads.run(f"user {user}", lambda: query(self._conversations))

    def close(self) -> None:
        self._threads.close()
