"""A pool of child processes that run model-written Python in isolation, and trusted code under a deadline.

The package imports nothing else from Shoal.

    pool                  `Sandbox`: warm fork servers of one tier
    limits                programs, their limits and their results
    forkserver, launch    start a server: namespaces, bubblewrap, uid
    server, program       run inside: the server forks each program, which confines itself and then runs
    kernel, seccomp       system calls and the system call filter that confine a program
    process, channel      exchange bytes and frames with a running program
    function              call functions with plain data

    with Sandbox() as box:
        result = box.run(Program("print(input()[::-1])", stdin=b"abc"))
        result.outcome, result.stdout, result.tier        # "exited", b"cba\\n", "bubblewrap"

Keep expected outputs outside: run the program on an input, or call its functions through `open`, and compare outside.

The tiers `bubblewrap` and `kernel` both promise:

- a process outside bounds wall time, CPU time and output; Linux bounds memory, file size and open files
- a program is one process with at most eight threads beside the first; nothing outlives a run
- a program gets no descriptor, environment or argument of the parent; no state of one run reaches the next
- the host's files cannot be read; nothing can be written outside the scratch folder, whose total size is bounded
- the program has no network, DNS or abstract sockets, and cannot see, signal or trace any other process
- a program has no capability and gains no privileges; setuid is ignored
- only listed system calls work, so mount, unshare, io_uring, keyctl, ptrace, bpf, userfaultfd, clone3 and memfd fail
- a program cannot create user namespaces; two mechanisms forbid this in `bubblewrap`, one in `kernel`

Both tiers have the same Landlock rules, seccomp filter and limits. In `bubblewrap` the widely reviewed bwrap builds the
namespaces; in `kernel`, `launch.py` builds them. A third tier, `plain`, is for code that this machine's owner trusts.
It bounds wall time, output, CPU time and memory. Apart from that, the code runs as the current user with all installed
packages.

The same program gives the same result everywhere with the same interpreter (`interpreter()`): hash seed 0, `random`
seeded with 0, an empty environment, fixed arguments, UTC. Not fixed: the clock, `os.urandom`, addresses. Left out:
systems other than Linux, kernels before 5.14, installed packages, GPUs, kernel bugs. The aarch64 code has never run.
"""

from shoal.sandbox.forkserver import interpreter
from shoal.sandbox.function import CallResult, RemoteFunction
from shoal.sandbox.limits import (
    PLAIN,
    TIERS,
    Budget,
    Program,
    ProgramLimits,
    Result,
    SandboxError,
    StartError,
    Tier,
)
from shoal.sandbox.pool import Sandbox, best_tier, problem
from shoal.sandbox.process import SandboxProcess

__all__ = [
    "PLAIN",
    "TIERS",
    "Budget",
    "CallResult",
    "RemoteFunction",
    "ProgramLimits",
    "Program",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxProcess",
    "StartError",
    "Tier",
    "best_tier",
    "interpreter",
    "problem",
]
