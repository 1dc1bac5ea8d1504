"""One test per lie, each with the reason that must be found first; and honest work, which no check may touch."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shoal import toploc
from shoal.messages import Reason, Verdict
from shoal.model.load import load_model, save_model
from shoal.model.sampling import choose, gumbel_noise, replay_margins, token_logprobs
from shoal.model.tree import Tree, forward_hidden, pack
from shoal.rollout.engine import Completion, Sampling
from shoal.rollout.worker import Worker
from shoal.store import rollouts as rollout_file
from shoal.store.rollouts import Header, Rollout, read_submission
from shoal.tasks.derive import GroupPlan, plan_groups
from shoal.testing.cheats import QuantizedWeights, WrongTemperature, round_to_4_bits_
from shoal.validator.checks import CHECKS, Case, compute, examine
from shoal.validator.service import Validator

from ..workers import ALICE, BOB, GROUPS, RUN
from .support import (
    ASKED,
    EOS,
    GROUP_SIZE,
    MAX_TOKENS,
    SETTINGS,
    Edited,
    assignment,
    config,
    judged,
    make_validator,
    make_worker,
    signed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def validator(tiny_folder: Path) -> Validator:
    return make_validator(tiny_folder, SETTINGS)


@pytest.fixture
def refused(worker: Worker, validator: Validator) -> Callable[[list[Rollout]], Verdict]:
    """The verdict on these rows, signed by Alice for the task she was given."""
    return lambda rows: judged(validator, ASKED, signed(worker, ASKED, rows))


@pytest.fixture
def edited(tiny_folder: Path, validator: Validator) -> Callable[[Callable[[Completion], Completion]], Verdict]:
    """The verdict on work whose completions were changed before proofs were built and rewards were computed."""

    def judge(edit: Callable[[Completion], Completion]) -> Verdict:
        liar = make_worker(tiny_folder, SETTINGS)
        liar.engine = Edited(liar.engine, edit)  # type: ignore[arg-type]
        return judged(validator, ASKED, signed(liar, ASKED, liar.generate(ASKED)))

    return judge


def with_row(rows: list[Rollout], number: int, **changed: Any) -> list[Rollout]:
    return [replace(row, **changed) if i == number else row for i, row in enumerate(rows)]


def first_only(edit: Callable[[Completion], Completion]) -> Callable[[Completion], Completion]:
    """Edit the first completion that is long enough; leave the others."""
    done: list[Completion] = []

    def one(completion: Completion) -> Completion:
        if done or len(completion.tokens) < MAX_TOKENS:
            return completion
        done.append(completion)
        return edit(completion)

    return one


# --- honest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_honest_work_is_accepted(worker: Worker, validator: Validator, number: int) -> None:
    asked = assignment(number, step=number)
    verdict = judged(validator, asked, signed(worker, asked, worker.generate(asked)))
    assert verdict.reason is None, verdict.detail
    assert verdict.evidence["margin_max"] < 1e-3


def test_honest_work_without_length_targets_is_accepted(tiny_folder: Path) -> None:
    settings = config(tasks={"length_targets": []})
    worker = make_worker(tiny_folder, settings)
    verdict = judged(make_validator(tiny_folder, settings), ASKED, signed(worker, ASKED, worker.generate(ASKED)))
    assert verdict.reason is None, verdict.detail


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_honest_work_at_another_stated_temperature_is_accepted(tiny_folder: Path, temperature: float) -> None:
    settings = config(sampling={"temperature": temperature})
    worker = make_worker(tiny_folder, settings)
    verdict = judged(make_validator(tiny_folder, settings), ASKED, signed(worker, ASKED, worker.generate(ASKED)))
    assert verdict.reason is None, verdict.detail


def test_work_within_bounds_is_checked_though_it_is_longer_than_a_row(tiny_folder: Path) -> None:
    settings = config(validator={"row_tokens": MAX_TOKENS + 1})
    worker = make_worker(tiny_folder, settings)
    verdict = judged(make_validator(tiny_folder, settings), ASKED, signed(worker, ASKED, worker.generate(ASKED)))
    assert verdict.reason is None, verdict.detail


def test_a_reward_of_thousands_is_not_a_lie_for_being_a_float32(tiny_folder: Path) -> None:
    settings = config(tasks={"length_targets": [32_003], "length_penalty": 0.7})
    worker = make_worker(tiny_folder, settings)
    verdict = judged(make_validator(tiny_folder, settings), ASKED, signed(worker, ASKED, worker.generate(ASKED)))
    assert verdict.reason is None, verdict.detail


@pytest.mark.parametrize("sharper", [1.0, 3.0])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_honest_work_in_another_dtype_is_accepted_with_room_to_spare(
    tiny_folder: Path, tmp_path: Path, dtypes: Any, sharper: float, record_property: Callable[[str, object], None]
) -> None:
    folder = sharpened(tiny_folder, tmp_path / "model", sharper)
    worker = make_worker(folder, SETTINGS, dtype=dtypes[0])
    validator = make_validator(folder, SETTINGS, dtype=dtypes[1])
    worst = {"exponent_mismatches": 0.0, "mantissa_mean": 0.0, "logprob_error": 0.0, "margin_max": 0.0, "beyond": 0.0}
    for number in range(3):
        asked = assignment(number)
        case = case_of(validator, worker, asked, worker.generate(asked))
        assert examine(case) is None
        assert case.prefill is not None
        chunks = toploc.verify_many(
            list(case.prefill.hidden_NH.split(case.prefill.lengths)), [row.proofs for row in case.rows]
        )
        claimed_N = torch.tensor([logprob for row in case.rows for logprob in row.logprobs])
        measured = {
            "exponent_mismatches": max(chunk.exponent_mismatches for row in chunks for chunk in row),
            "mantissa_mean": max(chunk.mantissa_error_mean for row in chunks for chunk in row),
            "logprob_error": float((claimed_N - case.prefill.logprobs_N).abs().mean()),
            "margin_max": float(case.prefill.margins_N.max()),
            "beyond": float((case.prefill.margins_N > SETTINGS.validator.sampling_margin).float().mean()),
        }
        worst = {name: max(worst[name], measured[name]) for name in worst}
    for name, value in worst.items():
        record_property(name, value)
    assert worst["exponent_mismatches"] <= toploc.BFLOAT16.exponent_mismatches / 2
    assert worst["mantissa_mean"] <= toploc.BFLOAT16.mantissa_error_mean / 2
    assert worst["logprob_error"] <= SETTINGS.validator.logprob_error_mean / 2
    assert worst["beyond"] <= SETTINGS.validator.sampling_mismatch_frac / 2


def sharpened(folder: Path, to: Path, factor: float) -> Path:
    """The model in `folder` with its logits multiplied by `factor`: surer of its tokens."""
    from shoal.model.load import load_tokenizer

    model = load_model(folder)
    with torch.no_grad():
        model.base_model.norm.weight.mul_(factor)
    save_model(model, load_tokenizer(folder), to)
    return to


def case_of(validator: Validator, worker: Worker, asked: Any, rows: list[Rollout]) -> Case:
    """What `Validator.check` examines, for tests that look at what was recomputed."""
    data = signed(worker, asked, rows)
    file = read_submission(data, max_rows=GROUPS * GROUP_SIZE, max_tokens=MAX_TOKENS)
    return Case(
        config=validator.config,
        run=RUN,
        worker=ALICE.public,
        assignment=asked,
        header=file.header,
        rows=file.rows,
        plans=worker.plan(asked),
        tasks=validator.tasks,
        tokenizer=validator.tokenizer,
        model=validator.model,
        eos_ids=validator.eos_ids,
        content_owner=None,
    )


def test_a_check_that_needs_the_prefill_says_so(validator: Validator, worker: Worker, honest: list[Rollout]) -> None:
    case = case_of(validator, worker, ASKED, honest)
    for check in CHECKS[CHECKS.index(compute) + 1 :]:
        with pytest.raises(RuntimeError, match="compute"):
            check(case)


# --- other weights ---------------------------------------------------------------------------------------------------


class Perturbed(Worker):
    """Weights that are off by one part in twenty, as after some fine-tuning of one's own."""

    def take_weights(self, newest: Any) -> None:
        super().take_weights(newest)
        torch.manual_seed(5)
        with torch.no_grad():
            for weight in self.engine.model.parameters():  # type: ignore[attr-defined]
                weight.mul_(1 + 0.05 * torch.randn_like(weight))


