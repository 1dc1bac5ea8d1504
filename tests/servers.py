"""Real servers that tests start: PostgreSQL, and two servers with the S3 API.

A test is skipped if its server is not installed. `make servers` installs all servers.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

UNPRIVILEGED = "nobody"  # PostgreSQL refuses to run as root
START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def postgres_programs() -> Path:
    """Return the folder of initdb and postgres. Skip the test if there is none."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'shoal[postgres]'")
    found = [Path("/usr/lib/postgresql").glob("*/bin/initdb"), map(Path, filter(None, [shutil.which("initdb")]))]
    for initdb in sorted((path for paths in found for path in paths), reverse=True):
        if (initdb.parent / "postgres").exists():
            return initdb.parent
    pytest.skip("PostgreSQL is not installed: make servers")


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Start PostgreSQL without syncing to disk. Yield the URL of its database `postgres`."""
    if url := os.environ.get("SHOAL_TEST_POSTGRES"):  # the URL of a server that is already running
        yield url
        return
    programs, port = postgres_programs(), free_port()
    user = UNPRIVILEGED if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="shoal-postgres-", dir="/tmp"))
    if user:
        shutil.chown(folder, user)
    try:
        make = [programs / "initdb", "-D", folder / "data", "-U", "shoal", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run([*make, "--locale=C"], check=True, capture_output=True, user=user, cwd=folder)
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "fsync": "off"}
        options |= {"shared_buffers": "16MB", "max_connections": 50, "full_page_writes": "off"}
        command = [programs / "postgres", "-D", folder / "data"]
        command += [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd=folder)
        try:
            wait_until_ready(server, folder / "log", "ready to accept connections")
            yield f"postgresql://shoal@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # SIGTERM waits for clients, which a failed test leaves behind
            server.wait(START_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


S3_KEY, S3_SECRET = "AKIASHOALTEST0001", "secretsecretsecret0001"


@contextlib.contextmanager
def s3_server(kind: str) -> Iterator[str]:
    """Start a server with the bucket `pool`. Yield its URL.

    Both kinds are needed. rclone checks signatures, but ignores `if-none-match` and checksums. moto handles
    `if-none-match` and checksums as S3 does, but does not check signatures.
    """
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shoal[s3]'")
    here = Path(sys.executable).parent
    name = {"rclone": "rclone", "moto": "moto_server"}[kind]
    program = next((path for path in (here / name, shutil.which(name)) if path and Path(path).exists()), None)
    if program is None:
        pytest.skip(f"{name} is not installed: make servers")
    port, folder = free_port(), Path(tempfile.mkdtemp(prefix=f"shoal-{kind}-", dir="/tmp"))
    try:
        (folder / "data" / "pool").mkdir(parents=True)
        keys = f"{S3_KEY},{S3_SECRET}"
        rclone = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, folder / "data"]
        command = rclone if kind == "rclone" else [program, "-H", "127.0.0.1", "-p", str(port)]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            wait_for_port(server, port, folder / "log")
            if kind == "moto":
                bucket = urllib.request.Request(f"http://127.0.0.1:{port}/pool", method="PUT")
                urllib.request.urlopen(bucket, timeout=START_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(START_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_port(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{server.args!r} did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def wait_until_ready(server: "subprocess.Popen[bytes]", log: Path, line: str) -> None:
    """Wait until the server has written this line to its log."""
    deadline_s = time.monotonic() + START_S
    while line not in (words := log.read_text(errors="replace")):
        if server.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{server.args!r} did not start: {words[-2000:]}")
        time.sleep(0.02)
