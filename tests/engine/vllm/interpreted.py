"""Runs a module in vLLM's Python with vLLM's Triton kernels interpreted on the CPU: `interpreted.py -P -m MODULE ARGUMENTS`.

vLLM's CPU build has its second model runner, and uses it where Triton has a backend called "cpu" (triton-cpu). This names
one, and has Triton interpret the kernels, so that the backend is never asked to compile.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends


class Interpreter:
    @classmethod
    def is_active(cls) -> bool:
        return True


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Interpreter)
flag, module, sys.argv = sys.argv[2], sys.argv[3], sys.argv[3:]
assert flag == "-m", sys.argv
runpy.run_module(module, run_name="__main__", alter_sys=True)
