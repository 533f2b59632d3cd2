"""The one data structure: a group of trajectories for one task, kept as the tree that the sampler grew.

A node of the tree is a `Segment`: a run of tokens with one author. Segment 0 is the prompt; its children are MODEL
segments; a TOOL segment answers the MODEL segment above it; two MODEL children of one PROMPT or TOOL segment are a
fork. A MODEL segment below a MODEL segment is its continuation by newer weights, and no fork. A path from the root to a
leaf is a trajectory. Everything here is numpy and knows no other part of the project.

Tokens are never edited or re-tokenized after sampling: what the engine returned is what the trainer trains.
"""

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int16Array = NDArray[np.int16]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
Array = TypeVar("Array", bound=NDArray[Any])
Record = TypeVar("Record", "BranchRecord", "ToolRecord")


class Role(StrEnum):
    """Author of the tokens of a segment."""

    PROMPT = "prompt"
    MODEL = "model"
    TOOL = "tool"


class Finish(StrEnum):
    """Reason for the end of a MODEL segment."""

    TOOL_CALL = "tool_call"  # a closing tool tag: a TOOL segment follows
    END = "end"  # the end-of-sequence token or a finished answer
    LENGTH = "length"  # the token limit of the trajectory
    CALL_LIMIT = "call_limit"  # asked for a tool after the last allowed call
    MALFORMED = "malformed"  # a closing tool tag without a usable call before it


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """One branching decision, taken on the first tokens of a MODEL segment."""

    dH: float  # noqa: N815  (the paper's symbol)
    """Normalised entropy after the tool result minus that at the start of the trajectory, dimensionless."""
    probability: float
    """Chance of a fork, in [0, 1]."""
    draw: float
    """Number in [0, 1] that is compared with the chance: a fork if draw < probability."""
    why: str
    """Rule that decided: "draw", "threshold", "budget spent", ..."""


FAILED_CALL = "failed"
"""Status of a call without a result, because a service, the network or a provider failed. It ended its branch."""


@dataclass(frozen=True, slots=True)
class ToolRecord:
    """The call that a TOOL segment answers. `seconds` is wall time at the caller."""

    name: str
    arguments: Mapping[str, Any]
    status: str
    seconds: float
    cached: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one author."""

    token_ids: Int32Array
    """int32[n]."""
    role: Role
    """Author of the tokens."""
    parent: int
    """Index of the segment above, smaller than this segment's; -1 for the root."""
    logprobs: Float32Array | None = None
    """float32[n], sampling log-probs in nats. MODEL only; None if unknown."""
    entropies: Float32Array | None = None
    """float32[k], entropy in nats of the distribution of each of the first k tokens. MODEL only."""
    policy_version: int = 0
    """Version of the weights that sampled the tokens."""
    finish: Finish | None = None
    """Reason for the end. MODEL only; None while it grows."""
    branch: BranchRecord | None = None
    """Branching decision at its start, if there was one."""
    tool: ToolRecord | None = None
    """The call that it answers. TOOL only."""
    routes: Int16Array | None = None
    """int16[n, layers, k], the experts that the engine chose for each token, in any order; -1 for a token without known
    routes. None: no token has routes."""
    rewards: Mapping[str, float] | None = None
    """Parts of the reward that an environment has given for the action that the segment ends with. MODEL only."""
    ended_s: float | None = field(default=None, compare=False)
    """Age of the tree in seconds at its end; it began at the end of the segment above. None: unknown."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One root-to-leaf path as flat arrays of one length n."""

    token_ids: Int32Array
    """int32[n]."""
    loss_mask: Int32Array
    """int32[n], 1 on MODEL tokens only."""
    logprobs: Float32Array
    """float32[n], sampling log-probs in nats; 0 outside MODEL tokens and if unknown."""
    segment_of_token: Int32Array
    """int32[n], index of the segment in the tree."""


_FIELDS = {field.name for field in fields(Segment)}
_PROMPT_FIELDS = {"role", "parent", "token_ids", "policy_version", "routes"}


def _ids(values: ArrayLike) -> Int32Array:
    given = np.asarray(values).reshape(-1)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {given.dtype}")
    array = given.astype(np.int64)
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError("token ids must be in [0, 2**31)")
    return _frozen(array.astype(np.int32))


