"""Record of everything a tree has sampled so far, kept so that another process can continue it.

Every answer of engine and tools becomes an entry as soon as it arrives. A tree is a function of its prompt, its
settings and these answers (see `grower`). So growing it again, with the entries answering first, leads to the same
point, from which it continues with the engine.

Entries are bytes (msgpack, so reading a file executes nothing). Trainer rank 0 keeps those of all unfinished trees, for
the rollout process and for the checkpoint.
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
class Prefill:
    """A prefix was put into the engine's cache."""

    prompt_tokens: int
    """Tokens in the request."""
    cached_tokens: int
    """Tokens of the request that the cache had before."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """Answer of the tool service to one call, with its tokens."""

    token_ids: Int32Array
    """int32[n], the tokens of the result."""
    tool: ToolRecord
    shared_as: str | None = None
    """Name that the call has in common with equal calls of the tree; None if it shares no execution."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of a generation, on which a branching decision was based while the engine sampled the rest.

    The whole generation replaces them. If it never comes, they are recorded again as a generation, and another request
    continues after them.
    """

    generation: Generation


Answer = Prefill | Generation | RecordedAnswer


@dataclass(frozen=True, slots=True)
class UntrainedTree:
    """A tree that has not been trained on yet, growing or finished, as a checkpoint stores it."""

    task_id: str
    step: int
    """Rollout step in which it was started."""
    version: int
    """Policy version when it was started."""
    entries: tuple[bytes, ...]
    """Encoded entries of its record, in the order of their arrival."""
    tree_id: int | None = field(default=None, compare=False)
    """Its number in the rollout process (`LiveTree.tree_id`), if it grows or has grown there."""


@dataclass(slots=True)
class TreeRecord:
    """The decoded entries of one tree."""

    prefills: list[Prefill] = field(default_factory=list)
    """Prefills in the order of their answers."""
    generations: dict[PathKey, list[Generation]] = field(default_factory=dict)
    """Generations of a MODEL segment, in order, by its path key."""
    first: dict[PathKey, Generation] = field(default_factory=dict)
    """First tokens of a generation that is not recorded, by its path key."""
    tool_results: dict[PathKey, RecordedAnswer] = field(default_factory=dict)
    """The result of the call that ended a MODEL segment, by its path key."""
    shared_results: dict[str, RecordedAnswer] = field(default_factory=dict)
    """The first of `tool_results` with each name (`RecordedAnswer.shared_as`)."""
    seconds: float = 0.0
    """Age of the tree at its newest entry."""
    sampled_s: dict[PathKey, list[float]] = field(default_factory=dict)
    """Age of the tree at each of `generations`."""
    answered_s: dict[PathKey, float] = field(default_factory=dict)
    """Age of the tree at each of `tool_results`."""

    @classmethod
    def from_entries(cls, entries: Iterable[bytes]) -> "TreeRecord":
        """Return the record of answers that `encode_entry` encoded, in their order."""
        record = cls()
        for entry in entries:
            record.add(*_decode_entry(entry))
        return record

    def add(self, key: PathKey, answer: Answer | FirstTokens, seconds: float) -> None:
        """Add an answer that arrived when the tree was `seconds` old."""
        self.seconds = max(self.seconds, seconds)
        match answer:
            case Prefill():
                self.prefills.append(answer)
            case FirstTokens():
                self.first[key] = answer.generation
            case Generation():
                self.first.pop(key, None)
                self.generations.setdefault(key, []).append(answer)
                self.sampled_s.setdefault(key, []).append(seconds)
            case RecordedAnswer():
                self.tool_results[key] = answer
                self.answered_s[key] = seconds
                if answer.shared_as is not None:
                    self.shared_results.setdefault(answer.shared_as, answer)


def encode_entry(key: PathKey, answer: Answer | FirstTokens, seconds: float) -> bytes:
    """Return the entry for an answer at a path key, which arrived when the tree was `seconds` old."""
    fields: dict[str, Any] = {"key": key, "seconds": seconds}
    if isinstance(answer, FirstTokens):
        fields["first"], answer = True, answer.generation
    match answer:
        case Prefill():
            fields["prefilled"] = (answer.prompt_tokens, answer.cached_tokens)
        case Generation():
            fields["ids"] = answer.token_ids.tobytes()
            fields["logprobs"], fields["entropies"] = answer.logprobs.tobytes(), answer.entropies.tobytes()
            fields["finish"], fields["matched"] = answer.finish.value, answer.matched
            fields["counts"] = (answer.prompt_tokens, answer.cached_tokens, answer.weight_version)
            if answer.routes is not None:
                fields["routes"] = (answer.routes.shape, answer.routes.tobytes())
        case RecordedAnswer():
            tool = answer.tool
            fields["ids"] = answer.token_ids.tobytes()
            fields["tool"] = (tool.name, dict(tool.arguments), tool.status, tool.seconds, tool.cached)
            if answer.shared_as is not None:
                fields["shared_as"] = answer.shared_as
    return _encoder.encode(fields)


def _decode_entry(entry: bytes) -> tuple[PathKey, Answer | FirstTokens, float]:
    fields = _decoder.decode(entry)
    key, seconds = tuple(fields["key"]), fields["seconds"]
    if "prefilled" in fields:
        return key, Prefill(*fields["prefilled"]), seconds
    ids = np.frombuffer(fields["ids"], np.int32)
    if "tool" in fields:
        return key, RecordedAnswer(ids, ToolRecord(*fields["tool"]), fields.get("shared_as")), seconds
    prompt_tokens, cached_tokens, version = fields["counts"]
    routes = None
    if "routes" in fields:
        shape, values = fields["routes"]
        routes = np.frombuffer(values, np.int16).reshape(shape)
    generation = Generation(
        token_ids=ids,
        logprobs=np.frombuffer(fields["logprobs"], np.float32),
        entropies=np.frombuffer(fields["entropies"], np.float32),
        finish=EngineFinish(fields["finish"]),
        matched=fields["matched"],
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        weight_version=version,
        routes=routes,
    )
    return key, FirstTokens(generation) if "first" in fields else generation, seconds


def encode_records(trees: Sequence[UntrainedTree]) -> bytes:
    """Return the content of a checkpoint's file."""
    return _encoder.encode([(tree.task_id, tree.step, tree.version, tree.entries) for tree in trees])


def decode_records(content: bytes | memoryview) -> list[UntrainedTree]:
    """Return the trees that `encode_records` encoded."""
    return [
        UntrainedTree(task_id, step, version, tuple(entries))
        for task_id, step, version, entries in _decoder.decode(content)
    ]
