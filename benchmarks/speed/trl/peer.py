"""One run of TRL's GRPOTrainer on prompts that Shoal exported. `__main__.py` starts it in TRL's environment.

    PYTHONPATH=src PEER/bin/python -m benchmarks.speed.trl.peer JOB.json

JOB.json holds the model, prompts, recipe and TRL's settings. Rewards come from `shoal.tasks`, as on Shoal's side. Only the
package's task code is imported, so TRL's environment keeps its own versions. The run checks that the prompts encode to the
tokens that Shoal gives its engine. It writes each step's seconds, tokens and rewards to the job's `out`. If `versions` is a
folder, it also writes the bf16 weights there every `save_every` steps, which is not timed.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from shoal import tasks
from shoal.config.tasks import TaskSection
from shoal.tasks.budget import reward
from shoal.tasks.prompt import completion_text


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    settings = dict(job["settings"])
    if settings.get("use_vllm"):
        keep_weights_loadable()
    section = TaskSection.model_validate(job["tasks"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    lines = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    for line in lines:
        if tokenizer(line["prompt"])["input_ids"] != line["tokens"]:
            raise SystemExit(f"TRL's tokens differ from Shoal's for task {line['task']}")
    model = AutoModelForCausalLM.from_pretrained(
        job["model"],
        dtype=getattr(torch, settings.pop("weights")),
        attn_implementation=settings.pop("attention", "sdpa"),
    )
    graders = tasks.Graders(section)
    source = section.sources[0].label
    steps: list[dict[str, Any]] = []
    now: dict[str, Any] = {}

    def graded(
        completion_ids: list[list[int]], task: list[str], answer: list[str], reward_name: list[str], **_: Any
    ) -> list[float]:
        """Return the rewards. TRL calls this once per step, on the whole batch."""
        batch = [
            tasks.Task(name, "", right, source, reward=by)
            for name, right, by in zip(task, answer, reward_name, strict=True)
        ]
        texts = [completion_text(tokenizer, ids) for ids in completion_ids]
        grades = [grade.score for grade in graders.grade(batch, texts)]
        now.update(
            generated_s=time.time(),
            generated_cpu_s=time.process_time(),
            completions=len(completion_ids),
            tokens=sum(map(len, completion_ids)),
            grade_mean=sum(grades) / len(grades),
        )
        return [
            reward(value, len(ids), job["target_length"], section)
            for value, ids in zip(grades, completion_ids, strict=True)
        ]

    recipe = job["recipe"]
    updates = recipe["updates"]  # a step of Shoal is this many of TRL's steps, with one batch of completions

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Time each step, without the time to write weights for the evaluation."""

        def __init__(self) -> None:
            self.off_s = 0.0  # seconds that are not timed

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % updates == 0:
                now.update(started_s=time.time(), started_cpu_s=time.process_time())

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            step, update = divmod(state.global_step, updates)
            if update:
                return
            ended_s = time.time()
            steps.append(
                {
                    "step": step,
                    "seconds": ended_s - now["started_s"],
                    "cpu_s": time.process_time() - now["started_cpu_s"],
                    "generate_s": now["generated_s"] - now["started_s"],
                    "generate_cpu_s": now["generated_cpu_s"] - now["started_cpu_s"],
                    "since_launch_s": ended_s - job["launched_s"] - self.off_s,
                    **{name: now[name] for name in ("completions", "tokens", "grade_mean")},
                }
            )
            if job["versions"] and step % job["save_every"] == 0:
                save(trainer.model, Path(job["versions"]) / f"v{step:06d}")
            self.off_s += time.time() - ended_s

    batch = recipe["group_size"] * recipe["prompts"]
    micro_batch = min(settings.pop("per_device_train_batch_size"), batch // updates)
    adapters = recipe["lora"] and LoraConfig(
        r=recipe["lora"]["rank"],
        lora_alpha=recipe["lora"]["alpha"],
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=graded,
        peft_config=adapters,
        train_dataset=Dataset.from_list(
            [{name: line[name] for name in ("prompt", "task", "answer", "reward_name")} for line in lines]
        ),
        args=GRPOConfig(
            output_dir=str(Path(job["out"]).parent / "trainer"),
            max_steps=job["steps"] * updates,
            num_generations=recipe["group_size"],
            generation_batch_size=batch,
            gradient_accumulation_steps=batch // updates // micro_batch,
            per_device_train_batch_size=micro_batch,
            max_completion_length=recipe["max_tokens"],
            temperature=recipe["temperature"],
            learning_rate=recipe["lr"],
            adam_beta1=recipe["betas"][0],
            adam_beta2=recipe["betas"][1],
            max_grad_norm=recipe["grad_clip"],
            epsilon=recipe["epsilon"],
            delta=recipe["delta"],
            beta=0.0,
            loss_type="dapo",  # averages over an update's tokens, as in Shoal
            scale_rewards="group" if recipe["normalize_std"] else "none",
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=recipe["warmup_steps"],
            use_cpu=job["device"] == "cpu",
            seed=job["seed"],
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        callbacks=[Clock()],
    )
    ready_s = time.time() - job["launched_s"]
    trainer.train()
    result = {"ready_s": ready_s, "dtype": str(next(trainer.model.parameters()).dtype), "steps": steps}
    Path(job["out"]).write_text(json.dumps(result, indent=1) + "\n")


def keep_weights_loadable() -> None:
    """Stop vLLM's CPU build from packing its weights, because TRL cannot load a step's new weights into packed ones."""
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep


def save(model: Any, folder: Path) -> None:
    """Save config and bf16 weights, with adapters merged, under the names in the folder that they were loaded from."""
    folder.mkdir(parents=True)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    changes = {
        f"{name}.weight": module.get_delta_weight("default").float()
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer)
    }
    tensors = {}
    for stored, tensor in base.state_dict().items():
        name = stored.replace(".base_layer", "")
        if ".lora_" in name or (name == "lm_head.weight" and base.config.tie_word_embeddings):
            continue
        whole = tensor.float() + changes[name] if name in changes else tensor
        tensors[name] = whole.detach().to("cpu", torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    base.config.save_pretrained(folder)


if __name__ == "__main__":
    main()
