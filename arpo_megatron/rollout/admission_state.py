"""State of engines, trees and paths in `admission`, and the figures of a report."""

from dataclasses import dataclass, field

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.capacity import EngineCapacity

FIRST_MARGIN = 1.0
PathId = tuple[int, PathKey]
"""Number of the tree in the order of starts, and key of the path's first segment. Smaller ones come first."""


@dataclass(slots=True)
class PathState:
    """A path between its start and the removal of its tree."""

    parent: PathKey | None
    """The path that it forked from; None for one that starts at the prompt."""
    start: int
    """Tokens from the root to its start."""
    length: int
    """Tokens from the root to its end so far."""
    cached: int = 0
    """Tokens of it, from the root, that an engine has computed since the last push."""
    segments: int = 0
    """Requests answered."""
    resident: bool = False
    released: bool = False
    """Others got its room, or its tree moved, and it has not been answered since. Its cached tokens may be gone,
    which is no reason to cut the margin."""
    asks: bool = False
    """It wants to send a request."""


@dataclass(slots=True)
class TreeState:
    """A tree with its paths and their tokens."""

    prompt: int
    paths: dict[PathKey, PathState] = field(default_factory=dict)
    """A path comes after the one that it forked from."""
    engine: int | None = None
    reserved: int = 0
    """Tokens that its resident paths are expected to need."""
    used: int = 0
    """Tokens that they have."""


@dataclass(slots=True)
class AdmittingEngine:
    """An engine with the paths that are resident there or wait for it."""

    capacity: EngineCapacity
    margin: float = FIRST_MARGIN
    recomputed: float = 0.0
    """Running mean over requests of tokens that were computed again."""
    due: float = 0.0
    """Running mean over requests of tokens that had not been computed before."""
    draining: bool = False
    """The margin was cut, and more is reserved than it allows: until that ends it is not cut again."""
    reserved: int = 0
    used: int = 0
    refused: tuple[PathId, float] | None = None
    """The last path that had no room, and the room that there was."""
    running: int = 0
    """Requests that were granted and not answered."""
    ready: list[PathId] = field(default_factory=list)
    """Heap of resident paths that ask."""
    waiting: list[PathId] = field(default_factory=list)
    """Heap of other paths of its trees that ask."""


@dataclass(frozen=True, slots=True)
class AdmissionFigures:
    """Figures of admission for a report."""

    trees_running: int = 0
    """Trees with a resident path now."""
    trees_waiting: int = 0
    """Trees without one that have a path which asks."""
    resident: int = 0
    """Resident paths now."""
    waiting: int = 0
    """Paths that ask and are not resident now."""
    recomputed: int = 0
    """Tokens that were expected in the cache and were computed, so far."""
    moved: int = 0
    """How often a tree moved to another engine, so far."""
    suspended: int = 0
    """How often a resident path had to wait because the pool was full, so far."""
    released: int = 0
    """How often a path was released while it waited for a tool, so far."""
    margin: float = FIRST_MARGIN
    """Smallest margin of an engine now."""
