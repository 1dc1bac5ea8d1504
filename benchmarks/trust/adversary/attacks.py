"""Every attack in the attack matrix, by name, in the order of the table that `benchmarks/trust/attacks.py` prints.

    made = ATTACKS["int8_weights"](config, run, identity, TorchEngine("float32"), Lab(versions))
    made.load(versions[-1], version)
    file = made.submission(assignment)

`honest` is the control: it must always be accepted. docs/results.md lists the attacks that sometimes pass.
"""

from shoal.config import Config

from . import proofs, tokens, tolerance, turns, weights
from .lab import Attack, Lab

__all__ = ["ATTACKS", "TOOL_ATTACKS", "Attack", "Lab", "attacks_on"]

ATTACKS: dict[str, type[Attack]] = {
    "honest": Attack,
    "previous_version": weights.PreviousVersion,
    "version_5_steps_ago": weights.StaleVersion,
    "int8_weights": weights.Int8Weights,
    "int4_weights": weights.Int4Weights,
    "fp8_cache": weights.Fp8Cache,
    "fp16_cache": weights.Fp16Cache,
    "other_model": weights.OtherModel,
    "other_system_prompt": weights.OtherSystemPrompt,
    "easier_task": weights.EasierTask,
    "easier_task_retold": weights.EasierTaskRetold,
    "temperature_x0.7": tokens.Cooler,
    "temperature_x1.3": tokens.Hotter,
    "top_k_5": tokens.TopK,
    "top_p_0.9": tokens.TopP,
    "greedy": tokens.Greedy,
    "best_of_4": tokens.BestOfFour,
    "spends_tolerance": tolerance.SpendsTolerance,
    "spends_tolerance_down": tolerance.SpendsToleranceDown,
    "draft_tokens": tokens.DraftTokens,
    "truncated": tokens.Truncated,
    "padded": tokens.Padded,
    "end_forced": tokens.EndForced,
    "end_suppressed": tokens.EndSuppressed,
    "forged_logprobs": proofs.ForgedLogprobs,
    "copied": proofs.Copied,
    "replayed": proofs.Replayed,
    "other_rows_proofs": proofs.OtherRowsProofs,
    "flipped_bit": proofs.FlippedBit,
    "constant_proofs": proofs.ConstantProofs,
    "template_proofs": proofs.TemplateProofs,
    "repeated_proof": proofs.RepeatedProof,
    "null_proofs": proofs.NullProofs,
    "missing_proofs": proofs.MissingProofs,
}
TOOL_ATTACKS: dict[str, type[Attack]] = {  # for tasks that have an environment
    "forged_tool": turns.ForgedAnswer,
    "skipped_tool": turns.SkippedAnswer,
    "invented_tool": turns.InventedAnswer,
}


def attacks_on(config: Config) -> dict[str, type[Attack]]:
    """Return the attacks that a run of this config could meet."""
    return ATTACKS | TOOL_ATTACKS if config.sampling.max_turns > 1 else ATTACKS
