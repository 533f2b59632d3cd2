"""Weight pushes: which ranks take part, what the probe checks, and how failed attempts are repeated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.config import JobConfig
from arpo_megatron.engine.admin import WeightPushError
from arpo_megatron.errors import UserError
from arpo_megatron.trainer import push
from arpo_megatron.trainer.push import PAUSES_S, push_once, push_with_retries


def test_failed_push_is_not_probed_and_a_wrong_probe_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles of engines: a real one does not fail or differ on demand."""
    answers: list[Any] = [WeightPushError("it died"), 0.1, 0.3]
    gathered, probed, resumed = [], [], []

    def send(buckets: Any, _version: int) -> Any:
        next(buckets)
        answer = answers.pop(0)
        if isinstance(answer, WeightPushError):
            raise answer
        return [1, 2, 3], lambda: [np.float32([-1, -1]), np.float32([-1, -1 - answer])]

    def logprobs(packs: Any, **_: Any) -> Any:
        probed.extend(packs)
        return [np.full(len(pack.predictors), -1.0, np.float32) for pack in packs]

    monkeypatch.setattr(push, "hf_buckets", lambda *_, **__: (gathered.append(n) for n in range(3)))
    actor = SimpleNamespace(chunks=[], spec=None, logprobs=logprobs)
    session: Any = SimpleNamespace(config=JobConfig("test"), actor=actor)
    controller: Any = SimpleNamespace(push_buffers=2, push=send, resume_trees=resumed.append)
    assert push_once(session, controller, 7) == ("it died", 0.0)
    assert (gathered, probed, resumed) == ([0, 1, 2], [], [])  # every rank took part in gathering all
    failure, gap = push_once(session, controller, 7)
    assert (failure, gap) == ("", pytest.approx(0.1))
    assert ([len(pack.predictors) for pack in probed], resumed) == ([2], [7])
    with pytest.raises(RuntimeError, match=r"push of version 8 the engine's log-probs differ .* by 3\.00e-01 nats"):
        push_once(session, controller, 8)
    assert resumed == [7]


def test_push_is_repeated_with_growing_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slept: list[float] = []
    notes: list[str] = []
    monkeypatch.setattr(push.time, "sleep", slept.append)
    failed = ("it died", 0.0)
    answers = [failed, failed, ("", 0.25)]
    monkeypatch.setattr(push, "push_once", lambda *_: answers.pop(0))
    session: Any = SimpleNamespace(stopping=lambda: False, note=notes.append)
    assert push_with_retries(session, None, 3) == 0.25
    assert slept == [1, 2]
    assert notes[0] == "push 1 of 9 failed and is repeated in 1 s: it died"
    slept.clear()
    monkeypatch.setattr(push, "push_once", lambda *_: failed)
    with pytest.raises(UserError, match=r"^9 weight pushes in a row have failed \(it died\): .*--resume"):
        push_with_retries(session, None, 3)
    assert slept == list(PAUSES_S)
    assert sum(slept) >= 120  # a disk that is full for a minute costs time only
    session.stopping = lambda: True  # a job that is asked to end does not wait
    assert push_with_retries(session, None, 3) == 0.0
