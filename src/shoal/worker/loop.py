"""The worker's loop gets tasks, produces submissions and uploads them. It is untrusted and makes only outbound
requests.

    upload finished submissions in order -> load newer weights if idle -> request a task -> produce it in a thread

Up to `workers.in_flight` submissions are produced at once, and the engine decodes them in one batch. The threads that
produce submissions leave all computation to the loop's thread, which does it while it waits for them (`OneThread`). An
upload that takes longer than SHORT_S continues in the background: the worker announces the file's hash, so the
coordinator can give it the next task. Only one upload runs at a time.
Invariants: weights change only while nothing is generated. Submissions are uploaded in the order of their tasks. A
submission is dropped only if the coordinator refuses it.
A restart loses finished files that are not uploaded.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from blake3 import blake3

from shoal.config import Config
from shoal.errors import ModelError
from shoal.protocol.calling import RefusedError
from shoal.protocol.messages import Assignment, Fingerprint, Finished, HeartbeatAnswer
from shoal.protocol.node import Node
from shoal.shardcast import Client, FetchError, Manifest
from shoal.shardcast.fetch.client import Follower
from shoal.worker.produce import Producer

IDLE_S = 0.1
BUSY_S = 1.0  # time between checks of the upload while no task may be requested
FOREVER_S = 1e9
SHORT_S = 0.25  # wait this long for an upload before requesting the next task

T = TypeVar("T")
log = logging.getLogger(__name__)


class OneThread:
    """An executor that runs the jobs of all threads in the thread that created it, one at a time.

    OpenMP keeps a team of threads for each thread that computes. A second team slows both down, because GNU's OpenMP
    puts waiting threads to sleep sooner when there are more threads than cores. On two cores a worker was a third
    slower when it decoded in another thread than the one that had loaded the weights.

    Other threads may submit jobs inside the `with` block. After it, waiting and later jobs raise CancelledError.
    """

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._refuse()

    def __call__(self, job: Callable[[], T]) -> T:
        """Run a job and return its result."""
        if threading.get_ident() == self._home:
            return job()
        done: Future[T] = Future()
        self._jobs.put((job, done))
        if not self._open:
            self._refuse()
        return done.result()

    def compute_until(self, done: Future[Any], max_s: float) -> None:
        """Run other threads' jobs until `done` is set, for at most `max_s`. `wake` must be a callback of `done`."""
        end_s = time.monotonic() + max_s
        while not done.done() and (left_s := end_s - time.monotonic()) > 0:
            try:
                job, future = self._jobs.get(timeout=left_s)
            except queue.Empty:
                return
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - the thread that submitted the job raises it
                future.set_exception(error)

    def wake(self, _: object = None) -> None:
        """Make `compute_until` check its condition."""
        self._jobs.put((lambda: None, Future()))

    def _refuse(self) -> None:
        while True:
            try:
                _, future = self._jobs.get_nowait()
            except queue.Empty:
                return
            future.set_exception(CancelledError("the thread that computes has ended"))


