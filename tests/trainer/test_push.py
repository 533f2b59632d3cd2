"""Weight pushes: which ranks take part, what the probe checks, and how failed attempts are repeated."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.config import JobConfig, ModelConfig, TrainConfig
from arpo_megatron.engine.admin import WeightPushError
from arpo_megatron.errors import UserError
from arpo_megatron.trainer import push
from arpo_megatron.trainer.consistency import check_push
from arpo_megatron.trainer.push import PAUSES_S, push_once, push_with_retries


def test_failed_push_is_not_probed_and_a_wrong_probe_ends_the_run() -> None:
    """Doubles of engines: a real one does not fail or differ on demand."""
    answers: list[Any] = [WeightPushError("it died"), 0.1, 0.3]
    verified = [(), ()]
    probed, resumed, prepared, compiled = [], [], [], list[Any]()

    def send(_version: int, prepare: Any) -> Any:
        prepare()
        answer = answers.pop(0)
        if isinstance(answer, WeightPushError):
            raise answer
        scores = [np.float32([-1, -1]), np.float32([-1, -1 - answer])]
        sync.engines.start_logprobs = lambda _: lambda: scores
        return SimpleNamespace(probe_tokens=3, verified=verified.pop(0))

    def logprobs(packs: Any, **_: Any) -> Any:
        probed.extend(packs)
        return [np.full(len(pack.predictors), -1.0, np.float32) for pack in packs]

    sync: Any = SimpleNamespace(push=send, engines=SimpleNamespace())
    session: Any = SimpleNamespace(
        config=JobConfig("test", train=TrainConfig(logprob_gap_limit=0.2)),
        actor=SimpleNamespace(logprobs=logprobs),
        prepare_kernels=compiled.extend,
    )
    controller: Any = SimpleNamespace(
        prepare_push=lambda: prepared.append(1),
        probe_tokens=lambda count: [1, 2, 3, 4][:count],
        collector=SimpleNamespace(after_push=resumed.append),
    )
    assert push_once(session, sync, controller, 7, None) == ("it died", 0.0)
    assert (prepared, probed, resumed) == ([1], [], [])
    failure, gap = push_once(session, sync, controller, 7, None)
    assert (failure, gap) == ("", pytest.approx(0.1))
    assert ([len(pack.predictors) for pack in probed], resumed) == ([2], [7])
    assert compiled == probed
    with pytest.raises(RuntimeError, match=r"push of version 8 the engine's log-probs differ .* by 3\.00e-01 nats"):
        push_once(session, sync, controller, 8, None)
    assert resumed == [7]


def test_checksums_decide_about_a_gap_that_the_first_push_did_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of float32 is 1e-3 nats; the first push had 5e-4, so 1.4e-3 is rounding and 1e-2 is looked into."""
    config = JobConfig("test", model=ModelConfig(dtype="float32"))
    assert check_push(1.4e-3, 5e-4, 3, config, equal=False)
    assert not check_push(1e-2, 5e-4, 3, config, equal=False)
    assert check_push(1e-2, 5e-4, 3, config, equal=True)
    assert check_push(1e-2, None, 1, config, equal=True)  # the first push is always verified
    given = replace(config, train=replace(config.train, logprob_gap_limit=1.3e-3))
    unset = r"more than 0.00\d+ \(train\.logprob_gap_limit sets another limit\)$"
    for gap, first, job, equal, bound in (
        (float("inf"), None, config, True, unset),
        (float("inf"), 5e-4, config, True, unset),
        (1.4e-3, None, given, True, r"more than train\.logprob_gap_limit=0\.0013$"),
        (1.4e-3, 5e-4, given, True, r"more than train\.logprob_gap_limit=0\.0013$"),
    ):
        with pytest.raises(RuntimeError, match=f"the engine's log-probs differ from the trainer's .* {bound}"):
            check_push(gap, first, 3, job, equal=equal)
    answers = [("", 0.01, False), ("", 0.01, True)]
    asked, notes, resumed = [], list[str](), []
    monkeypatch.setattr(push, "_push_and_probe", lambda *_: answers.pop(0))
    sync: Any = SimpleNamespace(verify_next=lambda: asked.append(1))
    session: Any = SimpleNamespace(note=notes.append, config=config)
    controller: Any = SimpleNamespace(collector=SimpleNamespace(after_push=resumed.append))
    assert push_once(session, sync, controller, 4, 5e-4) == ("", 0.01)
    assert (asked, resumed) == ([1], [4])
    gap = "the log-probs after the push of version 4 differ by 1.00e-02 nats"
    assert notes == [
        f"{gap}: checking all weights",
        f"{gap}, more than 0.0015, but all weights are equal: rounding, or the engine computes something else",
    ]


def test_push_is_repeated_with_growing_pauses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slept: list[float] = []
    notes: list[str] = []
    monkeypatch.setattr(push.time, "sleep", slept.append)
    failed = ("it died", 0.0)
    answers = [failed, failed, ("", 0.25)]
    monkeypatch.setattr(push, "push_once", lambda *_: answers.pop(0))
    session: Any = SimpleNamespace(stopping=lambda: False, note=notes.append)
    sync: Any = None
    assert push_with_retries(session, sync, None, 3) == 0.25
    assert slept == [1, 2]
    assert notes[0] == "push 1 of 9 failed and is repeated in 1 s: it died"
    slept.clear()
    monkeypatch.setattr(push, "push_once", lambda *_: failed)
    with pytest.raises(UserError, match=r"^9 weight pushes in a row have failed \(it died\): .*--resume"):
        push_with_retries(session, sync, None, 3)
    assert slept == list(PAUSES_S)
    assert sum(slept) >= 120  # a disk that is full for a minute costs time only
    session.stopping = lambda: True  # a job that is asked to end does not wait
    assert push_with_retries(session, sync, None, 3) == 0.0
