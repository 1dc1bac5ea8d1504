"""Attacks on the sandbox, one test each, under every tier that promises to hold them (the table in `shoal.sandbox`).

Every attack is followed by proof that the host is unharmed: the pool's next program runs as ever, and what the attack
aimed at is as it was. A program that finds itself stopped reports so on stdout; "ESCAPED" is what none may print.
"""

import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.sandbox import TIERS, Program, ProgramLimits, Result, Sandbox, forkserver, problem
from shoal.sandbox.limits import MIB

ROOT = os.getuid() == 0
ROOM = ProgramLimits(wall_s=60.0, cpu_s=20.0)
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack is written in x86_64 numbers")


@pytest.fixture(scope="module", params=TIERS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if reason := problem(request.param):
        pytest.skip(reason)
    with Sandbox(request.param) as sandbox:
        yield sandbox


def attack(box: Sandbox, source: str, limits: ProgramLimits = ROOM) -> Result:
    result = box.run(Program(source), limits)
    assert b"ESCAPED" not in result.stdout, result
    assert_works(box)
    return result


def assert_works(box: Sandbox) -> None:
    result = box.run(Program("import os; print(os.listdir('.'), input())", b"fine"), ROOM)
    assert (result.outcome, result.stdout, result.stderr) == ("exited", b"[] fine\n", b"")


def children_of(box: Sandbox) -> list[int]:
    """All processes below the pool's servers, as the host sees them."""

    def below(pid: int) -> list[int]:
        found = []
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                found += [int(child), *below(int(child))]
        return found

    servers = [server for server in [*box._idle.queue, *box._busy] if server is not None]
    return [pid for server in servers for pid in below(server._process.pid)]


# Bombs


def test_fork_bomb_of_a_single_process(box: Sandbox) -> None:
    result = attack(box, "import os\nwhile True: os.fork()")
    assert (result.outcome, result.exit_code) == ("exited", 1) and b"PermissionError" in result.stderr


def test_thread_bomb(box: Sandbox) -> None:
    source = (
        "import threading, time\nborn = 0\n"
        "try:\n"
        "    for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); born += 1\n"
        "except RuntimeError: print(born)"
    )
    assert attack(box, source).stdout == b"8\n"


def test_memory_bomb(box: Sandbox) -> None:
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
def test_disk_bomb(box: Sandbox, written: str, error: bytes) -> None:
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
        (DEAF, 0.5),  # it ignores every signal and closes all output
    ],
    ids=["sleep", "stopping itself", "deaf"],
)
def test_what_does_not_end_is_ended(box: Sandbox, source: str, cpu_s: float) -> None:
    limits = ProgramLimits(wall_s=0.5 if cpu_s > 1 else 60.0, cpu_s=cpu_s)
    assert attack(box, source, limits).outcome == "timeout"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_flood(box: Sandbox, stream: str) -> None:
    source = f"import sys\nwhile True: print('x' * 10_000, file=sys.{stream}, flush=True)"
    result = attack(box, source, ProgramLimits(wall_s=60.0, output_bytes=50_000))
    assert (result.outcome, len(getattr(result, stream))) == ("output", 50_000)


def test_filling_the_frame_pipe_without_reading(box: Sandbox) -> None:
    source = "import channel\nwhile True: channel.send(b'x' * 1000)"
    with box.open(Program(source), ProgramLimits(wall_s=60.0, output_bytes=50_000)) as talk:
        talk.send(b"y" * 10_000_000)  # never read: waits here, and blocks nobody
        while talk.receive() is not None:
            pass
        assert talk.close().outcome == "output"
    assert_works(box)


def test_frames_that_lie_about_their_length(box: Sandbox) -> None:
    with box.open(Program("import os; os.write(4, b'\\0\\0\\0\\x10half')"), ROOM) as talk:
        assert talk.receive() is None
        assert talk.close().outcome == "exited"
    assert_works(box)


# Files and environment


READ = """
import sys
for path in PATHS:
    try: found = open(path, 'rb').read()
    except OSError: continue
    if not SECRET or SECRET in found: print('ESCAPED', path)
"""


