"""The trainer's hold on the rollout process where that fails for good."""

import asyncio
import threading
import time
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.rollout.generation import Sampling
from arpo_megatron.rollout.grow_context import GrowLimits
from arpo_megatron.rollout.messages import GrowSettings, ServiceSettings
from arpo_megatron.rollout.record import UnfinishedTree
from arpo_megatron.rollout.service import RolloutError, RolloutHandle
from arpo_megatron.rollout.worker import Session
from arpo_megatron.tasks.base import Task

NOWHERE = "http://127.0.0.1:9"


def test_trees_that_end_the_process_each_time_are_sent_to_it_once(tmp_path: Path) -> None:
    """The process's own code serves here, in a thread, which counts how often it is connected to."""
    Tokenizer(models.WordLevel({"w": 0}, unk_token="w")).save(str(tmp_path / "tokenizer.json"))
    address, sessions = tmp_path / "socket", 0

    def serve(listener: Listener) -> None:
        nonlocal sessions
        while True:
            connection = listener.accept()
            sessions += 1
            asyncio.run(Session(connection).serve())

    with Listener(str(address), "AF_UNIX") as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        settings = GrowSettings(AlgorithmConfig(), 2, Sampling(), GrowLimits(3000, 900, 4, 60, 5.0))
        unreadable = UnfinishedTree("t", 0, 0, (b"not what a process has recorded",))
        with RolloutHandle.connect(address, ServiceSettings((NOWHERE,), NOWHERE, tmp_path, 1)) as handle:
            with pytest.raises(RolloutError, match="the rollout process failed"):
                handle.go_on("g", [(Task("t", (), "", "math", "w"), unreadable)], version=0, settings=settings)
            time.sleep(0.3)
            assert sessions == 1
            with pytest.raises(RolloutError, match="has failed before"):
                handle.pause()
