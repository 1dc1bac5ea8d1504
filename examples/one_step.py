"""One step of Shoal in one process, top to bottom: what worker, validator and learner compute and exchange.

    python examples/one_step.py

It takes a few seconds with the 3 M parameters of bundled:tiny (trained on first use, in two minutes). It leaves out the
parts that move the same bytes between machines: HTTP, coordinator, ledger, relays. `shoal run configs/tiny.toml` has them.
"""

import tempfile
from pathlib import Path

import torch

from shoal import tasks, toploc
from shoal.config import load
from shoal.engine.protocol import Sampling
from shoal.engine.torch_engine import TorchEngine
from shoal.learner.batch import group_advantages
from shoal.learner.loss import denominator, policy_loss
from shoal.learner.policy import Policy
from shoal.learner.sft.tiny import tiny
from shoal.model.load import eos_ids, load_model
from shoal.model.logprobs import logits, token_logprobs
from shoal.model.sampling import replay_margins
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.protocol.identity import Identity
from shoal.shardcast import ShardStore, SignedManifest, public_key_hex
from shoal.shardcast.alone import publish
from shoal.shardcast.delta import Link, apply
from shoal.shardcast.files import StreamFiles
from shoal.tasks.derive import plan_groups
from shoal.tasks.prompt import completion_text, prompt_tokens

GROUPS = 8
config = load(Path("tiny"), ["learner.warmup_steps=0", "learner.lr=1e-4"])  # configs/tiny.toml
folder = Path(tempfile.mkdtemp())
worker, learner = Identity.generate(), Identity.generate()  # ed25519 keys; a node is named by its public key
task_set = tasks.load(config.tasks)

# --- the learner publishes version 0: shards in a folder, and a signed manifest with the hash of each ---------------------

policy = Policy(tiny(), config.learner, "float32", "cpu", config.sampling.temperature)
policy.write(folder / "v0")
store, learner_key = ShardStore(folder / "store"), public_key_hex(learner.private_key)
first = publish(folder / "v0", store, learner.private_key, run="example")

# --- the coordinator assigns work; tasks and seeds follow from the assignment, so a worker chooses neither ---------------

assignment = {"run": "example", "step": 0, "submission": 0, "groups": GROUPS, "policy_digest": first.digest}
assignment |= {"worker": worker.public, "nonce": "5" * 32}  # random in a pool, so nobody knows the tasks earlier
size = config.sampling.group_size
plans = plan_groups(**assignment, group_size=size, pick=task_set.pick, length_targets=[])
questions = [task_set.train[plan.task_index] for plan in plans]
prompts = [prompt_tokens(policy.tokenizer, config.tasks, task, target_length=0) for task in questions]

# --- a worker generates with seeded noise, and commits to the hidden state of each token (TOPLOC) ------------------------

engine = TorchEngine("float32")
engine.load(folder / "v0")
sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, eos_ids(folder / "v0"))


def generate(how):
    """Return what a worker submits: for each group, the tokens of one completion per seed, and their proofs."""
    groups = engine.generate(prompts, [plan.seeds for plan in plans], how)
    return [([one.tokens for one in group], toploc.build_many([one.hidden_TH for one in group])) for group in groups]


honest = generate(sampling)
greedy = generate(Sampling(0.0, sampling.max_tokens, sampling.eos_ids))  # a liar that takes the most likely tokens
with torch.no_grad():
    for weight in engine.model.parameters():  # another liar, with a cheaper model: weights of 4 bits
        scale = weight.abs().amax() / 7
        weight.copy_((weight / scale).round() * scale)
rounded = generate(sampling)

# --- a validator computes all of it again, in one forward of the claimed version -----------------------------------------

validators_model = load_model(folder / "v0")


