"""One pool of child processes: model-written Python where it can harm nothing, and trusted code that must end in time.

Imports nothing else of Shoal.

    pool                     warm servers, and the strongest tier here     limits     what goes in and comes out
    process, launch          a server from outside; its namespaces, bubblewrap, uid
    server, program          the server from inside: it forks each program, which binds itself (kernel, seccomp) and runs
    conversation, channel    talk to a running program                     function   call functions with plain data

    with Sandbox() as box:
        result = box.run(Program("print(input()[::-1])", stdin=b"abc"))
        result.outcome, result.stdout, result.tier        # "exited", b"cba\\n", "bubblewrap"

Expected outputs stay outside: run the program on an input, or call its functions through `open`, and compare out here.

| property | bubblewrap | kernel | rlimits |
| --- | --- | --- | --- |
| wall time, output: stopped from outside | yes | yes | yes |
| memory and CPU of each process, file size, open files | yes | yes | yes |
| no fork, or a fixed number of processes and threads | yes | yes | as root only: a fixed number |
| no descriptor, environment or argument of the parent | yes | yes | yes |
| state of one run never reaches the next process | yes | yes | yes |
| nothing outlives a run | yes | yes | unless it kills its keeper |
| the host's files cannot be read, nothing written outside of scratch | yes | yes | as root: only what every user may |
| scratch bounded as a whole | yes | yes | no, one file |
| no network, no DNS, no abstract sockets | yes | yes | no |
| own processes only: none other visible, signalled, traced | yes | yes | as root: not those of others |
| no new privileges, setuid ignored, no capability | yes | yes | no |
| system calls by list: no mount, unshare, io_uring, keyctl, ptrace, bpf, userfaultfd, clone3, memfd | yes | yes | no |
| further user namespaces forbidden by two mechanisms | yes | one | no |

A fourth tier, `plain`, is for code that the machine's owner trusts: it has the first line and the limits of CPU time
and memory, and is otherwise the user that started it, with what is installed. `Function` calls code in any tier with
plain data.

bubblewrap and kernel have the same Landlock rules, seccomp filter and limits. bubblewrap's walls are built by a program that
many eyes have read; kernel's by `launch.py`.

The same program ends alike everywhere with the same interpreter (`interpreter()`): hash seed 0, `random` seeded with 0, an
empty environment, fixed arguments, UTC. Left alone: the clock, `os.urandom`, addresses. Left out: other systems than Linux,
kernels before 5.14 (the strong tiers), installed packages but those in `packages`, GPUs; bugs of the kernel itself.
aarch64 has its numbers of calls but was never run.
"""

from shoal.sandbox.conversation import Conversation
from shoal.sandbox.function import Call, Function
from shoal.sandbox.limits import (
    PLAIN,
    TIERS,
    Budget,
    Limits,
    Outcome,
    Program,
    Result,
    SandboxError,
    StartError,
    Tier,
)
from shoal.sandbox.pool import Sandbox, best_tier, problem
from shoal.sandbox.process import interpreter

__all__ = [
    "PLAIN",
    "TIERS",
    "Budget",
    "Call",
    "Conversation",
    "Function",
    "Limits",
    "Outcome",
    "Program",
    "Result",
    "Sandbox",
    "SandboxError",
    "StartError",
    "Tier",
    "best_tier",
    "interpreter",
    "problem",
]
