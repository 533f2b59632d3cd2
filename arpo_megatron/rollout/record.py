"""What a tree has sampled so far, kept so that whoever grows it may die.

Every answer of engine and tools becomes an entry as soon as it is there. A tree is a function of its prompt, its
settings and these answers (`grower`: every decision follows from them and the seed), so growing it again with the
entries answering first leads to the same place, and on from there with the engine.

Entries are bytes (msgpack: nothing in a file is executed); trainer rank 0 keeps those of all trees under way, for the
process that grows them and for the checkpoint.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from arpo_megatron.algorithms.branching import PathKey
from arpo_megatron.engine.request import EngineFinish, Generation
from arpo_megatron.tree import Int32Array, ToolRecord

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt was put into the engine's cache: tokens sent, and how many of those it held before."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A call was answered: int32[n] tokens of the result, how it came about."""

    token_ids: Int32Array
    tool: ToolRecord


Answer = Prefilled | Generation | Answered


@dataclass(frozen=True, slots=True)
class UnfinishedTree:
    """A tree that is not trained yet, growing or finished, as a checkpoint holds it.

    Attributes:
        task_id: its task.
        step: rollout step in which it was begun.
        version: of the policy at that time.
        entries: what it has sampled, in order.
    """

    task_id: str
    step: int
    version: int
    entries: tuple[bytes, ...]


@dataclass(slots=True)
class TreeRecord:
    """The entries of one tree by their places.

    Attributes:
        prefilled: of its prompt, in order.
        sampled: the answers of the engine at a MODEL segment's place, in order.
        answered: what came of the call that ended the MODEL segment at a place.
        seconds: age of the tree at its newest entry.
    """

    prefilled: list[Prefilled] = field(default_factory=list)
    sampled: dict[PathKey, list[Generation]] = field(default_factory=dict)
    answered: dict[PathKey, Answered] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of(cls, entries: Iterable[bytes]) -> "TreeRecord":
        """From what `packed` made."""
        record = cls()
        for entry in entries:
            record.add(*_unpacked(entry))
        return record

    def add(self, key: PathKey, answer: Answer, seconds: float) -> None:
        """Put in the answer at a place, which came when the tree was so old."""
        self.seconds = max(self.seconds, seconds)
        match answer:
            case Prefilled():
                self.prefilled.append(answer)
            case Generation():
                self.sampled.setdefault(key, []).append(answer)
            case Answered():
                self.answered[key] = answer


def packed(key: PathKey, answer: Answer, seconds: float) -> bytes:
    """One entry."""
    fields: dict[str, Any] = {"key": key, "seconds": seconds}
    match answer:
        case Prefilled():
            fields["prefilled"] = (answer.prompt_tokens, answer.cached_tokens)
        case Generation():
            fields["ids"] = answer.token_ids.tobytes()
            fields["logprobs"], fields["entropies"] = answer.logprobs.tobytes(), answer.entropies.tobytes()
            fields["finish"], fields["matched"] = answer.finish.value, answer.matched
            fields["counts"] = (answer.prompt_tokens, answer.cached_tokens, answer.weight_version)
            if answer.routes is not None:
                fields["routes"] = (answer.routes.shape, answer.routes.tobytes())
        case Answered():
            tool = answer.tool
            fields["ids"] = answer.token_ids.tobytes()
            fields["tool"] = (tool.name, dict(tool.arguments), tool.status, tool.seconds, tool.cached)
    return _encoder.encode(fields)


def _unpacked(entry: bytes) -> tuple[PathKey, Answer, float]:
    fields = _decoder.decode(entry)
    key, seconds = tuple(fields["key"]), fields["seconds"]
    if "prefilled" in fields:
        return key, Prefilled(*fields["prefilled"]), seconds
    ids = np.frombuffer(fields["ids"], np.int32)
    if "tool" in fields:
        return key, Answered(ids, ToolRecord(*fields["tool"])), seconds
    prompt_tokens, cached_tokens, version = fields["counts"]
    routes = None
    if "routes" in fields:
        shape, values = fields["routes"]
        routes = np.frombuffer(values, np.int16).reshape(shape)
    return (
        key,
        Generation(
            token_ids=ids,
            logprobs=np.frombuffer(fields["logprobs"], np.float32),
            entropies=np.frombuffer(fields["entropies"], np.float32),
            finish=EngineFinish(fields["finish"]),
            matched=fields["matched"],
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            weight_version=version,
            routes=routes,
        ),
        seconds,
    )


def pack_trees(trees: Sequence[UnfinishedTree]) -> bytes:
    """The file of a checkpoint."""
    return _encoder.encode([(tree.task_id, tree.step, tree.version, tree.entries) for tree in trees])


def unpack_trees(content: bytes | memoryview) -> list[UnfinishedTree]:
    """Inverse of `pack_trees`."""
    return [
        UnfinishedTree(task_id, step, version, tuple(entries))
        for task_id, step, version, entries in _decoder.decode(content)
    ]
