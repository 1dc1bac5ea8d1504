"""What `shoal config --explain` prints of each field, read from the models."""

import pytest

from shoal.config import Config, ConfigError, dumps, explain
from shoal.config.loading import field_paths, section_of
from tests.config.test_config import INTELLECT_2


def keys(text: str) -> set[str]:
    return {paragraph.partition("\n")[0] for paragraph in text.split("\n\n")}


def test_every_field_is_explained_and_every_section_documented() -> None:
    sections = dict(_sections(Config, ""))
    assert keys(explain()) >= set(field_paths(Config)) - set(sections)
    assert [path for path, section in sections.items() if not section.__dict__.get("__doc__")] == []


def _sections(section, prefix):  # type: ignore[no-untyped-def]
    for name, info in section.model_fields.items():
        if (inner := section_of(info.annotation)) is not None:
            yield f"{prefix}{name}", inner
            yield from _sections(inner, f"{prefix}{name}.")


OTHERS = ["sampling.temperature", "learner.loss.normalize_std"]  # the paper has the same values and does not claim them


@pytest.mark.parametrize("key", [key for key in INTELLECT_2 if key not in OTHERS])
def test_the_papers_defaults_name_the_paper(key: str) -> None:
    assert "(INTELLECT-2)" in explain(key)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("run.steps", "integer, above 0; default 100"),
        ("learner.loss.epsilon", "number, above 0, below 1; default 0.2"),
        ("learner.lora", "section or null; default null"),
        ("model.device", 'string; default "cpu"'),
        ("tasks.length_targets", "list of integer, above 0; default []"),
        ("model.dtype", '"auto" or "float32" or "bfloat16"; default "auto"'),
    ],
)
def test_a_field_is_explained_alone_by_type_bounds_and_default(key: str, kind: str) -> None:
    assert explain(key).splitlines()[0] == key and explain(key).splitlines()[2].strip() == kind


def test_a_section_is_explained_with_the_sections_in_it_alone() -> None:
    assert {"learner.lr", "learner.loss.beta", "learner.lora", "learner.lora.rank"} <= keys(explain("learner"))
    assert keys(explain("evaluator.n")) == {"evaluator.n"}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lerner", "did you mean 'learner'"),
        ("learner.lora.ranks", "did you mean 'learner.lora.rank'"),
        ("learner.lr.x", "learner.lr is a field"),
        ("run.zzz", "known: seed, steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'.*{hint}"):
        explain(key)


def test_a_field_without_a_value_is_not_written() -> None:
    assert "checkpoint_every" not in dumps(Config()).split("[sft]")[0]
