"""Weight pushes to the engines: attempts, and the probe that checks that the weights arrived."""

import time
from collections.abc import Sequence

from arpo_megatron.actor import parallel
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.engine.admin import EngineAdmin, WeightPushError
from arpo_megatron.errors import UserError
from arpo_megatron.packing.packs import TreePack, pack_trees
from arpo_megatron.rollout.endpoints import ServiceEndpoints
from arpo_megatron.trainer.consistency import check_push, gap_limit
from arpo_megatron.trainer.controller import Controller
from arpo_megatron.trainer.setup import ActorSession
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.weights.control import Control
from arpo_megatron.weights.sync import TIMEOUT_S, PushSettings, WeightSync, probe_gap

PAUSES_S = (1, 2, 4, 8, 15, 30, 30, 30)
"""Pauses between the attempts of one push: two minutes, so that a full disk can be cleared."""


def connect_engines(session: ActorSession, services: ServiceEndpoints) -> WeightSync:
    """Return this rank's end of pushes; it is closed with the session. All ranks call it."""
    sync = WeightSync(
        Control(parallel.group("control")),
        EngineAdmin(services.engine_urls, TIMEOUT_S, services.engine_token),
        session.actor.chunks,
        session.actor.spec,
        PushSettings.of(session.config, session.directory.path),
        session.note,
    )
    session.closing.callback(sync.close)
    return sync


def push_with_retries(
    session: ActorSession, sync: WeightSync, controller: Controller | None, version: int, first_gap: float | None = None
) -> float:
    """Push the actor's weights to the engines as policy `version`; all ranks call it.

    Does nothing if the job is asked to end. An attempt that an engine's death interrupts is repeated as soon as the
    engine is back. `first_gap` is the gap of the run's first push, or None if this is it.

    Returns:
        The largest gap between trainer and engine log-probs of the probe, in nats, the same on all ranks; 0 if the job
        is asked to end.

    Raises:
        UserError: all attempts have failed.
        RuntimeError: the gap exceeds `train.logprob_gap_limit`, or is not finite.
    """
    for attempt, pause_s in enumerate((*PAUSES_S, None), start=1):
        if session.stopping():
            return 0.0
        failure, gap = push_once(session, sync, controller, version, first_gap)
        if not failure:
            return gap
        if pause_s is not None:
            session.note(f"push {attempt} of {len(PAUSES_S) + 1} failed and is repeated in {pause_s} s: {failure}")
            time.sleep(pause_s)
    raise UserError(
        f"{attempt} weight pushes in a row have failed ({failure}): the logs of the engines say why; --resume continues"
    )


def push_once(
    session: ActorSession, sync: WeightSync, controller: Controller | None, version: int, first_gap: float | None
) -> tuple[str, float]:
    """Push once and check the probe; return what failed at the engines ("" for nothing) and the gap in nats.

    All ranks call it and get the same answer. If rounding does not explain the probe's gap, the push is repeated with
    checksums, which decide.
    """
    while True:
        failure, gap, explained = parallel.broadcast_object(
            _push_and_probe(session, sync, controller, version, first_gap)
        )
        if failure or explained:
            break
        session.note(
            f"the log-probs after the push of version {version} differ by {gap:.2e} nats: checking all weights"
        )
        sync.verify_next()
    if not failure and gap > (limit := gap_limit(first_gap, session.config)):
        session.note(
            f"the log-probs after the push of version {version} differ by {gap:.2e} nats, more than {limit:g}, but all "
            "weights are equal: rounding, or the engine computes something else"
        )
    if not failure and controller is not None:
        controller.collector.after_push(version)
    return failure, gap


def _push_and_probe(
    session: ActorSession, sync: WeightSync, controller: Controller | None, version: int, first_gap: float | None
) -> tuple[str, float, bool]:
    """Return what failed, the gap, and whether the gap is explained."""
    try:
        report = sync.push(version, controller.prepare_push if controller else lambda: None)
    except WeightPushError as error:  # on all ranks
        return str(error), 0.0, False
    probe, engine_scores = None, None
    if controller is not None:
        tokens = controller.probe_tokens(report.probe_tokens)
        probe, engine_scores = probe_pack(tokens), sync.engines.start_logprobs(tokens)
    packs = [parallel.broadcast_object(probe)]
    session.prepare_kernels(packs)
    # The engines compute the probe's log-probs at the same time, at temperature 1 as for every prompt.
    logprobs = session.actor.logprobs(packs, temperature=1.0, training=False)[0]
    if engine_scores is None:
        return "", 0.0, True
    try:
        gap = max(probe_gap(logprobs, engine) for engine in engine_scores())
    except WeightPushError as error:
        return str(error), 0.0, False
    return "", gap, check_push(gap, first_gap, version, session.config, equal=bool(report.verified))


def probe_pack(token_ids: Sequence[int]) -> TreePack:
    """Return a pack of one sequence whose targets are all its tokens but the first."""
    tree = RolloutTree("probe", token_ids[:1])
    tree.add(0, Role.MODEL, token_ids[1:])
    return pack_trees([tree], supervised_credit([tree]), token_budget=len(token_ids))[0]
