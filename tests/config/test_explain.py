"""What `shoal config --explain` says of each field, read from the models."""

from pathlib import Path

import pytest

from shoal.config import Config, ConfigError, dumps, load
from shoal.config.explain import fields, text
from shoal.config.loading import section_of
from tests.config.test_config import INTELLECT_2


def test_every_field_has_a_description_and_a_source() -> None:
    bare = [field.key for field in fields() if len(field.description) < 4 or not field.source]
    assert bare == [], "give them a description in shoal/config"


def test_every_section_has_a_description_of_its_own() -> None:
    sections = [found for info in Config.model_fields.values() if (found := section_of(info.annotation))]
    inner = [
        found for each in sections for info in each.model_fields.values() if (found := section_of(info.annotation))
    ]
    assert [each.__name__ for each in [*sections, *inner] if not each.__dict__.get("__doc__")] == []


def test_every_field_of_a_written_config_is_explained() -> None:
    table, written = "", set()
    for line in dumps(Config()).splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        elif " = " in line:
            written.add(f"{table}.{line.removeprefix('# ').split(' = ')[0]}")
    absent = ("learner.lora.", "validator.limits.")  # by default; `validator.limits` is a list
    assert written - {"validator.limits"} == {field.key for field in fields() if not field.key.startswith(absent)}


OTHERS = ["sampling.temperature", "learner.loss.normalize_std"]  # the paper has the same values and does not claim them


@pytest.mark.parametrize("key", [key for key in INTELLECT_2 if key not in OTHERS])
def test_the_papers_defaults_name_the_paper(key: str) -> None:
    (field,) = fields(key)
    assert field.source.startswith("INTELLECT-2")


def test_a_measured_limit_and_an_own_default_say_so() -> None:
    assert "measured" in fields("validator.sampling_margin")[0].source
    assert fields("run.stall_s")[0].source == "Shoal"


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("run.steps", "integer, at least 1", "100"),
        ("learner.loss.epsilon", "number, above 0, below 1", "0.2"),
        ("learner.betas", "2 × number at least 0 below 1", "[0.9, 0.99]"),
        ("workers.most_groups", "integer or none, at least 1", "none"),
        ("model.device", "text", '"cpu"'),
        ("relays.public", "true or false", "false"),
        ("sft.lr", "number, above 0", "2e-05"),
        ("tasks.length_targets", "list of integer at least 1", "[]"),
        ("tasks.sources.reward", "text or table", '""'),
        ("model.dtype", '"auto" or "float32" or "bfloat16"', '"auto"'),
    ],
)
def test_a_field_is_described_by_type_limits_and_default(key: str, kind: str, default: str) -> None:
    (field,) = fields(key)
    assert (field.type, field.default) == (kind, default)
    assert all(part in text([field]) for part in (key, field.description, kind, default))


@pytest.mark.parametrize("key", ["evaluator.n", "validator.sampling_margin"])
def test_a_field_is_explained_alone_though_other_names_begin_like_it(key: str) -> None:
    assert [field.key for field in fields(key)] == [key]


def test_a_section_is_explained_with_the_sections_in_it() -> None:
    keys = {field.key for field in fields("learner")}
    assert {"learner.lr", "learner.loss.beta", "learner.lora", "learner.lora.rank"} <= keys
    assert {field.key for field in fields("learner.guard")} == {
        "learner.guard.max_grad_norm",
        "learner.guard.action",
    }


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lerner", "did you mean 'learner'"),
        ("learner.lrr", "did you mean 'learner.lr'"),
        ("learner.lora.ranks", "did you mean 'learner.lora.rank'"),
        ("learner.lr.x", "learner.lr is a field"),
        ("run.zzz", "known: seed, steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'") as refusal:
        fields(key)
    assert hint in str(refusal.value)


def test_none_is_written_as_a_comment_and_loads_again(tmp_path: Path) -> None:
    written = dumps(Config())
    assert "# lora = none" in written and "# max_grad_norm = none" in written
    path = tmp_path / "written.toml"
    path.write_text(written)
    assert load(path) == Config()


def test_a_misspelt_key_of_an_optional_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lora.toml"
    path.write_text("[learner.lora]\nranks = 8\n")
    with pytest.raises(ConfigError, match=r"did you mean 'learner\.lora\.rank'"):
        load(path)
