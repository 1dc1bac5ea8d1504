"""Write conversations for the warm-up of `configs/calculator.toml`: some call the calculator, most answer directly.

    python examples/calculator/conversations.py configs/calculator.toml > conversations.jsonl

SmolLM2-135M never calls a tool that a prompt describes. After this warm-up it sometimes does, and reinforcement learning
can strengthen what earns more. The questions are training tasks of the config, none of them held out.
"""

import json
import random
import sys
from pathlib import Path

from shoal import config, tasks

N, CALLING = 240, 0.3

settings = config.load(Path(sys.argv[1])).tasks
draw = random.Random(0)
for task in draw.sample(list(tasks.load(settings).train), N):
    messages = [
        {"role": "system", "content": settings.system},
        {"role": "user", "content": settings.prompt.replace("{question}", task.question)},
    ]
    if draw.random() < CALLING:
        messages += [
            {"role": "assistant", "content": f"calc({task.question})"},
            {"role": "user", "content": task.answer},
        ]
    messages.append({"role": "assistant", "content": task.answer})
    sys.stdout.write(json.dumps({"messages": messages}) + "\n")