class Worker:
    def __init__(
        self,
        node: Node,
        producer: Producer,
        fingerprint: Callable[[], str] = lambda: "",
        compute: OneThread | None = None,
    ) -> None:
        """`fingerprint`: returns the loaded weights' fingerprint, or "" if arithmetic here depends on batch shapes.

        `compute`: the executor of the engine and the producer. If it is None, they compute in the calling thread.
        """
        self.node = node
        self.producer = producer
        self.fingerprint = fingerprint
        self.compute = compute or OneThread()
        self.loaded: int | None = None
        self.folder: Path | None = None  # holds the loaded version
        self.digest = ""  # digest of the loaded version's manifest
        self.refused: tuple[int | None, str] = None, ""  # the newest version, if it cannot be used, and why
        self.working: dict[Assignment, Future[bytes]] = {}  # submissions in production, oldest first
        self.upload: Future[None] | None = None  # the upload in progress

    def run(self, follower: Follower, stop: threading.Event) -> str:
        """Work until the run ends, this worker is evicted or drained, or `stop` is set. Return the reason to stop."""
        in_flight = self.producer.config.workers.in_flight
        with ThreadPoolExecutor(in_flight, "produce") as threads, self.compute:
            while not stop.is_set():
                self.check_upload(0)
                self.deliver()
                if not self.working:
                    self.load_newer(follower.newest())
                elif len(self.working) == in_flight or self.waits_to_load(follower.newest()):
                    self.wait(BUSY_S)
                    continue
                self.node.working_on = [assignment.id for assignment in self.working]
                answer = self.node.beat(wants_task=True)
                if answer.state != "running":
                    self.check_upload(FOREVER_S)
                    return answer.state
                if not self.working and (request := self.node.renewal()) is not None:
                    # The file was produced under the old fingerprint, so it must arrive before the new one.
                    self.check_upload(FOREVER_S)
                    self.renew()
                    self.node.renewals = request
                    continue
                if answer.assignment is None or answer.assignment.policy_digest != self.digest:
                    self.idle(answer, follower, stop)
                    continue
                self.begin(answer.assignment, threads)
            self.check_upload(FOREVER_S)
        return "stopped"

    def begin(self, assignment: Assignment, threads: ThreadPoolExecutor) -> None:
        """Start producing a submission in one of these threads."""
        self.node.doing(f"generating for step {assignment.step + 1}")
        log.info("task %s: %d groups for step %d", assignment.id, assignment.groups, assignment.step + 1)
        self.working[assignment] = produced = threads.submit(self.producer.submission, assignment)
        produced.add_done_callback(self.compute.wake)

    def deliver(self) -> None:
        """Upload finished submissions, up to the first unfinished one. Raise a producer's error, unless the version's files
        cause it."""
        for assignment, produced in list(self.working.items()):
            if not produced.done():
                break
            try:
                data = produced.result()
            except ModelError as error:
                del self.working[assignment]
                self.refuse(assignment.policy_version, error)
                continue
            self.node.tokens = self.producer.tokens
            self.send(assignment, data)

    def wait(self, max_s: float) -> None:
        """Compute until the oldest submission, which must be uploaded first, is done."""
        self.compute.compute_until(next(iter(self.working.values())), max_s)

    def waits_to_load(self, newest: tuple[Path, Manifest] | None) -> bool:
        """Return whether weights must be loaded. If so, no task is requested until the current ones are finished."""
        return self.is_new(newest) or self.node.renewal() is not None

    def is_new(self, newest: tuple[Path, Manifest] | None) -> bool:
        return newest is not None and newest[1].version not in (self.loaded, self.refused[0])

    def idle(self, answer: HeartbeatAnswer, follower: Follower, stop: threading.Event) -> None:
        """Wait before the next heartbeat."""
        pause_s = self.node.pause_s(IDLE_S)
        if self.working:
            self.wait(pause_s)
            return
        why = f"weights: {follower.last_error}" if follower.last_error else self.refused[1] or answer.waiting_for
        if answer.assignment is not None:  # a validator would reject work with the loaded weights
            version = answer.assignment.policy_version
            why = f"other weights: the pool's version {version} differs from the weights loaded here"
        self.node.doing(why, waiting=True)
        stop.wait(pause_s)

    def send(self, assignment: Assignment, data: bytes) -> None:
        """Upload a submission after the previous upload has ended. Return when it is done, or after SHORT_S."""
        self.check_upload(FOREVER_S)
        done: Future[None] = Future()
        done.add_done_callback(self.compute.wake)
        del self.working[assignment]
        self.node.finished, self.upload = Finished(submission=assignment.id, hash=blake3(data).hexdigest()), done

        def upload() -> None:
            try:
                self.put(assignment, data)
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - `check_upload` raises it, in the loop
                done.set_exception(error)

        threading.Thread(target=upload, daemon=True, name="upload").start()
        self.check_upload(SHORT_S)

    def check_upload(self, wait_s: float) -> None:
        """Compute until the upload in progress ends, for at most `wait_s`. Raise its error."""
        if self.upload is None:
            return
        self.compute.compute_until(self.upload, wait_s)
        if self.upload.done():
            self.upload.result()
            self.upload = self.node.finished = None

    def load_newer(self, newest: tuple[Path, Manifest] | None) -> None:
        """Load a newer version, or refuse it and keep the loaded one. Call it only while nothing is generated."""
        if newest is None or not self.is_new(newest):
            return
        folder, manifest = newest
        self.node.doing(f"loading version {manifest.version}")
        try:
            self.node.policy_version = self.producer.load(folder, manifest.version)
        except ModelError as error:
            self.refuse(manifest.version, error)
            return
        self.refused, self.node.refused = (None, ""), ""
        self.loaded, self.digest, self.folder = manifest.version, manifest.digest, folder
        self._take_fingerprint(manifest.version)
        log.info("version %d is loaded", manifest.version)

    def refuse(self, version: int, error: ModelError) -> None:
        """Keep the version that is loaded, unless it is this one: then the worker takes no task before a newer one."""
        self.node.refuse(version, error)
        self.refused = version, f"a newer version, because it refused {self.node.refused}"
        if version == self.loaded:
            self.loaded, self.digest, self.folder, self.node.policy_version = None, "", None, None

    def renew(self) -> None:
        """Load the same weights again from the verified files, and compute a new fingerprint.

        The coordinator requests this after an inexact submission, because a bit of the weights in memory may have flipped.
        """
        if self.folder is None or self.loaded is None:
            return
        self.node.doing(f"loading version {self.loaded} again")
        self.producer.load(self.folder, self.loaded)
        self._take_fingerprint(self.loaded)
        log.info("version %d is loaded again: a submission was inexact", self.loaded)

    def _take_fingerprint(self, version: int) -> None:
        value = self.fingerprint()
        self.node.fingerprint = Fingerprint(version=version, value=value) if value else None

    def put(self, assignment: Assignment, data: bytes) -> None:
        """Upload a submission. Drop it if it is refused, because an earlier attempt may have arrived."""
        try:
            self.node.send_file(assignment.upload_path, data)
            log.info("submission %s is uploaded: %d bytes", assignment.id, len(data))
        except RefusedError as refusal:
            if refusal.status != 409:
                raise
            self.node.doing(f"not uploading {assignment.id}: {refusal}")
            log.info("the pool refused the upload of submission %s: %s", assignment.id, refusal)


def follow(node: Node, config: Config, cache: Path, publisher: str) -> Follower:
    """Return a follower that fetches the newest version from the relays named in the heartbeat answers."""
    access = node.access(publisher, config)

    def newest_version() -> int | None:
        return node.answer.newest_version if node.answer and node.answer.relays else None

    def relays() -> list[str]:
        return node.answer.relays if node.answer else []

    def client() -> Client:
        if not relays():  # all relays left after `newest_version` was called
            raise FetchError("no relay is up")
        return Client(relays(), access, cache, relays=relays)

    return Follower(newest_version, client)
