"""Conversations as trees of messages: editing or regenerating adds a sibling, so nothing said is lost.

Invariant: every method takes the user whose conversation it must be; of another's it finds nothing. Sizes are bounded, so
one user cannot fill the disk.
Called by `routes` and `replies`.
"""

import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from shoal.web.guard import RefusedError

MOST_CONVERSATIONS, MOST_MESSAGES = 2000, 2000
MESSAGE_CHARACTERS = 100_000
CONVERSATION_CHARACTERS, USER_CHARACTERS = 4_000_000, 64_000_000  # texts and proofs
SIZE = "sum(length(content) + coalesce(length(proof), 0))"
TITLE_CHARACTERS = 80
FOUND = 200
ABSENT = "there is no such conversation"


class Conversations:
    def __init__(self, db: sqlite3.Connection, clock: Callable[[], float] = time.time) -> None:
        self.db, self.clock = db, clock

    def create(self, user: int) -> str:
        """A new one's id. Raises RefusedError."""
        count = self.db.execute("SELECT count(*) FROM conversation WHERE user = ?", (user,)).fetchone()[0]
        if count >= MOST_CONVERSATIONS:
            raise RefusedError(409, f"there are {count} conversations; delete some first")
        own = f"SELECT {SIZE} FROM message JOIN conversation c ON c.id = conversation WHERE user = ?"
        if (self.db.execute(own, (user,)).fetchone()[0] or 0) >= USER_CHARACTERS:
            raise RefusedError(409, "your conversations fill their space; delete some first")
        id, now_s = secrets.token_hex(12), self.clock()
        self.db.execute("INSERT INTO conversation VALUES(?, ?, '', NULL, ?, ?)", (id, user, now_s, now_s))
        return id

    def listed(self, user: int, search: str = "") -> list[dict[str, Any]]:
        """Newest first; with `search`, those whose title or text has it."""
        like = "%" + "".join("\\" + c if c in "\\%_" else c for c in search[:200]) + "%"
        rows = self.db.execute(
            "SELECT id, title, changed_s FROM conversation c WHERE user = ?1 AND (?2 = '%%' OR title LIKE ?2 ESCAPE '\\' "
            "OR EXISTS (SELECT 1 FROM message WHERE conversation = c.id AND content LIKE ?2 ESCAPE '\\')) "
            "ORDER BY changed_s DESC LIMIT ?3",
            (user, like, FOUND),
        )
        return [dict(row) for row in rows]

    def read(self, user: int, id: str) -> dict[str, Any]:
        """With all messages. Raises RefusedError."""
        own = self._own(user, id)
        rows = self.db.execute(
            "SELECT id, parent, role, content, facts, proof IS NOT NULL AS proven, created_s FROM message "
            "WHERE conversation = ? ORDER BY created_s, rowid",
            (id,),
        )
        messages = [dict(row) | {"facts": json.loads(row["facts"]), "proven": bool(row["proven"])} for row in rows]
        return {"id": id, "title": own["title"], "leaf": own["leaf"], "messages": messages}

    def path(self, user: int, id: str, leaf: str | None) -> list[dict[str, Any]]:
        """The messages from the first to `leaf`. Raises RefusedError."""
        by_id = {message["id"]: message for message in self.read(user, id)["messages"]}
        found: list[dict[str, Any]] = []
        while leaf is not None:
            if leaf not in by_id:
                raise RefusedError(404, "there is no such message")
            found.append(by_id[leaf])
            leaf = by_id[leaf]["parent"]
        return found[::-1]

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
        """A new message's id; it becomes the leaf. Raises RefusedError."""
        own = self._own(user, id)
        if len(content) > MESSAGE_CHARACTERS and role == "user":
            raise RefusedError(413, f"a message has at most {MESSAGE_CHARACTERS} characters")
        sizes = f"SELECT count(*), {SIZE} FROM message WHERE conversation = ?"
        count, size = self.db.execute(sizes, (id,)).fetchone()
        if count >= MOST_MESSAGES or (size or 0) + len(content) > CONVERSATION_CHARACTERS:
            raise RefusedError(409, f"this conversation is full ({count} messages); begin another")
        new, now_s = secrets.token_hex(12), self.clock()
        title = own["title"] or " ".join(content.split())[:TITLE_CHARACTERS]
        self.db.execute(
            "INSERT INTO message VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            (new, id, parent, role, content, json.dumps(facts or {}), proof, now_s),
        )
        self.db.execute(
            "UPDATE conversation SET leaf = ?, title = ?, changed_s = ? WHERE id = ?", (new, title, now_s, id)
        )
        return new

    def change(self, user: int, id: str, *, title: str | None = None, leaf: str | None = None) -> None:
        """Raises RefusedError."""
        self._own(user, id)
        if title is not None:
            self.db.execute("UPDATE conversation SET title = ? WHERE id = ?", (title[:TITLE_CHARACTERS], id))
        if leaf is not None:
            self.path(user, id, leaf)
            self.db.execute("UPDATE conversation SET leaf = ? WHERE id = ?", (leaf, id))

    def proof(self, user: int, id: str, message: str) -> str:
        """A reply's file. Raises RefusedError."""
        self._own(user, id)
        row = self.db.execute("SELECT proof FROM message WHERE conversation = ? AND id = ?", (id, message)).fetchone()
        if row is None or row["proof"] is None:
            raise RefusedError(404, "this message has no proof")
        return str(row["proof"])

    def delete(self, user: int, id: str) -> None:
        """Raises RefusedError."""
        self._own(user, id)
        self.db.execute("DELETE FROM conversation WHERE id = ?", (id,))

    def _own(self, user: int, id: str) -> sqlite3.Row:
        row: sqlite3.Row | None = self.db.execute(
            "SELECT title, leaf FROM conversation WHERE id = ? AND user = ?", (id, user)
        ).fetchone()
        if row is None:
            raise RefusedError(404, ABSENT)
        return row
