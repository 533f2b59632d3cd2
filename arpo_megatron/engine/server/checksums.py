"""More actions of SGLang's weight checker: checksums of the weights under Hugging Face names, and those of
`receive`."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from arpo_megatron.engine.server import receive
from arpo_megatron.engine.wire.boxes import TensorType
from arpo_megatron.engine.wire.checksums import CHECKSUM_ACTION, PIECES_ACTION, ChecksummedPart, checksummed

_latest = {PIECES_ACTION: "{}"}
"""JSON of the pieces of this rank that were computed last."""
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"


def register_hooks() -> None:
    """Register the hook of the weight checker in this process; SGLang's `load_plugins` applies it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CHECKER, _handle, HookType.AROUND)


def held_pieces(model: nn.Module, types: Mapping[str, TensorType]) -> dict[str, list[ChecksummedPart]]:
    """Return the pieces of each tensor that this rank's parameters hold.

    Raises:
        ValueError: the parameters hold a tensor in another number format, so its bits are different.
    """
    held = receive.shard.copies(model, types)
    for name, copies in held.items():
        for values, _ in copies:
            if values.dtype != types[name].torch_dtype:
                raise ValueError(f"{name} is {values.dtype} here and {types[name].dtype} in the trainer")
    parts = iter(checksummed([copy for copies in held.values() for copy in copies]))
    return {name: [next(parts) for _ in copies] for name, copies in held.items()}


def _handle(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """Answer this project's actions in `WeightChecker.handle`; leave all other actions to `original`."""
    # In sglang 0.5.12 the checker has the model's runner.
    model = checker._get_model() if hasattr(checker, "_get_model") else checker._model_runner.model
    info = checker._parallelism_info()
    try:
        answers = _answer(model, info.tp_rank, action)
    except Exception as error:  # the other ranks of the engine wait for this one's answer
        answers = {"error": f"{type(error).__name__}: {error}"}
    if answers is None:
        return original(checker, action, *args, **kwargs)
    return {"checksums": answers, "per_gpu_checksum": "", "parallelism_info": info.model_dump()}


def _answer(model: nn.Module, rank: int, action: str) -> dict[str, str] | None:
    """Answer an action of this project; None for any other action."""
    if action.startswith(CHECKSUM_ACTION):
        asked = json.loads(action.removeprefix(CHECKSUM_ACTION))
        held = held_pieces(model, {name: TensorType.from_json(kind) for name, kind in asked.items()})
        pieces = json.dumps({name: [piece.as_json() for piece in pieces] for name, pieces in held.items()})
        _latest[PIECES_ACTION] = pieces
        return {"answer": json.dumps(hashlib.blake2b(pieces.encode(), digest_size=16).hexdigest())}
    if action in _latest:
        return {"answer": _latest[action]}
    found = receive.answer(model, rank, action)
    return None if found is None else {"answer": json.dumps(found)}