def _routes(values: ArrayLike | Mapping[str, Any], tokens: int) -> Int16Array:
    # A mapping has the form of `stored_routes`.
    if isinstance(values, Mapping):
        values = np.asarray(values["experts"], np.int16).reshape(tokens, values["layers"], values["top_k"])
    array = np.array(values, dtype=np.int16)
    if array.ndim != 3 or len(array) != tokens:
        raise ValueError(f"routes of shape {array.shape} for {tokens} tokens: expected [tokens, layers, experts]")
    ordered = np.sort(array, axis=-1)
    unknown = (array == -1).all(axis=(1, 2))
    if not (unknown | ((array >= 0).all(axis=(1, 2)) & (np.diff(ordered) > 0).all(axis=(1, 2)))).all():
        raise ValueError("a token's experts of a layer must be different and not negative, or all of its routes -1")
    return _frozen(array)


def stored_routes(routes: Int16Array | None) -> dict[str, Any] | None:
    """Return the stored form of routes: flat int16 values and the lengths of the last two axes."""
    if routes is None:
        return None
    return {"layers": routes.shape[1], "top_k": routes.shape[2], "experts": routes.reshape(-1)}


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True)
class LostBranches:
    """The branches that failed tool calls have cost a tree. They are no part of the tree."""

    grown: "RolloutTree"
    """The tree with them; each ends in a TOOL segment without tokens and with status `FAILED_CALL`."""
    trajectories: int
    """Planned trajectories that the tree lacks."""


