"""Rollout files: workers' submissions and validators' accepted files, uploaded to the coordinator or to the pool's bucket.

    announce (size, SHA-256) -> grant -> the node's PUT to the bucket -> stored: checked, named, recorded

Invariants: only the worker with the task, or the validator with the claim, may upload or get a URL for an upload to the
bucket. A submission may be as large as its task's groups need. No file may exceed the config's limit. A file gets its
name only once the pool accepts it. So at most one file of each kind per submission is kept, and a refused
upload leaves nothing. A node may announce at most MAX_FILES different files per task, so a worker's files in the bucket
are bounded. The bytes of a failed upload count against its sender's rate. No credential leaves this process.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from aiohttp import web

from shoal.config import Config
from shoal.coordinator.database import PoolError
from shoal.coordinator.pool import Pool
from shoal.errors import check_extra
from shoal.protocol.messages import Announced, FileLink, Role, Stored, UploadGrant
from shoal.protocol.server import Admission, Answer, Read, Request, UncoveredError, body_pieces
from shoal.store.folder import BucketError, DamagedFileError, FileStore, Folder, StoreError

if TYPE_CHECKING:
    from shoal.store.bucket import Bucket

UPLOADS = 2  # at a time per submission: the newest, and an older one whose client lost its connection
TOO_LARGE = "the file has {} bytes; at most {} are allowed here"
MAX_FILES = 4  # different files per task; more than one, because a restarted worker may generate its file again


@dataclass(frozen=True)
class FileKind:
    """One kind of rollout file: the roles that send and fetch it, and the pool's functions for it."""

    name: Literal["submissions", "accepted"]
    sender: Role
    reader: Role
    may_store: Callable[[str, str, str], int]  # (key, submission, hash or "") -> most bytes; raises PoolError
    stored: Callable[[str, str, str], None]  # same arguments; records the file
    hash_of: Callable[[str], str]  # (submission) -> its file's hash, "" if it has none
    is_used: Callable[[str], bool]  # (hash) -> whether a submission has this file
    damaged: Callable[[str], None]  # (submission); called when its stored file is missing or was changed

    async def record(self, key: str, id: str, content_hash: str, remove: Callable[[str, str], None]) -> None:
        """Record a named file and remove the file that it replaces. If the pool refuses it, remove the new file."""
        before, unused = self.hash_of(id), content_hash
        try:
            self.stored(key, id, content_hash)
            unused = before
        finally:
            if unused and not self.is_used(unused):
                await asyncio.to_thread(remove, self.name, unused)


@dataclass
class AnnouncedFiles:
    """The files that a node announced for one submission, and a lock to check one of them at a time."""

    sha256s: set[str] = field(default_factory=set)
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)


class BucketFiles:
    """Files that nodes upload to the pool's bucket and fetch from it directly, by signed URLs."""

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self._announced: dict[tuple[str, str], AnnouncedFiles] = {}  # by kind and submission, until a file is stored
        self._storing = asyncio.Lock()  # one checked file at a time gets its name and its place in the database

    def grant(self, key: str, kind: FileKind, id: str, file: Announced) -> UploadGrant:
        if file.size_bytes > (limit_bytes := kind.may_store(key, id, "")):
            raise PoolError(TOO_LARGE.format(file.size_bytes, limit_bytes), 413)
        announced = self._announced.setdefault((kind.name, id), AnnouncedFiles()).sha256s
        if len(announced | {file.sha256}) > MAX_FILES:
            raise PoolError(f"{MAX_FILES} other files were announced for {id}; take a new task")
        announced.add(file.sha256)
        return self.bucket.grant(kind.name, id, file.size_bytes, file.sha256)

    async def stored(self, key: str, kind: FileKind, id: str, file: Announced) -> Stored:
        kind.may_store(key, id, "")
        announced = self._announced.get((kind.name, id))
        if announced is None or file.sha256 not in announced.sha256s:
            raise PoolError(f"the file of {id} was not announced; announce it first", 425)  # the node then starts over
        async with announced.checking:  # `check` may read a whole file; files of other submissions do not wait for it
            kind.may_store(key, id, "")
            with _starting_over():
                content_hash = await asyncio.to_thread(self.bucket.check, kind.name, id, file.size_bytes, file.sha256)
            async with self._storing:
                with _starting_over():
                    await self._name(key, kind, id, file, content_hash)
                await kind.record(key, id, content_hash, self.bucket.remove)
            self._announced.pop((kind.name, id), None)
        return Stored(size_bytes=file.size_bytes, hash=content_hash)

    async def _name(self, key: str, kind: FileKind, id: str, file: Announced, content_hash: str) -> None:
        """Give an uploaded file its name, or remove it if the pool refuses it. Raise PoolError, StoreError."""
        try:
            kind.may_store(key, id, content_hash)
        except PoolError:
            await asyncio.to_thread(self.bucket.drop, kind.name, id, file.sha256)
            raise
        await asyncio.to_thread(self.bucket.keep, kind.name, id, file.sha256, content_hash)

    def link(self, kind: FileKind, id: str) -> FileLink:
        content_hash = kind.hash_of(id)
        if not content_hash:
            raise PoolError(f"there is no {kind.name} file of {id}", 404)
        return FileLink(url=self.bucket.link(kind.name, content_hash), hash=content_hash)


