"""Growing a branch again: continuations of a stored tree, sampled by a served agent and scored like the stored ones.

They are kept in memory and shown next to the stored branches; no file of the run changes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from arpo_megatron.config import JobConfig
from arpo_megatron.errors import UserError
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Score, group_of
from arpo_megatron.rollout.limits import LIMIT
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.build import reading_protocol
from arpo_megatron.tree import Role, RolloutTree, ToolRecord
from arpo_megatron.utils.chat_client import with_version
from arpo_megatron.view.rows import Row
from arpo_megatron.view.tree_page import Decode, rounded, segment_row

MAX_CONTINUATIONS = 16
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Grower:
    """A served agent (`arpo serve`) that samples continuations."""

    url: str
    """Its address, with or without `/v1`."""
    token: str
    """Its bearer token; empty: it needs none."""

    def weights(self) -> str:
        """Return the source of the weights, in words of the agent. Raises UserError if it does not answer."""
        match self._send("GET", "/models"):
            case {"data": [{"weights": str(source)}, *_]} if source:
                return source
            case {"data": [{"id": str(name)}, *_]}:
                return name
        raise UserError(f"{self.url} does not answer as `arpo serve`: it lists no model")

    def sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request for continuations (`serving.continuations`). Raises UserError if it fails."""
        match self._send("POST", "/continuations", body):
            case {"text": str(), "weights": str(), "continuations": list()} as answer:
                return dict(answer)
        raise UserError(f"{self.url} does not answer as `arpo serve`: it returns no continuations")

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            answer = httpx.request(
                method, f"{with_version(self.url)}{path}", json=body, headers=headers, timeout=_TIMEOUT_S
            )
            content = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UserError(f"{self.url} does not answer as `arpo serve`: {error}") from None
        if answer.status_code != 200:
            match content:
                case {"error": {"message": str(reason)}}:
                    raise UserError(f"{self.url} refuses: {reason}")
            raise UserError(f"{self.url} refuses: HTTP status {answer.status_code}")
        return content


@dataclass(frozen=True, slots=True)
class Growth:
    """Continuations of one segment of a stored tree."""

    segment: int
    """They begin at its end."""
    weights: str
    """The weights that sampled them."""
    temperature: float
    continuations: Sequence[Sequence[Row]]
    """For each, its segments as `serving.continuations` returns them, and `policy_version`."""
    scores: Sequence[Score] | None
    """One per continuation; None if the page cannot score them."""
    note: str
    """Why not, or a difference to training; "" if there is none."""


def grow(grower: Grower, stored: Row, job: JobConfig, decode: Decode, *, segment: int, count: int) -> Growth:
    """Sample continuations of a stored tree with the sampling of training, and score them with the run's reward.

    Args:
        grower: the served agent.
        stored: a row of `tree_store.read_row`.
        job: the run's config.
        decode: of the run's tokenizer.
        segment: the PROMPT or TOOL segment at whose end they begin.
        count: their number.

    Raises:
        UserError: nothing can be sampled there, or the agent refuses or has another tokenizer.
    """
    segments = stored["segments"]
    if not 0 <= segment < len(segments) or segments[segment]["role"] == Role.MODEL:
        raise UserError(f"segment {segment} is no prompt and no tool answer: nothing can be grown there")
    if not 1 <= count <= MAX_CONTINUATIONS:
        raise UserError(f"{count} continuations: ask for 1 to {MAX_CONTINUATIONS}")
    path = _path(segments, segment)
    before = [token for each in path for token in each["token_ids"]]
    tools = [each["tool"] for each in path if each["tool"] is not None and each["tool"]["status"] != LIMIT]
    answer = grower.sample(
        {
            "token_ids": before,
            "prompt_tokens": len(segments[0]["token_ids"]),
            "calls": [{"name": tool["name"], "arguments": json.loads(tool["arguments"])} for tool in tools],
            "n": count,
            "temperature": job.rollout.temperature,
            "top_p": job.rollout.top_p,
        }
    )
    if answer["text"] != decode(before):
        raise UserError(f"the agent of {answer['weights']} has another tokenizer than the run")
    found = [
        [{**each, "policy_version": one["weight_version"]} for each in one["segments"]]
        for one in answer["continuations"]
    ]
    scores, note = _scores(stored, job, decode, path, found)
    if job.sandbox.sessions and any(tool["name"] == "python" for tool in tools):
        note = f"{note}; the interpreter state of earlier calls is not restored".removeprefix("; ")
    return Growth(segment, answer["weights"], job.rollout.temperature, found, scores, note)


