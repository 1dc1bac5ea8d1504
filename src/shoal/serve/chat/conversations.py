"""Conversations as trees of messages: editing or regenerating adds a sibling, so nothing said is lost.

Invariant: every method takes the user whose conversation it must be; of another's it finds nothing. A conversation's row
holds the size of all its messages, which each addition is charged to first, so one user cannot fill the disk.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.serve.chat.accounts import check_room
from shoal.serve.threads import Threads
from shoal.watch.page.guard import HttpError

MOST_CONVERSATIONS, MOST_MESSAGES = 2000, 2000
MESSAGE_CHARACTERS = 100_000
CONVERSATION_BYTES, USER_BYTES = 4_000_000, 64_000_000  # texts, facts and proofs
ROW_BYTES = 300  # of a message or conversation, beside these
TITLE_CHARACTERS = 80
LISTED = 500
ABSENT = "there is no such conversation"

Result = TypeVar("Result")


class Conversations:
    def __init__(self, db: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self.db, self.clock = db, clock

    def create(self, user: int) -> str:
        """A new one's id. Raises HttpError."""
        count = self.db.execute("SELECT count(*) FROM conversation WHERE user = ?", (user,)).fetchone()[0]
        if count >= MOST_CONVERSATIONS:
            raise HttpError(409, f"there are {count} conversations; delete some first")
        self.check_space(user)
        id, now_s = secrets.token_hex(12), self.clock()
        self.db.execute("INSERT INTO conversation VALUES(?, ?, '', NULL, ?, ?, ?)", (id, user, now_s, now_s, ROW_BYTES))
        return id

    def check_space(self, user: int, size_bytes: int = ROW_BYTES) -> None:
        """Raises HttpError if the user has no space for so much."""
        check_room(self.db)
        used = self.db.execute("SELECT sum(size_bytes) FROM conversation WHERE user = ?", (user,)).fetchone()[0] or 0
        if used + size_bytes > USER_BYTES:
            raise HttpError(409, "your conversations fill their space; delete some first")

    def listed(self, user: int) -> list[dict[str, Any]]:
        """Newest first."""
        found = "SELECT id, title, changed_s FROM conversation WHERE user = ? ORDER BY changed_s DESC LIMIT ?"
        return [dict(row) for row in self.db.execute(found, (user, LISTED))]

    def read(self, user: int, id: str) -> dict[str, Any]:
        """With all messages. Raises HttpError."""
        own = self._own(user, id)
        rows = self.db.execute(
            "SELECT id, parent, role, content, facts, proof IS NOT NULL AS proven, created_s FROM message "
            "WHERE conversation = ? ORDER BY created_s, rowid",
            (id,),
        )
        messages = [dict(row) | {"facts": json.loads(row["facts"]), "proven": bool(row["proven"])} for row in rows]
        return {"id": id, "title": own["title"], "leaf": own["leaf"], "messages": messages}

    def check(self, user: int, id: str, message: str) -> None:
        """Raises HttpError if the conversation has no such message."""
        self._own(user, id)
        if not self.db.execute("SELECT 1 FROM message WHERE conversation = ? AND id = ?", (id, message)).fetchone():
            raise HttpError(404, "there is no such message")

    def path(self, user: int, id: str, leaf: str) -> list[dict[str, Any]]:
        """Role and content of the messages from the first to `leaf`. Raises HttpError."""
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
        """A new message's id; it becomes the leaf. Raises HttpError, and then nothing is stored."""
        own = self._own(user, id)
        if len(content) > MESSAGE_CHARACTERS and role == "user":
            raise HttpError(413, f"a message has at most {MESSAGE_CHARACTERS} characters")
        noted = json.dumps(facts or {})
        size_bytes = ROW_BYTES + sum(len(one.encode()) for one in (content, noted, proof or ""))
        [count] = self.db.execute("SELECT count(*) FROM message WHERE conversation = ?", (id,)).fetchone()
        if count >= MOST_MESSAGES or own["size_bytes"] + size_bytes > CONVERSATION_BYTES:
            raise HttpError(409, f"this conversation is full ({count} messages); begin another")
        self.check_space(user, size_bytes)
        new, now_s = secrets.token_hex(12), self.clock()
        title = own["title"] or " ".join(content.split())[:TITLE_CHARACTERS]
        with self.db:
            self.db.execute("BEGIN")
            self.db.execute(
                "UPDATE conversation SET leaf = ?, title = ?, changed_s = ?, size_bytes = size_bytes + ? WHERE id = ?",
                (new, title, now_s, size_bytes, id),
            )
            self.db.execute(
                "INSERT INTO message VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                (new, id, parent, role, content, noted, proof, now_s),
            )
        return new

    def show(self, user: int, id: str, leaf: str) -> None:
        """Make this message the one that the page shows last. Raises HttpError."""
        self.check(user, id, leaf)
        self.db.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, id))

    def proof(self, user: int, id: str, message: str) -> str:
        """A reply's file. Raises HttpError."""
        self._own(user, id)
        row = self.db.execute("SELECT proof FROM message WHERE conversation = ? AND id = ?", (id, message)).fetchone()
        if row is None or row["proof"] is None:
            raise HttpError(404, "this message has no proof")
        return str(row["proof"])

    def delete(self, user: int, id: str) -> None:
        """Raises HttpError."""
        self._own(user, id)
        self.db.execute("DELETE FROM conversation WHERE id = ?", (id,))

    def _own(self, user: int, id: str) -> sqlite3.Row:
        row: sqlite3.Row | None = self.db.execute(
            "SELECT title, leaf, size_bytes FROM conversation WHERE id = ? AND user = ?", (id, user)
        ).fetchone()
        if row is None:
            raise HttpError(404, ABSENT)
        return row


class StoredConversations:
    """Conversations as a thread reads them, with a connection of its own: megabytes would stop the event loop."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._conversations, self._threads = Conversations(db), Threads("stored", 1)

    async def run(self, user: int, question: Callable[[Conversations], Result]) -> Result:
        """The answer to a question that changes nothing. Raises HttpError, BusyError."""
        return await self._threads.run(f"user {user}", lambda: question(self._conversations))

    def close(self) -> None:
        self._threads.close()