class RolloutTree:
    """All trajectories of one task, grown by `add`. Segments are immutable.

    `segments` has them in the order of their addition, so a parent comes before its children.

    Args:
        task_id: task that the trajectories attempt.
        prompt_ids: int[n], tokens of segment 0.
        routes: routes of the prompt; see `Segment`.
        step: rollout step in which it began; keys its branching draws.
        seconds: wall time from its beginning to the end of its last trajectory.
    """

    __slots__ = ("answered_shares", "lost", "needs", "same_calls", "seconds", "segments", "step", "task_id")

    def __init__(
        self,
        task_id: str,
        prompt_ids: ArrayLike,
        *,
        routes: ArrayLike | Mapping[str, Any] | None = None,
        step: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self.needs: dict[int, tuple[int, ...]] = {}
        """First MODEL segment of a trajectory whose start depended on other trajectories -> their TOOL segments that
        decided about it. Empty for a tree that has lost branches: see that of `grown`."""
        self.same_calls: dict[int, int] = {}
        """TOOL segment -> the first TOOL segment that shares its execution; -1: the result was known before the tree.
        Empty for a tree that has lost branches."""
        self.lost: LostBranches | None = None  # None: no tool call has failed
        self.answered_shares: dict[str, float] = {}
        """Share of a tool's calls that were answered around the time of this tree; only for tools whose calls fail."""
        self.task_id = task_id
        self.step = step
        self.seconds = seconds
        ids = _ids(prompt_ids)
        known = None if routes is None else _routes(routes, len(ids))
        self.segments = [Segment(ids, Role.PROMPT, -1, routes=known)]

    @property
    def prompt_ids(self) -> Int32Array:
        """int32[n]: the tokens of segment 0."""
        return self.segments[0].token_ids

    def add(
        self,
        parent: int,
        role: Role,
        token_ids: ArrayLike,
        *,
        logprobs: ArrayLike | None = None,
        entropies: ArrayLike | None = None,
        policy_version: int = 0,
        finish: Finish | None = None,
        branch: BranchRecord | None = None,
        tool: ToolRecord | None = None,
        routes: ArrayLike | Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
        ended_s: float | None = None,
    ) -> int:
        """Append a segment below `parent` and return its index.

        Raises:
            ValueError: unknown parent, log-probs of another length than the tokens, more entropies than tokens,
                values that are not finite, sampling fields outside MODEL, a tool record outside TOOL, a second prompt,
                routes of another length than the tokens or with an expert twice.
        """
        role, parent = Role(role), operator.index(parent)
        ids = _ids(token_ids)
        if not 0 <= parent < len(self.segments):
            raise ValueError(f"unknown parent {parent}: the tree has segments 0 to {len(self.segments) - 1}")
        if role is Role.PROMPT:
            raise ValueError("a tree has one PROMPT segment, its root")
        if role is not Role.MODEL and any(x is not None for x in (logprobs, entropies, finish, branch, rewards)):
            raise ValueError(f"log-probs, entropies, finish, branch, rewards belong to MODEL segments, not {role}")
        if rewards is not None and not np.isfinite(list(rewards.values())).all():
            raise ValueError("rewards must be finite numbers")
        if role is not Role.TOOL and tool is not None:
            raise ValueError(f"a tool record belongs to TOOL segments, not {role.value}")
        lps = None if logprobs is None else _frozen(np.array(logprobs, dtype=np.float32).reshape(-1))
        ents = None if entropies is None else _frozen(np.array(entropies, dtype=np.float32).reshape(-1))
        if lps is not None and len(lps) != len(ids):
            raise ValueError(f"{len(lps)} log-probs for {len(ids)} tokens")
        if ents is not None and len(ents) > len(ids):
            raise ValueError(f"{len(ents)} entropies for {len(ids)} tokens")
        if not all(values is None or np.isfinite(values).all() for values in (lps, ents)):
            raise ValueError("log-probs and entropies must be finite numbers")
        version = operator.index(policy_version)
        known = None if routes is None else _routes(routes, len(ids))
        self.segments.append(
            Segment(ids, role, parent, lps, ents, version, finish, branch, tool, known, rewards, ended_s)
        )
        return len(self.segments) - 1

    def append(self, parent: int, segment: Segment) -> int:
        """Add a copy of a segment, such as one of another tree, below `parent`."""
        return self.add(parent, **{name: getattr(segment, name) for name in _FIELDS - {"parent"}})

    def children(self) -> list[list[int]]:
        """Return for each segment the indices of its children, in the order of their addition."""
        below: list[list[int]] = [[] for _ in self.segments]
        for index, segment in enumerate(self.segments[1:], start=1):
            below[segment.parent].append(index)
        return below

    def leaves(self) -> list[int]:
        """Return the indices of the segments without children, ascending. A lone prompt is a leaf."""
        inner = {segment.parent for segment in self.segments}
        return [index for index in range(len(self.segments)) if index not in inner]

    def path(self, leaf: int) -> list[int]:
        """Return the indices from the root to `leaf`, both included. `leaf` may be any segment."""
        if not 0 <= leaf < len(self.segments):
            raise ValueError(f"unknown segment {leaf}: the tree has segments 0 to {len(self.segments) - 1}")
        indices = []
        while leaf >= 0:
            indices.append(leaf)
            leaf = self.segments[leaf].parent
        return indices[::-1]

    def trajectory(self, leaf: int) -> Trajectory:
        """Return the path to `leaf` as flat arrays."""
        path = self.path(leaf)
        parts = [self.segments[index] for index in path]
        zeros = [np.zeros(len(part), np.float32) for part in parts]
        return Trajectory(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            loss_mask=np.concatenate([np.full(len(part), part.role is Role.MODEL, np.int32) for part in parts]),
            logprobs=np.concatenate(
                [zero if p.logprobs is None else p.logprobs for p, zero in zip(parts, zeros, strict=True)]
            ),
            segment_of_token=np.repeat(np.array(path, np.int32), [len(part) for part in parts]),
        )

    def path_tokens(self, leaf: int) -> Int32Array:
        """Return int32[n], the token ids of `trajectory(leaf)`."""
        return np.concatenate([self.segments[index].token_ids for index in self.path(leaf)])

    @property
    def grown(self) -> "RolloutTree":
        """The tree with the branches that it has lost; itself if there are none."""
        return self if self.lost is None else self.lost.grown

    @property
    def planned(self) -> int:
        """Number of trajectories that it would have without failed tool calls."""
        return len(self.leaves()) + (0 if self.lost is None else self.lost.trajectories)

    @property
    def unique_tokens(self) -> int:
        """Number of tokens of the tree, each counted once."""
        return sum(len(segment) for segment in self.segments)

    @property
    def flat_tokens(self) -> int:
        """Number of tokens of all trajectories: shared ones count once per leaf."""
        lengths: list[int] = []
        for segment in self.segments:
            lengths.append(len(segment) + (lengths[segment.parent] if segment.parent >= 0 else 0))
        return sum(lengths[leaf] for leaf in self.leaves())

    @property
    def forks(self) -> int:
        """Number of trajectories that began after a tool result."""
        below = zip(self.children(), self.segments, strict=True)
        return sum(len(children) - 1 for children, segment in below if segment.role is Role.TOOL and children)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-safe, lossless form; float32 values survive the round trip bit for bit."""
        return {
            "task_id": self.task_id,
            "step": self.step,
            "seconds": self.seconds,
            "segments": [_segment_to_dict(segment) for segment in self.segments],
            "needs": [[first, list(calls)] for first, calls in self.needs.items()],
            "same_calls": [[call, first] for call, first in self.same_calls.items()],
            "answered_shares": self.answered_shares,
            "lost": self.lost and {"grown": self.lost.grown.to_dict(), "trajectories": self.lost.trajectories},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the tree of a `to_dict` form. Raises ValueError or KeyError if the data is not a tree."""
        root, *rest = data["segments"]
        if root["role"] != Role.PROMPT or root["parent"] != -1:
            raise ValueError("segment 0 must be the PROMPT with parent -1")
        if more := sorted(name for name, value in root.items() if value is not None and name not in _PROMPT_FIELDS):
            raise ValueError(f"segment 0 is a PROMPT, which has no {', '.join(more)}")
        step = int(data.get("step", 0))
        if not isinstance(data["task_id"], str) or step < 0:  # draws are keyed by both
            raise ValueError(f"task {data['task_id']!r}, begun in step {step}: expected text and a number from 0")
        seconds = float(data.get("seconds", 0.0))
        tree = cls(data["task_id"], root["token_ids"], routes=root.get("routes"), step=step, seconds=seconds)
        for item in rest:
            given = dict(item)
            if given.get("finish") is not None:
                given["finish"] = Finish(given["finish"])
            if given.get("branch") is not None:
                given["branch"] = _whole(BranchRecord(**given["branch"]))
            if given.get("tool") is not None:
                given["tool"] = _whole(ToolRecord(**given["tool"]))
            if unknown := given.keys() - _FIELDS:
                raise ValueError(f"unknown segment fields: {', '.join(sorted(unknown))}")
            tree.add(given.pop("parent"), Role(given.pop("role")), given.pop("token_ids"), **given)
        tree.needs = {first: tuple(calls) for first, calls in data.get("needs") or ()}
        tree.same_calls = dict(data.get("same_calls") or ())
        tree.answered_shares = dict(data.get("answered_shares") or {})
        if lost := data.get("lost"):
            tree.lost = LostBranches(cls.from_dict(lost["grown"]), int(lost["trajectories"]))
        return tree


def _whole(record: Record) -> Record:
    # A stored record may have been edited: a null in it is an error.
    if empty := [field.name for field in fields(record) if getattr(record, field.name) is None]:
        raise ValueError(f"a {type(record).__name__} without {', '.join(empty)}")
    return record


def _segment_to_dict(segment: Segment) -> dict[str, Any]:
    data: dict[str, Any] = {
        "parent": segment.parent,
        "role": segment.role.value,
        "token_ids": segment.token_ids.tolist(),
        "policy_version": segment.policy_version,
    }
    for name, values in (("logprobs", segment.logprobs), ("entropies", segment.entropies)):
        if values is not None:
            data[name] = values.tolist()
    if segment.finish is not None:
        data["finish"] = segment.finish.value
    data |= {} if segment.branch is None else {"branch": asdict(segment.branch)}
    if segment.tool is not None:
        data["tool"] = {**asdict(segment.tool), "arguments": dict(segment.tool.arguments)}
    data |= {} if segment.rewards is None else {"rewards": dict(segment.rewards)}
    data |= {} if segment.ended_s is None else {"ended_s": segment.ended_s}
    if (routes := stored_routes(segment.routes)) is not None:
        data["routes"] = {**routes, "experts": routes["experts"].tolist()}
    return data
