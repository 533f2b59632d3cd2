"""`python -m tests.plan.traced_engine ARGS`: the engine's server, which also writes what its scheduler does to a file.

`$TRACE_FILE` gets a JSON list for each event: ["flush"], ["request", id, CRC-32 of the prompt, its length, most new
tokens], ["prefill", computed tokens], ["decode"], ["evict", tokens] and ["finish", id, sampled tokens]. A request that
the engine retracted is not written again.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from arpo_megatron.engine.server import main as server

TRACE_FILE = "ARPO_TEST_TRACE"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CACHE = "sglang.srt.mem_cache.radix_cache.RadixCache"


def fingerprint(token_ids: Any) -> int:
    """Return the CRC-32 of token ids."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int64).tobytes())


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def write(*event: object) -> None:
        with Path(os.environ[TRACE_FILE]).open("a") as file:
            file.write(json.dumps(event) + "\n")

    def request(_scheduler: Any, request: Any, is_retracted: bool = False, **_options: object) -> None:
        if not is_retracted:
            ids = request.origin_input_ids
            write("request", request.rid, fingerprint(ids), len(ids), request.sampling_params.max_new_tokens)

    def prefill(result: Any, *_arguments: object, **_options: object) -> None:
        if result[0] is not None:
            write("prefill", sum(each.extend_range.length for each in result[0].reqs))

    def decode(result: Any, *_arguments: object, **_options: object) -> None:
        if not result.is_empty():
            write("decode")

    HookRegistry.register(f"{_SCHEDULER}.flush_cache", lambda *_a, **_k: write("flush"), HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}._add_request_to_queue", request, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}._get_new_batch_prefill_raw", prefill, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.update_running_batch", decode, HookType.AFTER)
    HookRegistry.register(
        f"{_CACHE}.evict", lambda result, *_a, **_k: write("evict", result.num_tokens_evicted), HookType.AFTER
    )
    HookRegistry.register(
        f"{_CACHE}.cache_finished_req",
        lambda _cache, request, *_a, **_k: write("finish", request.rid, len(request.output_ids)),
        HookType.BEFORE,
    )


if __name__ == "__main__":
    prepare = server._prepare_process

    def prepare_and_trace() -> None:
        prepare()
        _register_hooks()

    server._prepare_process = prepare_and_trace
    server.main()
