"""Quotas of users: each message, with its proof and facts, is charged to its user's quota before it is stored."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.serve.chat import accounts as database
from shoal.serve.chat import conversations as module
from shoal.serve.chat.accounts import MAX_BROWSERS, Accounts
from shoal.serve.chat.conversations import MESSAGE_CHARACTERS, ROW_BYTES, Conversations
from shoal.watch.page.guard import HttpError

from .support import CHEAP, PASSWORD, Running, User, serving

TEXT = "x" * MESSAGE_CHARACTERS
LIMIT = 10 * (MESSAGE_CHARACTERS + ROW_BYTES)


@pytest.fixture
def db(tmp_path: Path) -> sqlite3.Connection:
    return database.connect(tmp_path / "db")


@pytest.fixture
def user(db: sqlite3.Connection) -> int:
    return asyncio.run(Accounts(db, hasher=CHEAP).register("ada", PASSWORD, "here")).session.user


def stored_bytes(db: sqlite3.Connection) -> int:
    sizes = "length(CAST(content AS BLOB)) + length(facts) + coalesce(length(proof), 0)"
    return int(db.execute(f"SELECT coalesce(sum({sizes}), 0) FROM message").fetchone()[0])


def fill(tree: Conversations, user: int, ids: list[str], *, content: str = TEXT, proof: str | None = None) -> None:
    """Add messages to the conversations in turn until HttpError is raised."""
    for _ in range(1000):
        for id in ids:
            tree.add(user, id, None, "assistant", content, proof=proof)


def test_conversations_created_first_and_filled_later_stay_within_the_quota(
    db: sqlite3.Connection, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USER_BYTES", LIMIT)
    tree = Conversations(db)
    ids = [tree.create(user) for _ in range(20)]
    with pytest.raises(HttpError, match="fill your quota"):
        fill(tree, user, ids)
    assert LIMIT - 2 * len(TEXT) < stored_bytes(db) <= LIMIT
    with pytest.raises(HttpError, match="fill your quota"):
        tree.add(user, ids[0], None, "user", TEXT)
    tree.delete(user, ids[0])
    tree.add(user, ids[1], None, "user", TEXT)  # there is room again, because a conversation was deleted


@pytest.mark.parametrize(("content", "proof"), [("x", TEXT), ("\U0001f600" * 25_000, None)])
def test_proofs_are_charged_and_text_is_charged_by_its_bytes(
    db: sqlite3.Connection, user: int, monkeypatch: pytest.MonkeyPatch, content: str, proof: str | None
) -> None:
    monkeypatch.setattr(module, "USER_BYTES", LIMIT)
    tree = Conversations(db)
    with pytest.raises(HttpError, match="fill your quota"):
        fill(tree, user, [tree.create(user)], content=content, proof=proof)
    assert stored_bytes(db) <= LIMIT


def test_the_size_of_one_conversation_with_its_proofs_is_bounded(db: sqlite3.Connection, user: int) -> None:
    tree = Conversations(db)
    with pytest.raises(HttpError, match="this conversation is full"):
        fill(tree, user, [tree.create(user)], content="x", proof="y" * 500_000)
    assert stored_bytes(db) <= module.CONVERSATION_BYTES


def test_even_a_short_message_is_charged_the_overhead_of_its_row(
    db: sqlite3.Connection, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USER_BYTES", 100 * ROW_BYTES)
    tree = Conversations(db)
    with pytest.raises(HttpError, match="fill your quota"):
        fill(tree, user, [tree.create(user)], content="x")
    assert db.execute("SELECT count(*) FROM message").fetchone()[0] < 100


def test_one_users_quota_does_not_limit_another(
    db: sqlite3.Connection, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USER_BYTES", LIMIT)
    other = asyncio.run(Accounts(db, hasher=CHEAP).register("bob", PASSWORD, "here")).session.user
    tree = Conversations(db)
    with pytest.raises(HttpError, match="fill your quota"):
        fill(tree, user, [tree.create(user)])
    tree.add(other, tree.create(other), None, "user", TEXT)


def test_a_reply_whose_proof_does_not_fit_is_saved_without_it(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    id = ada.begin()
    monkeypatch.setattr(module, "CONVERSATION_BYTES", 4 * ROW_BYTES + 400)
    done = ada.say(id, "one", max_tokens=4)[-1]
    assert done["event"] == "done" and not done["message"]["proven"]
    assert "full" in done["message"]["facts"]["unproven"]
    assert ada.read(id)["messages"][-1]["content"] == done["message"]["content"]


def test_nothing_is_generated_for_a_user_whose_quota_is_used_up(
    page: Running, ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = ada.begin()
    question = ada.say(id)[0]["message"]
    monkeypatch.setattr(module, "USER_BYTES", 0)
    before = page.service.scheduler.counts.completions
    response = ada.post(f"conversations/{id}/replies", {"parent": question, "models": [page.model]})
    assert response.status_code == 409 and page.service.scheduler.counts.completions == before


def test_a_user_has_a_bounded_number_of_sessions(db: sqlite3.Connection) -> None:
    accounts = Accounts(db, hasher=CHEAP)
    asyncio.run(accounts.register("ada", PASSWORD, "here"))
    for _ in range(MAX_BROWSERS + 5):
        newest = asyncio.run(accounts.log_in("ada", PASSWORD, "here"))
    for table in ("session", "device"):
        assert db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == MAX_BROWSERS
    assert accounts.session(newest.token)


def test_nothing_is_stored_on_a_nearly_full_disk(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny_folder, tmp_path, hasher=CHEAP) as running:
        user = User.registered(running)
        id = user.begin()
        monkeypatch.setattr(database, "RESERVE_BYTES", 1 << 62)
        responses = [
            user.post("conversations"),
            user.post(f"conversations/{id}/replies", {"content": "one", "models": [running.model]}),
            User(running, "bob").enter(),
        ]
        assert [response.status_code for response in responses] == [507] * 3


def test_a_database_of_another_format_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as old:
        old.execute("CREATE TABLE user(id INTEGER PRIMARY KEY)")
    with pytest.raises(ShoalError, match="move it away"):
        database.connect(tmp_path / "db")
