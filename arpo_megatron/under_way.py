"""What the trees of a step have sampled, written down while it is under way: a killed run goes on within the step.

A checkpoint is of the moment between two steps. The file here is of the moment of its last writing, and says after how
many steps that was: it is of use to a run that goes on from the checkpoint of that very step, whose weights are those
that have sampled.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from arpo_megatron.durable import flush
from arpo_megatron.rollout.record import UnfinishedTree, pack_trees, unpack_trees


@dataclass(frozen=True, slots=True)
class Moment:
    """Within a step.

    Attributes:
        sampler: state of the task order, behind the tasks of these trees.
        trees: that are not trained yet, with all they had sampled.
    """

    sampler: dict[str, Any]
    trees: list[UnfinishedTree]

    @property
    def answers(self) -> int:
        """What engine and tools need not be asked again."""
        return sum(len(tree.entries) for tree in self.trees)


@dataclass(slots=True)
class UnderWay:
    """The file `path`, whole or not there, written every `every_s` seconds while `keep` is called.

    A disk that is full costs the file and not the run: that is told once.
    """

    path: Path
    every_s: float
    tell: Callable[[str], None]
    kept_at: float = field(default_factory=time.monotonic)
    failed: bool = False

    def keep(
        self, step: int, sampler: Mapping[str, Any], trees: Callable[[], Sequence[UnfinishedTree]], *, now: bool = False
    ) -> None:
        """Write the moment down, if it is time or must be `now`; so many steps are done."""
        if not now and time.monotonic() - self.kept_at < self.every_s:
            return
        self.kept_at = time.monotonic()
        content = msgspec.msgpack.encode((step, json.dumps(sampler), pack_trees(trees())))
        partial = self.path.with_name(self.path.name + ".tmp")
        try:
            partial.write_bytes(content)
            flush(partial)
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not self.failed:
                self.tell(f"{self.path.name} could not be written: {error.strerror}; training goes on")
            self.failed = True
        else:
            self.failed = False

    def read(self, step: int) -> Moment | None:
        """What was written when so many steps were done; None where that is not what the file holds."""
        try:
            written, sampler, trees = msgspec.msgpack.decode(self.path.read_bytes())
            return Moment(json.loads(sampler), unpack_trees(trees)) if written == step else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            self.tell(f"{self.path.name} is not used: {type(error).__name__}: {error}")
            return None
