"""The worker's loop: get a task, produce the submission, upload it. Untrusted; it makes outbound requests only.

An upload that takes longer than SHORT_S continues while the next submission is generated: the worker names the file's
hash, by which the coordinator knows that this task is done. One upload at a time.
Invariant: only the coordinator's refusal drops a submission, and none is produced before the one before the last is
uploaded. Called by `shoal worker`. It meets the rest of the system only through messages and files.
Left out: keeping a finished file over a restart.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from blake3 import blake3

from shoal.config import Config
from shoal.protocol.calling import RefusedError
from shoal.protocol.messages import Assignment, Fingerprint, Finished
from shoal.protocol.node import Node
from shoal.protocol.transfer import send_file
from shoal.rollout.produce import Producer
from shoal.shardcast import Client, FetchError, Manifest
from shoal.shardcast.fetch.follow import Follower

IDLE_S = 0.1
SHORT_S = 0.25  # an upload is waited for so long before the next task is asked for

log = logging.getLogger(__name__)


class Worker:
    def __init__(self, node: Node, producer: Producer, fingerprint: Callable[[], str] = lambda: "") -> None:
        """`fingerprint` of the loaded weights; "" if this machine's arithmetic depends on batch shapes."""
        self.node = node
        self.producer = producer
        self.fingerprint = fingerprint
        self.loaded: int | None = None
        self.folder: Path | None = None  # of that version
        self.digest = ""  # of the loaded version's manifest
        self.upload: Future[None] | None = None  # the last one, until it was waited for

    def run(self, follower: Follower, stop: threading.Event) -> str:
        """Work until the run ends, this worker is evicted or drained, or `stop` is set. Returns which."""
        while not stop.is_set():
            self.check_upload(0)
            self.take_weights(follower.newest())
            answer = self.node.beat(wants_task=True)
            if answer.state != "running":
                self.check_upload(None)
                return answer.state
            if (asked := self.node.renewal()) is not None:
                self.renew()
                self.node.renewals = asked
                continue
            if answer.assignment is None:
                self.node.doing(follower.last_error or answer.waiting_for, waiting=True)
                stop.wait(self.node.pause_s(IDLE_S))
                continue
            if answer.assignment.policy_digest != self.digest:  # its work would look like a lie
                version = answer.assignment.policy_version
                self.node.doing(f"a newer version: its weights of version {version} are not the pool's", waiting=True)
                stop.wait(self.node.pause_s(IDLE_S))
                continue
            self.node.doing(f"generating for step {answer.assignment.step}")
            log.info(
                "task %s: %d groups for step %d", answer.assignment.id, answer.assignment.groups, answer.assignment.step
            )
            data = self.producer.submission(answer.assignment)
            self.node.tokens = self.producer.tokens
            self.send(answer.assignment, data)
        self.check_upload(None)
        return "stopped"

    def send(self, assignment: Assignment, data: bytes) -> None:
        """Upload, after the upload before. Returns when it is done, or after SHORT_S."""
        self.check_upload(None)
        done: Future[None] = Future()
        self.node.finished, self.upload = Finished(submission=assignment.id, hash=blake3(data).hexdigest()), done

        def put() -> None:
            try:
                self.put(assignment, data)
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised by `check_upload`, in the loop
                done.set_exception(error)

        threading.Thread(target=put, daemon=True, name="upload").start()
        self.check_upload(SHORT_S)

    def check_upload(self, wait_s: float | None) -> None:
        """Wait for the upload under way, None: until it ends. Raises what it raised."""
        if self.upload is None:
            return
        try:
            self.upload.result(wait_s)
        except TimeoutError:
            if not self.upload.done():
                return
            raise
        self.upload = self.node.finished = None

    def take_weights(self, newest: tuple[Path, Manifest] | None) -> None:
        """Load a newer version, between two submissions."""
        if newest is None or newest[1].version == self.loaded:
            return
        folder, manifest = newest
        self.node.doing(f"loading version {manifest.version}")
        self.node.policy_version = self.producer.load(folder, manifest.version)
        self.loaded, self.digest, self.folder = manifest.version, manifest.digest, folder
        self._take_fingerprint(manifest.version)
        log.info("version %d is loaded", manifest.version)

    def renew(self) -> None:
        """Load the same weights whole from the verified files, and compute a new fingerprint.

        The coordinator asks for it when a submission was inexact: a bit of the weights in memory may have flipped.
        """
        if self.folder is None or self.loaded is None:
            return
        self.node.doing(f"loading version {self.loaded} again")
        self.producer.reload(self.folder, self.loaded)
        self._take_fingerprint(self.loaded)
        log.info("version %d is loaded again: a submission was inexact", self.loaded)

    def _take_fingerprint(self, version: int) -> None:
        value = self.fingerprint()
        self.node.fingerprint = Fingerprint(version=version, value=value) if value else None

    def put(self, assignment: Assignment, data: bytes) -> None:
        """One upload. A refusal costs this submission at most: an earlier upload of it may have arrived, unanswered."""
        try:
            send_file(self.node, assignment.upload_path, data)
            log.info("submission %s is uploaded: %d bytes", assignment.id, len(data))
        except RefusedError as refusal:
            if refusal.status != 409:
                raise
            self.node.doing(f"not uploading {assignment.id}: {refusal}")
            log.info("the pool takes no upload of submission %s now: %s", assignment.id, refusal)


def follow(node: Node, config: Config, cache: Path, publisher: str) -> Follower:
    """A follower of the relays that heartbeat answers name."""

    access = node.access(publisher, config)

    def wanted() -> int | None:
        return node.answer.newest_version if node.answer and node.answer.relays else None

    def known() -> list[str]:
        return node.answer.relays if node.answer else []

    def client() -> Client:
        relays = known()
        if not relays:  # all of them left since `wanted` was called
            raise FetchError("no relay is up")
        return Client(relays, access, cache, relays=known)

    return Follower(wanted, client)
