"""Buckets through safetensors files in a directory that trainer and engines share."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from arpo_megatron.engine.admin import EngineAdmin, EngineEndpoint, WeightPushError
from arpo_megatron.engine.wire.buckets import Block, Bucket
from arpo_megatron.models.safetensors import write_file, write_rows


class Disk:
    """Write each bucket, or all blocks of a tensor, to a safetensors file that the engines read; then delete it.

    Args:
        requests: requests to the engines.
        directory: path that trainer and engines share; it is created, and removed at the end.
    """

    buffers = 2

    def __init__(self, requests: EngineAdmin, directory: Path) -> None:
        self._requests = requests
        self._directory = directory
        self._engines: tuple[EngineEndpoint, ...] = ()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="weight-writer")
        self._last: Future[None] | None = None
        self._loads = 0

    def connect(self, engines: Sequence[EngineEndpoint]) -> None:
        """Create the directory, without the leftovers of an interrupted push."""
        self._loads = 0
        self._engines = tuple(engines)
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            self._directory.mkdir(parents=True)
        except OSError as error:
            raise WeightPushError(f"sync.directory: {error}") from error

    def send(self, bucket: Bucket) -> Callable[[], None]:
        """Write the file and let the engines read it, in a thread."""
        self._last = self._writer.submit(self._write_and_load, bucket)  # one writer: buckets are written in order
        return self._last.result

    def finish(self) -> int:
        """Return the number of loads; all buckets have been waited for."""
        return self._loads

    def close(self) -> None:
        """Remove the directory; a bucket that waits in the queue is not sent any more."""
        if self._last is not None:
            self._last.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_and_load(self, bucket: Bucket) -> None:
        file = self._directory / "model.safetensors"
        try:
            if isinstance(bucket, Block):
                write_rows(file, bucket.name, tuple(bucket.whole.shape), bucket.tensor, bucket.first)
            else:
                write_file(file, bucket)
        except OSError as error:
            raise WeightPushError(f"{file}: {error.strerror}") from error
        if isinstance(bucket, Block) and not bucket.is_last:
            return
        body = {"model_path": str(self._directory), "load_format": "safetensors", "flush_cache": False}
        self._loads += 1
        posts = self._requests.post_all("update_weights_from_disk", [(engine.url, body) for engine in self._engines])
        for post in posts:
            post.result()
        file.unlink()