@pytest.mark.parametrize("kind", [Perturbed, QuantizedWeights])
def test_other_weights_fail_the_proof(tiny_folder: Path, validator: Validator, kind: type[Worker]) -> None:
    liar = make_worker(tiny_folder, SETTINGS, kind)
    verdict = judged(validator, ASKED, signed(liar, ASKED, liar.generate(ASKED)))
    assert verdict.reason is Reason.PROOF
    assert verdict.evidence["failed"] > 0


def test_weights_of_another_version_fail_the_proof(tiny_folders: tuple[Path, Path], validator: Validator) -> None:
    liar = make_worker(tiny_folders[1], SETTINGS)
    verdict = judged(validator, ASKED, signed(liar, ASKED, liar.generate(ASKED)))
    assert verdict.reason is Reason.PROOF


def test_quantising_changes_every_linear_weight_by_at_most_half_a_level(tiny_folder: Path) -> None:
    model = load_model(tiny_folder)
    weight = model.base_model.layers[0].mlp.up_proj.weight.data
    before = weight.clone()
    round_to_4_bits_(weight)
    blocks = before.view(-1, 32)
    level = blocks.abs().amax(-1, keepdim=True) / 7
    assert ((weight.view(-1, 32) - blocks).abs() <= level / 2 + 1e-6).all()
    assert not torch.equal(weight, before)


