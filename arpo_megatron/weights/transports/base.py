"""Interface of the ways to send a bucket of tensors to an engine."""

from collections.abc import Callable, Sequence
from typing import Protocol

from arpo_megatron.engine.admin import EngineEndpoint
from arpo_megatron.engine.wire.buckets import Bucket


class Transport(Protocol):
    """A way to send buckets to engines."""

    buffers: int
    """Number of buffers for `export.hf_buckets`: 2, or 1 if `send` has copied the bucket when it returns."""

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Prepare to send to these engines; called at the start of every push."""

    def send(self, bucket: Bucket) -> Callable[[], None]:
        """Start to send a non-empty bucket; the result waits until every engine has received it.

        The caller leaves the bucket's tensors unchanged until then. It may send one more bucket before waiting.
        """

    def finish(self) -> int:
        """Wait until every engine has loaded all buckets; return the number of requests since `connect`."""

    def close(self) -> None:
        """Release what `connect` made; engines that have ended are not an error."""
