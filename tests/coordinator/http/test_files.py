"""Uploads: how much a member can make the coordinator store, and which files are kept."""

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from shoal.coordinator.database import PoolError
from shoal.coordinator.http.files import BucketFiles
from shoal.coordinator.http.routes import Coordinator
from shoal.ledger.connection import DatabaseFullError
from shoal.protocol.identity import Identity
from shoal.protocol.messages import Announced, Finished, Heartbeat, PolicyVersion, Stored
from shoal.protocol.pace import Refusal
from shoal.protocol.signing import SignatureError
from shoal.store.folder import BucketError, Folder, IncomingFile, StoreError

from ..support import config
from .support import ANYONE, CONFIG, PIECE, Site, pieces, refused, sending, served, task_of, upload, worker_with_task


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with served(tmp_path) as site:
        yield site.staff("worker", "validator", "origin")


def held(site: Site, kind: str = "submissions") -> set[str]:
    """Return the stored files of a kind, temporary ones included."""
    folder = site.folder / "store" / kind
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def announce(client: httpx.Client, id: str, content_hash: str) -> None:
    beat = Heartbeat(policy_version=0, finished=Finished(submission=id, hash=content_hash))
    client.post("/v1/heartbeat", content=beat.model_dump_json()).raise_for_status()


def worker_status(site: Site) -> dict[str, Any]:
    nodes = ANYONE.get(f"{site.url}/v1/status").json()["nodes"]
    return next(node for node in nodes if node["name"] == "worker")


def test_files_that_were_not_announced_are_not_kept_and_their_task_counts_as_missed(site: Site) -> None:
    """Otherwise a worker could announce one hash and fill the disk with a hundred other files at no cost."""
    worker = site.clients["worker"]
    task = task_of(worker)
    announce(worker, task["id"], "0" * 64)
    answers = [worker.put(task["upload_path"], content=secrets.token_bytes(4_000)) for _ in range(10)]
    refused(answers[0], 409, "not the file that was announced")
    for answer in answers[1:]:
        refused(answer, 409, "expired, not open")
    assert held(site) == set()
    assert worker_status(site)["missed"] == 1


def test_a_worker_that_sends_unannounced_files_is_suspended(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(file: IncomingFile) -> str:
        raise AssertionError("a file got its name before it was compared with the announced hash")

    monkeypatch.setattr(IncomingFile, "commit", commit)
    worker, task = worker_with_task(coordinator)
    db, members = coordinator.pool.db, coordinator.pool.members
    now_s, states = db.clock(), list[str]()
    db.clock = lambda: now_s
    while len(states) < 10 and "suspended" not in states:
        announced = Finished(submission=task.id, hash="0" * 64)
        members.heartbeat(worker.public, Heartbeat(policy_version=0, finished=announced))
        with pytest.raises(PoolError, match="not the file that was announced"):
            asyncio.run(upload(coordinator, worker, task, b"x", pieces(b"x")))
        states.append(db.nodes.get(worker.public).state)
        now_s += 3600
        task = members.heartbeat(worker.public, Heartbeat(policy_version=0, wants_task=True)).assignment or task
    assert states[-1] == "suspended" and len(states) <= 4
    assert list((coordinator.store.root / "submissions").iterdir()) == []


def test_the_announced_file_is_kept(site: Site) -> None:
    worker = site.clients["worker"]
    task = task_of(worker)
    announce(worker, task["id"], blake3(b"rollouts").hexdigest())
    assert worker.put(task["upload_path"], content=b"rollouts").status_code == 200
    assert len(held(site)) == 1 and worker_status(site)["missed"] == 0


def test_only_a_validators_newest_accepted_file_is_kept(site: Site) -> None:
    """A validator may store the same file again after a restart."""
    worker, validator = site.clients["worker"], site.clients["validator"]
    task = task_of(worker)
    worker.put(task["upload_path"], content=b"rollouts").raise_for_status()
    validator.post("/v1/claims", json={"most": 1}).raise_for_status()
    for number in range(5):
        stored = validator.put(f"/v1/accepted/{task['id']}", content=b"%d" % number).raise_for_status().json()
        assert held(site, "accepted") == {f"{stored['hash']}.parquet"}
    again = validator.put(f"/v1/accepted/{task['id']}", content=b"4").raise_for_status().json()
    assert again == stored and held(site, "accepted") == {f"{stored['hash']}.parquet"}


def test_a_submission_whose_file_is_damaged_expires(site: Site) -> None:
    """Otherwise every validator that claims it would end."""
    worker, validator = site.clients["worker"], site.clients["validator"]
    task = task_of(worker)
    worker.put(task["upload_path"], content=b"rollouts").raise_for_status()
    validator.post("/v1/claims", json={"most": 1}).raise_for_status()
    [name] = held(site)
    (site.folder / "store" / "submissions" / name).write_bytes(b"rollout5")
    refused(validator.get(f"/v1/submissions/{task['id']}"), 410, "was changed on disk")
    assert validator.post("/v1/claims", json={"most": 1}).json()["claims"] == []
    assert worker_status(site)["missed"] == 0
    task_of(worker)  # the worker gets work at once


def test_while_the_bucket_does_not_answer_a_submission_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> bytes:
        raise BucketError("the bucket does not answer")

    worker, validator = site.clients["worker"], site.clients["validator"]
    task = task_of(worker)
    worker.put(task["upload_path"], content=b"rollouts").raise_for_status()
    validator.post("/v1/claims", json={"most": 1}).raise_for_status()
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "get", away)
        refused(validator.get(f"/v1/submissions/{task['id']}"), 503, "the bucket does not answer")
    assert validator.get(f"/v1/submissions/{task['id']}").content == b"rollouts"