# --- rewards and figures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [1.0, float("nan"), float("inf"), 3e38])
def test_a_forged_reward(honest: list[Rollout], refused: Callable[..., Verdict], claimed: float) -> None:
    verdict = refused(with_row(honest, 5, reward=claimed))
    assert verdict.reason is Reason.REWARD
    assert verdict.evidence == {"wrong": 1, "rollouts": 8}


def test_forged_logprobs(honest: list[Rollout], refused: Callable[..., Verdict]) -> None:
    verdict = refused([replace(row, logprobs=[-0.1] * len(row.tokens)) for row in honest])
    assert verdict.reason is Reason.LOGPROBS


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf"), 0.5, -1e5])
def test_a_logprob_that_is_none(honest: list[Rollout], refused: Callable[..., Verdict], logprob: float) -> None:
    verdict = refused(with_row(honest, 2, logprobs=[logprob, *honest[2].logprobs[1:]]))
    assert verdict.reason is Reason.BOUNDS


@pytest.mark.parametrize("token", [64, -1, 2**31 - 1, -(2**31)])
def test_a_token_id_out_of_range(honest: list[Rollout], refused: Callable[..., Verdict], token: int) -> None:
    verdict = refused(with_row(honest, 2, tokens=[token, *honest[2].tokens[1:]]))
    assert verdict.reason is Reason.BOUNDS


def test_a_rollout_without_tokens(honest: list[Rollout], refused: Callable[..., Verdict]) -> None:
    verdict = refused(with_row(honest, 2, tokens=[], logprobs=[], proofs=[]))
    assert verdict.reason is Reason.BOUNDS


def test_fewer_logprobs_than_tokens(honest: list[Rollout], refused: Callable[..., Verdict]) -> None:
    verdict = refused(with_row(honest, 2, logprobs=honest[2].logprobs[:-1]))
    assert verdict.reason is Reason.BOUNDS


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: [*p, p[0]], lambda p: [], lambda p: p * 40])
def test_a_wrong_number_of_proofs(
    honest: list[Rollout], refused: Callable[..., Verdict], change: Callable[[list[bytes]], list[bytes]]
) -> None:
    verdict = refused(with_row(honest, 0, proofs=change(honest[0].proofs)))
    assert verdict.reason is Reason.BOUNDS


@pytest.mark.parametrize(
    "proof",
    [
        bytes(258),
        b"\xff" * 258,
        (65497).to_bytes(2, "big") + bytes(256),  # the constant 0
        (65497).to_bytes(2, "big") + (0x3F80).to_bytes(2, "big") + bytes(254),  # the constant 1.0
        (3).to_bytes(2, "big") + b"\x11" * 256,
        (65497).to_bytes(2, "big") + b"\xff" * 256,
        (40_000).to_bytes(2, "big") + b"\x12" * 256,
    ],
)
def test_a_malformed_proof(honest: list[Rollout], refused: Callable[..., Verdict], proof: bytes) -> None:
    verdict = refused(with_row(honest, 0, proofs=[honest[0].proofs[0], proof]))
    assert verdict.reason is Reason.PROOF


