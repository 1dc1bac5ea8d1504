"""Attacks on the sandbox under every tier that promises to withstand them (see `shoal.sandbox`).

After each attack the pool's next program must run normally and the target of the attack must be unchanged. A program prints
ESCAPED if its attack succeeds. `test_red_team_kernel` has the attacks with system calls and on limits and privileges.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.sandbox import Program, ProgramLimits, Sandbox
from shoal.sandbox.limits import MIB

from .conftest import WIDE, assert_works, attack, descendants


def processes_of(box: Sandbox) -> list[int]:
    """Return all processes below the pool's servers."""
    servers = [server for server in [*box._idle.queue, *box._busy] if server is not None]
    return [pid for server in servers for pid in descendants(server._process.pid)]


# Bombs


def test_a_program_cannot_fork(box: Sandbox) -> None:
    result = attack(box, "import os\nwhile True: os.fork()")
    assert (result.outcome, result.exit_code) == ("exited", 1) and b"PermissionError" in result.stderr


def test_a_thread_bomb_gets_eight_threads(box: Sandbox) -> None:
    source = (
        "import threading, time\nborn = 0\n"
        "try:\n"
        "    for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); born += 1\n"
        "except RuntimeError: print(born)"
    )
    assert attack(box, source).stdout == b"8\n"


def test_a_memory_bomb_stops_at_its_limit(box: Sandbox) -> None:
    result = attack(box, "x = []\nwhile True: x.append(bytearray(1 << 20))", ProgramLimits(memory_bytes=128 * MIB))
    assert result.outcome == "memory"


@pytest.mark.parametrize(
    ("written", "error"),
    [
        ("open('bomb', 'ab').write(bytes(1 << 20))", b"OSError"),
        ("open(str(n), 'wb').write(bytes(1 << 16))", b"No space left"),
        ("open(str(n), 'wb').close()", b"No space left"),
    ],
    ids=["one file", "many files", "empty files"],
)
def test_a_disk_bomb_fills_only_its_scratch_folder(box: Sandbox, written: str, error: bytes) -> None:
    result = attack(box, f"n = 0\nwhile True:\n    {written}; n += 1")
    assert result.exit_code == 1 and error in result.stderr


DEAF = """
import os, signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
os.closerange(0, 64)
while True: pass
"""


