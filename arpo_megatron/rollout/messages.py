"""What trainer rank 0 and the rollout process say to each other (see `service`)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.engine.expert_routes import ExpertRouteSpec
from arpo_megatron.engine.request import Sampling
from arpo_megatron.rollout.accounting import RolloutStats
from arpo_megatron.rollout.context import RolloutLimits
from arpo_megatron.tasks.base import Task
from arpo_megatron.tree import RolloutTree


class StaleEnginesError(RuntimeError):
    """EngineAdmin (their URLs are the arguments) serve older weights than trees need: push, then ask again."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How the trees of one call are grown.

    Attributes:
        branching: the algorithm whose policy distributes the trajectories; None: independent ones.
        samples: trajectories a task where `branching` is None.
        sampling: how tokens are drawn; its seed is replaced for every place.
        limits: bounds of a trajectory.
        routes: keep what the engine tells of expert routes, where it does (`ServiceSettings.routes`).
    """

    branching: AlgorithmConfig | None
    samples: int
    sampling: Sampling
    limits: RolloutLimits
    expert_routes: bool = False

    @classmethod
    def training(cls, config: JobConfig) -> Self:
        """A training step: the config's algorithm and temperature."""
        return cls(
            branching=config.algorithm,
            samples=config.algorithm.group_size,
            sampling=Sampling(config.rollout.temperature, config.rollout.top_p),
            limits=_limits(config),
            expert_routes=True,
        )

    @classmethod
    def evaluation(cls, config: JobConfig, *, samples: int = 1, temperature: float | None = None) -> Self:
        """Independent trajectories, sampled as `config.evaluation` says, or at another `temperature`."""
        drawn = config.evaluation if temperature is None else replace(config.evaluation, temperature=temperature)
        return cls(
            branching=None,
            samples=samples,
            sampling=Sampling(
                temperature=drawn.temperature,
                top_p=drawn.top_p,
                top_k=drawn.top_k,
                repetition_penalty=drawn.penalty,
            ),
            limits=_limits(config),
        )


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """How far a call has come. `trees_done` counts failed trees too."""

    trees_done: int
    trees_total: int
    tokens_sampled: int


@dataclass(frozen=True, slots=True)
class IncompleteTree:
    """A tree that was given up: what it had sampled, and why."""

    tree: RolloutTree
    reason: str


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """What a call has grown.

    Attributes:
        trees: the finished trees, in the order of their tasks.
        failed: the trees of tasks that could not be finished.
        stats: what all of them cost.
        numbers: of these trees (`LiveTree.tree_id`).
    """

    trees: list[RolloutTree]
    failed: list[IncompleteTree]
    stats: RolloutStats
    tree_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What the process needs to know once.

    Attributes:
        engine_urls: the SGLang servers.
        sandbox_url: the tool service.
        tokenizer_path: Hugging Face directory with the tokenizer.
        seed: the run's seed; branching draws follow from it.
        request_timeout_s: deadline of one engine request.
        retry_for_s: how long after its first failure a request or tool call is repeated.
        sandbox_token: the tool service's bearer token, if it has one.
        engine_token: that of engines and router, likewise.
        router_url: SGLang's router before the engines, if one runs.
        routes: what an engine's expert routes look like; None: it tells none.
    """

    engine_urls: tuple[str, ...]
    sandbox_url: str
    tokenizer_path: Path
    seed: int
    request_timeout_s: float = 600.0
    retry_for_s: float = 60.0
    sandbox_token: str | None = field(default=None, repr=False)
    engine_token: str | None = field(default=None, repr=False)
    router_url: str | None = None
    expert_routes: ExpertRouteSpec | None = None


@dataclass(frozen=True, slots=True)
class LiveTree:
    """A tree to be grown, and what it has sampled already.

    Attributes:
        number: different for all trees of a run.
        group: trees that are collected together.
        task: several trees of one task and step would draw equal numbers.
        step: keys the branching draws.
        version: of the policy when it was begun.
        settings: how to grow.
        entries: from `record.packed`, in order; they answer before engine and tools are asked.
    """

    tree_id: int
    group: str
    task: Task
    step: int
    version: int
    settings: RolloutSettings
    entries: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class StartTrees:
    """Grow these trees; the engines hold policy `version`, at least."""

    trees: tuple[LiveTree, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Restore:
    """First of all: what a process that ended has left. With `paused` no request may pass until `Resume`."""

    settings: ServiceSettings
    start: StartTrees
    paused: bool


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A tree has sampled something; an entry of its record. Not an answer to anything."""

    tree_id: int
    entry: bytes


@dataclass(frozen=True, slots=True)
class CollectTrees:
    """Wait for `count` finished trees of a group (None: for all of it), and for all that began before a version.

    Those that began with the oldest version come first, and in the order of their start. More than `count` come only
    where more began before `finish_before`.
    """

    group: str
    count: int | None = None
    finish_before: int | None = None


@dataclass(frozen=True, slots=True)
class FinishTrees:
    """Wait until no tree of a group grows; they stay to be collected."""

    group: str


@dataclass(frozen=True, slots=True)
class StopTrees:
    """Give up all trees of a group that were not collected: those that still grow are reported as failed."""

    group: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Let no request pass to the engine and cut short those that run."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with policy `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way back.

    Attributes:
        traceback: the process's, as text.
        user_error: the one line of a `UserError`, None for other exceptions.
    """

    traceback: str
    user_error: str | None = None


def _limits(config: JobConfig) -> RolloutLimits:
    rollout = config.rollout
    return RolloutLimits(
        max_length=config.model.max_length,
        max_response_tokens=rollout.max_response_tokens,
        max_tool_calls=rollout.max_tool_calls,
        max_tool_tokens=rollout.max_tool_tokens,
        tool_timeout_s=rollout.tool_timeout_s,
        stop_at_answer=rollout.stop_at_answer,
        sessions=config.sandbox.sessions,
    )
