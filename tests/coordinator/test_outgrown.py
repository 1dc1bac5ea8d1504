"""A pool over PostgreSQL and a bucket, with real servers and HTTP. The coordinator is killed and replaced."""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from shoal.config import dumps
from shoal.config.config import Config
from shoal.config.sections import StoreSection
from shoal.coordinator.folder import KEY
from shoal.ledger.chain import verify_chain
from shoal.protocol.calling import RefusedError
from shoal.protocol.history import Status
from shoal.protocol.identity import Identity
from shoal.protocol.invite import make_invite
from shoal.protocol.messages import Batch, ClaimRequest, Claims, Ok, PolicyVersion
from shoal.protocol.node import Node
from shoal.protocol.signing import SignedAuth

from ..servers import S3_KEY, S3_SECRET, free_port, s3_server
from .support import config, verdict

pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shoal[s3]'")
from shoal.ledger.postgres import open_postgres
from shoal.ledger.table import Ledger
from shoal.store.bucket import Bucket

from .backends import schema_url

RUN = "outgrown"
PATIENCE_S = 120.0
SUBMISSION, ACCEPTED = b"a worker's rows" * 50, b"a validator's rows" * 50


SERVE = """
import sys, threading
from pathlib import Path
from shoal import config
from shoal.coordinator.http.serving import serve_forever
folder, run, port = sys.argv[1:]
serve_forever(config.load(Path(folder) / "config.toml"), run, Path(folder), int(port), threading.Event())
"""


class Machine:
    """A coordinator process with a folder of its own, which holds a copy of the pool's key."""

    def __init__(self, folder: Path, key: Path, settings: Config, port: int) -> None:
        folder.mkdir()
        shutil.copy(key, folder / KEY)
        (folder / "config.toml").write_text(dumps(settings))
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(folder), RUN, str(port)], stdout=log, stderr=log
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def settings(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
    with s3_server("rclone") as endpoint:
        store = StoreSection(url=f"s3://pool/{RUN}", endpoint=endpoint)
        pool = config(database=schema_url(postgres, str(tmp_path)))
        yield pool.model_copy(update={"store": store})


def listens(url: str) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            return httpx.get(f"{url}/healthz").status_code == 200
        except httpx.TransportError:
            time.sleep(0.05)
    return False


def test_a_coordinator_on_another_machine_continues_where_the_first_was_killed(
    settings: Config, tmp_path: Path
) -> None:
    identity, port = Identity.load_or_create(tmp_path / KEY), free_port()
    url = f"http://127.0.0.1:{port}"
    machines = [Machine(tmp_path / "a", tmp_path / KEY, settings, port)]

    def join(role: str, name: str) -> Node:
        made = make_invite(identity, url=url, run=RUN, role=role, name=name, expires_s=int(time.time()) + 600)  # type: ignore[arg-type]
        node = Node.join(made, tmp_path / name, patience_s=PATIENCE_S, stop=threading.Event())
        received = node.config()
        assert node.store.url and received.coordinator.database == "", "private fields must not be sent"
        return node

    try:
        assert listens(url)
        worker, validator, origin, learner = (join(role, role) for role in ("worker", "validator", "origin", "learner"))
        origin.post("/v1/policies", PolicyVersion(version=0, digest="d" * 64, size_bytes=1), Ok)
        worker.policy_version = 0
        tasks = []
        for number in range(2):
            task = worker.beat(wants_task=True).assignment
            assert task is not None
            data = SUBMISSION + bytes([number])
            assert worker.send_file(task.upload_path, data).size_bytes == len(data)
            tasks.append((task, data))
        with pytest.raises(RefusedError, match="not open for upload"):
            worker.send_file(tasks[0][0].upload_path, b"other rows")
        used = httpx.Request("GET", f"{url}/v1/batches/0", content=b"")
        signed = next(SignedAuth(learner.identity, RUN).auth_flow(used))
        with httpx.Client() as client:
            assert client.send(signed).status_code == 200

        machines[0].kill()
        machines.append(Machine(tmp_path / "b", tmp_path / KEY, settings, port))
        # The node repeats this request until the second coordinator answers.
        claims = validator.post("/v1/claims", ClaimRequest(most=4), Claims).claims
        assert [claim.assignment.id for claim in claims] == [task.id for task, _ in tasks]
        assert machines[1].process.poll() is None
        with httpx.Client() as client:
            assert client.send(signed).status_code == 425, "a request that the first coordinator served must be refused"
        for number, (task, data) in enumerate(tasks):
            assert validator.fetch_file(f"/v1/submissions/{task.id}", max_bytes=1 << 20) == data
            stored = validator.send_file(f"/v1/accepted/{task.id}", ACCEPTED + bytes([number]))
            file = blake3(data).hexdigest()
            signed = {"validator": validator.identity, "run": RUN, "file": file, "accepted": stored.hash}
            validator.post("/v1/verdicts", verdict(task.id, **signed), Ok)
        batch = learner.get("/v1/batches/0", Batch)
        assert (
            batch.ready and learner.fetch_file(f"/v1/accepted/{tasks[1][0].id}", max_bytes=1 << 20) == ACCEPTED + b"\1"
        )
        lost = worker.beat(wants_task=True).assignment
        assert lost is not None
        stored = worker.send_file(lost.upload_path, SUBMISSION)
        assert len(validator.post("/v1/claims", ClaimRequest(most=4), Claims).claims) == 1
        Bucket(settings.store.url, settings.store.endpoint).remove("submissions", stored.hash)
        with pytest.raises(RefusedError, match="is not in s3://pool") as caught:
            validator.fetch_file(f"/v1/submissions/{lost.id}", max_bytes=1 << 20)
        assert caught.value.status == 410
        assert not validator.post("/v1/claims", ClaimRequest(most=4), Claims).claims, "nobody can judge a lost file"
        status = Status.model_validate_json(httpx.get(f"{url}/v1/status").content)
        assert sum(node.accepted for node in status.nodes) == 2 and not status.slashed
    finally:
        for machine in machines:
            machine.kill()
    ledger = Ledger(open_postgres(settings.coordinator.database))
    kinds = [entry.kind for entry in ledger.entries()]
    assert [kinds.count(kind) for kind in ("started", "registered", "policy", "accepted")] == [2, 4, 1, 2]
    assert "accepted" in kinds[len(kinds) - kinds[::-1].index("started") :], "the second coordinator accepted no work"
    verify_chain(ledger.entries(), identity.public)
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.rglob("pool.sqlite"))
