"""Checksums of the weights inside an engine, under Hugging Face names, for SGLang's own weight checker.

`weight_places` says where in the engine's fused and divided parameters a tensor has gone.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from arpo_megatron.engine.server.parameters import places
from arpo_megatron.engine.wire.checksums import CHECKSUM_ACTION, Piece, Sample

_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"


def register() -> None:
    """Teach SGLang's weight checker in this process (applied by SGLang's own `load_plugins`)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECKER, _handle, HookType.AROUND)


def held_pieces(model: nn.Module, samples: Mapping[str, Sample]) -> dict[str, list[Piece]]:
    """The pieces of each sample that this rank's parameters hold.

    Raises:
        ValueError: the parameters hold a tensor in another form, so that its bits cannot be compared.
    """
    asked = {name: (sample.sizes, getattr(torch, sample.dtype)) for name, sample in samples.items()}
    held: dict[str, list[Piece]] = {}
    for name, copies in places(model, asked).items():
        pieces = [samples[name].held(values, place) for values, place in copies]
        held[name] = [piece for piece in pieces if piece is not None]
    return held


def _handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """`WeightChecker.handle`, with one more action."""
    if not action.startswith(CHECKSUM_ACTION):
        return original(checker, action, *args, **kwargs)
    asked = json.loads(action.removeprefix(CHECKSUM_ACTION))
    # sglang 0.5.12 gives its checker the runner of the model.
    model = checker._get_model() if hasattr(checker, "_get_model") else checker._model_runner.model
    pieces = held_pieces(model, {name: Sample(**sample) for name, sample in asked.items()})
    return {
        "checksums": {name: json.dumps([piece.as_json() for piece in held]) for name, held in pieces.items()},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info().model_dump(),
    }
