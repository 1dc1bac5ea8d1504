"""The seccomp filters of both machine types are run in a small BPF interpreter. Both must decide alike."""

import pytest

from shoal.sandbox.seccomp import ALLOW, ALLOWED, AUDIT_ARCH, COLUMN, EPERM, KILL, assemble

ENOSYS = 0x00050000 | 38
NAMED = {  # x86_64, aarch64
    "read": (0, 63), "openat": (257, 56), "exit_group": (231, 94), "futex": (202, 98),
    "clone": (56, 220), "clone3": (435, 435), "execve": (59, 221), "socket": (41, 198),
    "socketpair": (53, 199), "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97),
    "bpf": (321, 280), "keyctl": (250, 219), "io_uring_setup": (425, 425), "userfaultfd": (323, 282),
    "memfd_create": (319, 279), "ioctl": (16, 29), "prlimit64": (302, 261), "setns": (308, 268),
    "kill": (62, 129),
}  # fmt: skip
THREAD = 0x3D0F00  # the flags with which the C library calls clone to start a thread


def decide(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """Return what the kernel would do with this call."""
    program = assemble(machine)
    data = {0: number, 4: AUDIT_ARCH[machine] if arch is None else arch}
    data |= {16 + 8 * index: value & 0xFFFFFFFF for index, value in enumerate(arguments)}
    at = value = 0
    while True:
        code, true, false, constant = program[at]
        assert at + 1 + max(true, false) <= len(program) and max(true, false) < 256
        if code == 0x20:
            value, at = data.get(constant, 0), at + 1
        elif code == 0x15:
            at += 1 + (true if value == constant else false)
        elif code == 0x45:
            at += 1 + (true if value & constant else false)
        else:
            return constant


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


DANGEROUS = [
    *("execve", "socket", "ptrace", "mount", "unshare", "bpf", "keyctl", "io_uring_setup", "userfaultfd"),
    *("memfd_create", "setns"),
]


def test_ordinary_calls_are_allowed_dangerous_ones_are_not_and_some_depend_on_arguments(machine: str) -> None:
    def call(name: str, *arguments: int) -> int:
        return decide(machine, NAMED[name][COLUMN[machine]], *arguments)

    for name in ("read", "openat", "exit_group", "futex", "kill"):
        assert call(name) == ALLOW, name
    for name in DANGEROUS:
        assert call(name) == EPERM, name
    assert call("clone", THREAD) == ALLOW
    assert call("clone", 17) == EPERM
    assert [call("clone", THREAD | 1 << bit) for bit in (17, 25, 26, 27, 28, 29, 30)] == [EPERM] * 7
    assert call("clone3") == ENOSYS
    assert (call("socketpair", 1), call("socketpair", 2), call("socketpair", 16)) == (ALLOW, EPERM, EPERM)
    assert (call("ioctl", 1, 0x5401), call("ioctl", 0, 0x5412)) == (ALLOW, EPERM)  # TCGETS, TIOCSTI
    assert (call("prlimit64", 0), call("prlimit64", 1)) == (ALLOW, EPERM)


def test_a_call_of_another_machine_type_kills_the_program(machine: str) -> None:
    assert decide(machine, 0, arch=0x40000003) == KILL  # i386


def test_no_system_call_number_occurs_twice_in_the_table() -> None:
    rows = [row.split() for row in ALLOWED.replace("\n", " ").split(",")]
    assert {len(row) for row in rows} == {3}
    for column in (1, 2):
        numbers = [row[column] for row in rows if row[column] != "-"]
        assert len(numbers) == len(set(numbers))
