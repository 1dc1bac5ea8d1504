"""A seccomp filter with an allowlist of system calls.

Invariant: a call that is not listed fails with EPERM, including calls of future kernels. `clone3` fails with ENOSYS, so
that libc falls back to `clone`, whose flags a filter can read. Most promises hold without this filter, because
namespaces, Landlock and limits enforce them, too. In the tier `kernel`, only this filter forbids user namespaces.

x86_64 is tested. The aarch64 numbers come from the kernel's asm-generic/unistd.h and were never tested.
"""

import ctypes
import platform
import sys

from shoal.sandbox.kernel import call_prctl

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COLUMN = {"x86_64": 0, "aarch64": 1}

# name, x86_64 number, aarch64 number. Deliberately absent: calls that create sockets, except `socketpair`; calls for
# memory that RLIMIT_AS does not count (memfd_create, shmget, splice, setsockopt); flock, which could lock the host's
# files; kill by pidfd; every privileged call.
ALLOWED = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215,
brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68,
readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101,
getitimer 36 102, alarm 37 -, setitimer 38 103, getpid 39 172, sendto 44 206, recvfrom 45 207, shutdown 48 210,
getsockname 51 204, getpeername 52 205, getsockopt 55 209, exit 60 93, wait4 61 260,
waitid 247 95, kill 62 129, uname 63 160, fcntl 72 25, fsync 74 82, fdatasync 75 83,
truncate 76 45, ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -,
mkdir 83 -, rmdir 84 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -, fchmod 91 52,
umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -,
setsid 112 157, getpgid 121 155, getsid 124 156, getgroups 115 158, getresuid 118 148, getresgid 120 150,
capget 125 90, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigqueueinfo 129 138, rt_sigsuspend 130 133,
sigaltstack 131 132, utime 132 -, statfs 137 43, fstatfs 138 44, getpriority 140 141, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126, arch_prctl 158 -,
gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123, set_tid_address 218 96,
restart_syscall 219 128, fadvise64 221 223, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108,
timer_getoverrun 225 109, timer_delete 226 111, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, exit_group 231 94, epoll_create 213 -, epoll_wait 232 -, epoll_ctl 233 21,
tgkill 234 131, tkill 200 130, utimes 235 -, openat 257 56, mkdirat 258 34, newfstatat 262 -, fstatat - 79,
unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78, fchmodat 268 53,
faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, get_robust_list 274 100,
sync_file_range 277 84, utimensat 280 88, epoll_pwait 281 22, eventfd 284 -, eventfd2 290 19,
epoll_create1 291 20, dup3 292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, getcpu 309 168,
renameat2 316 276, getrandom 318 278, membarrier 324 283, copy_file_range 326 285, preadv2 327 286,
pwritev2 328 287, statx 332 291, rseq 334 293, close_range 436 436, openat2 437 437, faccessat2 439 439,
epoll_pwait2 441 441, fchmodat2 452 452, open 2 -, stat 4 -, lstat 6 -, poll 7 -, getdents64 217 61,
sendfile 40 71, setpgid 109 154
"""
# The filter checks the arguments of these calls, except `clone3`, which always fails.
CLONE, CLONE3, IOCTL, PRLIMIT64, SOCKETPAIR = (56, 220), (435, 435), (16, 29), (302, 261), (53, 199)

CLONE_THREAD = 0x10000
CLONE_NEW_ANY = 0x7E020000  # every CLONE_NEW* flag that `clone` takes
AF_UNIX = 1
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX

# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JSET|K, BPF_RET|K
LOAD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant
# Allow `clone` for threads, but not for processes or new namespaces.
THREADS_ONLY: list[Instruction] = [
    (LOAD, 0, 0, ARGUMENTS),
    (JUMP_ANY_BIT, 0, 1, CLONE_NEW_ANY),
    (RETURN, 0, 0, EPERM),
    (JUMP_ANY_BIT, 1, 0, CLONE_THREAD),
    (RETURN, 0, 0, EPERM),
    (RETURN, 0, 0, ALLOW),
]


class Filter:
    """A compiled filter; `apply` confines the calling thread and everything that it starts, permanently."""

    def __init__(self) -> None:
        instructions = assemble(platform.machine())
        packed = b"".join(
            code.to_bytes(2, sys.byteorder) + bytes((true, false)) + constant.to_bytes(4, sys.byteorder)
            for code, true, false, constant in instructions
        )
        self._instructions = ctypes.create_string_buffer(packed, len(packed))
        self._program = SockFilterProgram(len(instructions), ctypes.addressof(self._instructions))

    def apply(self) -> None:
        """Install the filter. Needs `no_new_privs`. Raise OSError."""
        call_prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(self._program))


class SockFilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def assemble(machine: str) -> list[Instruction]:
    """Return the filter for one architecture. Raise KeyError for an unknown one."""
    column = COLUMN[machine]
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),  # 32-bit calls have other numbers
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        *when(CLONE3[column], [(RETURN, 0, 0, ENOSYS)]),
        *when(CLONE[column], THREADS_ONLY),
        *when(IOCTL[column], argument_in(1, IOCTLS)),
        *when(SOCKETPAIR[column], argument_in(0, (AF_UNIX,))),
        *when(PRLIMIT64[column], argument_in(0, (0,))),  # only on the caller itself
    ]
    for number in numbers(column):
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    return [*program, (RETURN, 0, 0, EPERM)]


def numbers(column: int) -> list[int]:
    rows = [row.split() for row in ALLOWED.replace("\n", " ").split(",")]
    return [int(row[1 + column]) for row in rows if row[1 + column] != "-"]


def when(number: int, then: list[Instruction]) -> list[Instruction]:
    """Run `then` for one call number. `then` must end with a return; it may overwrite the accumulator."""
    return [(JUMP_EQUAL, 0, len(then), number), *then]


def argument_in(index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow the call if the low 32 bits of an argument are among `values`. The kernel ignores the other bits."""
    tests = [pair for value in values for pair in ((JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
    return [(LOAD, 0, 0, ARGUMENTS + 8 * index), *tests, (RETURN, 0, 0, EPERM)]
