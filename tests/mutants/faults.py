"""Deliberate faults, each with the few tests meant to catch it. `run` applies them one by one; a survivor is a missing test.

Invariant: the text to replace occurs exactly once in its file (`test_faults` checks it, so a change of the code shows here).
"""

from typing import NamedTuple


class Fault(NamedTuple):
    file: str  # in src/shoal
    old: str
    new: str
    tests: str  # a file in tests/
    only: str = ""  # pytest's -k

    @property
    def name(self) -> str:
        old, new = (text.strip().splitlines() or ["(gone)"] for text in (self.old, self.new))
        return f"{self.file}: {old[0][:60]} -> {new[0][:90]}"


LOOP, POLICY, CHECKPOINT, BATCH = "learner/loop.py", "learner/policy.py", "learner/checkpoint.py", "learner/batch.py"
GROUPS, LOSS, METRICS, GUARD = "learner/groups.py", "learner/loss.py", "learner/metrics.py", "learner/guard.py"
SHARE, DEAL = "learner/share.py", "learner/deal.py"
LOGPROBS, TREE, SAMPLING, HEAD = "model/logprobs.py", "model/tree.py", "model/sampling.py", "model/head.py"
OPTIMIZERS, SCHEDULE, BLOCK_MASK = "learner/optimizers.py", "learner/schedule.py", "model/block_mask.py"
MASTERS = "learner/masters.py"
CHECKS, DELTA, FORMAT = "validator/checks.py", "shardcast/format/delta.py", "shardcast/format/delta_format.py"
FIELD, PROOF, CHUNK, VERIFY = "toploc/field.py", "toploc/proof.py", "toploc/chunk.py", "toploc/verify.py"

UPDATES, LOSSES, TREES = "learner/test_updates.py", "learner/test_loss.py", "model/test_tree.py"
STREAMED = "learner/test_stream.py"
SAMPLED, JUDGED, DELTAS = "model/test_sampling.py", "validator/test_checks.py", "shardcast/test_delta.py"
SHARING, SERVED, BOARD = "coordinator/sharing.py", "coordinator/served.py", "coordinator/http/board.py"
DISCOVERY, MEMBERS = "protocol/discovery.py", "coordinator/membership/members.py"
NODES, ESCROW = "coordinator/tables/nodes.py", "coordinator/credit/escrow.py"
SHARED, FOUND = "coordinator/test_sharing.py", "protocol/test_discovery.py"
PLACES = "coordinator/membership/test_places.py"
TOPLOC, MALFORMED = "toploc/test_toploc_verify.py", "toploc/test_toploc_malformed.py"