def with_growths(tree: Row, growths: Sequence[Growth], decode: Decode | None) -> Row:
    """Return the data of a tree's page with grown continuations as further branches, marked by `grown`."""
    segments, leaves, facts = list(tree["segments"]), list(tree["leaves"]), []
    for number, growth in enumerate(growths):
        for place, continuation in enumerate(growth.continuations):
            parent = growth.segment
            for own in continuation:
                tool = own["tool"] and {**own["tool"], "arguments": json.dumps(own["tool"]["arguments"])}
                text = "" if decode is None else decode(own["token_ids"])
                row = {**own, "parent": parent, "text": text, "trainer_logprobs": None, "branch": None}
                row |= {"tool": tool, "ended_s": None}
                segments.append({**segment_row(row, decode), "grown": number})
                parent = len(segments) - 1
            score = None if growth.scores is None else growth.scores[place]
            leaves.append(_leaf(parent, score, number))
        facts.append(
            {name: getattr(growth, name) for name in ("segment", "weights", "temperature", "note")}
            | {"count": len(growth.continuations)}
        )
    return {**tree, "segments": segments, "leaves": leaves, "growths": facts}


def _leaf(segment: int, score: Score | None, growth: int) -> Row:
    return {
        "segment": segment,
        "reward": None if score is None else rounded(float(score.reward)),
        "accuracy": None if score is None else rounded(float(score.accuracy)),
        "format_ok": None if score is None else bool(score.format_ok),
        "answer": None if score is None else score.answer,
        "format_fault": None if score is None else score.reason,
        "terms": {} if score is None else {name: rounded(float(value)) for name, value in score.terms.items()},
        "advantages": [],
        "replayed": False,
        "grown": growth,
    }


def _path(segments: Sequence[Row], segment: int) -> list[Row]:
    path = []
    while segment >= 0:
        path.append(segments[segment])
        segment = segments[segment]["parent"]
    return path[::-1]


def _scores(
    stored: Row, job: JobConfig, decode: Decode, path: Sequence[Row], continuations: Sequence[Sequence[Row]]
) -> tuple[list[Score] | None, str]:
    """Score continuations as a tree of their own; None with the reason if a judge would have to be asked."""
    try:
        protocol = reading_protocol(job.rollout)
        reward = make_reward(job.reward, max_response_tokens=job.rollout.max_response_tokens, protocol=protocol)
    except UserError as error:
        return None, f"not scored: {error}"
    if reward.needs_judge:
        return None, "not scored: the run's reward asks a judge"
    tree = RolloutTree(stored["task_id"], np.array(path[0]["token_ids"], np.int32))

    def add(rows: Sequence[Row], parent: int) -> int:
        for row in rows:
            tool = row["tool"] and ToolRecord(row["tool"]["name"], {}, row["tool"]["status"], 0.0, cached=False)
            parent = tree.add(parent, Role(row["role"]), row["token_ids"], tool=tool)
        return parent

    node = add(path[1:], 0)
    for continuation in continuations:
        add(continuation, node)
    aliases = tuple(stored["aliases"] or ())
    task = Task(stored["task_id"], (), stored["ground_truth"], stored["source"], stored["prompt"], aliases)
    return reward.score_group(group_of(tree, task, decode, step=stored["step"])), ""
