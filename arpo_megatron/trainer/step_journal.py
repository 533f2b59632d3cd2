"""A journal of the step in progress: what its trees have sampled, so that a killed run resumes within the step.

A checkpoint holds the state between two steps. The journal holds the state within the step that follows checkpoint
`step_N`, and names N. Only a run that resumes from that checkpoint uses it: its weights are the ones that sampled.

The first write within a step writes all trees. Later ones append what is new: a step may sample gigabytes.
"""

import hashlib
import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from arpo_megatron.rollout.record import UntrainedTree
from arpo_megatron.utils.atomic import atomic_write, flush

_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.blake2b().digest_size


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The state of a run within a step."""

    selector: dict[str, Any]
    """State of the task selector after the tasks of these trees were drawn."""
    trees: list[UntrainedTree]
    """Trees that were started and not trained, with all that they have sampled."""

    @property
    def entries(self) -> int:
        """Number of entries in the records of all trees."""
        return sum(len(tree.entries) for tree in self.trees)


@dataclass(slots=True)
class StepJournal:
    """The file `path`. Its first state exists whole or not at all; a later one that is cut off does not count.

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
    content: "_Content | None" = None
    """The states that this process has written to the file; None if there are none."""
    failed: int | None = None
    """Step of the last write that failed; None again after a write of another step that worked."""

    def write(
        self,
        step: int,
        selector: Mapping[str, Any],
        trees: Callable[[], Sequence[UntrainedTree]],
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
        head = json.dumps({"step": step, "selector": selector}).encode()
        try:
            if self.content is None or self.content.step != step:
                self.content = _Content(step)
                with atomic_write(self.path) as partial, partial.open("wb") as file:
                    self.content.write(file, head, trees())
            else:
                with self.path.open("ab") as file:
                    self.content.write(file, head, trees())
                flush(self.path)
        except OSError as error:
            # The old journal goes too: its step may have been repeated since, with other weights.
            self.path.unlink(missing_ok=True)
            self.content = None
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
            head, trees = _last_state(memoryview(self.path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.log(f"{self.path.name} is not used: {error}")
            return None
        found = json.loads(head)
        return StepSnapshot(found["selector"], trees) if found["step"] == step else None


@dataclass(slots=True)
class _Content:
    """The states in a file.

    A state is a head and, for each tree, what the states before it lack. Each of these parts comes after its length.
    The parts end with one of length 0, and with a digest of the file up to there.
    """

    step: int
    entries: dict[int, int] = field(default_factory=dict)
    """Number of entries in the file, by the tree's number in it."""
    digest: "hashlib.blake2b" = field(default_factory=hashlib.blake2b)

    def write(self, file: BinaryIO, head: bytes, trees: Sequence[UntrainedTree]) -> None:
        self._write_part(file, head)
        for tree in trees:
            # A tree that does not grow yet has no number, and no later state refers to it.
            number = len(self.entries) + 2**32 if tree.tree_id is None else tree.tree_id
            known = self.entries.get(number, 0)
            part = (number, tree.task_id, tree.step, tree.version, tree.entries[known:])
            self._write_part(file, msgspec.msgpack.encode(part))
            self.entries[number] = len(tree.entries)
        self._write_part(file, b"")
        file.write(self.digest.digest())

    def _write_part(self, file: BinaryIO, part: bytes) -> None:
        for piece in (_LENGTH.pack(len(part)), part):
            file.write(piece)
            self.digest.update(piece)


def _last_state(content: memoryview) -> tuple[bytes, list[UntrainedTree]]:
    """Return head and trees of the last whole state. Raises ValueError if there is none."""
    digest, entries = hashlib.blake2b(), dict[int, list[bytes]]()
    state: tuple[bytes, list[UntrainedTree]] | None = None
    with suppress(struct.error, IndexError):  # the end of the file
        while True:
            parts = list[memoryview]()
            while part := _part(content):
                parts.append(part)
                digest.update(content[: _LENGTH.size + len(part)])
                content = content[_LENGTH.size + len(part) :]
            digest.update(content[: _LENGTH.size])
            content = content[_LENGTH.size :]
            if content[:_DIGEST] != digest.digest():
                break
            content = content[_DIGEST:]
            state = bytes(parts[0]), [_tree(part, entries) for part in parts[1:]]
    if state is None:
        raise ValueError("it is damaged")
    return state


def _part(content: memoryview) -> memoryview:
    """Return the part at the start of the content, without its length."""
    (length,) = _LENGTH.unpack(content[: _LENGTH.size])
    if length > len(content):
        raise IndexError
    return content[_LENGTH.size :][:length]


def _tree(part: memoryview, entries: dict[int, list[bytes]]) -> UntrainedTree:
    """Return a tree, given the entries of earlier states, and add its own to them."""
    number, task_id, step, version, new = msgspec.msgpack.decode(part)
    known = entries.setdefault(number, [])
    known += new
    return UntrainedTree(task_id, step, version, tuple(known))
