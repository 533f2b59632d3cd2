"""Responses of agents, before they are scored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from arpo_megatron.evaluation.journal import Outcome
from arpo_megatron.rewards.base import environment_rewards, last_turn
from arpo_megatron.rollout.messages import FailedTree
from arpo_megatron.tree import FAILED_CALL, Finish, Role, RolloutTree

Decode = Callable[[list[int]], str]
"""Token ids to text."""


@dataclass(frozen=True, slots=True)
class AgentResponse:
    """Texts and counts of a trajectory that an agent has finished."""

    text: str
    """Everything after the prompt, with tool results."""
    model_text: str
    """Text of the model alone; a boxed answer in a tool result is not the model's answer."""
    finish: Finish
    tool_calls: int = 0
    """Calls that were answered."""
    tool_errors: int = 0
    """Calls whose status is not "ok"."""
    model_tokens: int = 0
    tool_tokens: int = 0
    """Tokens of tool results."""
    seconds: float = 0.0
    """Wall time."""
    last_turn: str | None = None
    """Text of the model after the last tool result; None: all of `text`."""
    called: tuple[str, ...] = ()
    """Names of the tools that were called."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Sums of the parts of the reward that an environment has given."""


@dataclass(frozen=True, slots=True)
class NoResponse:
    """Outcome and error of an attempt without a trajectory."""

    outcome: Outcome
    detail: str
    """The error in words."""


Response = AgentResponse | NoResponse

_OUTCOMES = {Finish.LENGTH: Outcome.LENGTH, Finish.CALL_LIMIT: Outcome.CALL_LIMIT, Finish.MALFORMED: Outcome.MALFORMED}


def outcome_without_answer(finish: Finish) -> Outcome:
    """Return the outcome of a response without an answer."""
    return _OUTCOMES.get(finish, Outcome.NO_ANSWER)


def tree_responses(tree: RolloutTree, decode: Decode) -> list[Response]:
    """Return the trajectories of a finished tree without forks, in the order of their start."""
    tree = tree.grown
    prompt = len(tree.segments[0])
    responses: list[Response] = []
    for leaf in tree.leaves():
        call = tree.segments[leaf].tool
        if call is not None and call.status == FAILED_CALL:
            responses.append(NoResponse(Outcome.TOOLS, f"a call of {call.name} failed"))
            continue
        path = [tree.segments[index] for index in tree.path(leaf)]
        last, called = last_turn(tree, leaf)
        model = [segment for segment in path if segment.role is Role.MODEL]
        tools = [segment for segment in path if segment.role is Role.TOOL]
        responses.append(
            AgentResponse(
                text=decode(tree.path_tokens(leaf)[prompt:].tolist()),
                model_text="".join(decode(segment.token_ids.tolist()) for segment in model),
                finish=tree.segments[leaf].finish or Finish.END,
                tool_calls=len(tools),
                tool_errors=sum(segment.tool is not None and segment.tool.status != "ok" for segment in tools),
                model_tokens=sum(len(segment) for segment in model),
                tool_tokens=sum(len(segment) for segment in tools),
                seconds=tree.seconds,
                last_turn=decode(last),
                called=tuple(sorted(called)),
                rewards=environment_rewards(tree, leaf),
            )
        )
    return responses


_FAILURES = {
    "AllBranchesLostError": Outcome.TOOLS,
    "PromptTooLongError": Outcome.PROMPT_TOO_LONG,
    "EngineRefusedError": Outcome.REFUSED,
    "SandboxUnavailable": Outcome.TOOLS,
    "SandboxDenied": Outcome.TOOLS,
    "ToolBlockedError": Outcome.TOOLS,
    "SandboxError": Outcome.TOOLS,
}


def failed_response(failed: FailedTree) -> NoResponse:
    """Return the outcome of the attempts in a tree that could not be finished."""
    name, _, rest = failed.reason.partition(": ")
    return NoResponse(_FAILURES.get(name, Outcome.ENGINE), rest or name)
