"""A discrete-event model of rollouts: engine, admission, tools, forks and pushes. Pure and seeded.

The trees are given: synthetic ones of a job (`workload`), or trees that a run has grown. The model decides when each of
their requests is sent, with the real `KvAdmission`, and what the engine computes and evicts (`simulated_engine`).
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.capacity import EngineCapacity
from arpo_megatron.engine.growing_trees import GrowingTrees
from arpo_megatron.plan.simulated_engine import EngineModel, KvBlock, Request, SimulatedEngine
from arpo_megatron.rollout.admission import KvAdmission
from arpo_megatron.rollout.admission_gate import SPARE_REQUESTS, path_of
from arpo_megatron.rollout.admission_state import PathId
from arpo_megatron.tree import Role, RolloutTree


@dataclass(frozen=True, slots=True)
class RolloutModel:
    """Engine, trees and schedule of a simulation."""

    engine: EngineModel
    """The engine that grows the trees."""
    trees: Sequence[RolloutTree]
    """All trees, in the order of their start."""
    per_step: int
    """Trees of a step."""
    tool_s: Callable[[int, int], float]
    """Returns the seconds of a tool call, given the number of its tree and of its TOOL segment."""
    limit: int
    """Most tokens of a response."""
    initial: int
    """Trajectories that start from the prompt at once."""
    measured: int
    """Tokens after a tool result whose entropies decide on a fork."""
    admission: Literal["kv", "all"] = "kv"
    priority: Literal["none", "age"] = "none"
    staleness: Literal[0, 1] = 0
    """With 1, the trees of the next step grow while the trainer trains."""
    train_s: float = 0.0
    """Seconds of a step's training and push."""
    colocated: bool = False
    """The engine has the trainer's GPUs, so nothing is sampled while it trains."""


