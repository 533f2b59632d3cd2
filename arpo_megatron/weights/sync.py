"""Live weights from the trainer into running SGLang servers: begin, buckets, commit, verify.

    begin    every engine refuses to generate (HTTP 503) and has no generation left
    buckets  one is on its way while the next one is gathered from the trainer's ranks: never more than two
    commit   caches are emptied, answers carry the new policy version, engines generate again
    verify   the caller compares log-probs of a short probe

At an engine's first push, and at every n-th, checksums of sampled rows on the engine are compared too, and the probe is
a long one.

Whatever interrupts a push before its commit, a kill -9 of the trainer included, leaves engines that refuse to
generate until a whole push has arrived.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, WeightPushError
from arpo_megatron.engine.wire.buckets import Block, Bucket, named_tensors
from arpo_megatron.engine.wire.checksums import Sample
from arpo_megatron.hardware.placement import placement
from arpo_megatron.weights.transports import Broadcast, Disk, SharedMemory, Transport

TIMEOUT_S = 120.0
"""Deadline of a request to an engine: of joining, of a bucket, of generations that are waited for."""
PROBE_TOKENS = 3
"""Of the probe after every push: its last log-prob depends on every weight, also on how two tokens mix; products of
so few rows take no longer than reading the weights."""
LONG_PROBE_TOKENS = 16
"""Where a push is verified. What mixes tokens, queries and keys, shows better in a longer one."""
_SAMPLED_SHARE = 16
"""Of each bucket's tensors one in so many is sampled for checksums, and at least one; all that come in blocks."""
_SAMPLE_BYTES = 2**20
"""Of a sampled tensor's rows so many bytes."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push took.

    Attributes:
        seconds: wall time from begin to commit, or to the comparison of checksums.
        bytes: sent to each engine.
        buckets: in how many parts.
        verified: names of the tensors whose checksums were compared.
        probe_tokens: length of the probe whose log-probs are to be compared now.
    """

    seconds: float
    bytes: int
    buckets: int
    verified: tuple[str, ...]
    probe_tokens: int


