"""Shoal: reinforcement learning of language models on machines nobody has to trust."""

import os

os.environ["USE_HUB_KERNELS"] = "0"  # read when transformers is imported: it would download native code and run it

__version__ = "0.2.0"
