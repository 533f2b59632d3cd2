"""A wrong value in a config is one clear line before anything starts."""

import dataclasses
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from arpo_megatron.algorithms.components import sampling_correction
from arpo_megatron.config import JobConfig
from arpo_megatron.config.io import save_config
from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.paths import PATHS, paths_of

IN_SQL = ["rollout.environment=sql", "reward.kind=environment"]


@pytest.mark.parametrize("recipe", resolve.recipe_names())
def test_recipes_survive_saving_and_loading(recipe: str, tmp_path: Path) -> None:
    config = resolve.resolve(recipe)
    save_config(config, tmp_path / "config.yaml")
    assert resolve.load(tmp_path / "config.yaml") == config


def test_overrides_win_over_the_file_and_the_file_over_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 5, tasks_per_step: 4}\noptimizer: {lr: 1e-5}\n")
    config = resolve.resolve("quickstart", file=file, overrides=["train.steps=7"])
    assert (config.train.steps, config.train.tasks_per_step, config.optimizer.lr) == (7, 4, 1e-5)
    assert config.algorithm == resolve.resolve("quickstart").algorithm


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["algorithm.entropy_wieght=0.3"], "did you mean algorithm.entropy_weight?"),
        (["algorithm.lr=0.3"], "did you mean optimizer.lr?"),
        (["lr=0.3"], "did you mean optimizer.lr?"),
        (["trian.steps=3"], "did you mean train?"),
        (["train.step=3"], "did you mean train.steps?"),
        (["zzz=1"], "keys: name, seed"),
        (["algorithm.group_size=many"], "algorithm.group_size: must be a whole number"),
        (["optimizer.lr=-1"], "greater than 0, not -1"),
        (["algorithm.router_replay=rollout"], "needs a model with experts at model.path"),
        (
            ["algorithm.router_replay=rollout", "model.path=x", "engine.router=sglang"],
            "needs engine.router=auto or none",
        ),
        (["algorithm.initial_rollouts=99"], "algorithm.initial_rollouts=99 exceeds algorithm.group_size"),
        (["parallel.sequence=true"], "needs parallel.tensor > 1"),
        (["parallel.tensor=5"], "not a multiple of parallel.tensor=5"),
        (["algorithm.minibatches=99"], "exceeds train.tasks_per_step"),
        (["algorithm=3"], "config key algorithm: must be a mapping of keys to values, not 3"),
        (["data.path={a.jsonl: -1}"], "data.path.a.jsonl: must be greater than 0, not -1"),
        (["data.kind=questions"], "config key data.kind: must be 'generated', 'trails', "),
        (["train.steps=true"], "train.steps: must be a whole number"),
        (['train.steps="20"'], "train.steps: must be a whole number"),
        (["train.steps=2026-11-21"], "train.steps: must be a whole number"),
        (["parallel.sequence=yes"], "parallel.sequence: must be true or false"),
        (["reward.format_penalty=.nan"], "reward.format_penalty: must be a finite number"),
        (["optimizer.beta2=1.0"], "optimizer.beta2: must be less than 1"),
        (["train.tasks_per_step=3000"], "train.tasks_per_step=3000 exceeds data.tasks"),
        (
            ["rollout.max_staleness=1", "algorithm.loss=minirl", "train.tasks_per_step=4", "data.tasks=7"],
            "tasks_per_step=4 with rollout.max_staleness=1 starts 8 trees at once, which exceeds data.tasks=7",
        ),
        (
            ["rollout.oversampling=0.5", "train.tasks_per_step=5", "data.tasks=7"],
            "tasks_per_step=5 with rollout.oversampling=0.5 starts 8 trees at once, which exceeds data.tasks=7",
        ),
        (["evaluation.tasks=1000"], "exceeds data.held_out"),
        (["engine.max_total_tokens=10"], "cannot hold one model.max_length"),
        (["data.kind=files"], "data.path"),
        (["data.path=x.parquet"], "data.path is not read with data.kind=generated"),
        (
            ["data.reader=./mine.py:Rows"],
            "data.reader is not read with data.kind=generated: give data.kind=files, too, or remove it",
        ),
        (["data.kind=trails", "data.verifier=math"], "data.verifier is not read with data.kind=trails"),
        (
            ["data.kind=files", "data.path=x", "data.max_prompt_tokens=99", "sft.steps=0", "data.tasks=50"],
            "data.tasks is not read with data.kind=files: leave it at 2000",
        ),
        (["seed=99999999999999999999"], "seed: must be less than 4294967296"),
        (["name=../../etc"], "name=../../etc must consist of letters"),
        (["optimizer.lr=.inf"], "optimizer.lr: must be a finite number"),
        (["model.max_length=10"], "model.max_length: must be at least 64"),
        (["model.hidden_size=4"], "rotary positions need an even quotient"),
        (
            ["model.fp8=current", "model.dtype=float32"],
            "model.fp8=current needs model.dtype=bfloat16, not float32",
        ),
        (["model.transformer_impl=transformer_engine"], "transformer_impl=transformer_engine needs model.dtype=bfloat"),
        (
            ["model.fp8=blockwise", "model.dtype=bfloat16", "model.hidden_size=192"],
            "hidden size of a rank (192) is not a multiple of 128",
        ),
        (["model.fp8=current", "model.dtype=bfloat16", "model.ffn_size=520"], "MLP width of a rank (520)"),
        (["model.bf16_edge_layers=1"], "has no effect with model.fp8=none"),
        (["model.fp8=delayed"], "model.fp8=delayed is not offered: its first scales underflow gradients"),
        (["model.fp8=current", "model.dtype=bfloat16", "model.bf16_edge_layers=9"], "exceeds the 4 layers"),
        (["model.attention_backend=flash"], "model.attention_backend=flash needs model.dtype=bfloat16, not float32"),
        (
            ["model.attention_backend=flash", "model.dtype=bfloat16", "model.hidden_size=1024"],
            "needs heads whose width is a multiple of 8 and at most 128, not 256: give model.attention_backend=auto",
        ),
        (
            ["model.attention_backend=flash", "model.dtype=bfloat16", "model.hidden_size=48"],
            "at most 128, not 12: give",
        ),
        (["engine.deterministic=true", "engine.attention_backend=flashinfer"], "fa3 or triton"),
        (["engine.quantization=fp8"], "engine.quantization=fp8 needs model.dtype=bfloat16, not float32"),
        (["engine.tensor=2", "engine.expert=4"], "engine.tensor=2 is not a multiple of engine.expert=4"),
        (
            ["engine.quantization=fp8", "model.dtype=bfloat16", "sync.transport=disk"],
            "needs sync.transport=network or ipc",
        ),
        (["engine.deterministic=true", "engine.tensor=2"], "engine.deterministic=true needs engine.tensor=1, not 2"),
        (
            ["rollout.environment=sql", "rollout.tools=[python]"],
            "rollout.environment and rollout.tools exclude each other",
        ),
        (["rollout.environment=sql", "rollout.stop_at_answer=true"], "rollout.environment needs stop_at_answer=false"),
        (["reward.kind=environment"], "reward.kind=environment needs rollout.environment=NAME"),
        (["rollout.environment=sql"], "reward.kind=arpo scores the tags of tools, which rollout.environment=sql has"),
        (["rollout.environment=sql", "reward.kind=arpo_released"], "set reward.kind=environment, or FILE.py:NAME"),
        ([*IN_SQL, "rollout.protocol=hermes"], "rollout.protocol=hermes is not used with rollout.environment=sql"),
        ([*IN_SQL, "rollout.system_prompt=arpo"], "rollout.system_prompt is not used with rollout.environment=sql"),
        ([*IN_SQL, "evaluation.refuse_repeated=[search]"], "evaluation.refuse_repeated is not used with rollout.env"),
        (
            [*IN_SQL, "rollout.at_limit=answer_now", "rollout.max_response_tokens=1024"],
            "rollout.environment needs at_limit=end: an answer is an action",
        ),
        (["sync.directory=/shared"], "sync.directory needs sync.transport=disk, not auto"),
        (["rollout.max_staleness=1", "algorithm.sampling_correction=none"], "set algorithm.sampling_correction=tis"),
        (["algorithm.replay=rollout_replay", "algorithm.sampling_correction=none"], "algorithm.replay=rollout_replay"),
        (["algorithm.loss=hispo", "algorithm.sampling_correction=tis"], "corrects for sampling itself"),
        (["algorithm.sampling_ratio_min=3"], "exceeds algorithm.sampling_ratio_max"),
        (["rollout.stale=drop"], "rollout.stale=drop needs rollout.max_staleness > 0"),
        (["reward.terms={nope: 1}"], "unknown reward term 'nope'"),
        (["reward.kind=nope"], "unknown reward 'nope'"),
        (["reward.params.nope=1"], "no chosen component has the param 'nope'"),
        (["steps"], "section.key=value"),
        (["=3"], "section.key=value"),
        (["train.=3"], "section.key=value"),
    ],
)
def test_wrong_override_is_one_line_that_helps(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve.resolve("quickstart", overrides=overrides)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "correction"),
    [
        ([], "none"),
        (["rollout.max_staleness=1"], "tis"),
        (["algorithm.replay=rollout_replay"], "tis"),
        (["rollout.max_staleness=1", "algorithm.sampling_correction=geometric"], "geometric"),
        (["algorithm.sampling_correction=icepop"], "icepop"),
        *((["rollout.max_staleness=1", f"algorithm.loss={loss}"], "none") for loss in ("hispo", "minirl", "mix_ppg")),
    ],
)
def test_sampling_correction_follows_from_the_origin_of_the_tokens(overrides: list[str], correction: str) -> None:
    assert sampling_correction(resolve.resolve("quickstart", overrides=overrides)) == correction


