"""What an agent gives back for a question, before it is scored."""

from collections.abc import Callable
from dataclasses import dataclass

from arpo_megatron.evaluation.journal import Outcome
from arpo_megatron.rollout.messages import IncompleteTree
from arpo_megatron.tree import Finish, Role, RolloutTree

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class AgentResponse:
    """A trajectory as text.

    Attributes:
        text: everything after the prompt, tool results included.
        model_text: what the model wrote of it: a box in a tool's result is no answer.
        finish: why it ended.
        tool_calls: made and answered.
        tool_errors: those whose tool did not answer "ok".
        model_tokens: sampled.
        tool_tokens: of tool results.
        seconds: wall time.
    """

    text: str
    model_text: str
    finish: Finish
    tool_calls: int = 0
    tool_errors: int = 0
    model_tokens: int = 0
    tool_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NoResponse:
    """Why there is none: the kind, and more about it."""

    outcome: Outcome
    detail: str


Response = AgentResponse | NoResponse

_FINISHES = {Finish.LENGTH: Outcome.LENGTH, Finish.CALL_LIMIT: Outcome.CALL_LIMIT, Finish.MALFORMED: Outcome.MALFORMED}


def outcome_without_answer(finish: Finish) -> Outcome:
    """The kind of failure of a response in which no answer was found."""
    return _FINISHES.get(finish, Outcome.NO_ANSWER)


def tree_responses(tree: RolloutTree, decode: Decode) -> list[AgentResponse]:
    """The trajectories of a finished tree, in the order of its leaves."""
    prompt = len(tree.segments[0])
    found = []
    for leaf in tree.leaves():
        path = [tree.segments[index] for index in tree.path(leaf)]
        model = [segment for segment in path if segment.role is Role.MODEL]
        tools = [segment for segment in path if segment.role is Role.TOOL]
        found.append(
            AgentResponse(
                text=decode(tree.path_tokens(leaf)[prompt:].tolist()),
                model_text="".join(decode(segment.token_ids.tolist()) for segment in model),
                finish=tree.segments[leaf].finish or Finish.END,
                tool_calls=len(tools),
                tool_errors=sum(segment.tool is not None and segment.tool.status != "ok" for segment in tools),
                model_tokens=sum(len(segment) for segment in model),
                tool_tokens=sum(len(segment) for segment in tools),
                seconds=tree.seconds,
            )
        )
    return found


_REASONS = {
    "PromptTooLongError": Outcome.PROMPT_TOO_LONG,
    "EngineRefusedError": Outcome.REFUSED,
    "SandboxUnavailable": Outcome.TOOLS,
    "SandboxDenied": Outcome.TOOLS,
    "SandboxError": Outcome.TOOLS,
}


def no_response(failed: IncompleteTree) -> NoResponse:
    """Why a tree could not be grown."""
    name, _, rest = failed.reason.partition(": ")
    return NoResponse(_REASONS.get(name, Outcome.ENGINE), rest or name)