@pytest.mark.parametrize(
    ("source", "cpu_s"),
    [
        ("import time; time.sleep(10**6)", 20.0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", 20.0),
        (DEAF, 0.5),  # ignores every signal and closes all output
    ],
    ids=["sleep", "stopping itself", "deaf"],
)
def test_endless_programs_are_stopped(box: Sandbox, source: str, cpu_s: float) -> None:
    limits = ProgramLimits(wall_s=0.5 if cpu_s > 1 else 60.0, cpu_s=cpu_s)
    assert attack(box, source, limits).outcome == "timeout"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_output_flood_stops_at_its_limit(box: Sandbox, stream: str) -> None:
    source = f"import sys\nwhile True: print('x' * 10_000, file=sys.{stream}, flush=True)"
    result = attack(box, source, ProgramLimits(wall_s=60.0, output_bytes=50_000))
    assert (result.outcome, len(getattr(result, stream))) == ("output", 50_000)


def test_frames_that_a_program_does_not_read_block_nobody(box: Sandbox) -> None:
    source = "import channel\nwhile True: channel.send(b'x' * 1000)"
    with box.open(Program(source), ProgramLimits(wall_s=60.0, output_bytes=50_000)) as process:
        process.send(b"y" * 10_000_000)  # the program never reads it, so it stays in the buffer
        while process.receive() is not None:
            pass
        assert process.close().outcome == "output"
    assert_works(box)


def test_an_incomplete_frame_is_not_received(box: Sandbox) -> None:
    with box.open(Program("import os; os.write(4, b'\\0\\0\\0\\x10half')"), WIDE) as process:
        assert process.receive() is None
        assert process.close().outcome == "exited"
    assert_works(box)


# Files and environment


READ = """
import sys
for path in PATHS:
    try: data = open(path, 'rb').read()
    except OSError: continue
    if not SECRET or SECRET in data: print('ESCAPED', path)
"""


def test_the_parents_files_cannot_be_read(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    secret.chmod(0o600)
    links = [f"/proc/{os.getpid()}/root{secret}", f"/proc/{os.getpid()}/cwd", f"/proc/self/root{secret}"]
    attack(box, f"PATHS, SECRET = {[str(secret), '/etc/shadow', *links]}, b''" + READ)


UNREACHABLE = {
    "the host's files": """
PATHS = ["/etc/passwd", "/etc/hostname", "/etc/resolv.conf", FILE, "/proc/version", "/proc/self/status", "/sys/kernel"]
SECRET = b""
""".replace("FILE", repr(__file__))
    + READ,
    "arguments of other processes": """
import os
if os.path.exists('/proc/1') or os.path.exists('/proc/self'): print('ESCAPED')
""",
    "any folder": """
import os
for folder in ['/', '/root', '/home', '/etc', '/dev', '/var', '/run', '/proc', '/sys', '/mnt']:
    try: print('ESCAPED', os.listdir(folder))
    except OSError: pass
""",
    "addresses of names": """
import socket
for name in ('localhost', 'example.com', 'pypi.org'):
    try: socket.getaddrinfo(name, 80); print('ESCAPED')
    except OSError: pass
""",
    "memory outside of its address space": """
import os
try: os.memfd_create('x'); print('ESCAPED')
except PermissionError: pass
""",
    "IPC objects": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for call in (libc.shmget, libc.semget, libc.msgget):
    if call(0x5EC2E7, 4096, 0o1777) >= 0: print('ESCAPED', call)
""",
    "the supervisor's limits": """
import resource, os
for pid in (1, os.getppid()):
    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)); print('ESCAPED')
    except OSError: pass
""",
    "a program from scratch": """
import os, shutil, sys
shutil.copy(os.path.realpath(sys.executable), 'python'); os.chmod('python', 0o6755)
try: os.execv('./python', ['python', '-c', 'print("ESCAPED")'])
except OSError: pass
""",
}


@pytest.mark.parametrize("what", UNREACHABLE)
def test_a_program_cannot_reach_anything_outside(box: Sandbox, what: str) -> None:
    result = attack(box, UNREACHABLE[what] + "print('tried')")
    assert result.stdout == b"tried\n", result


def test_the_parents_environment_cannot_be_read(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_SECRET", "the secret")
    with Sandbox(box.tier) as fresh:  # its server starts with the secret in its environment
        paths = f"[f'/proc/{{pid}}/environ' for pid in ['self', *range(1, 99), {os.getpid()}, {os.getppid()}]]"
        attack(fresh, f"PATHS, SECRET = {paths}, b'the secret'" + READ)
        attack(fresh, "import os, sys\nif 'secret' in repr(os.environ) + repr(sys.argv): print('ESCAPED')")


def test_nothing_is_written_outside_the_scratch_folder(box: Sandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    folders = ["/", "/usr/lib", "/usr", "/dev", "/dev/shm", "/var/tmp", "/etc", sys.base_prefix, str(tmp_path)]
    source = (
        "import os, sys\n"
        f"for path in {[f'{folder}/sandbox-was-here' for folder in folders] + [str(victim), os.__file__]}:\n"
        "    for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):\n"
        "        try: os.open(path, flags, 0o666)\n"
        "        except OSError: continue\n"
        "        print('ESCAPED', path)\n"
    )
    attack(box, source)
    assert victim.read_text() == "as it was"
    assert not any(Path(folder, "sandbox-was-here").exists() for folder in folders)


def test_symlink_races_in_the_scratch_folder_lead_nowhere(box: Sandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    (victim / "inner" / "file").write_text("as it was")
    source = (
        "import os, threading, time\n"
        "def swap(stop=time.monotonic() + 0.5):\n"
        "    while time.monotonic() < stop:\n"
        "        try:\n"
        f"            os.symlink({str(victim)!r}, 'new'); os.rename('new', 'data')\n"
        "            os.unlink('data'); os.mkdir('data'); os.rmdir('data')\n"
        "        except OSError: pass\n"
        "threads = [threading.Thread(target=swap) for _ in range(2)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        f"os.makedirs('deep', exist_ok=True); os.symlink({str(victim)!r}, 'deep/link'); os.symlink('/', 'root')\n"
        "try: print('ESCAPED', open('deep/link/inner/file').read())\n"
        "except OSError: pass\n"
    )
    tmp_path.chmod(0o700)
    attack(box, source)
    assert (victim / "inner" / "file").read_text() == "as it was"


# Network


def test_there_is_no_network(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        source = (
            "import socket\n"
            "for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
            "    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):\n"
            "        try: socket.socket(family, kind); print('ESCAPED', family, kind)\n"
            "        except OSError: pass\n"
            f"try: socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 1); print('ESCAPED')\n"
            "except OSError: print('stopped')"
        )
        assert attack(box, source).stdout == b"stopped\n"
        with pytest.raises(TimeoutError):
            listener.accept()


# Other processes


KILL = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
for pid in PIDS:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):
        try: os.kill(pid, number)
        except OSError: continue
        if pid > 1: print('ESCAPED', pid, number)
    if libc.ptrace(16, pid, None, None) == 0: print('ESCAPED: traced', pid)
print('still here', flush=True)
"""


def test_the_parent_cannot_be_killed_or_traced(box: Sandbox) -> None:
    victims = [os.getpid(), os.getppid(), *processes_of(box)]
    result = attack(box, f"import os\nPIDS = [os.getppid(), 1, *{victims}]" + KILL)
    assert result.stdout == b"still here\n"


def test_kill_reaches_no_process_outside(box: Sandbox) -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        result = attack(box, "import os\nfor _ in range(9):\n    try: os.kill(-1, 9)\n    except OSError: pass")
        assert result.outcome in ("exited", "killed") and bystander.poll() is None
        bystander.kill()


# What a program claims about itself


def test_os_exit_does_not_count_as_an_answer(box: Sandbox) -> None:
    with box.open(Program("import os; os._exit(0)"), WIDE) as process:
        process.send(b"question")
        assert process.receive() is None  # even though the exit code is 0
        assert process.close().exit_code == 0
    assert_works(box)


@pytest.mark.parametrize(
    ("source", "outcome", "code"),
    [
        ("import atexit, os; atexit.register(os._exit, 0); 1 / 0", "exited", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", "memory", -10),
        ("raise SystemExit(True)", "exited", 1),
        ("class E(int): __and__ = lambda *a: 'x'\nraise SystemExit(E(5))", "exited", 5),
        ("class E:\n def __str__(self): raise RuntimeError\nraise SystemExit(E())", "exited", 1),
        ("import sys; sys.stdout = None; sys.stderr = 3; 1 / 0", "exited", 1),
        ("import sys, traceback; traceback.print_exception = 1; sys.stderr = 1; 1 / 0", "exited", 1),
        ("class E(SystemExit):\n @property\n def code(self): raise ValueError\nraise E", "exited", 1),
        ("import threading; threading._shutdown = lambda: 1 / 0", "exited", 0),
    ],
)
def test_exit_code_tricks_change_only_the_programs_own_result(
    box: Sandbox, source: str, outcome: str, code: int
) -> None:
    result = attack(box, source)
    assert (result.outcome, result.exit_code) == (outcome, code)


def test_the_supervisors_report_cannot_be_forged(box: Sandbox) -> None:
    source = (
        "import os\n"
        "for fd in range(1024):\n"
        '    try: os.write(fd, b\'\\n{"code": 0, "timely": true, "cpu_s": 0}\\n\')\n'
        "    except OSError: pass\n"
        "os._exit(9)"
    )
    assert attack(box, source).exit_code == 9


def test_no_descriptor_is_inherited(box: Sandbox) -> None:
    source = (
        "import os\nopened = []\n"
        "for fd in range(4096):\n"
        "    try: os.fstat(fd); opened.append(fd)\n"
        "    except OSError: pass\n"
        "os.write(1, repr(opened).encode())"
    )
    secret = os.memfd_create("secret", 0)
    os.set_inheritable(secret, True)
    try:
        with Sandbox(box.tier) as fresh:
            assert attack(fresh, source).stdout == b"[0, 1, 2]"
            with fresh.open(Program(source), WIDE) as process:
                assert process.close().stdout == b"[0, 1, 2, 3, 4]"
    finally:
        os.close(secret)


def test_standard_input_cannot_be_changed_and_the_pipes_cannot_be_read_back(box: Sandbox) -> None:
    source = (
        "import os\n"
        "calls = [lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 0), lambda: os.read(1, 1), lambda: os.read(2, 1)]\n"
        "for call in calls:\n"
        "    try: call(); print('ESCAPED')\n"
        "    except OSError: pass"
    )
    result = box.run(Program(source, b"input"), WIDE)
    assert (result.stdout, result.exit_code) == (b"", 0)


# From one run to the next


def test_no_state_of_one_run_reaches_the_next(box: Sandbox) -> None:
    poison = (
        "import builtins, json, sys, os, channel, gc, types, ctypes\n"
        "builtins.print = lambda *a, **k: os.write(1, b'POISON')\n"
        "json.loads = lambda *a: 'POISON'; json.decoder.JSONDecoder.decode = json.loads\n"
        "channel.send = channel.receive = lambda *a: b'POISON'\n"
        "sys.path[:] = ['/poison']; sys.meta_path.insert(0, 1); os.environ['POISON'] = '1'; os.umask(0o777)\n"
        "open('poison', 'w').write('x')\n"
        "for thing in gc.get_objects():\n"
        "    if isinstance(thing, dict) and 'serve_one' in thing: thing['serve_one'] = None\n"
        "    if isinstance(thing, types.FunctionType) and thing.__code__.co_filename.startswith('shoal'):\n"
        "        thing.__code__ = (lambda *a, **k: None).__code__\n"
        "ctypes.memset(id(0), 255, 8)"
    )
    clean = (
        "import json, sys, os, channel\n"
        "print(json.loads('[1]'), 'POISON' in os.environ, '/poison' in sys.path, os.listdir('.'), oct(os.umask(0)))"
    )
    with Sandbox(box.tier) as fresh:
        expected = fresh.run(Program(clean), WIDE)
        fresh.run(Program(poison), WIDE)
        after = fresh.run(Program(clean), WIDE)
    assert (after.stdout, after.stderr, after.exit_code) == (expected.stdout, b"", 0)
    assert expected.stdout.startswith(b"[1] False False []")


def test_import_hooks_change_only_their_own_process(box: Sandbox) -> None:
    source = (
        "import sys, importlib.abc\n"
        "class Hook(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Hook()); sys.modules.clear()\n"
        "import json"
    )
    attack(box, source)
    assert box.run(Program("import uuid, json; print(json.dumps(1))"), WIDE).stdout == b"1\n"


BUFFERS = """
import fcntl, socket
a, b = socket.socketpair()
try:
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
except PermissionError:
    print("no setsockopt")
try:
    fcntl.flock(a, fcntl.LOCK_EX)
except PermissionError:
    print("no flock")
"""


def test_a_program_raises_no_socket_buffer_and_locks_no_file(box: Sandbox) -> None:
    assert attack(box, BUFFERS).stdout == b"no setsockopt\nno flock\n"


FRAMES = """
import gc, sys
frame, found, seen = sys._getframe(), [], set()
while frame:
    for scope in (frame.f_locals, frame.f_globals):
        for value in list(scope.values()):
            if isinstance(value, dict):
                found += [key for key in value if key in ("binds", "bwrap", "blob", "devices", "host_uid", "control")]
    frame = frame.f_back
for value in gc.get_objects():
    if type(value) is dict and "binds" in value and "host_uid" in value:
        found.append("collected")
print(found)
"""


def test_the_frames_below_a_program_name_no_file_of_the_host(box: Sandbox) -> None:
    assert attack(box, FRAMES).stdout == b"[]\n"