def test_reading_the_parents_files(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    secret.chmod(0o600)
    links = [f"/proc/{os.getpid()}/root{secret}", f"/proc/{os.getpid()}/cwd", f"/proc/self/root{secret}"]
    attack(box, f"PATHS, SECRET = {[str(secret), '/etc/shadow', *links]}, b''" + READ)


FINDS_NOTHING = {
    "the host's files": """
PATHS = ["/etc/passwd", "/etc/hostname", "/etc/resolv.conf", FILE, "/proc/version", "/proc/self/status", "/sys/kernel"]
SECRET = b""
""".replace("FILE", repr(__file__))
    + READ,
    "arguments of other processes": """
import os
if os.path.exists('/proc/1') or os.path.exists('/proc/self'): print('ESCAPED')
""",
    "what else there is": """
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
    "memory outside of the address space": """
import os
try: os.memfd_create('x'); print('ESCAPED')
except PermissionError: pass
""",
    "objects of IPC": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for call in (libc.shmget, libc.semget, libc.msgget):
    if call(0x5EC2E7, 4096, 0o1777) >= 0: print('ESCAPED', call)
""",
    "the keeper's limits": """
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


@pytest.mark.parametrize("what", FINDS_NOTHING)
def test_a_program_does_not_get_at(box: Sandbox, what: str) -> None:
    result = attack(box, FINDS_NOTHING[what] + "print('tried')")
    assert result.stdout == b"tried\n", result


def test_reading_the_parents_environment(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_SECRET", "the secret")
    with Sandbox(box.tier) as fresh:  # its server was started with the secret around
        paths = f"[f'/proc/{{pid}}/environ' for pid in ['self', *range(1, 99), {os.getpid()}, {os.getppid()}]]"
        attack(fresh, f"PATHS, SECRET = {paths}, b'the secret'" + READ)
        attack(fresh, "import os, sys\nif 'secret' in repr(os.environ) + repr(sys.argv): print('ESCAPED')")


def test_writing_outside_of_scratch(box: Sandbox, tmp_path: Path) -> None:
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


def test_symlink_races_in_scratch(box: Sandbox, tmp_path: Path) -> None:
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


def test_network(box: Sandbox) -> None:
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


def test_killing_and_tracing_the_parent(box: Sandbox) -> None:
    victims = [os.getpid(), os.getppid(), *children_of(box)]
    result = attack(box, f"import os\nPIDS = [os.getppid(), 1, *{victims}]" + KILL)
    assert result.stdout == b"still here\n"


def test_killing_all_it_can_see(box: Sandbox) -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        result = attack(box, "import os\nfor _ in range(9):\n    try: os.kill(-1, 9)\n    except OSError: pass")
        assert result.outcome in ("exited", "killed") and bystander.poll() is None
        bystander.kill()


# What a program says about itself


def test_os_exit_tells_only_its_own_code(box: Sandbox) -> None:
    with box.open(Program("import os; os._exit(0)"), ROOM) as talk:
        talk.send(b"question")
        assert talk.receive() is None  # no answer counts as none, whatever the exit code
        assert talk.close().exit_code == 0
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
def test_exit_code_tricks(box: Sandbox, source: str, outcome: str, code: int) -> None:
    result = attack(box, source)
    assert (result.outcome, result.exit_code) == (outcome, code)


def test_forging_the_keepers_report(box: Sandbox) -> None:
    source = (
        "import os\n"
        "for fd in range(1024):\n"
        '    try: os.write(fd, b\'\\n{"code": 0, "timely": true, "cpu_s": 0}\\n\')\n'
        "    except OSError: pass\n"
        "os._exit(9)"
    )
    assert attack(box, source).exit_code == 9


def test_inherited_descriptors(box: Sandbox) -> None:
    source = (
        "import os\nfound = []\n"
        "for fd in range(4096):\n"
        "    try: os.fstat(fd); found.append(fd)\n"
        "    except OSError: pass\n"
        "os.write(1, repr(found).encode())"
    )
    secret = os.memfd_create("secret", 0)
    os.set_inheritable(secret, True)
    try:
        with Sandbox(box.tier) as fresh:
            assert attack(fresh, source).stdout == b"[0, 1, 2]"
            with fresh.open(Program(source), ROOM) as talk:
                assert talk.close().stdout == b"[0, 1, 2, 3, 4]"
    finally:
        os.close(secret)


def test_standard_input_cannot_be_changed_or_the_pipes_read_back(box: Sandbox) -> None:
    source = (
        "import os\n"
        "calls = [lambda: os.write(0, b'x'), lambda: os.ftruncate(0, 0), lambda: os.read(1, 1), lambda: os.read(2, 1)]\n"
        "for call in calls:\n"
        "    try: call(); print('ESCAPED')\n"
        "    except OSError: pass"
    )
    result = box.run(Program(source, b"input"), ROOM)
    assert (result.stdout, result.exit_code) == (b"", 0)


# From one run to the next


def test_nothing_of_one_run_reaches_the_next(box: Sandbox) -> None:
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
        expected = fresh.run(Program(clean), ROOM)
        fresh.run(Program(poison), ROOM)
        after = fresh.run(Program(clean), ROOM)
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
    assert box.run(Program("import uuid, json; print(json.dumps(1))"), ROOM).stdout == b"1\n"


# The kernel


CALLS = {
    "ptrace": 101, "socket": 41, "connect": 42, "bind": 49, "sendmsg": 46, "recvmsg": 47, "mount": 165, "umount2": 166,
    "unshare": 272, "setns": 308, "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "perf_event_open": 298, "userfaultfd": 323, "process_vm_readv": 310,
    "process_vm_writev": 311, "kexec_load": 246, "init_module": 175, "finit_module": 313, "pivot_root": 155, "chroot": 161,
    "swapon": 167, "reboot": 169, "personality": 135, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "memfd_create": 319, "memfd_secret": 447, "execve": 59,
    "execveat": 322, "fork": 57, "vfork": 58, "clone3": 435, "fanotify_init": 300, "inotify_init1": 294, "prctl": 157,
    "seccomp": 317, "setuid": 105, "setresuid": 117, "capset": 126, "mknod": 133, "mknodat": 259, "fsopen": 430,
    "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "iopl": 172, "modify_ldt": 154, "settimeofday": 164,
    "clock_settime": 227, "sethostname": 170, "syslog": 103, "acct": 163, "quotactl": 179, "vmsplice": 278, "splice": 275,
    "shmget": 29, "msgget": 68, "mq_open": 240, "setpriority": 141, "sched_setaffinity": 203, "landlock_restrict_self": 446,
    "a call that no kernel has yet": 900, "x32 getpid": 0x40000000 | 39,
}  # fmt: skip


@X86
def test_system_calls(box: Sandbox) -> None:
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {CALLS}.items():\n"
        "    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)\n"
        "    if (result, ctypes.get_errno()) != (-1, 38 if name == 'clone3' else 1):\n"  # ENOSYS, EPERM
        "        print('ESCAPED', name, result, ctypes.get_errno(), flush=True)\n"
        "print('all tried')"
    )
    assert attack(box, source).stdout == b"all tried\n"


@X86
def test_new_namespaces_by_clone(box: Sandbox) -> None:
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):\n"
        "    if libc.syscall(56, ctypes.c_long(flag | 17), *[ctypes.c_long(0)] * 4) >= 0: print('ESCAPED', hex(flag))"
    )
    attack(box, source)


@X86
def test_32_bit_system_calls(box: Sandbox) -> None:
    source = (
        "import ctypes, mmap\n"
        "code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20; int 0x80; ret\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(address)(), flush=True)"
    )
    assert attack(box, source).exit_code == -31  # SIGSYS


@pytest.mark.parametrize("name", ["AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE", "STACK", "MEMLOCK"])
def test_lifting_its_own_limits(box: Sandbox, name: str) -> None:
    source = (
        f"import resource\nlimit = resource.RLIMIT_{name}\nsoft, hard = resource.getrlimit(limit)\n"
        "try: resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); print('ESCAPED')\n"
        "except (ValueError, OSError): print(hard != resource.RLIM_INFINITY)"
    )
    assert attack(box, source).stdout == b"True\n"


def test_no_capability_is_left(box: Sandbox) -> None:
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "print(libc.capget(head, data), list(data))"
    )
    assert attack(box, source).stdout == b"0 [0, 0, 0, 0, 0, 0]\n"


def test_setuid_programs(box: Sandbox) -> None:
    source = (
        "import os\n"
        "for name in ('su', 'mount', 'passwd', 'sh', 'sudo', 'newuidmap'):\n"
        "  for path in ('/usr/bin/' + name, '/bin/' + name):\n"
        "    try: os.execv(path, [path])\n"
        "    except OSError: pass\n"
        "for path in ('/usr/lib', os.__file__, '/tmp', '/'):\n"
        "    if not os.statvfs(path).f_flag & os.ST_NOSUID: print('ESCAPED', path)\n"
        "print(os.getuid() == os.geteuid() != 0)"
    )
    assert attack(box, source).stdout == b"True\n"


# One wall missing


@pytest.mark.parametrize("missing", ["seccomp", "landlock"])
def test_the_other_walls_hold_without_one(box: Sandbox, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forkserver.sources()
    line = {"seccomp": "    FILTERS[0].apply()\n",
            "landlock": "    kernel.restrict_files(config[\"binds\"], config[\"devices\"], SCRATCH)\n"}[missing]  # fmt: skip
    assert line in whole["shoal.sandbox.program"]
    weakened = whole | {"shoal.sandbox.program": whole["shoal.sandbox.program"].replace(line, "")}
    monkeypatch.setattr(forkserver, "sources", lambda: weakened)
    with Sandbox(box.tier) as weak, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        source = (
            "import ctypes, os, socket\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "def tried(name, call):\n"
            "    try: result = call()\n"
            "    except OSError: return\n"
            "    if result != -1: print('ESCAPED', name, result)\n"
            f"tried('connect', lambda: socket.create_connection(('127.0.0.1', {port}), 1))\n"
            "tried('mount', lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))\n"
            "tried('remount', lambda: libc.mount(None, b'/', None, 32, None))\n"
            "tried('chroot', lambda: os.chroot('/tmp'))\n"
            "tried('parent', lambda: os.kill(os.getppid(), 0) if os.getppid() != 1 else -1)\n"
            "tried('trace', lambda: libc.ptrace(16, 1, None, None))\n"
            f"tried('host', lambda: os.kill({os.getpid()}, 0))\n"
            "tried('passwd', lambda: open('/etc/passwd'))\n"
            "tried('proc', lambda: open('/proc/1/environ'))\n"
            "tried('write', lambda: open(os.path.dirname(os.__file__) + '/x', 'w'))\n"
            "tried('root', lambda: open('/x', 'w'))\n"
            "tried('setuid', lambda: os.setuid(0))\n"
            "tried('keeper', lambda: libc.syscall(310, 1, None, 0, None, 0, 0) or -1)\n"
            "print('done')"
        )
        result = attack(weak, source)
        assert result.stdout == b"done\n", result


@X86
def test_user_namespaces_without_seccomp(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    if box.tier != "bubblewrap":
        pytest.skip(f"{box.tier} forbids them by seccomp alone")
    whole = forkserver.sources()
    weakened = {name: text.replace("    FILTERS[0]", "    0 and FILTERS[0]") for name, text in whole.items()}
    monkeypatch.setattr(forkserver, "sources", lambda: weakened)
    source = "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))"
    with Sandbox(box.tier) as weak:
        assert attack(weak, source).stdout == b"-1\n"


# The pool


def test_many_attackers_at_once(box: Sandbox) -> None:
    sources = [
        "while True: print('x' * 1000)", "import time; time.sleep(600)", "x = bytearray(1 << 40)", "import os; os._exit(0)",
        "import os; os.kill(os.getpid(), 9)", "while True: pass",
    ]  # fmt: skip
    outcomes: list[str] = []
    with Sandbox(box.tier, ProgramLimits(wall_s=2.0, cpu_s=1.0), size=3) as pool:

        def work(source: str) -> None:
            outcomes.append(pool.run(Program(source)).outcome)

        threads = [threading.Thread(target=work, args=(source,)) for source in sources * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(outcomes) == len(threads)
        assert {"killed", "memory", "exited", "timeout"} <= set(outcomes)
        for _ in range(3):
            assert_works(pool)


BECOME_PLAIN = """
import os, sys
from shoal.sandbox import launch
python, source, *needed = sys.argv[1:]
launch.reveal([path for path in (source, *needed) if not launch.enterable(path)])
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.execv(python, [python, "-S", "-c", sys.stdin.read()])
"""
PLAIN_USER = """
import os
from shoal.sandbox import ProgramLimits, Program, Sandbox, problem, SandboxError
assert os.getuid() == 65534
for tier in ("bubblewrap", "kernel"):
    if problem(tier):
        print(problem(tier))
        continue
    with Sandbox(tier) as box:
        fine = Program("print(input())", b"fine")
        assert box.run(fine).stdout == b"fine\\n"
        bomb = box.run(Program("import os\\nborn = 0\\nwhile True:\\n    if os.fork(): born += 1\\n    else: os.wait()"),
                       ProgramLimits(wall_s=1.0))
        source = "for path in '/etc/passwd', '/proc/1/environ':\\n  try: print(open(path))\\n  except OSError: pass"
        assert box.run(Program(source)).stdout == b""
        assert box.run(fine).stdout == b"fine\\n"
        print(tier, bomb.outcome, bomb.exit_code)
"""


@pytest.mark.skipif(not ROOT, reason="the other tests already run as a plain user")
def test_it_holds_for_a_plain_user_too(tmp_path: Path) -> None:
    """Also where only root may enter the folders of the interpreter and of the sources."""
    if all(map(problem, TIERS)):
        pytest.skip(problem("kernel"))
    source, needed = tmp_path / "src", [*forkserver.binds(), *filter(None, [forkserver.bwrap()])]
    shutil.copytree(Path(forkserver.__file__).parent, source / "shoal" / "sandbox", copy_function=shutil.copyfile)
    for path in (source, *source.rglob("*")):
        path.chmod(0o755)
    python = forkserver.executable()
    done = subprocess.run(
        [python, "-S", "-c", BECOME_PLAIN, python, source, *needed],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        input=PLAIN_USER,
        cwd="/",
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for tier in TIERS:
        if not problem(tier):
            assert f"{tier} exited 1" in done.stdout or f"{tier} timeout None" in done.stdout, done.stdout


def test_nothing_is_left_of_all_this(box: Sandbox) -> None:
    assert_works(box)
    assert len(children_of(box)) <= 2
    (server,) = box._idle.queue
    assert server is not None
    box.close()
