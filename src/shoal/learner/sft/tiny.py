"""Trains `bundled:tiny`, a character-level llama of about 3 M parameters that adds two-digit numbers, often correctly.

The loss covers only the answer's tokens. Training stops early, to leave room for reinforcement learning.
Invariant: the model never sees a sum that `tasks` holds out.
Left out: what `shoal sft` has for real data (chat templates, epochs, checkpoints).
"""

import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shoal import tasks
from shoal.config.recipe import LearnerSection, LossSection
from shoal.config.tasks import SourceSection, TaskSection
from shoal.files import commit_folder_once
from shoal.learner.policy import Policy
from shoal.model.load import save_model
from shoal.model.sources import TINY, bundled_dir
from shoal.model.tree import Pack, Tree, pack
from shoal.tasks.prompt import prompt_tokens

TINY_TASKS = TaskSection(
    sources=[SourceSection(generator="arithmetic", options={"operand_min": 10, "operand_max": 99})],
    prompt="{question}=",
    heldout=512,
)
BATCH, LR = 128, 1e-3
UNTIL_LOSS, MAX_STEPS = 0.55, 600  # smoothed loss in nats per token, at which the greedy accuracy is about 40 %

log = logging.getLogger(__name__)


def tiny() -> Path:
    """Return the folder of `bundled:tiny`; train it into the cache first if it is missing."""
    folder = bundled_dir(TINY)
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".training-") as temporary:
        start, done = Path(temporary) / "start", Path(temporary) / "done"
        save_model(_tiny_model(), _tiny_tokenizer(), start)
        settings = LearnerSection(lr=LR, warmup_steps=50, grad_clip=1.0, loss=LossSection(beta=0.0))
        policy = Policy(start, settings, "float32", "cpu", temperature=1.0)
        train(policy, TINY_TASKS, batch=BATCH, until_loss=UNTIL_LOSS, max_steps=MAX_STEPS)
        save_model(policy.model, policy.tokenizer, done)
        commit_folder_once(done, folder)
    return folder


def train(policy: Policy, section: TaskSection, *, batch: int, until_loss: float, max_steps: int) -> None:
    """Train on `batch` random training tasks per step, until the smoothed loss is below `until_loss`.

    Stop after `max_steps` steps at the latest.
    """
    task_set = tasks.load(section)
    draw = random.Random(0)
    smoothed = None

    def loss(packed: Pack) -> Tensor:
        logprobs_N, _ = policy.logprobs(packed, with_entropy=False)
        return -logprobs_N.mean()

    for step in range(max_steps):
        chosen = draw.choices(task_set.train, k=batch)
        trees = [_example(policy.tokenizer, section, task.question, task.answer) for task in chosen]
        value = policy.step(loss, [pack(trees)])["loss"]
        smoothed = value if smoothed is None else 0.9 * smoothed + 0.1 * value
        if step % 50 == 0:
            log.info("supervised step %d: loss %.2f (training stops at %.2f)", step, smoothed, until_loss)
        if smoothed < until_loss:
            return


def _example(tokenizer: Any, section: TaskSection, question: str, answer: str) -> Tree:
    task = tasks.Task(id="", question=question, answer=answer)
    answer_tokens = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Tree(prompt_tokens(tokenizer, section, task, 0), [[*answer_tokens, tokenizer.eos_token_id]])


def _tiny_model() -> Any:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def _tiny_tokenizer() -> Any:
    """Make a tokenizer with one token per printable ASCII character. Its chat template concatenates the messages."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {text: i for i, text in enumerate([*special, "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = "<bos>{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast
