"""Inputs of a job: its tasks, its initial model, and the files of the tool service, before the first process starts.

`load_data` is a pure function of the config, so the command line and every trainer rank get the same tasks.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arpo_megatron.config import JobConfig
from arpo_megatron.config.validation import check_tasks
from arpo_megatron.engine.function_calls import known_parsers
from arpo_megatron.engine.options import age_options, extra_options
from arpo_megatron.engine.version import SGLANG_VERSION
from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.hardware.placement import check_machine
from arpo_megatron.jobs.fingerprint import check_started_with
from arpo_megatron.jobs.run_directory import RunDirectory, start_model
from arpo_megatron.jobs.tool_file import read_tool_file, write_tool_config
from arpo_megatron.models.known import load_spec
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.rewards import make_reward
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.build import environment_maker
from arpo_megatron.tasks.environments.protocol import EnvironmentProtocol
from arpo_megatron.tasks.files.reader import check_readable, read_tasks, read_texts
from arpo_megatron.tasks.protocols.build import make_protocol
from arpo_megatron.tasks.selectors.base import make_task_selector
from arpo_megatron.tasks.sft.dataset import Conversations, read_conversations
from arpo_megatron.tasks.sft.rows import check_file
from arpo_megatron.tasks.synthetic.families import FAMILIES
from arpo_megatron.tasks.synthetic.lookup import GeneratedTasks
from arpo_megatron.tasks.system_prompts import system_prompt

if TYPE_CHECKING:  # transformers imports torch, which takes seconds
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class JobData:
    """Training and held-out tasks of a job, with the facts that its search tool finds."""

    train: Sequence[Task]
    held_out: Sequence[Task]
    """Tasks to evaluate on; never trained."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of its search result, for generated tasks; empty for other data."""
    bad_rows: Sequence[Mapping[str, Any]] = ()
    """Skipped rows, each with its position and the reason."""
    notes: Sequence[str] = ()
    """Lines for the user."""


def load_conversations(
    config: JobConfig,
    tokenizer: "PreTrainedTokenizerFast",
    spec: ModelSpec,
    log: Callable[[str], None] = lambda text: None,
) -> Conversations | None:
    """Read `sft.data`. Return None if it is not set; raise UserError if the file is missing or unusable."""
    if config.sft.data is None:
        return None
    longest = config.sft.max_tokens or config.model.max_length
    return read_conversations(config.sft.data, tokenizer, longest, vocabulary=spec.vocabulary, log=log)


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a Hugging Face directory. Raises UserError if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.path={directory}: cannot load its tokenizer: {reason}") from None
    if not tokenizer.encode("a", add_special_tokens=False):  # transformers loads an empty one if files are missing
        raise UserError(f"model.path={directory}: its tokenizer is empty: is tokenizer.json missing?")
    return tokenizer


def load_data(config: JobConfig, tokenizer: "PreTrainedTokenizerFast") -> JobData:
    """Read or generate the tasks. Raises UserError for a missing or unusable file."""
    data = config.data
    if data.is_generated:
        made = FAMILIES[data.kind].generate(config.seed, data.tasks, data.held_out)
        return JobData(made.train, made.held_out, made.facts)
    read = read_tasks(data, tokenizer)
    train, held_out = read.split(data.held_out)
    return JobData(train, held_out, bad_rows=[asdict(row) for row in read.bad_rows])


def training_prompt(config: JobConfig) -> str | None:
    """Return the system prompt of the data that a run was trained on; None if it has none."""
    if config.data.is_generated:
        return None
    first = read_tasks(config.data).tasks[0].messages[0]
    return first["content"] if first["role"] == "system" else None


def check_inputs(config: JobConfig, run: RunDirectory | None = None) -> None:
    """Check the engine, every file in the config, the reward's components, and every tensor of the model.

    Args:
        config: config of the job.
        run: the run that is resumed.

    Raises:
        UserError: something is missing. Nothing has been written or started yet.
    """
    if importlib.util.find_spec("sglang") is None:
        raise UserError(
            "the engine is not installed: run `make setup`, or in the clone "
            f"pip install '.[cpu]' && pip install --no-deps sglang=={SGLANG_VERSION}"
        )
    spec = check_files(config, run)
    without_file = replace(config.reward, judge=replace(config.reward.judge, cache=None))
    make_reward(without_file, max_response_tokens=config.rollout.max_response_tokens)
    if config.model.path is not None:
        from arpo_megatron.models.check import check_tensors  # imports torch
        from arpo_megatron.models.safetensors import TensorFiles

        with TensorFiles(config.model.path) as files:
            check_tensors(files, spec)
    check_machine(config)


def check_files(config: JobConfig, run: RunDirectory | None = None) -> ModelSpec:
    """Check every file in the config, and whether the model can be partitioned as configured.

    Args:
        config: config of the job.
        run: the run that is resumed; its copy of `sandbox.file` is checked if the file is gone.

    Returns:
        The model's spec.

    Raises:
        UserError: a file is missing or cannot be used.
    """
    extra_options(config.engine.options)
    if config.rollout.priority == "age":
        age_options(config.engine.options)
    hub_id, path = config.model.hub_id, config.model.path
    if hub_id is not None and path is None:
        raise UserError(f"model.path is missing: fetch {hub_id} (`hf download {hub_id} --local-dir DIR`), then set it")
    if path is not None and not (path / "config.json").is_file():
        raise UserError(f"model.path={path}: no Hugging Face model there (config.json is missing){_hub_hint(path)}")
    spec = load_spec(config.model)
    spec.check_divisible(config.parallel)
    spec.check_fp8(config.model, config.parallel)
    spec.check_attention(config.model)
    spec.check_engine(config.engine, config.parallel)
    spec.check_replay(config.algorithm)
    if config.sft.data is not None:
        check_file(config.sft.data)
    if not config.data.is_generated:
        check_readable(config.data)
        cache = config.data.search_cache
        if cache is not None and not cache.is_file():
            raise UserError(f"data.search_cache={cache}: no such file")
    _check_protocol(config)
    if config.sandbox.file is not None:
        read_tool_file(config.sandbox.file, config.sandbox, run)
    return spec


