"""Uploads: streamed to the disk, and kept only if they are what was signed, while their grant is valid."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shoal.coordinator.database import PoolError
from shoal.coordinator.http.routes import Coordinator
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Stored
from shoal.protocol.signing import SignatureError
from shoal.store.folder import IncomingFile

from ..support import config
from .support import PIECE, pieces, upload, worker_with_task


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
    Coordinator(config(), "r", Identity.generate(), tmp_path)
    assert not leftover.exists()