class FileRoutes:
    def __init__(
        self, config: Config, pool: Pool, store: Folder, bucket: BucketFiles | None, admission: Admission
    ) -> None:
        """`bucket`: if None, this process receives and serves the files itself."""
        self.config = config
        self.store = store
        self.bucket = bucket
        self.admission, self._signed = admission, admission.signed
        # By kind and submission: an event for each upload in progress, set when a newer upload replaces it.
        self._uploads: dict[tuple[str, str], list[asyncio.Event]] = {}
        self._storing = asyncio.Lock()  # one upload at a time gets its name and its place in the database
        assigned, judged = pool.assignments, pool.judgement

        def may_store_submission(key: str, id: str, content_hash: str) -> int:
            return config.submission_bytes(assigned.may_upload(key, id, content_hash).groups)

        def may_store_accepted(key: str, id: str, content_hash: str) -> int:
            judged.may_store_accepted(key, id, content_hash)
            return config.max_submission_bytes

        self.submissions = FileKind(
            "submissions",
            sender="worker",
            reader="validator",
            may_store=may_store_submission,
            stored=assigned.uploaded,
            hash_of=lambda id: judged.hashes(id)[0],
            is_used=lambda content_hash: pool.db.submissions.has_file("submissions", content_hash),
            damaged=judged.damaged,
        )
        self.accepted = FileKind(
            "accepted",
            sender="validator",
            reader="learner",
            may_store=may_store_accepted,
            stored=judged.accepted_stored,
            hash_of=lambda id: judged.hashes(id)[1],
            is_used=lambda content_hash: pool.db.submissions.has_file("accepted", content_hash),
            damaged=lambda id: None,  # the learner trains without its groups
        )

    def routes(self) -> list[web.RouteDef]:
        routes: list[web.RouteDef] = []
        for kind in (self.submissions, self.accepted):
            routes += self._bucket_routes(self.bucket, kind) if self.bucket else self._file_routes(kind)
        return routes

    async def receive(self, request: web.Request, kind: FileKind) -> Answer:
        """Stream an upload into the store, only while its sender may store the file, and only up to the size limit."""
        id = request.match_info["id"]
        head = self.admission.admit(request, [kind.sender], self.config.max_submission_bytes)
        limit_bytes = kind.may_store(head.key, id, "")
        if (size_bytes := request.content_length or 0) > limit_bytes:
            raise UncoveredError(TOO_LARGE.format(size_bytes, limit_bytes), 413)
        with (
            self._upload(kind, id) as check_newest,
            self._counted(head.key, request.content.readany) as read,
            self.store.receive(kind.name) as file,
        ):
            size_bytes = 0
            async for piece in body_pieces(read, head, limit_bytes):
                check_newest()  # a client that lost its connection may have started a new upload
                kind.may_store(head.key, id, "")  # ends a slow upload once its sender may no longer store it
                size_bytes += len(piece)
                await asyncio.to_thread(file.write, piece)
            async with self._storing:  # otherwise uploads that end at the same time would all be kept
                check_newest()
                kind.may_store(head.key, id, file.content_hash)  # before naming, so that a refused file leaves nothing
                content_hash = await asyncio.to_thread(file.commit)
                await kind.record(head.key, id, content_hash, self.store.remove)
        return Stored(size_bytes=size_bytes, hash=content_hash)

    @contextmanager
    def _upload(self, kind: FileKind, id: str) -> Iterator[Callable[[], None]]:
        """Register an upload. Yield a check that raises PoolError once a newer upload for the same submission has started.

        Raise PoolError with status 429 if UPLOADS uploads are in progress. A replaced upload keeps its file until its
        sender's next piece arrives.
        """
        uploads, replaced = self._uploads.setdefault((kind.name, id), []), asyncio.Event()
        if len(uploads) >= UPLOADS:
            raise PoolError(f"{UPLOADS} uploads of {id} are in progress; send it again later", 429)
        for earlier in uploads:
            earlier.set()
        uploads.append(replaced)

        def check() -> None:
            if replaced.is_set():
                raise PoolError(f"another upload of {id} has started")

        try:
            yield check
        finally:
            uploads.remove(replaced)
            if not uploads:
                del self._uploads[kind.name, id]

    @contextmanager
    def _counted(self, key: str, read: Read) -> Iterator[Read]:
        """Yield a function that reads an upload. If the upload fails, what it read counts against its sender's rate."""
        read_bytes = 0

        async def read_counted() -> bytes:
            nonlocal read_bytes
            arrived = await read()
            read_bytes += len(arrived)
            return arrived

        try:
            yield read_counted
        except BaseException:
            self.admission.pace.moved(key, read_bytes)
            raise

    def _get(self, store: FileStore, kind: FileKind) -> web.RouteDef:
        """Return the route by which a node fetches a file from here."""

        async def get(request: Request) -> Answer:
            id = request.match["id"]
            try:
                return await asyncio.to_thread(store.get, kind.name, kind.hash_of(id))
            except DamagedFileError:
                kind.damaged(id)
                raise
            except BucketError as error:
                raise PoolError(str(error), 503) from error  # the node repeats its request

        return web.get(f"/v1/{kind.name}/{{id}}", self._signed(get, [kind.reader]))

    def _file_routes(self, kind: FileKind) -> list[web.RouteDef]:
        """Return the routes for a store in a folder: nodes upload and fetch files here."""

        async def put(request: web.Request) -> Answer:
            return await self.receive(request, kind)

        return [web.put(f"/v1/{kind.name}/{{id}}", self.admission.answering(put)), self._get(self.store, kind)]

    def _bucket_routes(self, bucket: BucketFiles, kind: FileKind) -> list[web.RouteDef]:
        """Return the routes for a store in a bucket: nodes get signed URLs.

        If a URL does not yield the file, they fetch it from here.
        """

        async def grant(request: Request) -> Answer:
            file = Announced.model_validate_json(request.body)
            return bucket.grant(request.key, kind, request.match["id"], file)

        async def stored(request: Request) -> Answer:
            file = Announced.model_validate_json(request.body)
            return await bucket.stored(request.key, kind, request.match["id"], file)

        async def link(request: Request) -> Answer:
            return bucket.link(kind, request.match["id"])

        path = f"/v1/{kind.name}/{{id}}"
        return [
            web.post(f"{path}/grant", self._signed(grant, [kind.sender])),
            web.post(f"{path}/stored", self._signed(stored, [kind.sender])),
            web.get(f"{path}/link", self._signed(link, [kind.reader])),
            self._get(bucket.bucket, kind),
        ]


@contextmanager
def _starting_over() -> Iterator[None]:
    """Turn a StoreError into an answer after which the node announces and uploads its file again."""
    try:
        yield
    except StoreError as error:
        raise PoolError(str(error), 425) from error


def open_bucket(config: Config) -> BucketFiles | None:
    """Return the configured bucket; None if the store is a folder. Raise StoreError if there are no credentials."""
    section = config.store
    if not section.url:
        return None
    check_extra("s3", "store.url")
    from shoal.store.bucket import Bucket

    return BucketFiles(Bucket(section.url, section.endpoint))
