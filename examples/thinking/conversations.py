"""Sums answered after some thinking, for the warm-up of `configs/target-short.toml` and `configs/target-long.toml`.

    python examples/thinking/conversations.py configs/target-short.toml > runs/thinking.jsonl

Every prompt asks for a length, in the words of `tasks.budget`, but the length of the thinking is drawn without regard to it.
So the warm-up teaches lengths of every kind and no obedience: that is left to reinforcement learning. A thought of the tiny
model is a row of `~`. The questions are training tasks of the config, none of which is held out.
"""

import json
import random
import sys
from pathlib import Path

from shoal import config, tasks
from shoal.tasks.budget import instruction

N = 20_000
ASKED = range(2, 33)  # tokens that a prompt asks for
THOUGHT = range(0, 25)  # tokens of thinking before the answer

settings = config.load(Path(sys.argv[1])).tasks
train = tasks.load(settings).train
draw = random.Random(0)
for _ in range(N):
    task, asked, thought = draw.choice(train), draw.choice(ASKED), draw.choice(THOUGHT)
    prompt = settings.prompt.replace("{question}", task.question) + f"\n{instruction(asked)}"
    sys.stdout.write(json.dumps({"prompt": prompt, "completion": "~" * thought + task.answer}) + "\n")
