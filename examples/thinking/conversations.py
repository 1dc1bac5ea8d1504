"""Write sums answered after some thinking, for the warm-up of `configs/target-short.toml` and `configs/target-long.toml`.

    python examples/thinking/conversations.py configs/target-short.toml > runs/thinking.jsonl

Every prompt asks for a length, in the words of `tasks.budget`, but the length of the thinking is drawn independently of it.
So the warm-up teaches all lengths, but not to keep to the requested one. Reinforcement learning teaches that. The tiny model
thinks by writing `~` several times. The questions are training tasks of the config, none of them held out.
"""

import json
import random
import sys
from pathlib import Path

from shoal import config, tasks
from shoal.tasks.budget import instruction

N = 20_000
TARGETS = range(2, 33)  # tokens that a prompt asks for
THOUGHT = range(0, 25)  # tokens of thinking before the answer

settings = config.load(Path(sys.argv[1])).tasks
train = tasks.load(settings).train
draw = random.Random(0)
for _ in range(N):
    task, target, thought = draw.choice(train), draw.choice(TARGETS), draw.choice(THOUGHT)
    prompt = settings.prompt.replace("{question}", task.question) + f"\n{instruction(target)}"
    sys.stdout.write(json.dumps({"prompt": prompt, "completion": "~" * thought + task.answer}) + "\n")