@dataclass(slots=True)
class SimulatedRollout:
    """Time, tokens and requests of a simulated rollout, summed over its steps."""

    seconds: float = 0.0
    steps: int = 0
    sampled: int = 0
    """Tokens."""
    given: int = 0
    """Tokens of prompts and tool results, each once."""
    computed: int = 0
    """Prompt tokens that the engine computed."""
    evicted: int = 0
    """Tokens that its cache evicted for others."""
    retracted: int = 0
    """How often a running request had to give up its tokens, because the pool was full."""
    requests: int = 0
    busy_share: float = 0.0
    """Share of the time in which the engine computes."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / max(1, self.steps)

    @property
    def reprefill(self) -> float:
        """Computed prompt tokens over unique ones."""
        return self.computed / max(1, self.given)


@dataclass(slots=True)
class _Tree:
    number: int
    tree: RolloutTree
    keys: list[PathKey]
    children: list[list[int]]
    blocks: list[KvBlock]
    starts: list[int]
    """Tokens before each segment."""
    open: int = 0
    """Paths that have started and not ended."""
    waiting: deque[int] | None = field(default_factory=deque)
    """Segments that wait until the prompt is in the cache; None once it is."""
    fresh: list[int] = field(default_factory=list)
    """Trajectories from the prompt that start when all other paths have ended."""


def simulate(model: RolloutModel) -> SimulatedRollout:
    """Return the totals of all steps: trees grow, and each step trains on its own."""
    return _Simulation(model).run()


class _Simulation:
    def __init__(self, model: RolloutModel) -> None:
        self._model = model
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._engine = SimulatedEngine(model.engine, self._at)
        size = model.engine
        capacity = EngineCapacity(size.tokens, int(size.requests * SPARE_REQUESTS) + 1)
        self._admission = None
        if model.admission == "kv":
            self._admission = KvAdmission([capacity], size.tokens * size.prefill_s)
        self._asked: dict[PathId, Callable[[], None]] = {}
        self._growing = GrowingTrees()
        self._next = self._trained = self._finished = 0
        self._training = False
        self._found = SimulatedRollout()

    def run(self) -> SimulatedRollout:
        self._start_trees()
        while self._events:
            self._now, _, call = heapq.heappop(self._events)
            call()
        found, engine = self._found, self._engine
        assert self._trained == len(self._model.trees), "the simulation is stuck"
        found.seconds = self._now
        found.computed, found.evicted, found.retracted = engine.computed, engine.evicted, engine.retracted
        found.busy_share = engine.busy_s / max(self._now, 1e-9)
        return found

    def _at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._order), call))

    def _start_trees(self) -> None:
        room = self._trained + self._model.per_step * (1 + self._model.staleness)
        while self._next < min(room, len(self._model.trees)):
            self._start_tree(self._next)
            self._next += 1

    def _start_tree(self, number: int) -> None:
        tree = self._model.trees[number]
        keys, children = list[PathKey](), [list[int]() for _ in tree.segments]
        blocks, starts = list[KvBlock](), list[int]()
        for index, segment in enumerate(tree.segments):
            above = segment.parent
            if above < 0:
                keys.append(())
                blocks.append(KvBlock(None, len(segment)))
                starts.append(0)
                continue
            keys.append((*keys[above], len(children[above])))
            children[above].append(index)
            # The KV of sampled tokens is in the block of the request.
            blocks.append(KvBlock(blocks[above], 0 if segment.role is Role.MODEL else len(segment)))
            starts.append(starts[above] + len(tree.segments[above]))
        self._found.given += sum(len(each) for each in tree.segments if each.role is not Role.MODEL)
        state = _Tree(number, tree, keys, children, blocks, starts)
        self._growing.begin(str(number), 0)
        if self._admission is not None:
            self._admission.add_tree(number, len(tree.prompt_ids), self._model.limit)
        first, state.fresh = children[0][: self._model.initial], children[0][self._model.initial :]
        self._start_paths(state, first)

    def _start_paths(self, tree: _Tree, first: Sequence[int]) -> None:
        """Start the paths with these first segments."""
        tree.open += len(first)
        for index in first:
            self._start_path(tree, index)

    def _start_path(self, tree: _Tree, index: int) -> None:
        if self._admission is not None:
            above = tree.tree.segments[index].parent
            parent = None if not above else path_of(tree.keys[above])
            self._admission.add_path(tree.number, path_of(tree.keys[index]), parent, tree.starts[index])
        self._ask(tree, index)

    def _ask(self, tree: _Tree, index: int) -> None:
        """Send the request for a MODEL segment as soon as it is admitted."""
        if self._admission is None:
            self._send(tree, index)
            return
        path = tree.number, path_of(tree.keys[index])
        self._asked[path] = lambda: self._send(tree, index)
        self._admission.ask(*path, tree.starts[index])
        self._grant()

    def _grant(self) -> None:
        if self._admission is not None:
            for path, _ in self._admission.grant():
                self._asked.pop(path)()

    def _send(self, tree: _Tree, index: int) -> None:
        """Send a request; the first of a tree computes the prompt before all others."""
        if tree.waiting is not None:
            tree.waiting.append(index)
            if len(tree.waiting) == 1:
                self._submit(tree, Request(tree.blocks[0], 0, 0, lambda _request: self._prompt_cached(tree)))
            return
        segment, above = tree.tree.segments[index], tree.tree.segments[index].parent
        siblings = tree.children[above][1:] if above and tree.children[above][0] == index else []
        room = max(self._model.limit - tree.starts[index] + len(tree.tree.prompt_ids), len(segment))
        request = Request(tree.blocks[above], len(segment), room, partial(self._answered, tree, index))
        if siblings:
            at = min(self._model.measured, len(segment) - 1)
            request.first = at, partial(self._start_paths, tree, siblings)
        request.output = tree.blocks[index]
        self._submit(tree, request)

    def _submit(self, tree: _Tree, request: Request) -> None:
        self._found.requests += 1
        if self._model.priority == "age":
            request.priority = self._growing.priority(str(tree.number))
        self._engine.submit(request)

    def _prompt_cached(self, tree: _Tree) -> None:
        waiting, tree.waiting = tree.waiting, None
        for index in waiting or ():
            self._send(tree, index)

    def _answered(self, tree: _Tree, index: int, request: Request) -> None:
        segment, key = tree.tree.segments[index], path_of(tree.keys[index])
        self._found.sampled += len(segment)
        end = tree.starts[index] + len(segment)
        if self._admission is not None:
            self._admission.answered(0, tree.number, key, end, tree.starts[index] - request.computed)
        after = tree.children[index]
        if not after:
            self._end(tree, key)
        elif tree.tree.segments[after[0]].role is Role.MODEL:
            self._ask(tree, after[0])  # a push has cut the segment short
        else:
            self._call_tool(tree, after[0], key)
        self._grant()

    def _call_tool(self, tree: _Tree, tool: int, key: PathKey) -> None:
        seconds, waits = self._model.tool_s(tree.number, tool), True

        def answer() -> None:
            nonlocal waits
            waits = False
            if self._admission is not None:
                self._admission.tool_answered(seconds)
            if tree.children[tool]:
                self._ask(tree, tree.children[tool][0])
            else:
                self._end(tree, key)

        def release() -> None:
            if waits and self._admission is not None:
                self._admission.release(tree.number, key)
                self._grant()

        patience_s = math.inf if self._admission is None else self._admission.patience_s
        if patience_s < seconds:
            self._at(patience_s, release)
        self._at(seconds, answer)

    def _end(self, tree: _Tree, key: PathKey) -> None:
        if self._admission is not None:
            self._admission.end(tree.number, key)
            self._grant()
        tree.open -= 1
        if tree.open:
            return
        fresh, tree.fresh = tree.fresh, []
        self._start_paths(tree, fresh)
        if not fresh:
            if self._admission is not None:
                self._admission.remove_tree(tree.number)
                self._grant()
            self._growing.end(str(tree.number))
            self._finished += 1
            self._train()

    def _train(self) -> None:
        """Train if a step's trees are finished; with staleness 0 all of them belong to that step."""
        due = min(self._model.per_step, len(self._model.trees) - self._trained)
        if self._training or not due or self._finished - self._trained < due:
            return
        self._training = True
        if self._model.colocated:
            self._engine.pause()
        self._at(self._model.train_s, lambda: self._pushed(due))

    def _pushed(self, due: int) -> None:
        self._training = False
        self._trained += due
        self._found.steps += 1
        self._engine.flush()
        if self._admission is not None:
            self._admission.flushed()
        self._engine.resume()
        self._start_trees()
        self._train()