def test_proofs_of_another_rollout(honest: list[Rollout], refused: Callable[..., Verdict]) -> None:
    full = [i for i, row in enumerate(honest) if len(row.tokens) == MAX_TOKENS]
    a, b = full[0], full[-1]
    swapped = with_row(with_row(honest, a, proofs=honest[b].proofs), b, proofs=honest[a].proofs)
    verdict = refused(swapped)
    assert verdict.reason is Reason.PROOF
    assert verdict.evidence["failed"] == 4


# --- other tasks -----------------------------------------------------------------------------------------------------


class OtherTasks(Worker):
    """Takes easier tasks than it was given."""

    def plan(self, asked: Any) -> list[GroupPlan]:
        return [replace(plan, task_index=(plan.task_index + 1) % len(self.tasks.train)) for plan in super().plan(asked)]


class CherryPicked(Worker):
    """Works on the tasks of a submission with a luckier number."""

    def plan(self, asked: Any) -> list[GroupPlan]:
        return super().plan(asked.model_copy(update={"number": 17}))


class GroundSeeds(Worker):
    """Tries seeds until one gives a right answer, and says so."""

    def plan(self, asked: Any) -> list[GroupPlan]:
        return [replace(plan, seeds=tuple(seed + 1 for seed in plan.seeds)) for plan in super().plan(asked)]


class OtherTargets(Worker):
    """Prefers short answers."""

    def plan(self, asked: Any) -> list[GroupPlan]:
        return [replace(plan, target_length=1) for plan in super().plan(asked)]


@pytest.mark.parametrize("kind", [OtherTasks, CherryPicked, GroundSeeds, OtherTargets])
def test_work_that_was_not_asked_for(tiny_folder: Path, validator: Validator, kind: type[Worker]) -> None:
    liar = make_worker(tiny_folder, SETTINGS, kind)
    verdict = judged(validator, ASKED, signed(liar, ASKED, liar.generate(ASKED)))
    assert verdict.reason is Reason.TASKS


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1],
        lambda rows: rows[:GROUP_SIZE],
        lambda rows: rows[GROUP_SIZE:] + rows[:GROUP_SIZE],
        lambda rows: [*rows[:-1], rows[0]],
        lambda rows: with_row(rows, 3, group=-7),
        lambda rows: with_row(rows, 3, group=2**31 - 1),
        lambda rows: with_row(rows, 3, task="x" * 5_000),
        lambda rows: with_row(rows, 3, task=""),
        lambda rows: with_row(rows, 3, seed=-1),
    ],
)
def test_rows_missing_moved_or_doubled(
    honest: list[Rollout], refused: Callable[..., Verdict], change: Callable[[list[Rollout]], list[Rollout]]
) -> None:
    verdict = refused(change(honest))
    assert verdict.reason is Reason.TASKS


def test_the_right_seeds_named_and_others_used(tiny_folder: Path, validator: Validator) -> None:
    liar = make_worker(tiny_folder, SETTINGS, GroundSeeds)
    rows = [replace(row, seed=row.seed - 1) for row in liar.generate(ASKED)]
    verdict = judged(validator, ASKED, signed(liar, ASKED, rows))
    assert verdict.reason is Reason.SAMPLING
    assert verdict.evidence["mismatch_frac"] > 0.3


# --- other sampling --------------------------------------------------------------------------------------------------


def test_a_lower_temperature(tiny_folder: Path, validator: Validator) -> None:
    liar = make_worker(tiny_folder, SETTINGS, WrongTemperature)
    verdict = judged(validator, ASKED, signed(liar, ASKED, liar.generate(ASKED)))
    assert verdict.reason is Reason.SAMPLING


class Greedy(Worker):
    """Takes the likeliest token every time."""

    def generate(self, asked: Any) -> list[Rollout]:
        self.sampling = Sampling(0.0, MAX_TOKENS, (EOS,))
        return super().generate(asked)


def test_greedy_decoding(tiny_folder: Path, validator: Validator) -> None:
    liar = make_worker(tiny_folder, SETTINGS, Greedy)
    verdict = judged(validator, ASKED, signed(liar, ASKED, liar.generate(ASKED)))
    assert verdict.reason is Reason.SAMPLING


