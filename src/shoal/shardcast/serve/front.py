"""An nginx in front of a server without access control: it sends finished shards, and passes the rest on.

    reader -> nginx -> a finished shard: from the store's folder, by sendfile
                    -> lists, manifests, shards that still arrive: `server.app`, over a socket file

Python's cost per request is what makes an origin expensive; most requests are for finished shards, which never change.
`tcp_nopush` stays off: it makes nginx take half as much CPU time again for each byte.
Invariant: nginx serves only files named like shards of versions. It ends with this process, whatever ends that.
Called by `alone`, where no reader needs a token: nginx asks nobody, so the pool's origin, which bans readers and limits
rates, is served by `server.app` alone.
Left out: TLS, limits per address, and leases for shards that nginx sent: a version stays for LEASE_S after a request for
its manifest.
Source: nginx takes listening sockets from its parent through the variable NGINX (src/core/nginx.c).
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web

from shoal.errors import ShoalError
from shoal.shardcast.serve.connections import BACKLOG, PATIENCE, bound
from shoal.shardcast.serve.log import LOG

PR_SET_PDEATHSIG = 1
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # before a fork, where nothing may be loaded
CONNECTIONS = 4096
LEASE_S = 600.0  # of a version, from a request for its manifest: nginx does not tell when it sends shards
STOP_S = 5.0

SETTINGS = """
{user}
daemon off;
worker_processes 1;
worker_rlimit_nofile {files};
pid {folder}/pid;
error_log stderr error;
events {{ worker_connections {connections}; }}
http {{
    access_log off;
    server_tokens off;
    sendfile on;
    types {{ }}
    default_type application/octet-stream;
    open_file_cache max=4096 inactive=10s;
    client_max_body_size 1k;
    client_header_timeout {headers_s}s;
    keepalive_timeout {idle_s}s;
    send_timeout {stall_s}s;
    reset_timedout_connection on;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream python {{ server unix:{folder}/python.sock; keepalive 16; }}
    server {{
        listen {address};
        location ~ "^/v[0-9]+/(full|delta)/[0-9]+\\.shard$" {{
            # nginx applies Range to HEAD, which RFC 9110 (14.2) forbids: Python answers all but GET.
            error_page 405 = @python;
            if ($request_method != GET) {{ return 405; }}
            root {store};
            add_header Cache-Control "max-age=31536000, immutable";
            try_files $uri @python;
        }}
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_buffering off;
        proxy_read_timeout {stall_s}s;
        location / {{ proxy_pass http://python; }}
        location @python {{ proxy_pass http://python; }}
    }}
}}
"""


class FrontError(ShoalError):
    """nginx could not be started, and why."""


def nginx() -> str | None:
    """The program, None if it is not installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@asynccontextmanager
async def fronted(application: web.Application, store: Path, host: str, port: int) -> AsyncIterator[int]:
    """Serves the application behind an nginx that listens on `port` (0: a free one). Yields the port. Raises FrontError,
    and OSError if the address cannot be bound."""
    program = nginx()
    if program is None:
        raise FrontError("nginx is not installed; install it (Debian: nginx-light), or serve without it")
    with tempfile.TemporaryDirectory(prefix="shoal-nginx-") as name, bound(host, port) as listening:
        folder = Path(name)
        runner = web.AppRunner(application, access_log=None, logger=LOG, shutdown_timeout=1.0)
        await runner.setup()
        process: subprocess.Popen[bytes] | None = None
        try:
            await web.UnixSite(runner, str(folder / "python.sock")).start()
            (folder / "python.sock").chmod(0o600)
            process = _started(program, folder, store, listening)
            yield int(listening.getsockname()[1])
        finally:
            if process is not None:
                _stop(process)
            await runner.cleanup()


def _started(program: str, folder: Path, store: Path, listening: socket.socket) -> subprocess.Popen[bytes]:
    host, port = listening.getsockname()[:2]
    (folder / "nginx.conf").write_text(
        SETTINGS.format(
            user=f"user {getpass.getuser()};" if os.geteuid() == 0 else "",  # its workers read what this user may
            folder=folder,
            files=2 * CONNECTIONS,
            connections=CONNECTIONS,
            headers_s=int(PATIENCE.headers_s),
            idle_s=int(PATIENCE.idle_s),
            stall_s=int(PATIENCE.stall_s),
            address=f"{f'[{host}]' if ':' in host else host}:{port}",
            store=f'"{store.resolve()}"',
        )
    )
    listening.listen(BACKLOG)
    listening.set_inheritable(True)
    command = [program, "-p", str(folder), "-e", os.devnull, "-c", str(folder / "nginx.conf")]
    environment = {"NGINX": f"{listening.fileno()};", "PATH": os.environ.get("PATH", "")}
    tested = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True, env={"PATH": environment["PATH"]})
    if tested.returncode and "bind()" not in tested.stderr:  # the address is taken: by this process
        raise FrontError(f"{program} refuses its settings: {tested.stderr.strip()}")
    return subprocess.Popen(
        command, env=environment, pass_fds=[listening.fileno()], preexec_fn=_end_with_parent, stdin=subprocess.DEVNULL
    )


def _end_with_parent() -> None:
    """In the child: it gets SIGTERM when this process ends, even by SIGKILL."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
        return
    process.kill()
    process.wait()
