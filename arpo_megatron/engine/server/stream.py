"""Streams few pieces of an answer: the first token, the first tokens that the client asks for, and the whole.

SGLang repeats all tokens in each piece, so a piece every few tokens would cost the square of an answer's length. A
client sets the interval of its request to the number of tokens whose entropies it needs first; after the piece with
these tokens the next one is the whole answer.
"""

from collections.abc import Callable
from typing import Any

from arpo_megatron.engine.request import NO_MORE
from arpo_megatron.engine.version import streams_entropies

_ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"


def register_hooks() -> None:
    """Register the hook of the scheduler in this process; SGLang's `load_plugins` applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if streams_entropies():
        HookRegistry.register(_ACCEPT, _accept, HookType.AROUND)


def _accept(original: Callable[..., None], streamer: Any, *, req: Any) -> None:
    """`accept` of a request's new tokens; it queues a piece if it is due by the interval of the request."""
    sent = len(streamer.rids)
    original(streamer, req=req)
    if req.stream and len(streamer.rids) > sent and len(req.output_ids) > 1:
        req.sampling_params.stream_interval = NO_MORE