@torch.inference_mode()
def validate(submission):
    """Return the logprobs of each group's tokens, or what is wrong. The learner gets these logprobs, never the worker's."""
    accepted = []
    for prompt, plan, (completions, proofs) in zip(prompts, plans, submission):
        packed = pack([Tree(prompt, completions)])  # the prompt is computed once for all of them
        hidden_NH = forward_hidden(validators_model, packed)
        scaled_NV = logits(validators_model, hidden_NH).float() / config.sampling.temperature
        lengths = [len(tokens) for tokens in completions]
        results = toploc.verify_many(hidden_NH.bfloat16().split(lengths), proofs)
        mismatches = max(chunk.exponent_mismatches for chunks in results for chunk in chunks)
        if mismatches > config.validator.proof_exponent_mean:
            return f"proof: {mismatches} of 128 exponents differ from those of the stated weights"
        seeds = [seed for seed, length in zip(plan.seeds, lengths) for _ in range(length)]
        positions = [at for length in lengths for at in range(length)]
        margins_N = replay_margins(scaled_NV, packed.target_N, seeds, positions)
        if margins_N.mean() > config.validator.sampling_margin_mean:
            return f"sampling: tokens are {margins_N.mean():.3f} nats from those that the seeds yield"
        accepted.append(token_logprobs(scaled_NV, packed.target_N))
    return accepted


behaviour = validate(honest)
print(f"honest  accepted\ngreedy  {validate(greedy)}\n4 bits  {validate(rounded)}")

# --- the validator also recomputes the rewards; a group whose rewards are equal teaches nothing --------------------------

rewards = []
with tasks.Graders(config.tasks) as graders:
    for task, (completions, _) in zip(questions, honest):
        texts = [completion_text(policy.tokenizer, tokens) for tokens in completions]
        rewards.append([grade.score for grade in graders.grade([task] * len(texts), texts)])
print(f"reward  {sum(map(sum, rewards)) / (GROUPS * size):.3f}")

# --- the learner: GRPO's advantages, the token-level loss over the whole batch, one update of the fp32 masters -----------

useful = [number for number, group in enumerate(rewards) if len(set(group)) > 1]
n_tokens, n_rollouts = (sum(len(of[number]) for number in useful) for of in (behaviour, rewards))
whole = denominator("grpo", n_tokens, n_rollouts, config.sampling.max_tokens)


def loss(number):
    completions, _ = honest[number]
    logp_N, _ = policy.logprobs(pack([Tree(prompts[number], completions)]))
    advantage_G = group_advantages(torch.tensor(rewards[number]), normalize_std=True)
    advantage_N = advantage_G.repeat_interleave(torch.tensor([len(tokens) for tokens in completions]))
    return policy_loss(logp_N, behaviour[number], advantage_N, denominator=whole, settings=config.learner.loss).loss


figures = policy.step(loss, useful)
print(
    f"loss    {figures['loss']:.4f}, gradient norm {figures['optim/grad_norm']:.3f}, from {len(useful)} useful groups"
)

# --- version 1 goes out as a delta: whoever has version 0 fetches only the words that changed ----------------------------

policy.write(folder / "v1")
second = publish(folder / "v1", store, learner.private_key, run="example")
print(f"delta   {second.streams['delta'].size_bytes} bytes, in full {second.size_bytes}")

# --- whoever fetches it checks the learner's signature on the manifest, then the hash of every shard ---------------------

manifest = SignedManifest.parse(store.manifest_path(second.version).read_bytes()).open(learner_key, run="example")
shards = [store.shard_path(manifest.version, "delta", shard.index) for shard in manifest.streams["delta"].entries()]
(folder / "delta").write_bytes(b"".join(path.read_bytes() for path in shards))
sizes = tuple((file.path, file.size_bytes) for file in manifest.files)
apply(folder / "v0", [Link(folder / "delta", sizes)], folder / "fetched")
assert StreamFiles(folder / "fetched", manifest.files).match(manifest.content), "the fetched files are not version 1"
print(f"fetched version {manifest.version}: every byte is what {learner_key[:16]} signed")
