"""Section `rollout`: limits and sampling of a trajectory, and how rollouts overlap with training."""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, NonNegative, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class RolloutConfig:
    """Limits and sampling of trajectories, and how rollouts overlap with training."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: probability mass of the tokens that are drawn from; use 1 in training."""
    tools: tuple[str, ...] | None = None
    """Names of the tools that the policy may call, each with a tag of its name; None: search and python. A tool whose
    only required argument is a text takes the text of the tag, any other one a JSON object (docs/guides/tools.md)."""
    protocol: str = "tags"
    """Form of calls and results (docs/guides/tools.md). `tags`: ARPO's. `hermes`: JSON in <tool_call>, as Qwen2.5 and
    Qwen3 write it. `template`: the model's chat template, with `tool_call_parser`. Packages can add others."""
    tool_call_parser: str | None = None
    """SGLang's name for the format of the model's calls (`protocol=template`), for example qwen25 or llama3."""
    system_prompt: str | None = None
    """System prompt of all tasks instead of that of the data: `tools` (rendered from the tools of the job), a released
    prompt of ARPO (`arpo`, `arpo_search`, `arpo_python`, `arpo_no_tools`), or a text file."""
    environment: str | None = None
    """Environment of the tasks, in place of tools (docs/guides/environments.md): each turn of the model is an action.
    `sql`, `scripted_user`, `verifiers` (environments of that library), one of an installed package, or FILE.py:CLASS.
    Its steps are limited by `max_tool_calls`."""
    environment_params: dict[str, Any] = field(default_factory=dict, hash=False)
    """Params of the environment."""
    max_tool_calls: NonNegative = 3
    """Tool calls per trajectory; see `at_limit` for a call beyond them."""
    max_calls_by_tool: dict[str, NonNegative] = field(default_factory=dict, hash=False)
    """Calls per trajectory of single tools, for example {python: 5, search: 10}; `max_tool_calls` holds, too."""
    refuse_repeated: tuple[str, ...] = ()
    """Tools whose calls with the arguments of an earlier call of the path are not executed; a result reports it."""
    deterministic_tools: tuple[str, ...] = ()
    """Tools whose results depend on nothing but the arguments and, with `sandbox.sessions`, on the earlier python calls
    of the path: an equal call in another path of the task is not executed again. Search and browse are cached too."""
    at_limit: Literal["end", "answer_now"] = "end"
    """Treatment of a call beyond a limit. `end`: the trajectory ends with it. `answer_now`: its result states that the
    limit is reached and the model continues; the second such call at the same limit ends the trajectory. So does a call
    that leaves no room for `max_tool_tokens` and `answer_tokens`."""
    answer_tokens: NonNegative | None = None
    """Tokens that `at_limit=answer_now` keeps for the answer; None: an eighth of `max_response_tokens`."""
    max_turn_tokens: Positive | None = None
    """Tokens of one turn of the model, from prompt or tool result to call or answer; a longer turn ends the trajectory.
    None: only `max_response_tokens` limits it."""
    max_response_tokens: Positive = 4096
    """Tokens after the prompt, model and tool together."""
    stop_at_answer: bool = False
    """End a trajectory at </answer> instead of waiting for the end-of-sequence token, which is then not trained."""
    max_tool_tokens: Positive = 1024
    """A longer tool result is cut to this many tokens."""
    tool_timeout_s: PositiveFloat = 30.0
    """Deadline of a tool call in seconds. The model reads that the call timed out; a timeout of a search engine drops
    the branch, and one of an environment fails the tree."""
    max_staleness: NonNegative = 0
    """0: a step trains only trees that it began. n >= 1: a step trains trees that began at most n policy versions
    earlier, and twice its number of trees are in flight, also while the trainer trains."""
    across_push: Literal["keep", "keep_kv", "drain"] = "keep"
    """Treatment of trees in flight at a weight push. `keep`: they continue with the new weights. `keep_kv`: so do they,
    on the keys and values of the old weights, which are not computed again. `drain`: they are finished first."""
    admission: Literal["kv", "all"] = "kv"
    """Trajectories that are in an engine at the same time. `kv`: as many as its KV pool is expected to hold, of older
    trees first, so that prefixes stay in its cache while tools run. `all`: all of them."""
    priority: Literal["none", "age"] = "none"
    """Order in which an engine takes requests from its queue. `none`: first in, first out. `age`: those of older trees
    first, by SGLang's priority scheduling without preemption. It changes little with `admission=kv`."""
    stale: Literal["wait", "drop"] = "wait"
    """Handling of trees that take too long for `max_staleness` (> 0). `wait`: the step waits for them. `drop`: the step
    continues; when they finish they are left out, counted and replaced. `algorithm.sampling_correction` corrects for
    the older weights in trees that are trained."""
    oversampling: NonNegativeFloat = 0.0
    """Share of trees started beyond a step's need; the last ones to finish are dropped. Favours short trajectories.
    Needs `max_staleness` = 0."""
    max_refills: NonNegative = 8
    """Rounds of new tasks per step that replace failed or dropped trees, before the step continues with fewer. A run
    that is resumed within a step starts counting again."""
    journal_every_s: NonNegativeFloat = 60.0
    """Seconds between two writes of the step journal, which holds what the trees in flight have sampled: the most that
    a killed run has to sample again."""