FAULTS = [
    # --- the learner's updates
    Fault(SHARE, "n_tokens for group in self.groups)", "n_tokens for group in self.groups[:1])", UPDATES, "eight"),
    Fault(SHARE, "rewards) for group in self.groups)", "rewards) for group in self.groups[:1])", UPDATES, "eight"),
    Fault(
        SHARE,
        "n_tokens for group in self.groups)",
        "n_tokens for group in teaching(self.groups, self.settings.loss)) or 1",
        UPDATES,
        "eight",
    ),
    Fault(LOOP, "share.take(groups[number::n_updates])", "share.take(groups[0::n_updates])", UPDATES, "eight"),
    Fault(
        LOOP,
        "n_updates = min(self.config.learner.optimizer_steps_per_step, len(groups))",
        "n_updates = self.config.learner.optimizer_steps_per_step",
        UPDATES,
        "fewer",
    ),
    Fault(SHARE, " or not turn.checked", "", "learner/test_behaviour.py", "nobody_checked"),
    Fault(SHARE, "turn.seen = True", "pass", "learner/test_behaviour.py", "steps_start"),
    Fault(DEAL, "dealt[rank :: ranks.size]", "dealt[:: ranks.size]", "learner/test_deal.py", "own_rows"),
    Fault(SHARE, "if list(groups[: len(self.groups)]) != self.groups:", "if False:", STREAMED, "taken_back"),
    Fault(SHARE, "            self.policy.forget()\n", "            pass\n", STREAMED, "taken_back"),
    Fault(LOOP, "commit_folder(temporary, final)", "temporary.rename(final)", "learner/test_loop.py", "on_disk_before"),
    Fault(LOOP, "self.policy.skipped_in_row += 1", "pass", "learner/test_loop.py", "several_times_in_a_row"),
    Fault(POLICY, 'group["lr"] = self.lr', "pass", UPDATES, "adamw"),
    Fault(OPTIMIZERS, "betas=section.betas, ", "", UPDATES, "adamw"),
    Fault(OPTIMIZERS, "weight_decay=section.weight_decay, fused", "weight_decay=0.0, fused", UPDATES, "adamw"),
    Fault(OPTIMIZERS, "newton_schulz(ahead)", "ahead", "learner/test_optimizers.py", "bit_for_bit"),
    Fault(
        OPTIMIZERS,
        "section.momentum, section.weight_decay, compute",
        "0.95, section.weight_decay, compute",
        "learner/test_optimizers.py",
        "without_momentum",
    ),
    Fault(SCHEDULE, "(updates + 1) / warm_up", "updates / warm_up", "learner/test_policy.py", "warms_up"),
    Fault(SCHEDULE, "left = 1.0 - done if", "left = 1.0 if", "learner/test_schedule.py", "rate"),
    Fault(POLICY, "return rate(self.updates, self.config)", "return rate(0, self.config)", "learner/test_schedule.py"),
    Fault(POLICY, 'group["lr"] = self.lr', 'group["lr"] = self.config.lr', "learner/test_schedule.py", "move_by"),
    Fault(
        POLICY,
        "self.optimizer.step()\n        self.round()",
        "self.optimizer.step()",
        "learner/test_policy.py",
        "published_is_the_masters",
    ),
    Fault(
        MASTERS,
        "grad if master.grad is None else master.grad.add_(grad)",
        "grad",
        "learner/test_policy.py",
        "in_pieces",
    ),
    Fault(
        POLICY, "self.optimizer.zero_grad(set_to_none=True)", "pass", "learner/test_policy.py", "skipped_update_leaves"
    ),
    Fault(POLICY, "        self.before_update()\n", "", "learner/test_checkpoint.py"),
    Fault(
        POLICY,
        "self.config.grad_clip / (norm + 1e-6)",
        "1e9 / (norm + 1e-6)",
        "learner/test_policy.py",
        "before_clipping",
    ),
    Fault(POLICY, "(norm + 1e-6)) / denominator", "(norm + 1e-6))", "learner/test_policy.py", "before_clipping"),
    Fault(
        CHECKPOINT,
        "[STEP].copy_(step)",
        "[STEP].fill_(self.policy.updates)",
        "learner/test_checkpoint.py",
        "empty_updates",
    ),
    Fault(
        CHECKPOINT, "        torch.set_rng_state(tensors[RNG])\n", "", "learner/test_checkpoint.py", "random_numbers"
    ),
    Fault(
        CHECKPOINT,
        "replace(progress, trained=[*progress.trained])",
        "progress",
        "learner/test_checkpoint.py",
        "as_it_was_at_the_beginning",
    ),
    Fault(
        CHECKPOINT,
        "if moment != STEP}",
        'if moment not in (STEP, "momentum_buffer")}',
        "learner/test_optimizers.py",
        "resumed",
    ),
    Fault(BLOCK_MASK, "pairs_QK == BLOCK * BLOCK", "pairs_QK >= BLOCK", "model/test_block_mask.py", "pytorch"),
    # --- its data
    Fault(BATCH, "max(self.row_tokens, longest)", "self.row_tokens", "learner/test_loop.py", "longer_than_a_row"),
    Fault(BATCH, "row.behaviour_N.isnan()", "row.behaviour_N.isinf()", "learner/test_behaviour.py", "nobody_checked"),
    Fault(
        BATCH,
        "torch.cat(advantages).repeat_interleave(lengths)",
        "torch.cat(advantages).repeat_interleave(lengths).abs()",
        "learner/test_behaviour.py",
        "rollout_by_rollout",
    ),
    Fault(
        BATCH,
        "of_group[part.completions.start : part.completions.stop]",
        "of_group[: len(part.completions)]",
        "learner/test_policy.py",
        "in_pieces",
    ),
    Fault(
        GROUPS,
        "step - file.header.policy_version > self.config.coordinator.async_level",
        "step - file.header.policy_version > self.config.coordinator.async_level + 1",
        "learner/test_groups.py",
        "beyond_the_async_level",
    ),
    Fault(GROUPS, "if header.signer not in validators:", "if False:", "learner/test_groups.py", "left_out"),
    Fault(
        GROUPS,
        "if group.checked and len(wrong):",
        "if len(wrong):",
        "learner/test_groups.py",
        "nobody_checked",
    ),
    Fault(
        GROUPS,
        "if not abs(value) <= LARGEST_REWARD:",
        "if abs(value) > LARGEST_REWARD:",
        "learner/test_groups.py",
        "impossible_reward",
    ),
    Fault(GROUPS, "checked=file.header.prefilled,", "checked=True,", "learner/test_groups.py", "nobody_checked"),
    # --- the loss
    Fault(LOSS, "bounded_N = ratio_N.clamp(max=delta) * advantage_N", "bounded_N = ratio_N * advantage_N", LOSSES),
    Fault(LOSS, "torch.minimum(bounded_N, clipped_N)", "torch.maximum(bounded_N, clipped_N)", LOSSES),
    Fault(LOSS, "return float(max_tokens * n_rollouts)", "return float(n_tokens)", LOSSES),
    Fault(
        LOSS, "loss_N = loss_N - settings.entropy * entropy_N", "loss_N = loss_N + settings.entropy * entropy_N", LOSSES
    ),
    Fault(LOSS, "kl_N = k3(logp_N, reference_N)", "kl_N = k3(reference_N, logp_N)", LOSSES),
    Fault(LOSS, "torch.exp(drift_N.clamp(max=MAX_LOG_RATIO))", "torch.exp(drift_N)", LOSSES),
    Fault(
        LOSS,
        "low_N = (advantage_N < 0) & (moved_N < -threshold)",
        "low_N = (advantage_N < 0) & (moved_N < threshold)",
        LOSSES,
    ),
    Fault(GUARD, "if not math.isfinite(value):", "if math.isnan(value):", "learner/test_guard.py"),
    Fault(
        GUARD,
        "if skipped_in_row >= settings.max_skips:",
        "if skipped_in_row > settings.max_skips:",
        "learner/test_guard.py",
    ),
    Fault(METRICS, "2.0 * (shape.body * (prompt + length)", "2.0 * (shape.body * length", "learner/test_metrics.py"),
    # --- the model
    Fault(LOGPROBS, "if how.temperature != 1.0:", "if False:", "model/test_logprobs.py"),
    Fault(LOGPROBS, "(grad_C / how.temperature for grad_C", "(grad_C for grad_C", "model/test_logprobs.py"),
    Fault(
        LOGPROBS,
        "                grad_RV.mul_(slope)\n",
        "                pass\n",
        "model/test_support.py",
        "gradients_on_the_slower",
    ),
    Fault(
        HEAD,
        "torch.tanh(scaled_NV / self.cap) * self.cap",
        "scaled_NV.clamp(-self.cap, self.cap)",
        "model/test_support.py",
        "gradients_on_the_slower",
    ),
    Fault(TREE, "np.arange(prompt, prompt + length)", "np.arange(length)", TREES),
    Fault(TREE, "np.where(own > 0, at + own - 1, last_of_prompt)", "at + own - 1", TREES),
    Fault(
        "model/attention.py",
        "merged_Ch = torch.logaddexp(own_Ch, other_Ch)",
        "merged_Ch = torch.maximum(own_Ch, other_Ch)",
        TREES,
    ),
    Fault(
        "model/rows.py",
        "hidden_LH if number == 0 else hidden_LH[len(prompt) :]",
        "hidden_LH[len(prompt) * (number > 0) :].roll(1, 0)",
        "model/test_support.py",
        "gradients_on_the_slower",
    ),
    Fault("model/adapters.py", "alpha=self.scale", "alpha=1.0", "learner/test_lora.py", "adds_its_product"),
    Fault("model/positions.py", "if longest > most:", "if longest > most + 1:", "model/test_support.py", "rope_that"),
    # --- sampling
    Fault(SAMPLING, "(np.asarray(positions, np.uint64) + np.uint64(1))", "np.uint64(1)", SAMPLED),
    Fault(SAMPLING, "score_C += scaled.ravel()[flat_C]", "pass", SAMPLED),
    Fault(
        SAMPLING,
        "gumbel_noise(keys_N, given_N).numpy() - LARGEST_NOISE",
        "gumbel_noise(keys_N, given_N).numpy() - 1.0",
        SAMPLED,
    ),
    Fault(SAMPLING, r'\n{rollout}" + (f"\n{nonce}"', r'\n0" + (f"\n{nonce}"', SAMPLED),
    Fault(SAMPLING, "uniform.log_().neg_().log_().neg_()", "uniform.log_().neg_().log_()", SAMPLED),
    # --- the validator
    Fault(CHECKS, "if far == 0 and beyond <= allowed", "if beyond <= allowed", JUDGED),
    Fault(CHECKS, "mean <= limits.sampling_margin_mean:", "True:", JUDGED),
    Fault(CHECKS, "if error <= rules.limits(case).logprob_error_mean:", "if True:", JUDGED),
    Fault(
        CHECKS,
        "likely_N = prefill.logprobs_N.exp() > limits.eos_probability",
        "likely_N = prefill.logprobs_N.exp() >= 0",
        JUDGED,
    ),
    Fault(CHECKS, "if not failed and exponents", "if exponents", JUDGED),
    Fault(
        CHECKS,
        "if not all(0 <= token < vocabulary for token in row.tokens):",
        "if not all(0 <= token <= vocabulary for token in row.tokens):",
        JUDGED,
    ),
    Fault(CHECKS, "if any(token in rules.eos_ids for token in row.tokens[start : end - 1]):", "if False:", JUDGED),
    Fault(CHECKS, "and not abs(row.reward - own) <= _tolerance(own)", "and abs(row.reward - own) > 1e9", JUDGED),
    Fault(CHECKS, "if case.header.prompts != prompts_digest(case.prompts):", "if False:", JUDGED),
    Fault(
        CHECKS,
        "if header.signer != case.worker or header.worker != case.worker:",
        "if header.worker != case.worker:",
        JUDGED,
    ),
    # --- proofs
    Fault(FIELD, "PRIME = 65497", "PRIME = 65521", "toploc/test_toploc_format.py"),
    Fault(PROOF, 'astype(">u2")', 'astype("<u2")', "toploc/test_toploc_format.py"),
    Fault(PROOF, "if not MODULUS_MIN <= modulus <= PRIME:", "if not 1 <= modulus <= PRIME:", MALFORMED),
    Fault(PROOF, "if largest >= PRIME:", "if largest > PRIME:", MALFORMED),
    Fault(
        CHUNK,
        "remainder = (tokens - prefill) % chunk_tokens",
        "remainder = tokens % chunk_tokens",
        "toploc/test_toploc_prefill.py",
    ),
    Fault(VERIFY, "& ~forged_B[:, None]", "", TOPLOC),
    Fault(
        VERIFY,
        "exponent_own_BK = (own_BK & 0x7FFF) >> mantissa_bits",
        "exponent_own_BK = (own_BK & 0x3FFF) >> mantissa_bits",
        TOPLOC,
    ),
    Fault(VERIFY, "mean_B[agreeing_B == 0] = inf", "pass", TOPLOC),
    # --- weights over the network
    Fault(DELTA, "words[places_K] += steps_K", "words[places_K] = steps_K", DELTAS),
    Fault(
        DELTA,
        "if any(reader.take(len(header_hash)) != header_hash for reader in readers):",
        "if any(not reader.take(len(header_hash)) for reader in readers):",
        DELTAS,
    ),
    Fault(DELTA, "writer.write(MAGIC + bytes(kinds))", "writer.write(MAGIC + bytes(reversed(kinds)))", DELTAS),
    Fault(FORMAT, "if places_K[-1] >= words:", "if places_K[-1] > words:", DELTAS),
    Fault(FORMAT, "if zstandard.frame_content_size(data) != raw_bytes:", "if False:", DELTAS),
    Fault(FORMAT, 'raise DeltaError("the delta has extra bytes after its last file")', "pass", DELTAS),
    # --- several runs at one listener, discovery, places, late work
    Fault(SHARING, 'self._fail("is not served", error)', "raise", SHARED, "cannot_be_served"),
    Fault(SHARING, "taken[address.run] = self.name", "pass", SHARED, "cannot_be_served"),
    Fault(SHARING, "if split_url(address.url)[1] != name:", "if False:", SHARED, "cannot_share"),
    Fault(SHARING, "if config.coordinator.database:", "if False:", SHARED, "cannot_share"),
    Fault(SHARING, "if config.run.tracker in PROCESS_WIDE:", "if False:", SHARED, "cannot_share"),
    Fault(SHARING, "await self._end_requests()", "pass", SHARED, "under_way"),
    Fault(SHARING, "            self.close()\n\n    def close", "            pass\n\n    def close", SHARED, "sealed"),
    Fault(SHARING, "status=200 if served else 503", "status=200", SHARED, "not_healthy"),
    Fault(SHARING, 'record.msg = f"{place}: {record.msg}"', "pass", SHARED, "lines_of_the_log"),
    Fault(
        SHARING,
        "        if self.run is None or self.why:\n            return ClosedRun",
        "        if self.run is None:\n            return ClosedRun",
        SHARED,
        "published_invite",
    ),
    Fault(SHARING, "self.run.coordinator.routes() if", "self.run.coordinator.app() if", SHARED, "counts_once"),
    Fault(SERVED, "seal(self.coordinator.pool.db)", "pass", SHARED, "sealed"),
    Fault(
        SERVED,
        "if self._report_is_due():  # it was stopped",
        "if False:  # it was stopped",
        "coordinator/test_report.py",
    ),
    Fault(
        BOARD,
        "invite.encode() if time.time() < payload.expires_s else",
        "invite.encode() if True else",
        SHARED,
        "published_invite",
    ),
    Fault(BOARD, "if not payload.open:", "if False:", SHARED, "published_invite"),
    Fault(DISCOVERY, "expected = key or signed.key", "expected = signed.key", FOUND),
    Fault(DISCOVERY, "signed.open(expected, domain=DOMAIN)", "signed.payload", FOUND),
    Fault(DISCOVERY, "if found.protocol != VERSION:", "if False:", FOUND),
    Fault(DISCOVERY, "RequirementsSection.model_validate(offer.requirements)", "pass", FOUND),
    Fault(DISCOVERY, "if len(body) > MOST_BYTES:", "if False:", FOUND),
    Fault(DISCOVERY, 'if "content-encoding" in response.headers:', "if False:", FOUND),
    Fault(DISCOVERY, 'invite.check("worker", None)', "pass", SHARED, "not_the_runs_own"),
    Fault(MEMBERS, 'if node.state == "left":\n                self', "if False:\n                self", PLACES),
    Fault(MEMBERS, "self.count_workers() >= places", "self.count_workers() > places", PLACES),
    Fault(NODES, "state NOT IN ('left', 'dismissed', 'banned')", "state NOT IN ('left', 'dismissed')", PLACES),
    Fault(NODES, '" AND seen_s >= ?"', '" AND seen_s >= ? - 100"', PLACES),
    Fault(
        ESCROW,
        "if self.db.is_trained(self.config.run.steps):",
        "if False:",
        "coordinator/credit/test_escrow.py",
        "after_the_last_step",
    ),
    Fault(
        ESCROW,
        "self._credit(worker, self.db.submissions.pending_of(worker))\n        else",
        "pass\n        else",
        "coordinator/credit/test_escrow.py",
        "after_the_last_step",
    ),
    Fault(
        "coordinator/state/database.py",
        'has("step", str(steps - 1))',
        'has("step", str(steps - 2))',
        "coordinator/credit/test_escrow.py",
    ),
]
