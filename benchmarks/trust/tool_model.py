"""Make a tiny model that calls a calculator, so that the attack matrix can have rows for forged tool answers.

    python -m benchmarks.trust.tool_model DIR                                                    DIR/v000000
    python -m benchmarks.trust.attacks benchmarks/trust/tool_model.toml --versions DIR \
        --n 10 --groups 2 --only honest forged_tool ...

`bundled:tiny` has no end token between two messages, so no environment can answer it. Here each message of the model ends
with an end token, and every other message with "=". Half of the training conversations call the calculator:

    12+34=   calc(12+34)<eos>   46=   46<eos>
    12+34=   46<eos>

Invariant: the model never sees a sum that the config holds out. It need not be good at sums, because the lies only need its
calls.
"""

import argparse
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal import config, tasks
from shoal.config.recipe import LearnerSection, LossSection
from shoal.config.tasks import TaskSection
from shoal.learner.policy import Policy
from shoal.model.load import load_model, load_tokenizer, save_model
from shoal.model.sources import resolve
from shoal.model.tree import Pack, Tree, pack
from shoal.tasks.prompt import prompt_tokens

TEMPLATE = (
    "<bos>{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% else %}={% endif %}{% endfor %}"
)
STEPS, BATCH, LR = 50, 16, 2e-3


def main(out: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = config.load(Path(__file__).with_suffix(".toml"))
    start = resolve(settings.model.name)
    tokenizer = load_tokenizer(start)
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as temporary:
        save_model(load_model(start, "float32", "cpu"), tokenizer, Path(temporary) / "start")
        section = LearnerSection(lr=LR, warmup_steps=5, grad_clip=1.0, loss=LossSection(beta=0.0))
        policy = Policy(Path(temporary) / "start", section, "float32", "cpu", temperature=1.0)
    train, draw = tasks.load(settings.tasks).train, random.Random(0)

    def loss(packed: Pack) -> Tensor:
        logprobs_N, _ = policy.logprobs(packed, with_entropy=False)
        return -logprobs_N.mean()

    for step in range(STEPS):
        trees = [conversation(policy.tokenizer, settings.tasks, task) for task in draw.choices(train, k=BATCH)]
        value = policy.step(loss, [pack(trees)])["loss"]
        if step % 10 == 0:
            logging.info("step %d of %d: loss %.2f", step, STEPS, value)
    save_model(policy.model, policy.tokenizer, out / "v000000")


def conversation(tokenizer: Any, section: TaskSection, task: tasks.Task) -> Tree:
    call = encoded(tokenizer, f"calc({task.question})<eos>")
    reply = encoded(tokenizer, f"{task.answer}=")
    answer = encoded(tokenizer, f"{task.answer}<eos>")
    return Tree(prompt_tokens(tokenizer, section, task, 0), [[*call, *reply, *answer]], [[len(call), len(reply)]])


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
