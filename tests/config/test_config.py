"""Configs have the paper's defaults, refuse wrong keys and values by name, and survive a round trip through TOML."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.config import Config, ConfigError, check_resumed, dumps, explain, load, parse
from shoal.config.loading import field_paths, section_of
from shoal.config.section import Section
from shoal.config.tasks import SourceSection

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))

INTELLECT_2 = {  # arXiv 2505.07291, sections 3 and 4
    "learner.loss.kind": "grpo",
    "learner.loss.epsilon": 0.2,
    "learner.loss.delta": 4.0,
    "learner.loss.beta": 0.001,
    "learner.loss.entropy": 1e-4,
    "learner.loss.normalize_std": False,
    "learner.grad_clip": 0.1,
    "learner.lr": 3e-7,
    "learner.warmup_steps": 25,
    "learner.optimizer_steps_per_step": 8,
    "coordinator.prompts_per_step": 256,
    "coordinator.async_level": 2,
    "sampling.group_size": 16,
    "sampling.max_tokens": 32_768,
    "sampling.temperature": 1.0,
    "tasks.length_penalty": 0.0003,
}


def value_at(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


def overridden(tmp_path: Path, *overrides: str) -> Config:
    return load(written(tmp_path, ""), list(overrides))


@pytest.mark.parametrize(("path", "value"), INTELLECT_2.items(), ids=list(INTELLECT_2))
def test_the_defaults_are_those_of_intellect_2(path: str, value: Any) -> None:
    assert value_at(Config(), path) == value


@pytest.mark.parametrize("path", [None, *CONFIGS], ids=lambda path: path.name if path else "defaults")
def test_a_config_equals_its_dump_loaded_again(path: Path | None, tmp_path: Path) -> None:
    config = load(path) if path else Config()
    assert load(written(tmp_path, dumps(config))) == config


# --- unknown keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[learner]\nbeta = 0.1", "unknown key 'learner.beta'; did you mean 'learner.loss.beta'?"),
        ("[learner]\nlrr = 1", "unknown key 'learner.lrr'; did you mean 'learner.lr'?"),
        ("[learner.loss]\nbetta = 1", "unknown key 'learner.loss.betta'; did you mean 'learner.loss.beta'?"),
        ("[lerner]\nlr = 1", "unknown key 'lerner'; did you mean 'learner'?"),
        ("steps = 3", "unknown key 'steps'; did you mean 'run.steps'"),
        ("[run]\nzzz = 3", "known: seed, steps, "),
    ],
)
def test_an_unknown_key_is_refused_with_a_suggestion(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(written(tmp_path, text))
    assert message in str(refusal.value) and "some.toml: " in str(refusal.value)


def test_an_error_names_every_fault() -> None:
    with pytest.raises(ConfigError, match=r"run\.steps: .*greater than 0, not 0; unknown key 'lerner'"):
        parse({"run": {"steps": 0}, "lerner": {}})


# --- defaults that depend on other fields -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["tasks.heldout=8"], "evaluator.n", 8),
        (["tasks.heldout=1000"], "evaluator.n", 256),
        (["evaluator.n=300"], "tasks.heldout", 300),
        (["coordinator.prompts_per_step=12"], "learner.optimizer_steps_per_step", 6),
        (["coordinator.prompts_per_step=7"], "learner.optimizer_steps_per_step", 7),
        (["sampling.max_tokens=65536"], "learner.row_tokens", 73728),
        (["tasks.sources=[{generator = 'arithmetic', environment = 'calculator'}]"], "sampling.max_turns", 4),
    ],
)
def test_an_unset_field_follows_the_field_that_is_set(
    tmp_path: Path, overrides: list[str], path: str, value: int
) -> None:
    assert value_at(overridden(tmp_path, *overrides), path) == value
    assert value_at(Config(), path) != value or value == 256, (
        "the default must differ, so that the value shows the override"
    )


# --- overrides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.seed=7", "run.seed", 7),
        ("learner.lr=1e-5", "learner.lr", 1e-5),
        ("learner.loss.beta=0.5", "learner.loss.beta", 0.5),
        ("learner.loss.normalize_std=true", "learner.loss.normalize_std", True),
        ("model.name=./folder", "model.name", "./folder"),
        ("model.dtype=float32", "model.dtype", "float32"),
        ("coordinator.listen=127.0.0.2:80", "coordinator.listen", "127.0.0.2:80"),
        ('tasks.system="say = 3"', "tasks.system", "say = 3"),
        ("tasks.system=say = 3", "tasks.system", "say = 3"),
        ("tasks.length_targets=[100, 200]", "tasks.length_targets", [100, 200]),
        ("tasks.sources=[{generator = 'arithmetic'}]", "tasks.sources", [SourceSection(generator="arithmetic")]),
        (" run.seed = 7 ", "run.seed", 7),
        ("ledger.contract=0x" + "52" * 20, "ledger.contract", "0x" + "52" * 20),
        ("tasks.system=42", "tasks.system", "42"),
        ("model.name=1e3", "model.name", "1e3"),
    ],
)
def test_an_override_sets_its_key(tmp_path: Path, override: str, path: str, value: Any) -> None:
    assert value_at(overridden(tmp_path, override), path) == value


def test_the_last_override_wins_over_others_and_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nseed = 1\nsteps = 5")
    config = load(path, ["run.seed=2", "run.seed=3"])
    assert (config.run.seed, config.run.steps) == (3, 5)


def test_an_override_of_a_text_in_a_list_keeps_a_number_as_text(tmp_path: Path) -> None:
    path = written(tmp_path, "[[tasks.sources]]\nhub = 'a/b'")
    assert load(path, ["tasks.sources.0.revision=1234567"]).tasks.sources[0].revision == "1234567"
    assert load(path, ["tasks.sources.0.weight=2"]).tasks.sources[0].weight == 2


@pytest.mark.parametrize("override", ["run.seed", "seed=3", "=3", "run.=3", ""])
def test_a_malformed_override_is_refused_with_an_example(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as section\.key=value, e\.g\. learner\.lr=1e-5"):
        overridden(tmp_path, override)


def test_an_override_that_treats_a_value_as_a_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'lr' is a value, not a section"):
        load(written(tmp_path, "[learner]\nlr = 1e-5"), ["learner.lr.first=3"])


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluator.n=300", "tasks.heldout=256"], "evaluator.n = 300 exceeds tasks.heldout = 256"),
        (
            ["coordinator.prompts_per_step=12", "learner.optimizer_steps_per_step=8"],
            "must be a multiple of learner.optimizer_steps_per_step",
        ),
        (
            ["tasks.length_targets=[8, 12]", "sampling.max_tokens=10"],
            "tasks.length_targets asks for 12 tokens, but sampling.max_tokens = 10",
        ),
        (["learner.row_tokens=32768"], "learner.row_tokens must exceed sampling.max_tokens"),
        (["learner.loss.delta=1.1"], "learner.loss.delta must exceed 1 + 0.2"),
        (
            ["tasks.sources=[{}]"],
            "tasks.sources.0: a source needs exactly one of path, hub and generator; this one has none",
        ),
        (
            ["tasks.sources=[{path = 'a', pat = 'b'}]"],
            "unknown key 'tasks.sources.0.pat'; did you mean 'tasks.sources.path'?",
        ),
        (
            ["tasks.sources=[{path = 'a'}, {hub = 'b/a'}]"],
            "tasks: two sources are named a; give one of them another name",
        ),
        (["tasks.sources=[{path = 'a', options = {a = 1}}]"], "tasks.sources.0: options apply only to a generator"),
        *(
            ([f"tasks.sources=[{{generator = 'arithmetic', {key}}}]"], "fields do not apply to a generator")
            for key in ("split = 'test'", "heldout_split = 'test'", "fields = {question = 'q'}")
        ),
        (["tasks.prompt=solve it"], "tasks: prompt must contain {question}"),
        (["tasks.length_targets=[100, 0]"], "tasks.length_targets.1: "),
        (["tasks.sources=[+]"], "tasks.sources: Input should be a valid list"),
        (["coordinator.listen=0.0.0.0:99999"], "coordinator.listen: write HOST:PORT, with a port up to 65535"),
        (["store.url=http://x"], "store.url: write s3://BUCKET/PREFIX"),
        (["origin.url=192.0.2.1:8710"], "origin.url: write http://HOST:PORT or https://HOST:PORT"),
        (["origin.url=http://[1"], "origin.url: write http://HOST:PORT or https://HOST:PORT"),
        (["store.endpoint=s3.example"], "store.endpoint: write http://HOST:PORT or https://HOST:PORT"),
        (["ledger.contract=0x5"], "ledger.contract: write 0x and 40 hex digits"),
        (["model.name=['a']"], "model.name: Input should be a valid string"),
        (["model.name=true"], "model.name: Input should be a valid string"),
        (["0.1=3"], "write it as section.key=value"),
        (["learner.lr=nan"], "learner.lr: "),
        (["learner.lr=inf"], "learner.lr: "),
        (["sampling.group_size=1"], "sampling.group_size: "),
        (["run.steps=1.5"], "run.steps: "),
        (["model=small"], "write it as section.key=value"),
        (["learner.loss.bet=0"], "did you mean 'learner.loss.beta'"),
        (["learner.lr=fast"], "some.toml and --set learner.lr=fast: learner.lr: "),
    ],
)
def test_an_invalid_value_is_refused_by_name(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        overridden(tmp_path, *overrides)
    assert message in str(refusal.value)


# --- files --------------------------------------------------------------------------------------------------


def test_a_missing_config_lists_the_existing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    written(tmp_path / "configs", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no config at nowhere\.toml; available: configs/some\.toml"):
        load(Path("nowhere.toml"))


@pytest.mark.parametrize("content", [b"[run\n", b"run = \xff", b"[run]\nseed = 1\nseed = 2"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.toml is not readable as TOML: "):
        load(path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\nseed = 7\n")
    assert load(path).run.seed == 7


def test_a_folder_is_refused_as_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; name a config"):
        load(tmp_path)


def test_an_overlay_changes_only_the_keys_it_names(tmp_path: Path) -> None:
    base, above, top = (tmp_path / name for name in ("base.toml", "above.toml", "top.toml"))
    base.write_text("[run]\nsteps = 3\n[learner]\nlr = 1e-5\n[learner.loss]\nbeta = 0.5\nepsilon = 0.1\n")
    above.write_text("[learner.loss]\nbeta = 0.25\n[validator]\nproof_exponent_mean = 4.5\n[run]\nsteps = 4\n")
    top.write_text("[run]\nsteps = 5\n")
    config = load(base, ["validator.count=2"], [above, top])
    assert (config.run.steps, config.validator.proof_exponent_mean, config.validator.count) == (5, 4.5, 2)
    assert (config.learner.lr, config.learner.loss.beta, config.learner.loss.epsilon) == (1e-5, 0.25, 0.1)
    assert load(base, ["run.steps=6"], [top]).run.steps == 6, "an override must win over all files"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[validator]\nproof_exponents = 1\n", "did you mean 'validator.proof_exponent_mean'"),
        ("[validatr]\nbatch = 1\n", "did you mean 'validator'"),
        ("[validator]\ncount = 0\n", "validator.count"),
        ("validator = 3\n", "validator"),
        ("[validator\n", "not readable as TOML"),
    ],
)
def test_an_error_in_an_overlay_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    above = tmp_path / "limits.toml"
    above.write_text(text)
    with pytest.raises(ConfigError, match="limits.toml") as caught:
        load(written(tmp_path, "[validator]\nbatch = 2\n"), [], [above])
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="nowhere.toml"):
        load(written(tmp_path, ""), [], [tmp_path / "nowhere.toml"])


def test_a_config_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().run.seed = 3


@pytest.mark.parametrize(
    ("field", "url"),
    [
        ("coordinator.database", "postgresql://shoal:secret@db/shoal"),
        ("coordinator.database", "postgresql://db/shoal?password=secret"),
        ("coordinator.database", "mysql://db/shoal"),
        ("coordinator.database", "pool.sqlite"),
        ("store.url", "https://bucket/run"),
        ("store.url", "s3://"),
        ("store.url", "s3://key:secret@bucket"),
        ("store.url", "s3://bucket?x=1"),
    ],
)
def test_a_url_of_another_service_or_with_a_password_is_refused(field: str, url: str) -> None:
    section, _, name = field.partition(".")
    with pytest.raises(ConfigError, match=field) as caught:
        parse({section: {name: url}})
    assert "secret" not in str(caught.value)


def test_urls_of_a_bucket_and_a_database_are_accepted() -> None:
    store, database = "s3://pool/run-1", "postgresql://shoal@db:5432/shoal"
    config = parse({"store": {"url": store}, "coordinator": {"database": database}})
    assert (config.store.url, config.coordinator.database) == (store, database)


# --- limits for an engine on a device ------------------------------------------------------------------------------------

VALIDATOR: dict[str, Any] = {
    "sampling_margin": 0.5,
    "logprob_error_mean": 0.07,
    "limits": {"vllm/cpu": {"sampling_margin": 1.5}},
}


def test_limits_of_an_engine_replace_the_sections_own() -> None:
    section = parse({"validator": VALIDATOR}).validator
    own = section.of("vllm/cpu")
    assert (own.sampling_margin, own.logprob_error_mean) == (1.5, 0.07), "an omitted limit must be the section's own"
    assert section.of("").sampling_margin == section.of("vllm/cuda").sampling_margin == 0.5


def test_the_widest_limit_is_the_maximum_over_all_engines() -> None:
    narrow = {"sampling_margin": 0.2, "logprob_error_mean": 0.1}
    section = parse({"validator": VALIDATOR | {"limits": VALIDATOR["limits"] | {"vllm/cuda": narrow}}}).validator
    assert (section.widest("sampling_margin"), section.widest("logprob_error_mean")) == (1.5, 0.1)
    assert section.widest("proof_mantissa_mean") == section.proof_mantissa_mean
    assert parse({"validator": {"sampling_margin": 0.5}}).validator.widest("sampling_margin") == 0.5


def test_limits_for_the_torch_engine_are_refused() -> None:
    """Torch workers name no engine, so only liars could use such limits."""
    with pytest.raises(ConfigError, match="limits.torch/cuda"):
        parse({"validator": {"limits": {"torch/cuda": {"sampling_margin": 9.0}}}})


def test_engines_are_assigned_to_workers_in_turn() -> None:
    workers = parse({"workers": {"engines": ["vllm", "torch"], "count": 3}}).workers
    assert [workers.engine(number) for number in range(3)] == ["vllm", "torch", "vllm"]


# --- shoal config --explain ----------------------------------------------------------------------------


def keys(text: str) -> set[str]:
    return {paragraph.partition("\n")[0] for paragraph in text.split("\n\n")}


def sections(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    for name, info in section.model_fields.items():
        if (inner := section_of(info.annotation)) is not None:
            yield f"{prefix}{name}", inner
            yield from sections(inner, f"{prefix}{name}.")


def test_every_field_is_explained_and_every_section_documented() -> None:
    by_path = dict(sections(Config))
    assert keys(explain()) >= set(field_paths(Config)) - set(by_path)
    assert [path for path, section in by_path.items() if not section.__dict__.get("__doc__")] == []


OTHERS = ["sampling.temperature", "learner.loss.normalize_std"]  # common defaults, not the paper's choices


@pytest.mark.parametrize("key", [key for key in INTELLECT_2 if key not in OTHERS])
def test_an_explanation_names_the_paper_of_a_default(key: str) -> None:
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
def test_an_explanation_has_type_bounds_and_default(key: str, kind: str) -> None:
    assert explain(key).splitlines()[0] == key and explain(key).splitlines()[2].strip() == kind


def test_an_explanation_of_a_section_includes_its_subsections() -> None:
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
def test_an_unknown_key_to_explain_is_refused_with_a_suggestion(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'.*{hint}"):
        explain(key)


def test_a_dump_omits_fields_that_are_none() -> None:
    assert "checkpoint_every" not in dumps(Config()).split("[sft]")[0]


@pytest.mark.parametrize(
    "change",
    [
        *("run.steps=7", "learner.lr=0.5", "coordinator.async_level=5", "validator.sampling_mismatches=9"),
        "tasks.sandbox.cpu_s=3.0",
    ],
)
def test_a_run_continues_with_other_values_of_fields_that_earlier_work_does_not_depend_on(change: str) -> None:
    key, _, value = change.partition("=")
    [described] = check_resumed(dumps(load(Path("tiny"))), load(Path("tiny"), [change]))
    assert described.startswith(f"{key} from ") and described.endswith(f" to {value}")


@pytest.mark.parametrize(
    ("change", "was"),
    [
        *(("model.name=./other", '"bundled:tiny"'), ("run.seed=8", "0"), ("coordinator.prompts_per_step=5", "32")),
        *(("sampling.temperature=0.8", "1.0"), ("learner.lora.rank=2", "unset"), ("tasks.length_targets=[5]", "[]")),
        ("tasks.digest=" + "0" * 64, '""'),
    ],
)
def test_a_run_does_not_continue_with_another_value_on_which_earlier_work_depends(change: str, was: str) -> None:
    """Otherwise a validator would slash honest workers for work done before, or a batch would never be full."""
    before, now = load(Path("tiny")), load(Path("tiny"), [change])
    key, _, value = change.partition("=")
    with pytest.raises(
        ConfigError, match=rf'^{key} is "?{re.escape(value)}"?, but .* with {re.escape(was)}: set it back'
    ):
        check_resumed(dumps(before), now)
    with pytest.raises(ConfigError, match=f"^{key} is "):
        check_resumed(dumps(now), before)


def test_a_field_that_an_older_version_of_shoal_did_not_have_counts_as_its_default() -> None:
    older = re.sub("^temperature = .*\n", "", dumps(Config()), flags=re.MULTILINE) + "\n[old]\nfield = 1\n"
    assert check_resumed(older, Config()) == []
    with pytest.raises(ConfigError, match="with 1.0: set it back"):
        check_resumed(older, parse({"sampling": {"temperature": 0.9}}))