def _check_protocol(config: JobConfig) -> None:
    """Check the names of protocol, parser and system prompt. Raises UserError."""
    rollout = config.rollout
    protocol = make_protocol(rollout.protocol)
    if rollout.environment is not None:
        environment_maker(rollout.environment, rollout.environment_params)
    if rollout.system_prompt is not None:
        system_prompt(rollout.system_prompt, protocol)
    parsers, named = known_parsers(), rollout.tool_call_parser
    if rollout.protocol == "template" and named is None:
        raise UserError(
            "rollout.protocol=template needs rollout.tool_call_parser, SGLang's name for the format of the model's "
            f"calls ({', '.join(parsers)})"
        )
    if named is not None and parsers and named not in parsers:
        raise UserError(
            f"rollout.tool_call_parser={named}: SGLang has no such parser{did_you_mean(named, parsers)}; it has "
            f"{', '.join(parsers)}"
        )


def _hub_hint(path: Path) -> str:
    """Return the command that downloads the model, if the user seems to have written the id of one on a hub."""
    with suppress(ValueError):
        named = path.relative_to(Path.cwd())
        if len(named.parts) == 2 and not path.parent.exists():
            name = named.name
            return f"; if {named} is a hub id: `hf download {named} --local-dir {name}`, then model.path={name}"
    return ""


def prepare(config: JobConfig, run: RunDirectory, log: Callable[[str], None] = lambda text: None) -> JobData:
    """Write the inputs of the job's processes to its run directory, unless they exist. Raises UserError.

    Args:
        config: config of the job.
        run: its run directory.
        log: receives the progress of the slow parts.
    """
    if config.model.path is None and not run.initial_model.exists():
        _make_model(config, run)
    changed = check_started_with(config, run)
    tokenizer = load_tokenizer(start_model(config, run, "sft"))
    data = load_data(config, tokenizer)
    _check_data(config, data, tokenizer)
    data = replace(data, notes=[*changed, *write_tool_files(config, run, data)])
    spec = ModelSpec.from_hf(start_model(config, run, "sft"))
    if (conversations := load_conversations(config, tokenizer, spec, log)) is not None:
        conversations.split(config.sft.held_out_share, config.seed)  # raises now if nothing is left to train on
        bad = [{"file": str(config.sft.data), **asdict(row)} for row in conversations.bad_rows]
        data = replace(data, bad_rows=[*data.bad_rows, *bad])
    if data.bad_rows:
        lines = (json.dumps(row) + "\n" for row in data.bad_rows)
        (run.path / "bad_rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return data


def write_tool_files(
    config: JobConfig, run: RunDirectory, data: JobData, trained: RunDirectory | None = None
) -> list[str]:
    """Write the tool service's config, and the facts of generated tasks as a search corpus; return notes for the user.

    If `sandbox.file` is gone, the copy of the run `trained` is read; None: that of `run`.

    Raises:
        UserError: `sandbox.file` cannot be used.
    """
    sources = []
    if data.facts:
        GeneratedTasks((), (), data.facts).write_corpus(run.corpus)
        sources = [{"path": run.corpus.name, "format": "jsonl"}]
    elif cache := _search_cache(config):
        sources = [{"path": str(cache.resolve()), "format": "arpo_cache"}]
    timeout_s = max(config.rollout.tool_timeout_s, config.evaluation.tool_timeout_s or 0.0)
    return write_tool_config(config.sandbox, run, sources, trained, timeout_s=timeout_s)


def _check_data(config: JobConfig, data: JobData, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Check the config against the data and the tokenizer. Raises UserError."""
    try:
        check_tasks(config, len(data.train), f"the {len(data.train)} training tasks")
    except ValueError as error:
        raise UserError(str(error)) from None
    if not config.sft_only:
        make_task_selector(config.algorithm, data.train, config.seed)  # raises if the tasks lack something it needs
    rollout = config.rollout
    model = Path(tokenizer.name_or_path)
    tags = make_protocol(rollout.protocol, model=model)
    protocol = tags if rollout.environment is None else EnvironmentProtocol(model)
    frame = len(tokenizer.encode(protocol.result_frame().text(""), add_special_tokens=False))
    if rollout.max_tool_tokens <= frame:
        raise UserError(
            f"rollout.max_tool_tokens={rollout.max_tool_tokens} leaves no room for a tool result: "
            f"the text around it takes {frame} tokens"
        )


def _make_model(config: JobConfig, run: RunDirectory) -> None:
    from arpo_megatron.models import tiny
    from arpo_megatron.models.random_init import save_random_weights

    if config.data.is_generated:
        tokenizer = tiny.generated_tokenizer()
    else:
        tokenizer = tiny.train_bpe(read_texts(config.data), config.model.vocabulary_size)
    partial = run.initial_model.with_name(run.initial_model.name + ".tmp")
    tiny.make_model_directory(partial, config.model, tokenizer)
    save_random_weights(partial, seed=config.seed)
    partial.rename(run.initial_model)


def _search_cache(config: JobConfig) -> Path | None:
    if config.data.search_cache is not None:
        return config.data.search_cache
    beside = (path.with_name("search_cache.json") for path, _ in config.data.sources)
    return next((path for path in beside if path.is_file()), None)
