"""Messages between trainer rank 0 (`handle`) and the rollout process (`worker`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.accounting import RolloutStats
from arpo_megatron.rollout.admission_state import AdmissionFigures
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree


class StaleEnginesError(RuntimeError):
    """Engines (their URLs are the arguments) have older weights than trees need: push weights, then collect again."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Branching, sampling and limits of the trees to grow."""

    branching: AlgorithmConfig | None
    """The algorithm whose policy distributes the trajectories; None: independent trajectories."""
    group_size: int
    """Trajectories per task if `branching` is None."""
    sampling: Sampling
    """Its seed is replaced for each path."""
    limits: RolloutLimits
    expert_routes: bool = False
    """Store expert routes, if the engine returns them (`ServiceSettings.expert_routes`)."""

    @classmethod
    def training(cls, config: JobConfig) -> Self:
        """Return the settings of a training step."""
        return cls(
            branching=config.algorithm,
            group_size=config.algorithm.group_size,
            sampling=Sampling(config.rollout.temperature, config.rollout.top_p),
            limits=RolloutLimits.training(config),
            expert_routes=True,
        )

    @classmethod
    def evaluation(cls, config: JobConfig, *, group_size: int = 1, temperature: float | None = None) -> Self:
        """Return the settings of an evaluation: independent trajectories, optionally at another `temperature`."""
        evaluation = config.evaluation if temperature is None else replace(config.evaluation, temperature=temperature)
        return cls(
            branching=None,
            group_size=group_size,
            sampling=Sampling(
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
                top_k=evaluation.top_k,
                repetition_penalty=evaluation.penalty,
            ),
            limits=RolloutLimits.evaluation(config),
        )


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Progress of a `collect`. `trees_done` includes failed trees."""

    trees_done: int
    trees_total: int
    tokens_sampled: int
    admission: AdmissionFigures = field(default_factory=AdmissionFigures)
    """Trees and paths of all purposes that run or wait."""


@dataclass(frozen=True, slots=True)
class FailedTree:
    """A tree that could not be finished: what it had sampled, and why it failed."""

    tree: RolloutTree
    reason: str
    """Name of the error's type, and its message."""
    blocked: str = ""
    """If a tool is blocked, its message: no tree that calls it can be finished until its operator acts."""


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Finished and failed trees of one collection, and their costs."""

    trees: list[RolloutTree]
    """Finished trees: those with the oldest policy version first, in the order of their start."""
    failed: list[FailedTree]
    """Trees that could not be finished."""
    stats: RolloutStats
    """Costs of all of them."""
    tree_ids: tuple[int, ...] = ()
    """Their ids (`LiveTree.tree_id`)."""
    failed_calls: Mapping[str, str] = field(default_factory=dict)
    """Why the newest failed call of each tool failed."""
    calls: Mapping[tuple[str, bool], int] = field(default_factory=dict)
    """Calls that were executed for all of them, by tool and whether they were answered."""


@dataclass(frozen=True, slots=True)
class FinishedTree:
    """A tree that has just been finished. It is sent without a request, so that it can be scored while others grow."""

    tree_id: int
    tree: RolloutTree


@dataclass(frozen=True, slots=True)
class ReportPart:
    """A failed tree of the `RolloutReport` that follows. A whole report would be pickled at once, and block threads."""

    tree: FailedTree


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Addresses and constants of the rollout process."""

    engine_urls: tuple[str, ...]
    """The SGLang servers."""
    sandbox_url: str
    """The tool service."""
    tokenizer_path: Path
    """Hugging Face directory with the tokenizer."""
    seed: int
    """The run's seed, from which branching draws follow."""
    request_timeout_s: float = 600.0
    """Deadline of one attempt of an engine request."""
    retry_for_s: float = 60.0
    """Time after its first failure during which a request or tool call is retried."""
    sandbox_token: str | None = field(default=None, repr=False)
    """Bearer token of the tool service; None if it needs none."""
    engine_token: str | None = field(default=None, repr=False)
    """Bearer token of engines and router; None if they need none."""
    router_url: str | None = None
    """SGLang's router, if there is one."""
    expert_routes: ExpertRouteSpec | None = None
    """Sizes of the engines' expert routes; None if they return none."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that the policy may call (`rollout.tools`)."""
    protocol: str = "tags"
    """Name of the call protocol (`rollout.protocol`)."""
    tool_call_parser: str | None = None
    """SGLang's name of the format of calls (`rollout.tool_call_parser`)."""
    admission: Literal["kv", "all"] = "kv"
    """`rollout.admission`."""
    priority: Literal["none", "age"] = "none"
    """`rollout.priority`."""
    keeps_kv: bool = False
    """Whether pushes leave the engines' KV caches as they are (`rollout.across_push=keep_kv`)."""
    environment: str | None = None
    """Name of the environment (`rollout.environment`); None: the policy calls tools."""
    environment_params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Its params (`rollout.environment_params`)."""


@dataclass(frozen=True, slots=True)
class LiveTree:
    """A tree to grow, with what it has sampled already."""

    tree_id: int
    """Unique in the run."""
    purpose: str
    """Use of the tree, for example "training"; trees of one purpose are collected together."""
    task: Task
    """Several trees of the same task and step make the same draws."""
    step: int
    """Rollout step, part of the key of branching draws."""
    version: int
    """Policy version when the tree was started."""
    settings: RolloutSettings
    entries: Sequence[bytes] = ()
    """Its record (`record.encode_entry`), which answers before engine and tools are asked."""


@dataclass(frozen=True, slots=True)
class StartTrees:
    """Grow these trees; the engines have at least policy `version`."""

    trees: tuple[LiveTree, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The first message of a connection: all unfinished trees. With `paused`, requests are held until `Resume`."""

    settings: ServiceSettings
    start: StartTrees
    paused: bool


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A new entry of a tree's record. It is sent without a request."""

    tree_id: int
    entry: bytes


@dataclass(frozen=True, slots=True)
class CollectTrees:
    """Wait for `count` finished trees of one purpose (None: all), and for all trees started before a policy version.

    Trees with the oldest version come first, in the order of their start. More than `count` are reported only if more
    were started before version `finish_before`.
    """

    purpose: str
    count: int | None = None
    finish_before: int | None = None


@dataclass(frozen=True, slots=True)
class FinishTrees:
    """Wait until all trees of one purpose are finished; they can still be collected."""

    purpose: str


@dataclass(frozen=True, slots=True)
class StopTrees:
    """Stop all trees of one purpose that were not collected. Unfinished ones are reported as failed."""

    purpose: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Hold new engine requests and cut running ones short."""


@dataclass(frozen=True, slots=True)
class Resume:
    """End a `Pause`: trees continue with policy `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended the session."""

    traceback: str
    user_error: str | None = None
    """The message of a `UserError`; None for other exceptions."""
