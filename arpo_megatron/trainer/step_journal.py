"""What the trees of a step have sampled, written down while the step waits for them: a killed run goes on within it.

A checkpoint is of the moment between two steps. The file here is of the moment of its last writing, and says after how
many steps that was: it is of use to a run that goes on from the checkpoint of that very step, whose weights are those
that have sampled.
"""

import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from arpo_megatron.rollout.record import UnfinishedTree, pack_trees, unpack_trees
from arpo_megatron.utils.atomic import flush

_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.blake2b().digest_size


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """Within a step.

    Attributes:
        selector: state of the task order, behind the tasks of these trees.
        trees: that are not trained yet, with all they had sampled.
    """

    selector: dict[str, Any]
    trees: list[UnfinishedTree]

    @property
    def entries(self) -> int:
        """Of all records together."""
        return sum(len(tree.entries) for tree in self.trees)


@dataclass(slots=True)
class StepJournal:
    """The file `path`, whole or not there, written every `every_s` seconds while `keep` is called.

    A disk that is full costs the file and not the run: that is told once, and again after a step in which all was well.

    Attributes:
        path: of the file.
        checkpoints: where `step_N` are.
        save_every: steps between two of them. Within a step before which none is saved nothing is written, for nobody
            could go on there; what there is of an earlier one stays.
        every_s: seconds.
        tell: takes a line for the user.
        kept_at: when it was written last.
        failed: the step of the last writing that did, until one of another step has not.
    """

    path: Path
    checkpoints: Path
    save_every: int
    every_s: float
    tell: Callable[[str], None]
    kept_at: float = field(default_factory=time.monotonic)
    failed: int | None = None

    def keep(
        self,
        step: int,
        selector: Mapping[str, Any],
        trees: Callable[[], Sequence[UnfinishedTree]],
        *,
        now: bool = False,
    ) -> None:
        """Write the moment down, if it is time or must be `now`; so many steps are done."""
        if not now and time.monotonic() - self.kept_at < self.every_s:
            return
        # A stopped run has one between those that are due.
        if step % self.save_every and not (self.checkpoints / f"step_{step}").exists():
            return
        self.kept_at = time.monotonic()
        partial = self.path.with_name(self.path.name + ".tmp")
        try:
            _write(partial, {"step": step, "selector": selector}, trees())
            partial.replace(self.path)
            flush(self.path.parent)
        except OSError as error:
            # The file goes too: it may be of an earlier life of the run, whose weights had the same number.
            for path in (partial, self.path):
                path.unlink(missing_ok=True)
            if self.failed is None:
                self.tell(f"{self.path.name} could not be written: {error.strerror}; training goes on")
            self.failed = step
        else:
            # Within a step one may succeed by the room that a failure has given back: that says nothing of the next.
            if step != self.failed:
                self.failed = None

    def read(self, step: int) -> StepSnapshot | None:
        """What was written when so many steps were done; None where that is not what the file holds, whole.

        What is of no use is removed: a later checkpoint with the file's number would be of another life of the run.
        """
        if (moment := self._found(step)) is None:
            self.path.unlink(missing_ok=True)
        return moment

    def _found(self, step: int) -> StepSnapshot | None:
        try:
            head, *trees = _parts(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            self.tell(f"{self.path.name} is not used: {error}")
            return None
        found = json.loads(bytes(head))
        if found["step"] != step:
            return None
        return StepSnapshot(found["selector"], [tree for part in trees for tree in unpack_trees(part)])


def _write(path: Path, head: Mapping[str, Any], trees: Sequence[UnfinishedTree]) -> None:
    """The head and every tree with its length before it, and behind them their digest.

    Tree by tree: the routes of experts of a whole step can take gigabytes.
    """
    digest = hashlib.blake2b()
    with path.open("wb") as file:
        for part in chain([json.dumps(head).encode()], (pack_trees([tree]) for tree in trees)):
            for piece in (_LENGTH.pack(len(part)), part):
                file.write(piece)
                digest.update(piece)
        file.write(digest.digest())
    flush(path)


def _parts(content: bytes) -> Iterator[memoryview]:
    """What `_write` has put together. Raises ValueError where a bit of it is another."""
    body, digest = memoryview(content)[:-_DIGEST], content[-_DIGEST:]
    if not body or hashlib.blake2b(body).digest() != digest:
        raise ValueError("it is damaged")
    while body:
        (length,) = _LENGTH.unpack(body[: _LENGTH.size])
        yield body[_LENGTH.size :][:length]
        body = body[_LENGTH.size + length :]