def test_a_small_models_tokens_proven_with_the_right_weights(
    tiny_folders: tuple[Path, Path], validator: Validator
) -> None:
    """Speculation: another model writes, the stated one only reads along to make proofs and logprobs."""
    liar = make_worker(tiny_folders[1], SETTINGS)
    rows = liar.generate(ASKED)
    read = [read_along(validator.model, prompt_of(liar, i), row.tokens) for i, row in enumerate(rows)]
    proofs = toploc.build_many([hidden_TH for hidden_TH, _ in read])
    rows = [replace(row, proofs=proofs[i], logprobs=read[i][1].tolist()) for i, row in enumerate(rows)]
    verdict = judged(validator, ASKED, signed(liar, ASKED, rows))
    assert verdict.reason is Reason.SAMPLING


@torch.inference_mode()
def read_along(model: Any, prompt: list[int], tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden_TH and logprobs_T of these tokens under the model, as a worker would compute them who did not sample."""
    hidden_TH = forward_hidden(model, pack([Tree(prompt, [tokens])], len(prompt) + len(tokens)))
    return hidden_TH, token_logprobs(model.lm_head(hidden_TH), torch.tensor(tokens))


def prompt_of(worker: Worker, number: int) -> list[int]:
    return worker._prompt(worker.plan(ASKED)[number // GROUP_SIZE])


# --- ending early or late --------------------------------------------------------------------------------------------


def test_a_completion_cut_off(edited: Callable[..., Verdict]) -> None:
    verdict = edited(first_only(lambda c: Completion(c.tokens[:9], c.logprobs[:9], c.hidden_TH[:9])))
    assert verdict.reason is Reason.TERMINATION
    assert "stops after 9 tokens" in verdict.detail


def test_an_end_token_forced(edited: Callable[..., Verdict]) -> None:
    verdict = edited(first_only(lambda c: Completion([*c.tokens[:9], EOS], [*c.logprobs[:9], -4.0], c.hidden_TH[:10])))
    assert verdict.reason is Reason.TERMINATION
    assert "unlikely end token" in verdict.detail


def test_every_completion_ended_early(edited: Callable[..., Verdict]) -> None:
    verdict = edited(lambda c: Completion([*c.tokens[:9], EOS], [*c.logprobs[:9], -4.0], c.hidden_TH[:10]))
    assert verdict.reason is Reason.SAMPLING, "one token in ten is not what its seed yields"


class NeverEnds(Worker):
    """Goes on after its end token."""

    def generate(self, asked: Any) -> list[Rollout]:
        self.sampling = Sampling(1.0, MAX_TOKENS, ())
        return super().generate(asked)


def test_tokens_after_the_end(tiny_folder: Path, validator: Validator) -> None:
    liar = make_worker(tiny_folder, SETTINGS, NeverEnds)
    asked = next(asked for number in range(20) if ended_early(liar, validator, asked := assignment(number)))
    verdict = judged(validator, asked, signed(liar, asked, liar.generate(asked)))
    assert verdict.reason is Reason.TERMINATION
    assert "goes on after an end token" in verdict.detail


def ended_early(worker: Worker, validator: Validator, asked: Any) -> bool:
    return any(EOS in row.tokens[:-1] for row in worker.generate(asked))


# --- whose file, for what --------------------------------------------------------------------------------------------


def test_a_file_made_for_another_task(worker: Worker, validator: Validator, honest: list[Rollout]) -> None:
    later = assignment(1)
    verdict = judged(validator, later, signed(worker, ASKED, honest))
    assert verdict.reason is Reason.REPLAYED


def test_the_same_rollouts_signed_again_for_another_task(
    tiny_folder: Path, worker: Worker, honest: list[Rollout]
) -> None:
    validator = make_validator(tiny_folder, SETTINGS)
    validator.node.owner = ASKED.id  # type: ignore[attr-defined]
    later = assignment(1)
    verdict = judged(validator, later, signed(worker, later, honest))
    assert verdict.reason is Reason.REPLAYED and ASKED.id in verdict.detail


def test_the_same_rollouts_signed_again_are_caught_even_where_nobody_knows_their_owner(
    worker: Worker, validator: Validator, honest: list[Rollout]
) -> None:
    later = assignment(1)
    verdict = judged(validator, later, signed(worker, later, honest))
    assert verdict.reason is Reason.TASKS


def test_a_file_that_was_judged_before_for_the_same_task_is_no_replay(tiny_folder: Path, worker: Worker) -> None:
    validator = make_validator(tiny_folder, SETTINGS)
    validator.node.owner = ASKED.id  # type: ignore[attr-defined]
    assert judged(validator, ASKED, signed(worker, ASKED, worker.generate(ASKED))).reason is None


def test_someone_elses_file(worker: Worker, validator: Validator, honest: list[Rollout]) -> None:
    verdict = judged(validator, assignment(worker=BOB), signed(worker, ASKED, honest), worker=BOB)
    assert verdict.reason is Reason.SIGNATURE


def test_someone_elses_rollouts_under_ones_own_signature(
    tiny_folder: Path, validator: Validator, honest: list[Rollout]
) -> None:
    thief, asked = make_worker(tiny_folder, SETTINGS, identity=BOB), assignment(worker=BOB)
    verdict = judged(validator, asked, signed(thief, asked, honest), worker=BOB)
    assert verdict.reason is Reason.TASKS, "seeds are bound to the worker's key"


@pytest.mark.parametrize(
    "said", [{"step": 4}, {"policy_version": 1}, {"policy_digest": "e" * 64}, {"step": 4, "policy_version": 3}]
)
def test_another_step_or_version_in_the_header(
    worker: Worker, validator: Validator, honest: list[Rollout], said: dict[str, Any]
) -> None:
    verdict = judged(validator, ASKED, signed(worker, ASKED.model_copy(update=said), honest))
    assert verdict.reason is Reason.CONTEXT


def test_another_run_in_the_header(tiny_folder: Path, validator: Validator, honest: list[Rollout]) -> None:
    liar = make_worker(tiny_folder, SETTINGS)
    liar.node.invite.run = "other-0"
    assert judged(validator, ASKED, signed(liar, ASKED, honest)).reason is Reason.CONTEXT


def test_tokens_changed_after_signing(worker: Worker, validator: Validator, honest: list[Rollout]) -> None:
    data = signed(worker, ASKED, honest)
    changed = with_row(honest, 0, tokens=[honest[0].tokens[0] ^ 1, *honest[0].tokens[1:]])
    table = pa.Table.from_pylist([vars(row) for row in changed], schema=rollout_file.SUBMISSION)
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata.metadata
    buffer = io.BytesIO()
    with pq.ParquetWriter(
        buffer, table.schema, compression="zstd", use_dictionary=False, write_statistics=False, store_schema=False
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    verdict = judged(validator, ASKED, buffer.getvalue())
    assert verdict.reason is Reason.SIGNATURE and "not those that were signed" in verdict.detail


def test_a_header_that_names_another_signer(worker: Worker, validator: Validator, honest: list[Rollout]) -> None:
    """Bob signs, and the header says that Alice did."""

    class Impostor(type(BOB)):  # type: ignore[misc]
        public = ALICE.public

    header = Header(
        schema_version=1,
        run=RUN,
        step=ASKED.step,
        policy_version=ASKED.policy_version,
        policy_digest=ASKED.policy_digest,
        worker=ALICE.public,
        submission=0,
        signer=ALICE.public,
    )
    data = rollout_file.write_submission(header, honest, Impostor(BOB.private_key))
    assert judged(validator, ASKED, data).reason is Reason.SIGNATURE


# --- what the checks stand on ----------------------------------------------------------------------------------------


def test_the_plan_depends_on_every_number_that_names_the_work() -> None:
    base: dict[str, Any] = {
        "run": "r",
        "step": 1,
        "policy_digest": "a",
        "worker": "w",
        "submission": 2,
        "groups": 2,
        "group_size": 2,
        "n_tasks": 10**6,
        "length_targets": [1, 2, 3],
    }
    plan = plan_groups(**base)
    for name, other in [("run", "s"), ("step", 2), ("policy_digest", "b"), ("worker", "v"), ("submission", 3)]:
        changed = plan_groups(**base | {name: other})
        assert [p.task_index for p in changed] != [p.task_index for p in plan], name
        assert (changed[0].seeds == plan[0].seeds) == (name == "policy_digest"), name
    assert len({seed for p in plan for seed in p.seeds}) == 4


def test_replayed_margins_are_zero_for_what_was_sampled_and_the_gap_for_anything_else() -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(16, 64)
    seeds, positions = list(range(16)), [3] * 16
    tokens_N, _ = choose(logits_NV, seeds, positions, 1.0)
    assert float(replay_margins(logits_NV, tokens_N, seeds, positions, 1.0).max()) == 0
    second_N = (logits_NV + gumbel_noise(seeds, positions, 64)).topk(2).indices[:, 1]
    assert float(replay_margins(logits_NV, second_N, seeds, positions, 1.0).min()) > 0
