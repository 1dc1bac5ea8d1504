"""Where memory ends, the learner says which field to lower; any other failure stays what it is."""

from pathlib import Path

import pytest
import torch

from shoal.config.recipe import LearnerSection
from shoal.errors import ShoalError
from shoal.learner.out_of_memory import OutOfMemoryError, explained
from shoal.model.adapters import AdapterError

from .support import N_TOKENS, batches, make_policy, masters

FIELD = r"lower learner\.row_tokens \(now 4096\)"
SMALL = LearnerSection(row_tokens=4096)


def test_an_allocation_that_fails_on_the_cpu_names_the_field_and_its_value() -> None:
    with pytest.raises(OutOfMemoryError, match=FIELD) as caught, explained(SMALL):
        torch.empty(2**48)
    assert "\n" not in str(caught.value) and "activation_checkpointing = true" in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nmore"), MemoryError()])
def test_a_devices_or_pythons_own_error_does_too(error: Exception) -> None:
    with pytest.raises(OutOfMemoryError, match=FIELD) as caught, explained(SMALL):
        raise error
    assert caught.value.__cause__ is error and "more" not in str(caught.value)
    assert ("learner.offload = true" in str(caught.value)) == isinstance(error, torch.OutOfMemoryError)


def test_what_is_set_already_is_not_advised() -> None:
    section = LearnerSection(row_tokens=4096, activation_checkpointing=True)
    with pytest.raises(OutOfMemoryError, match=FIELD) as caught, explained(section):
        raise MemoryError
    assert "activation_checkpointing" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("x"), KeyboardInterrupt()])
def test_another_failure_passes_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explained(SMALL):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("again", ["update", "recompute_behaviour"])
def test_the_policy_explains_it_and_is_unchanged(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, again: str, one_thread: None
) -> None:
    policy = make_policy(tiny_folder, row_tokens=4096)
    before = masters(policy)
    monkeypatch.setattr(policy.scorer, "forward", lambda *_: torch.empty(2**48))
    with pytest.raises(OutOfMemoryError, match=FIELD):
        if again == "update":
            policy.update(batches(), N_TOKENS)
        else:
            policy.recompute_behaviour(batches())
    assert all(torch.equal(before[name], now) for name, now in masters(policy).items())


@pytest.mark.parametrize("error", [OutOfMemoryError("x"), AdapterError("x")])
def test_the_message_is_one_line(error: Exception) -> None:
    assert isinstance(error, ShoalError)