def test_quantized_engines_get_a_sampling_correction() -> None:
    assert sampling_correction(resolve.resolve("reasoning_3b+fp8_engine")) == "tis"


def choices(owner: Any = JobConfig, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, value) for every value of every key with a fixed set of them."""
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(field.type):
            yield from choices(field.type, f"{prefix}{field.name}.")
        elif get_origin(field.type) is Literal:
            yield from ((prefix + field.name, value) for value in get_args(field.type))


def test_documented_choices_can_be_overrides() -> None:
    wide = ["model.dtype=bfloat16", "model.hidden_size=256", "model.heads=8", "model.kv_heads=8"]
    documented = list(choices())
    assert ("rollout.stale", "drop") in documented
    for key, value in documented:
        in_bfloat16 = ("model.fp8", "model.transformer_impl", "model.attention_backend", "engine.quantization")
        more = [*wide] if key in in_bfloat16 else []
        more += ["data.path=x", "data.max_prompt_tokens=99", "sft.steps=0"] if value == "files" else []
        more += ["model.path=x"] if value == "rollout" else []
        more += ["rollout.max_staleness=1", "algorithm.loss=minirl"] if value == "drop" else []
        more += ["rollout.max_staleness=1"] if value == "keep_kv" else []
        more += ["rollout.max_response_tokens=1024"] if value == "answer_now" else []
        config = resolve.resolve("quickstart", overrides=[f"{key}={value}", *more])
        assert attrgetter(key)(config) == value


@pytest.mark.parametrize("text", ["1e-5", "0.00001", "1E-5", "10e-6"])
def test_numbers_are_read_as_yaml_1_2(text: str) -> None:
    assert resolve.resolve("quickstart", overrides=[f"optimizer.lr={text}"]).optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("algorithm.samples", "keys of algorithm: name, "),
        ("algorithm.store", "keys of algorithm: name, "),
        ("algorithm.numbers", "keys of algorithm: name, "),
        ("algorithm.attribution", "keys of algorithm: name, "),
        ("algorithm.initial", "did you mean algorithm.initial_rollouts?"),
        ("algorithm.beam", "did you mean algorithm.beam_size?"),
        ("algorithm.aggregation", "did you mean algorithm.loss_aggregation?"),
        ("rollout.keep_every_s", "keys of rollout: temperature, "),
        ("sft.careless", "keys of sft: "),
    ],
)
def test_keys_of_earlier_versions_are_refused_in_one_line(key: str, hint: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    file = tmp_path / "config.yaml"
    file.write_text(f"name: quickstart\n{section}: {{{name}: 4}}\n")
    refusal = f"unknown config key {key}; {hint}"
    with pytest.raises(UserError) as caught:
        resolve.resolve("quickstart", overrides=[f"{key}=4"])
    assert str(caught.value).startswith(refusal) and "\n" not in str(caught.value)
    for attempt in (lambda: resolve.load(file), lambda: resolve.resolve("quickstart", file=file)):
        with pytest.raises(UserError) as caught:
            attempt()
        assert str(caught.value).startswith(f"{file}: {refusal}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["train: {steps: many}", "algorithm: {loss: pppo}", "algorithm: {name: gripo}"])
def test_refusal_names_file_with_bad_value(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(UserError) as caught:
        resolve.resolve("quickstart", file=file, overrides=["train.save_every=5"])
    assert str(caught.value).startswith(f"{file}: ")
    file.write_text("train: {steps: 3}")
    with pytest.raises(UserError, match=r"^unknown config key train\.stepz"):
        resolve.resolve("quickstart", file=file, overrides=["train.stepz=5"])


def test_misspelt_recipe_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean quickstart"):
        resolve.resolve("quikstart")


@pytest.mark.parametrize("content", ["a: [", "- 1\n- 2\n", "1: 2\n", "\x00"])
def test_unusable_config_file_is_one_line(content: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        resolve.resolve("quickstart", file=file)
    assert "bad.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        resolve.resolve("quickstart", file=tmp_path / "nowhere.yaml")


def test_repeated_key_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("train:\n  steps: 3\n  token_budget: 4096\n  steps: 4\n")
    with pytest.raises(UserError, match=r"twice\.yaml.*found duplicate key .steps. .line 4.") as caught:
        resolve.resolve("quickstart", file=file)
    assert len(str(caught.value).splitlines()) == 1
    file.write_text("train:\n  steps: 3\nsft:\n  steps: 4\n")  # the same key of two sections
    config = resolve.resolve("quickstart", file=file)
    assert (config.train.steps, config.sft.steps) == (3, 4)


def test_config_file_may_use_yaml_anchors(tmp_path: Path) -> None:
    file = tmp_path / "anchors.yaml"
    file.write_text("optimizer: &rate\n  lr: 2e-4\nsft:\n  optimizer: *rate\n")
    config = resolve.resolve("quickstart", file=file)
    assert config.optimizer.lr == config.sft.optimizer.lr == 2e-4


def test_input_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [*PATHS, "data.path"]
    given = [*(f"{key}={key}" for key in keys), "data.kind=files", "data.max_prompt_tokens=99"]
    config = resolve.resolve("quickstart", overrides=[*given, "sync.transport=disk"])
    assert paths_of(config) == {key: tmp_path / key for key in keys}


def with_path(owner: Any = JobConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key that takes a path."""
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(field.type):
            yield from with_path(field.type, f"{prefix}{field.name}.")
        elif Path in (field.type, *get_args(field.type)):
            yield prefix + field.name


def test_every_key_with_a_path_is_listed() -> None:
    assert set(with_path()) == {*PATHS, "data.path", "run_dir"}


def test_files_of_components_and_of_their_parameters_are_made_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("Answer.\n---\nThink, then answer.\n")
    (tmp_path / "own.py").write_text(
        "from arpo_megatron.algorithms.losses.ppo import Ppo\n\n\nclass Own(Ppo):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    overrides = ["algorithm.selector=prompts", "algorithm.params.prompt_file=prompts.txt", "algorithm.loss=own.py:Own"]
    algorithm = resolve.resolve("quickstart", overrides=overrides).algorithm
    assert algorithm.params["prompt_file"] == str(tmp_path / "prompts.txt")
    assert algorithm.loss == f"{tmp_path}/own.py:Own"
