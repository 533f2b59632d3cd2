"""Rank 0's requests about an exchange: each engine's part of the plan, and its start."""

import concurrent.futures
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from arpo_megatron.engine.admin import EngineAdmin, WeightPushError, first_line
from arpo_megatron.engine.wire.boxes import EXCHANGE_FORMAT, JOIN_ACTION, PLAN_ACTION
from arpo_megatron.weights.transports.base import Exchange

_ANSWER_S = 5.0
"""Seconds to wait for an engine's own account of a failure."""


def send_plan(requests: EngineAdmin, exchange: Exchange) -> None:
    """Give each engine the rounds in which its ranks receive.

    Raises:
        WeightPushError: a rank refuses, because the pieces are not exactly what it holds.
    """
    plans: list[list[Any]] = [[] for _ in exchange.bucket_holders]
    for turn in exchange.rounds:
        arriving: dict[int, list[Any]] = defaultdict(list)
        for send in turn:
            arriving[send.receiver].append(send.as_json())
        for receiver, sends in arriving.items():
            plans[receiver].append(sends)
    engines = range(len(exchange.engines))
    requests.send_to_ranks(PLAN_ACTION, [[plans[rank] for rank in exchange.ranks_of(engine)] for engine in engines])


def join(requests: EngineAdmin, exchange: Exchange, links: Sequence[Mapping[str, Any]]) -> None:
    """Have each rank of all engines connect to the trainer by its link. Raises WeightPushError."""
    engines = range(len(exchange.engines))
    requests.send_to_ranks(
        JOIN_ACTION,
        [[{**links[rank], "plan": exchange.name} for rank in exchange.ranks_of(engine)] for engine in engines],
    )


def start(requests: EngineAdmin, exchange: Exchange) -> list["Future[Any]"]:
    """Start the exchange in every engine; the answers come at its end."""
    settings = {"plan": exchange.name, "deadline_s": requests.engine_deadline_s}
    body = {
        "names": [],
        "dtypes": [],
        "shapes": [],
        "group_name": "",
        "load_format": EXCHANGE_FORMAT + json.dumps(settings),
        "flush_cache": False,
    }
    return requests.post_all("update_weights_from_distributed", [(engine.url, body) for engine in exchange.engines])


def run(posts: Sequence["Future[Any]"], work: Callable[[], None]) -> None:
    """Do this rank's part, and wait for the engines' answers.

    Raises:
        WeightPushError: an engine's account of the failure if there is one, else what `work` has raised.
    """
    try:
        work()
    except (RuntimeError, OSError, EOFError) as error:
        concurrent.futures.wait(posts, _ANSWER_S, concurrent.futures.FIRST_EXCEPTION)
        raise WeightPushError(first_failure(posts) or first_line(str(error) or type(error).__name__)) from error
    for post in posts:
        post.result()


def first_failure(posts: Sequence["Future[Any]"]) -> str:
    """Return the first error with which an engine has answered; "" if there is none yet."""
    for post in posts:
        if post.done() and isinstance(error := post.exception(), WeightPushError):
            return str(error)
    return ""
