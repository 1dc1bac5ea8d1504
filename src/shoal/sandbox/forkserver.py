"""Control one fork server from outside: start it, send it programs, kill it, and choose the host files that it can see.

Invariants: `kill` needs no cooperation from the server, because it signals a pidfd. Except in `plain`, Linux then also
kills every process inside. A failed start raises StartError with the reason. The visible files are the interpreter, its
library, the system's shared libraries and four devices. User files, Shoal's code and /etc are not visible, except the
loader's cache in /etc.
Left out: the program's output (`process.py`), installed packages.
"""

import contextlib
import fcntl
import json
import os
import platform
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

from shoal.sandbox.limits import PLAIN, Program, ProgramLimits, StartError
from shoal.sandbox.server import DONE, READY

START_S = 20.0
PLAIN_START_S = 120.0  # a plain server may import slow packages
HIGH_UID = 0x70000000  # no account has a uid this high
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/etc/ld.so.cache")
INSIDE = ("kernel", "seccomp", "channel", "program", "server", "launch")
BOOT = """
import json, os, sys, types
blob = json.loads(os.pread(int(sys.argv[1]), 1 << 24, 0))
for name, text in blob["modules"].items():
    parent, _, last = name.rpartition(".")
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
    if parent:
        setattr(sys.modules[parent], last, module)
sys.modules[sys.argv[2]].main(blob["config"])
"""


class ForkServer:
    def __init__(self, tier: str, preloaded: Mapping[str, str] | None = None, python: str | None = None) -> None:
        """Start a server and wait until it is ready. Raise StartError.

        `preloaded` as in `Sandbox`. `python`: the interpreter of the tier `plain`; None: this one.
        """
        self.tier = tier
        self._lock = threading.Lock()  # guards `kill`, which the pool and a caller may call at the same time
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = tier == PLAIN
        isolated = [] if plain else ["-s", "-S"]
        interpreter_path = (python or sys.executable) if plain else executable()
        parent, self._errors = os.pidfd_open(os.getpid()), os.memfd_create("errors")
        blob = os.memfd_create("server")
        try:
            with theirs:
                config = {
                    "tier": tier,
                    "plain": plain,
                    "preloaded": dict(preloaded or {}),
                    "control": theirs.fileno(),
                    "parent": parent,
                    "blob": blob,
                    "boot": BOOT,
                    "bwrap": bwrap(),
                    "binds": binds(),
                    "links": links(),
                    "devices": list(DEVICES),
                    "host_uid": HIGH_UID + random.SystemRandom().randrange(1 << 24),
                }
                write_all(blob, json.dumps({"modules": sources(), "config": config}).encode())
                self._process = subprocess.Popen(
                    [interpreter_path, *isolated, "-P", "-c", BOOT, str(blob), "shoal.sandbox.launch"],
                    env={**(os.environ if plain else {}), "PYTHONHASHSEED": "0"},
                    cwd=None if plain else "/",
                    stdin=subprocess.DEVNULL,
                    stdout=self._errors,
                    stderr=self._errors,
                    pass_fds=(theirs.fileno(), parent, blob),
                    start_new_session=True,
                )
        except OSError as error:
            self._control.close()
            os.close(self._errors)
            raise StartError(f"sandbox tier {tier} cannot start: {interpreter_path}: {error.strerror}") from error
        finally:
            os.close(parent)
            os.close(blob)
        self._server_fd = self._handshake(PLAIN_START_S if plain else START_S)

    def _handshake(self, timeout_s: float) -> int:
        self._control.settimeout(timeout_s)
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
        except TimeoutError:
            message, descriptors = b"", []
        if message != READY or len(descriptors) != 1:
            self._process.kill()
            self._process.wait()
            lines = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip().splitlines()
            self._control.close()
            os.close(self._errors)
            raise StartError(f"sandbox tier {self.tier} cannot start: {lines[-1] if lines else 'no answer'}")
        return descriptors[0]

    def start(self, program: Program, limits: ProgramLimits, ends: list[int]) -> None:
        """Send a program with its descriptors (stdout, stderr, leash and frames). The caller closes its copies."""
        request = asdict(limits) | {"source": program.source}
        payload, stdin = os.memfd_create("request"), os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            write_all(payload, json.dumps(request).encode())
            write_all(stdin, program.stdin)
            seal(stdin)
            socket.send_fds(self._control, [b"run"], [payload, stdin, *ends])
        finally:
            os.close(payload)
            os.close(stdin)

    def finished(self, timeout_s: float) -> bool:
        """Return whether the server reports within `timeout_s` that the program's supervisor has exited."""
        try:
            self._control.settimeout(timeout_s)
            return self._control.recv(64) == DONE
        except OSError:
            return False

    @property
    def dead(self) -> bool:
        if self._control.fileno() < 0:  # killed
            return True
        poll = select.poll()
        poll.register(self._server_fd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """Kill the server and everything inside, and release its resources."""
        with self._lock:
            if self._control.fileno() < 0:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._server_fd, signal.SIGKILL)
            self._control.close()
            self._process.wait()
            os.close(self._server_fd)
            os.close(self._errors)


def sources() -> dict[str, str]:
    """Return the source of the modules that run inside, by name. Shoal's folder is not visible there."""
    here = Path(__file__).parent
    inside = {f"shoal.sandbox.{name}": (here / f"{name}.py").read_text() for name in INSIDE}
    return {"shoal": "", "shoal.sandbox": ""} | inside


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def seal(descriptor: int) -> None:
    """Make the file immutable and rewind it for its reader."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(descriptor, 0, os.SEEK_SET)


def interpreter() -> str:
    """Return the version of the interpreter that runs the programs, such as `CPython 3.11.7 x86_64`."""
    return f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"


# --- host files visible in the sandbox ------------------------------------------------------------------------------


@cache
def executable() -> str:
    """Return the path of the real interpreter, which a virtual environment links to."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def binds() -> list[str]:
    """Return the files and folders to bind read-only. Omit those inside another folder of the list."""
    prefix = Path(os.path.realpath(sys.base_prefix))
    bases = dict.fromkeys(("base", "platbase", "installed_base", "installed_platbase"), str(prefix))  # not the venv
    library = [sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib")]
    paths = {executable(), str(prefix / "lib"), *map(os.path.realpath, library), *SYSTEM}
    real = sorted(path for path in paths if Path(path).exists() and not Path(path).is_symlink())
    return [path for path in real if not any(path.startswith(other + "/") for other in real)]


@cache
def links() -> list[tuple[str, str]]:
    """Return the symbolic links among the system's library folders: (path, target)."""
    return [(path, str(Path(path).readlink())) for path in SYSTEM if Path(path).is_symlink()]


def bwrap() -> str | None:
    """Return the path of the real bwrap program, or None."""
    beside = Path(sys.prefix) / "bin" / "bwrap"  # where pip installs it
    path = shutil.which("bwrap") or (str(beside) if beside.exists() else None)
    return path and os.path.realpath(path)