def test_a_file_that_is_refused_after_it_was_written_is_removed(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise DatabaseFullError("the disk is full")

    for name, kept in (("w", 0), ("other", 1)):  # both submit the same file
        worker, task = worker_with_task(coordinator, name)
        with monkeypatch.context() as patched, pytest.raises(DatabaseFullError):
            patched.setattr(coordinator.pool.db.submissions, "move", full)
            asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouts")))
        assert len(list((coordinator.store.root / "submissions").iterdir())) == kept
        asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouts")))


def test_a_task_has_at_most_two_unfinished_files(coordinator: Any) -> None:
    """The newest upload replaces the others, but a replaced upload keeps its file until its sender's next piece."""
    worker, task = worker_with_task(coordinator)

    async def many() -> list[Any]:
        ended = asyncio.Event()

        async def held_up() -> bytes:
            await ended.wait()
            return b""

        sent = [asyncio.create_task(upload(coordinator, worker, task, b"", held_up)) for _ in range(5)]
        done, _ = await asyncio.wait(sent, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            await asyncio.sleep(0)
            done = {task for task in sent if task.done()}
        unfinished = len(list((coordinator.store.root / "submissions").iterdir()))
        ended.set()
        return [unfinished, *await asyncio.gather(*sent, return_exceptions=True)]

    unfinished, *outcomes = asyncio.run(many())
    refusals = [outcome for outcome in outcomes if isinstance(outcome, PoolError)]
    assert unfinished == 2 and sum(refusal.status == 429 for refusal in refusals) == 3, (
        "three uploads must get status 429, so that their senders repeat them"
    )
    [replaced] = [refusal for refusal in refusals if refusal.status != 429]
    assert "another upload" in str(replaced)
    assert len(list((coordinator.store.root / "submissions").iterdir())) == 1


def test_a_file_larger_than_its_task_needs_is_refused(coordinator: Any) -> None:
    """Files are kept for ever. A worker paid for one small task must not make the pool keep 64 MiB."""
    worker, task = worker_with_task(coordinator)
    limit_bytes = coordinator.config.submission_bytes(task.groups)
    assert coordinator.config.submission_bytes(1) < limit_bytes < coordinator.config.max_submission_bytes
    with pytest.raises(Refusal, match=f"more than {limit_bytes} bytes"):
        asyncio.run(upload(coordinator, worker, task, bytes(limit_bytes + 1), pieces(bytes(limit_bytes), b"x")))
    assert list((coordinator.store.root / "submissions").iterdir()) == []
    asyncio.run(upload(coordinator, worker, task, bytes(limit_bytes), pieces(bytes(limit_bytes))))


def test_a_file_that_announces_more_than_its_task_needs_is_refused_before_any_of_it_is_read(site: Site) -> None:
    path = task_of(site.clients["worker"])["upload_path"]
    with sending(site, "worker", "PUT", path, size_bytes=CONFIG.max_submission_bytes) as connection:
        assert b" 413 " in connection.recv(100)


def test_an_interrupted_upload_is_counted_and_not_kept(coordinator: Any) -> None:
    worker, task = worker_with_task(coordinator)
    wasted: list[int] = []
    coordinator.admission.pace.moved = lambda key, size_bytes: wasted.append(size_bytes)

    left = [bytes(1_000)]

    async def read() -> bytes:
        if not left:
            raise ConnectionResetError
        return left.pop()

    with pytest.raises(ConnectionResetError):
        asyncio.run(upload(coordinator, worker, task, bytes(2_000), read))
    assert list((coordinator.store.root / "submissions").iterdir()) == []
    asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouts")))
    assert wasted == [1_000]


# --- in a bucket -----------------------------------------------------------------------------------------------------


class FakeBucket:
    """A bucket whose objects are in memory."""

    def __init__(self) -> None:
        self.incoming: dict[str, bytes] = {}
        self.kept: set[tuple[str, str]] = set()

    def check(self, kind: str, id: str, size_bytes: int, digest: str) -> str:
        if digest not in self.incoming:
            raise StoreError("it has not arrived")
        return blake3(self.incoming[digest]).hexdigest()

    def keep(self, kind: str, id: str, digest: str, content_hash: str) -> None:
        self.kept.add((kind, content_hash))
        del self.incoming[digest]

    def drop(self, kind: str, id: str, digest: str) -> None:
        self.incoming.pop(digest, None)

    def remove(self, kind: str, content_hash: str) -> None:
        self.kept.discard((kind, content_hash))

    def grant(self, kind: str, id: str, size_bytes: int, digest: str) -> Any:
        class Made:
            url, headers = "http://bucket", dict[str, str]()

        return Made


def test_in_a_bucket_only_the_announced_file_gets_a_name(coordinator: Any) -> None:
    coordinator.pool.learning.published(PolicyVersion(version=0, digest="d" * 64, size_bytes=1))
    bucket = FakeBucket()
    transfers, kind = BucketFiles(bucket), coordinator.files.submissions  # type: ignore[arg-type]
    worker, task = worker_with_task(coordinator)
    announced = Finished(submission=task.id, hash=blake3(b"rollouts").hexdigest())
    coordinator.pool.members.heartbeat(worker.public, Heartbeat(policy_version=0, finished=announced))

    def send(data: bytes) -> None:
        file = Announced(size_bytes=len(data), sha256=sha256(data).hexdigest())
        transfers.grant(worker.public, kind, task.id, file)
        bucket.incoming[file.sha256] = data
        asyncio.run(transfers.stored(worker.public, kind, task.id, file))

    with pytest.raises(PoolError, match="not the file that was announced"):
        send(b"another")
    assert not bucket.kept and not bucket.incoming
    with pytest.raises(PoolError, match="expired, not open"):
        send(b"rollouts")
    node = coordinator.pool.db.nodes.get(worker.public)
    assert node.missed_in_a_row == 1


def test_in_a_bucket_a_file_that_takes_long_to_check_delays_only_its_sender(
    coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker that asks again and again for a file that it never uploads would make all others wait."""
    bucket, checks, honest_stored = FakeBucket(), list[str](), threading.Event()
    transfers, kind = BucketFiles(bucket), coordinator.files.submissions  # type: ignore[arg-type]
    (liar, never_sent), (honest, sent) = (worker_with_task(coordinator, name) for name in ("liar", "honest"))
    file = Announced(size_bytes=8, sha256=sha256(b"rollouts").hexdigest())

    def check(kind: str, id: str, size_bytes: int, digest: str) -> str:
        checks.append(id)
        if id == never_sent.id:
            assert honest_stored.wait(60), "the honest worker's file waited for another worker's"
        return FakeBucket.check(bucket, kind, id, size_bytes, digest)

    async def both() -> list[Any]:
        lies = [asyncio.create_task(transfers.stored(liar.public, kind, never_sent.id, file)) for _ in range(3)]
        while not checks:
            await asyncio.sleep(0.01)
        bucket.incoming[file.sha256] = b"rollouts"
        stored = await transfers.stored(honest.public, kind, sent.id, file)
        assert checks == [never_sent.id, sent.id], "a worker's files must be checked one at a time"
        honest_stored.set()
        return [stored, *await asyncio.gather(*lies, return_exceptions=True)]

    monkeypatch.setattr(bucket, "check", check)
    for worker, task in ((liar, never_sent), (honest, sent)):
        transfers.grant(worker.public, kind, task.id, file)
    stored, *refusals = asyncio.run(both())
    assert stored.size_bytes == 8 and len(bucket.kept) == 1
    assert [refusal.status for refusal in refusals] == [425] * 3


def test_in_a_bucket_a_file_larger_than_its_task_needs_gets_no_url(coordinator: Any) -> None:
    transfers, kind = BucketFiles(FakeBucket()), coordinator.files.submissions  # type: ignore[arg-type]
    worker, task = worker_with_task(coordinator)
    limit_bytes = coordinator.config.submission_bytes(task.groups)
    transfers.grant(worker.public, kind, task.id, Announced(size_bytes=limit_bytes, sha256="0" * 64))
    with pytest.raises(PoolError, match="at most") as caught:
        transfers.grant(worker.public, kind, task.id, Announced(size_bytes=limit_bytes + 1, sha256="1" * 64))
    assert caught.value.status == 413


# --- streaming ---------------------------------------------------------------------------------------------------------


def test_twenty_uploads_at_once_keep_one_piece_each_in_memory(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the bytes that were read but not yet written to a file."""
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
    assert [file.size_bytes for file in stored] == [1 << 20] * 20
    assert len(PIECE) <= peak <= 20 * len(PIECE)
    assert coordinator.pool.db.submissions.count_by_state() == {"uploaded": 20}
    assert coordinator.store.get("submissions", stored[0].hash) == PIECE * 16


def test_an_upload_with_a_changed_body_is_not_kept_and_may_be_repeated(coordinator: Coordinator) -> None:
    worker, task = worker_with_task(coordinator)
    with pytest.raises(SignatureError, match="body changed"):
        asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouTs")))
    assert list((coordinator.store.root / "submissions").iterdir()) == []
    assert asyncio.run(upload(coordinator, worker, task, b"rollouts", pieces(b"rollouts"))).size_bytes == 8


def test_a_task_that_expires_during_its_upload_keeps_no_file(coordinator: Coordinator) -> None:
    worker, task = worker_with_task(coordinator)

    async def read() -> bytes:
        coordinator.pool.db.submissions.drop_all(worker.public)
        return b""

    with pytest.raises(PoolError, match="expired, not open"):
        asyncio.run(upload(coordinator, worker, task, b"", read))
    assert list((coordinator.store.root / "submissions").iterdir()) == []


def test_a_slow_upload_ends_when_its_task_expires(coordinator: Coordinator) -> None:
    """Otherwise a worker could keep one more file in the store's folder after every expired task."""
    worker, task = worker_with_task(coordinator)
    read_pieces = 0

    async def trickling() -> bytes:
        nonlocal read_pieces
        read_pieces += 1
        if read_pieces == 3:
            coordinator.pool.db.submissions.drop_all(worker.public)
        assert read_pieces < 5, "the upload continued after its task had expired"
        return PIECE

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
