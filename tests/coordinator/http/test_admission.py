"""Uploads: streamed to the disk, and kept only if they are what was signed, while their grant is valid."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from shoal.coordinator.database import PoolError
from shoal.coordinator.http.routes import Coordinator
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Assignment, Heartbeat, PolicyVersion, Stored
from shoal.protocol.server import SLOT
from shoal.protocol.signing import SignatureError, sign_request
from shoal.store.folder import IncomingFile

from ..support import config, payload

RUN = "r"


def pieces(*parts: bytes) -> Callable[[], Awaitable[bytes]]:
    left = [*parts]

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return read


PIECE = bytes(64 << 10)


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    found = Coordinator(config(prompts_per_step=1_000), RUN, Identity.generate(), tmp_path)
    found.pool.learning.published(PolicyVersion(version=0, digest="d" * 64, size_bytes=1))
    return found


def worker_with_task(coordinator: Coordinator, name: str = "w") -> tuple[Identity, Assignment]:
    identity = Identity.generate()
    invite = payload(name, nonce=secrets.token_hex(16), expires_s=1 << 40)
    coordinator.pool.members.register(identity.public, invite, None)
    answer = coordinator.pool.members.heartbeat(identity.public, Heartbeat(policy_version=0, wants_task=True))
    assert answer.assignment is not None, answer.waiting_for
    return identity, answer.assignment


async def upload(
    coordinator: Coordinator, worker: Identity, task: Assignment, body: bytes, read: Callable[[], Awaitable[bytes]]
) -> Stored:
    headers = sign_request(
        worker,
        method="PUT",
        path=task.upload_path,
        query="",
        body=body,
        audience=RUN,
        created_s=int(coordinator.admission.clock()),
        nonce=secrets.token_hex(16),
    )
    arriving: Any = SimpleNamespace(readany=read)
    request = make_mocked_request("PUT", task.upload_path, headers, match_info={"id": task.id}, payload=arriving)
    with ExitStack() as slot:
        request[SLOT] = slot
        stored = await coordinator.files.receive(request, coordinator.files.submissions)
    assert isinstance(stored, Stored)
    return stored


def test_twenty_uploads_at_once_hold_one_piece_each(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts bytes that were read and are not yet in a file."""
    in_memory, peak = 0, 0
    write = IncomingFile.write

    def counted_write(file: IncomingFile, piece: bytes) -> None:
        nonlocal in_memory
        write(file, piece)
        in_memory -= len(piece)

    async def all_at_once() -> list[Stored]:
        def arriving() -> Callable[[], Awaitable[bytes]]:
            next_piece = pieces(*[PIECE] * 16)

            async def read() -> bytes:
                nonlocal in_memory, peak
                await asyncio.sleep(0)  # lets the others read
                piece = await next_piece()
                in_memory += len(piece)
                peak = max(peak, in_memory)
                return piece

            return read

        workers = [worker_with_task(coordinator, f"w-{number}") for number in range(20)]
        return await asyncio.gather(*(upload(coordinator, *worker, PIECE * 16, arriving()) for worker in workers))

    monkeypatch.setattr(IncomingFile, "write", counted_write)
    stored = asyncio.run(all_at_once())
    assert [found.size_bytes for found in stored] == [1 << 20] * 20
    assert len(PIECE) <= peak <= 20 * len(PIECE)
    assert coordinator.pool.db.submissions.count_by_state() == {"uploaded": 20}
    assert coordinator.store.get("submissions", stored[0].hash) == PIECE * 16


def test_a_second_upload_of_the_same_task_ends_the_first(coordinator: Coordinator) -> None:
    """A client whose connection broke sends again while the coordinator still waits for the first body."""
    worker, task = worker_with_task(coordinator)

    async def both() -> list[Stored | BaseException]:
        first_reads, second_is_done = asyncio.Event(), asyncio.Event()

        async def slow() -> bytes:
            first_reads.set()
            await second_is_done.wait()
            return b"late"

        async def second() -> Stored:
            await first_reads.wait()
            stored = await upload(coordinator, worker, task, b"rollouts", pieces(b"rollouts"))
            second_is_done.set()
            return stored

        first = upload(coordinator, worker, task, b"late", slow)
        return await asyncio.gather(first, second(), return_exceptions=True)

    first, stored = asyncio.run(both())
    assert isinstance(first, PoolError) and "another upload" in str(first)
    assert isinstance(stored, Stored)
    assert [path.stem for path in (coordinator.store.root / "submissions").iterdir()] == [stored.hash]


def test_an_upload_whose_body_was_changed_is_not_kept_and_may_be_repeated(coordinator: Coordinator) -> None:
    worker, task = worker_with_task(coordinator)
    with pytest.raises(SignatureError, match="body changed"):
        asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouTs")))
    assert list((coordinator.store.root / "submissions").iterdir()) == []
    assert asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouts"))).size_bytes == 8


def test_an_upload_whose_connection_breaks_is_no_fault_of_the_store(coordinator: Coordinator) -> None:
    worker, task = worker_with_task(coordinator)

    async def read() -> bytes:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        asyncio.run(upload(coordinator, worker, task, b"rollouts", read))
    assert list((coordinator.store.root / "submissions").iterdir()) == []


def test_a_task_that_expires_during_its_upload_keeps_no_file(coordinator: Coordinator) -> None:
    worker, task = worker_with_task(coordinator)

    async def read() -> bytes:
        coordinator.pool.db.submissions.drop_of(worker.public)
        return b""

    with pytest.raises(PoolError, match="expired, not open"):
        asyncio.run(upload(coordinator, worker, task, b"", read))
    assert list((coordinator.store.root / "submissions").iterdir()) == []


def test_a_slow_upload_ends_with_its_grant(coordinator: Coordinator) -> None:
    """Otherwise a worker could hold one file more in the store's folder after every task it lets expire."""
    worker, task = worker_with_task(coordinator)
    read_pieces = 0

    async def trickling() -> bytes:
        nonlocal read_pieces
        read_pieces += 1
        if read_pieces == 3:
            coordinator.pool.db.submissions.drop_of(worker.public)
        assert read_pieces < 5, "the upload continues without a grant"
        return b"x"

    with pytest.raises(PoolError, match="expired, not open"):
        asyncio.run(upload(coordinator, worker, task, b"", trickling))
    assert read_pieces == 3
    assert list((coordinator.store.root / "submissions").iterdir()) == []


def test_a_killed_coordinators_unfinished_files_are_removed_at_its_next_start(tmp_path: Path) -> None:
    (tmp_path / "store" / "submissions").mkdir(parents=True)
    leftover = tmp_path / "store" / "submissions" / ".put-x.tmp"
    leftover.write_bytes(PIECE)
    Coordinator(config(), RUN, Identity.generate(), tmp_path)
    assert not leftover.exists()