class WeightSync:
    """Rank 0's end.

    Args:
        requests: to the engines; closed with this.
        transport: carries the buckets; closed with this.
        verify_every: so many pushes after one that was verified another one is; 0: only those to engines that no
            whole push has reached yet, or none since one that failed.
        comparable: the engines hold the trainer's bits; False where they quantize them: no checksums then.
    """

    def __init__(
        self, requests: EngineAdmin, transport: Transport, *, verify_every: int, comparable: bool = True
    ) -> None:
        self._requests = requests
        self._transport = transport
        self._verify_every = verify_every
        self._comparable = comparable
        self._reached: tuple[EngineEndpoint, ...] = ()
        """The engines of the last push, if it was a success."""
        self._since_verified = 0
        """Pushes, the verified one included."""

    @property
    def engines(self) -> EngineAdmin:
        """Requests to the engines beside a push."""
        return self._requests

    @property
    def buffers(self) -> int:
        """How many buffers `export.hf_buckets` is to gather into."""
        return self._transport.buffers

    @property
    def fused(self) -> bool:
        """Whether `export.hf_buckets` is to keep tensors of one parameter together: where engines quantize them."""
        return not self._comparable

    @classmethod
    def of(cls, config: JobConfig, urls: Sequence[str], run: Path, token: str | None = None) -> Self:
        """As a job's config says.

        Args:
            config: of the job.
            urls: http://host:port of each engine.
            run: the run directory.
            token: that the engines ask for, if they do.

        Raises:
            UserError: the transport cannot reach an engine.
        """
        requests = EngineAdmin(urls, TIMEOUT_S, token)
        shared = placement(config).shared
        kind = config.sync.transport
        transport: Transport
        if kind == "disk":
            transport = Disk(requests, _directory(config.sync.directory, run))
        elif kind == "ipc" or (kind == "auto" and shared):
            transport = SharedMemory(requests)
        else:  # NCCL refuses two ranks on one GPU
            transport = Broadcast(requests, "gloo" if shared else None)
        comparable = config.engine.quantization == "none"
        return cls(requests, transport, verify_every=config.sync.verify_every, comparable=comparable)

    def push(self, buckets: Iterable[Bucket], version: int) -> PushReport:
        """Replace engines' weights and set their policy version.

        Args:
            buckets: full tensors under Hugging Face names, each bucket made when it is asked for
                (`export.hf_buckets`). A tied head needs no entry of its own: SGLang's head is its embedding.
            version: reported from then on by every answer of an engine (`meta_info["weight_version"]`).

        Raises:
            WeightPushError: an engine failed or differs; the next push starts anew.
            ValueError: there are no tensors.
        """
        started = time.monotonic()
        reached, self._reached = self._reached, ()
        try:
            engines = self._requests.begin_push(version)
            verify = engines != reached or self._since_verified == self._verify_every
            self._transport.connect(engines)
            sampler = np.random.default_rng(version) if verify and self._comparable else None
            total, count, sums = self._send(buckets, sampler)
            self._requests.commit_push(version, self._transport.finish())
        except BaseException:
            self._transport.close()  # the two ends may be out of step now
            raise
        if sums:
            self._verify(sums)
        self._reached, self._since_verified = engines, 1 if verify else self._since_verified + 1
        probe_tokens = LONG_PROBE_TOKENS if verify else PROBE_TOKENS
        return PushReport(time.monotonic() - started, total, count, tuple(sums), probe_tokens)

    def close(self) -> None:
        """Let go of the engines. Those that are gone already are not an error."""
        self._transport.close()
        self._requests.close()

    def _send(
        self, buckets: Iterable[Bucket], sampler: np.random.Generator | None
    ) -> tuple[int, int, dict[str, tuple[Sample, int]]]:
        """Bytes and buckets sent, and what is known of the sampled tensors."""
        total, count = 0, 0
        sums: dict[str, tuple[Sample, int]] = {}
        wait: Callable[[], None] | None = None
        for bucket in buckets:  # gathered while the last one travels
            if sampler is not None:
                _sample(bucket, sampler, sums)
            arrived = self._transport.send(bucket)  # announced before the last one has arrived: engines do not idle
            if wait is not None:
                wait()
            wait = arrived
            total, count = total + sum(tensor.nbytes for _, tensor in named_tensors(bucket)), count + 1
        if wait is None:
            raise ValueError("a push needs at least one tensor")
        wait()
        return total, count, sums

    def _verify(self, sums: dict[str, tuple[Sample, int]]) -> None:
        everyones = self._requests.checksums({name: sample for name, (sample, _) in sums.items()})
        for url, held in zip(self._requests.urls, everyones, strict=True):
            for name, (sample, expected) in sums.items():
                if what := sample.difference(held[name], expected):
                    raise WeightPushError(f"{url}: {name} is not what the trainer sent: {what}")


def _sample(bucket: Bucket, sampler: np.random.Generator, sums: dict[str, tuple[Sample, int]]) -> None:
    """Add what is to be known of a bucket. The sampled rows of a tensor that comes in blocks may lie in two of them."""
    if isinstance(bucket, Block):
        if not bucket.first:
            sums[bucket.name] = Sample.of(bucket.whole, sampler.random(), _SAMPLE_BYTES), 0
        sample, known = sums[bucket.name]
        piece = sample.piece_in(bucket.tensor.detach(), bucket.whole[bucket.rows])
        sums[bucket.name] = sample, (known + (0 if piece is None else piece.checksum)) % 2**64
        return
    for index in sampler.choice(len(bucket), max(1, len(bucket) // _SAMPLED_SHARE), replace=False):
        name, tensor = bucket[index]
        sample = Sample.of(tensor, sampler.random(), _SAMPLE_BYTES)
        sums[name] = sample, sample.checksum(tensor.detach())


def _directory(shared: Path | None, run: Path) -> Path:
    """Of the `disk` transport, which empties it: inside the run's, or one of the run's own in what jobs share."""
    if shared is None:
        return run / "sync"
    return shared / f"{run.name}-{hashlib.blake2b(str(run.resolve()).encode(), digest_size=4).hexdigest()}"


def probe_gap(trainer_logprobs: ArrayLike, engine_logprobs: ArrayLike) -> float:
    """Largest absolute difference in nats of two arrays of log-probs; infinity where either is not finite.

    Raises:
        ValueError: they are of different lengths.
    """
    trainer, engine = np.asarray(trainer_logprobs, np.float64), np.asarray(engine_logprobs, np.float64)
    if trainer.shape != engine.shape:
        raise ValueError(f"log-probs of {trainer.shape} and {engine.shape} cannot be compared")
    if not (np.isfinite(trainer).all() and np.isfinite(engine).all()):
        return float("inf")
    return float(np.abs(trainer - engine).max(initial=0.0))
