"""Exchange of hidden states between the stages of a pipeline.

Packs differ in length. Megatron's stages would send each other the shape of each tensor first, and the host would wait
for the device to read it. But every stage knows the packs, and the schedule fixes the order in which they come.
"""

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

Shape = tuple[int, int, int]


class StageCommunicator(P2PCommunicator):  # type: ignore[misc]  # Megatron has no types
    """Megatron's communicator for one pass of a schedule, without an exchange of shapes.

    Args:
        config: the model's TransformerConfig.
        tokens: tokens of each micro-batch on this rank, before sequence parallelism divides them.
    """

    def __init__(self, config: Any, tokens: Sequence[int]) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        super().__init__(group, config)
        divisor = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes: list[Shape] = [(count // divisor, 1, config.hidden_size) for count in tokens]
        forward, backward = arrivals(
            len(tokens), config.virtual_pipeline_model_parallel_size or 1, group.rank(), group.size()
        )
        self._inputs, self._gradients = (iter([shapes[index] for index in order]) for order in (forward, backward))
        self._requests: list[Any] = []

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next tensors from the previous and from the next stage, if they are to come now."""
        return next(self._inputs) if recv_prev else None, next(self._gradients) if recv_next else None

    def _communicate(self, **arguments: Any) -> Any:
        """Communicate as Megatron does, and keep the requests that have not ended."""
        received = super()._communicate(**arguments)
        self._requests = [request for request in self._requests if not request.is_completed()]
        self._requests += (received[2] or {}).values()
        return received

    def wait(self) -> None:
        """Wait for the last sends. The interleaved schedule drops their requests, and gloo then drops the sends."""
        for request in self._requests:
            if not request.is_completed():
                request.wait()


def arrivals(micro_batches: int, chunks: int, stage: int, stages: int) -> tuple[list[int], list[int]]:
    """Return the micro-batches of the hidden states and of the gradients that a stage receives, in order of arrival.

    A stage receives in the order in which its neighbour computes. The neighbour of the first stage is the last stage,
    which sends the hidden states of all its chunks but the last. The neighbour of the last stage is the first stage,
    which sends the gradients of all its chunks but the first; chunks of gradients come in reverse.

    Args:
        micro_batches: their number.
        chunks: chunks of the model on each stage; 1 without interleaving.
        stage: index of the stage.
        stages: number of stages.
    """
    order = get_schedule_table(micro_batches, chunks, stages)
    inner = [index for index, chunk in order if chunk < chunks - 1]
    every = [index for index, _ in order]
    return every if stage > 0 else inner, every if stage < stages - 1 else inner


def pipeline_groups() -> ProcessGroupCollection:
    """Return the process groups that a schedule asks for next to a communicator."""
    groups = ["tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(groups)
