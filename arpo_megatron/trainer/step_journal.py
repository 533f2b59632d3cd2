"""A journal of the step in progress: what its trees have sampled, so that a killed run resumes within the step.

A checkpoint holds the state between two steps. The journal holds the state within the step that follows checkpoint
`step_N`, and names N. Only a run that resumes from that checkpoint uses it: its weights are the ones that sampled.
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

from arpo_megatron.rollout.record import UnfinishedTree, decode_records, encode_records
from arpo_megatron.utils.atomic import atomic_write

_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.blake2b().digest_size


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The state of a run within a step."""

    selector: dict[str, Any]
    """State of the task selector after the tasks of these trees were drawn."""
    trees: list[UnfinishedTree]
    """Trees that were started and not trained, with all that they have sampled."""

    @property
    def entries(self) -> int:
        """Number of entries in the records of all trees."""
        return sum(len(tree.entries) for tree in self.trees)


@dataclass(slots=True)
class StepJournal:
    """The file `path`, which exists whole or not at all.

    A full disk costs the journal, not the run. It is logged once, and again after a step in which every write worked.
    """

    path: Path
    checkpoints: Path
    """Directory of the checkpoints `step_N`."""
    save_every: int
    """Steps between two checkpoints. Within a step without a checkpoint before it nothing is written, because no run
    could resume there; the journal of an earlier step stays."""
    every_s: float
    """Seconds between two writes."""
    log: Callable[[str], None]
    written_at: float = field(default_factory=time.monotonic)
    failed: int | None = None
    """Step of the last write that failed; None again after a write of another step that worked."""

    def write(
        self,
        step: int,
        selector: Mapping[str, Any],
        trees: Callable[[], Sequence[UnfinishedTree]],
        *,
        now: bool = False,
    ) -> None:
        """Write the state within the step after `step` finished ones, if it is time or `now`."""
        if not now and time.monotonic() - self.written_at < self.every_s:
            return
        # A run that was stopped has a checkpoint between those that are due.
        if step % self.save_every and not (self.checkpoints / f"step_{step}").exists():
            return
        self.written_at = time.monotonic()
        try:
            with atomic_write(self.path) as partial:
                _write(partial, {"step": step, "selector": selector}, trees())
        except OSError as error:
            # The old journal goes too: its step may have been repeated since, with other weights.
            self.path.unlink(missing_ok=True)
            if self.failed is None:
                self.log(f"{self.path.name} could not be written: {error.strerror}; training continues")
            self.failed = step
        else:
            # Within the step of a failure a write may work in the room that the deleted journal left.
            if step != self.failed:
                self.failed = None

    def read(self, step: int) -> StepSnapshot | None:
        """Return the journal of the step after `step` finished ones; None if the file holds no such journal.

        A file that is of no use is deleted: a later checkpoint of the same number would have other weights.
        """
        if (snapshot := self._read(step)) is None:
            self.path.unlink(missing_ok=True)
        return snapshot

    def _read(self, step: int) -> StepSnapshot | None:
        try:
            head, *trees = _parts(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            self.log(f"{self.path.name} is not used: {error}")
            return None
        found = json.loads(bytes(head))
        if found["step"] != step:
            return None
        return StepSnapshot(found["selector"], [tree for part in trees for tree in decode_records(part)])


def _write(path: Path, head: Mapping[str, Any], trees: Sequence[UnfinishedTree]) -> None:
    """Write the head and every tree, each after its length, then a digest of all of it.

    One tree at a time: the expert routes of a whole step can take gigabytes.
    """
    digest = hashlib.blake2b()
    with path.open("wb") as file:
        for part in chain([json.dumps(head).encode()], (encode_records([tree]) for tree in trees)):
            for piece in (_LENGTH.pack(len(part)), part):
                file.write(piece)
                digest.update(piece)
        file.write(digest.digest())


def _parts(content: bytes) -> Iterator[memoryview]:
    """Return what `_write` was given. Raises ValueError if the content is damaged."""
    body, digest = memoryview(content)[:-_DIGEST], content[-_DIGEST:]
    if not body or hashlib.blake2b(body).digest() != digest:
        raise ValueError("it is damaged")
    while body:
        (length,) = _LENGTH.unpack(body[: _LENGTH.size])
        yield body[_LENGTH.size :][:length]
        body = body[_LENGTH.size + length :]
