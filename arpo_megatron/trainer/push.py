"""Weight pushes to the engines: attempts, and the probe that checks that the weights arrived."""

import time
from collections.abc import Sequence

from arpo_megatron.actor import parallel
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.engine.admin import WeightPushError
from arpo_megatron.errors import UserError
from arpo_megatron.packing.packs import TreePack, pack_trees
from arpo_megatron.trainer.consistency import check_push
from arpo_megatron.trainer.controller import Controller
from arpo_megatron.trainer.setup import ActorSession
from arpo_megatron.tree import Role, RolloutTree
from arpo_megatron.weights.export import hf_buckets
from arpo_megatron.weights.sync import probe_gap

PAUSES_S = (1, 2, 4, 8, 15, 30, 30, 30)
"""Pauses between the attempts of one push: two minutes, so that a full disk can be cleared."""


def push_with_retries(session: ActorSession, controller: Controller | None, version: int) -> float:
    """Push the actor's weights to the engines as policy `version`; all ranks call it.

    Does nothing if the job is asked to end. An attempt that an engine's death interrupts is repeated as soon as the
    engine is back.

    Returns:
        The largest gap between trainer and engine log-probs of the probe, in nats, the same on all ranks; 0 if the job
        is asked to end.

    Raises:
        UserError: all attempts have failed.
        RuntimeError: the gap exceeds `train.logprob_gap_limit`.
    """
    for attempt, pause_s in enumerate((*PAUSES_S, None), start=1):
        if session.stopping():
            return 0.0
        failure, gap = parallel.broadcast_object(push_once(session, controller, version))
        if not failure:
            return gap
        if pause_s is not None:
            session.note(f"push {attempt} of {len(PAUSES_S) + 1} failed and is repeated in {pause_s} s: {failure}")
            time.sleep(pause_s)
    raise UserError(f"{attempt} weight pushes in a row have failed ({failure}): fix it and use --resume")


def push_once(session: ActorSession, controller: Controller | None, version: int) -> tuple[str, float]:
    """Push once and check the probe; return what failed at the engines ("" for nothing) and the gap in nats."""
    config, actor = session.config, session.actor
    buckets = hf_buckets(
        actor.chunks,
        actor.spec,
        config.sync.bucket_bytes,
        controller.push_buffers if controller else 0,
        fused=config.engine.quantization != "none",
    )
    probe, engine_scores, failure = None, None, ""
    if controller is not None:
        try:
            tokens, engine_scores = controller.push(buckets, version)
            probe = probe_pack(tokens)
        except WeightPushError as error:
            failure = str(error)
    for _ in buckets:  # every rank takes part in gathering the shards, also if the push failed
        pass
    if (probe := parallel.broadcast_object(probe)) is None:
        return failure, 0.0
    # The engines compute the probe's log-probs at the same time, at temperature 1 as for every prompt.
    logprobs = actor.logprobs([probe], temperature=1.0, training=False)[0]
    if controller is None or engine_scores is None:
        return "", 0.0
    try:
        gap = max(probe_gap(logprobs, engine) for engine in engine_scores())
    except WeightPushError as error:
        return str(error), 0.0
    check_push(gap, version, config)
    controller.resume_trees(version)
    return "", gap


def probe_pack(token_ids: Sequence[int]) -> TreePack:
    """Return a pack of one sequence whose targets are all its tokens but the first."""
    tree = RolloutTree("probe", token_ids[:1])
    tree.add(0, Role.MODEL, token_ids[1:])
    return pack_trees([tree], supervised_credit([tree]), token_budget=len(token_ids))[0]
