"""The engine's end of a push: what each rank holds, and how the rounds of an exchange get into its parameters.

SGLang's own ways take whole tensors and leave the division to each rank. Here a rank reports which boxes of the tensors
it holds, gets a plan, and receives exactly those boxes. Two existing SGLang requests carry the protocol: actions of its
weight checker, which every rank answers, and the start of an exchange in `update_weights_from_distributed`.

A rank writes each piece straight into its parameter. Tensors that SGLang's loader computes with are held whole until
all tensors of their parameter have arrived, and then loaded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from arpo_megatron.engine.server.incoming import FromGroup, FromMemory, Incoming
from arpo_megatron.engine.server.parameters import Copy, EngineParameters, find_copies
from arpo_megatron.engine.wire.boxes import (
    EXCHANGE_FORMAT,
    JOIN_ACTION,
    LAYOUT_ACTION,
    PLAN_ACTION,
    PlannedSend,
    TensorType,
    WeightMessage,
)
from arpo_megatron.engine.wire.checksums import RECEIVED_ACTION
from arpo_megatron.engine.wire.devices import device_name, host_name

_RECEIVER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_distributed"
)
_OLDER_RECEIVER = "sglang.srt.model_executor.model_runner.ModelRunner.update_weights_from_distributed"
"""The method in sglang 0.5.12, which has no `WeightUpdater`."""


class Shard:
    """One rank's part of the weights, and its present plan."""

    def __init__(self) -> None:
        self.parameters: EngineParameters | None = None
        self._incoming: Incoming | None = None
        self._rounds: list[list[WeightMessage]] = []
        self._plan = ""
        self._received = 0

    def describe(self, model: Any, request: dict[str, Any]) -> dict[str, Any]:
        """Answer `LAYOUT_ACTION`: where this rank is, and which boxes it holds."""
        types = {name: TensorType.from_json(kind) for name, kind in request["types"].items()}
        self.parameters = EngineParameters(model, types, request["together"])
        device = next(model.parameters()).device
        boxes = json.dumps(self.parameters.boxes())
        return {"device": device_name(device), "host": host_name(), "boxes": boxes}

    def copies(self, model: Any, types: Mapping[str, TensorType]) -> dict[str, list[Copy]]:
        """Return the result of `find_copies`, which takes SGLang seconds for a mixture, from the layout if it holds."""
        known = None if self.parameters is None else self.parameters.known_copies(model, types)
        return find_copies(model, types) if known is None else known

    def accept_plan(self, rounds: Sequence[Sequence[Any]]) -> None:
        """Take `PLAN_ACTION`'s rounds for this rank.

        Raises:
            ValueError: the pieces do not cover what this rank holds exactly once, or no layout was asked for.
        """
        self.leave()
        plan = [[each for data in turn for each in PlannedSend.from_json(data).messages()] for turn in rounds]
        self._held().check_cover([piece for turn in plan for message in turn for piece in message.pieces])
        self._rounds = plan

    def join(self, link: dict[str, Any]) -> None:
        """Connect to the trainer: to the rank that hands over this rank's buckets, or to all of its ranks."""
        parameters = self._held()
        self._plan = link["plan"]
        self._incoming = FromMemory(link, parameters) if link["kind"] == "ipc" else FromGroup(link, parameters)

    def receive(self, plan: str, deadline_s: float) -> None:
        """Receive all rounds of a push; one arrives while the one before it is stored.

        Raises:
            ValueError: `plan` is not this rank's plan, or a tensor has not arrived whole.
            Exception: the exchange failed; the next push needs a plan.
        """
        parameters, incoming = self._held(), self._incoming
        if incoming is None or plan != self._plan:
            raise ValueError("this exchange does not follow the engine's newest plan")
        self._received = 0
        parameters.begin()
        try:
            with incoming.opened(deadline_s):
                for turn in range(len(self._rounds) + 1):
                    if turn < len(self._rounds):
                        incoming.start(self._rounds[turn])
                    if turn:
                        incoming.finish(self._rounds[turn - 1])
                        self._received += sum(p.bytes for m in self._rounds[turn - 1] for p in m.pieces)
            parameters.end()
        except BaseException:
            self.leave()
            raise

    def received(self) -> dict[str, int]:
        """Answer `RECEIVED_ACTION`: figures of the last exchange."""
        largest = 0 if self._incoming is None else self._incoming.largest
        held = 0 if self.parameters is None else self.parameters.bytes
        return {"received": self._received, "largest_buffer": largest, "held": held}

    def _held(self) -> EngineParameters:
        if self.parameters is None:
            raise ValueError("a plan has come before the question for the layout")
        return self.parameters

    def leave(self) -> None:
        """Disconnect from the trainer; the next push needs a plan."""
        if self._incoming is not None:
            self._incoming.close()
        self._incoming, self._rounds = None, []


shard = Shard()
"""The shard of this process."""


def register_hooks() -> None:
    """Register the hooks of the weight updater in this process; SGLang's `load_plugins` applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    older = find_spec("sglang.srt.model_executor.model_runner_components") is None
    receiver = _OLDER_RECEIVER if older else _RECEIVER
    HookRegistry.register(receiver, _receive, HookType.REPLACE)
    for way in ("distributed", "disk"):
        HookRegistry.register(f"{receiver.rpartition('_')[0]}_{way}", _agree, HookType.AROUND)


def answer(model: Any, rank: int, action: str) -> dict[str, Any] | None:
    """Answer an action of the weight checker that belongs to a push; None for any other action.

    Raises:
        Exception: this rank refuses.
    """
    if action.startswith(LAYOUT_ACTION):
        return shard.describe(model, json.loads(action.removeprefix(LAYOUT_ACTION)))
    for prefix, work in ((PLAN_ACTION, shard.accept_plan), (JOIN_ACTION, shard.join)):
        if action.startswith(prefix):
            work(json.loads(action.removeprefix(prefix))[rank])
            return {}
    return shard.received() if action == RECEIVED_ACTION else None


def _receive(
    _updater: Any,
    names: Sequence[str],
    _dtypes: Sequence[str],
    _shapes: Sequence[Sequence[int]],
    _group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Replace SGLang's `update_weights_from_distributed`; return whether it succeeded, and a message."""
    if names or load_format is None or not load_format.startswith(EXCHANGE_FORMAT):
        return False, "Failed to update parameter online: this engine takes the exchanges of arpo-megatron only"
    shard.receive(**json.loads(load_format.removeprefix(EXCHANGE_FORMAT)))
    return True, "Succeeded to update parameter online."


def _agree(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Answer for all ranks of the engine: SGLang answers when its first rank has finished, and only for that rank.

    SGLang does not handle errors here: after one in a file it loads the same file once more, "rolling back".
    """
    from sglang.srt.distributed import get_tp_group

    try:
        mine = original(*args, **kwargs)
    except Exception as error:  # it would end the engine; the gate stays closed, and the sender gets the message
        mine = False, f"Failed to update weights: {type(error).__name__}: {error}"
    group = get_tp_group().cpu_group
    answers = [mine] * group.size()
    if len(answers) > 1:
        dist.all_gather_object(answers, mine, group=group)
    return next((each for each in answers if not each[0]), mine)
