"""Growing one tree with a scripted engine and the real tool service."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from arpo_megatron.algorithms.branching import GrpoPolicy, make_branch_policy
from arpo_megatron.config import AlgorithmConfig
from arpo_megatron.engine.client import EngineClient, EngineUnavailableError
from arpo_megatron.engine.request import EngineRefusedError, Sampling
from arpo_megatron.rollout.accounting import TreeStats, rollout_stats
from arpo_megatron.rollout.context import PromptTooLongError, RolloutContext
from arpo_megatron.rollout.grower import TreeGrower
from arpo_megatron.rollout.lost_branches import AllBranchesLostError
from arpo_megatron.rollout.result_cache import ResultCache
from arpo_megatron.rollout.tools import ToolClient
from arpo_megatron.rollout.tree_queue import TREE_FAILURES
from arpo_megatron.tasks.protocols.tools import ToolDefinition
from arpo_megatron.tasks.tags.calls import RESULT_FRAME
from arpo_megatron.tasks.tags.protocol import TagProtocol
from arpo_megatron.tree import Finish, Role, RolloutTree
from tests.engine.scripted import CharacterCodec, ScriptedEngine
from tests.rollout.growing import (
    CODEC,
    LIMITS,
    PLAN,
    PROMPT,
    SEED,
    Start,
    any_of,
    arpo,
    fork_points,
    grow,
    planned,
    texts,
)
from tools_sandbox.client import ToolAnswer


def test_trajectory_alternates_between_model_and_tool_and_keeps_every_token(
    scripted_engine: Start, sandbox_url: str
) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(1))
    (leaf,) = tree.leaves()
    assert texts(tree, leaf) == [
        PROMPT,
        PLAN[0],
        RESULT_FRAME.text("2"),
        PLAN[1],
        RESULT_FRAME.text("4"),
        PLAN[2] + "\0",
    ]
    finishes = [segment.finish for segment in tree.segments if segment.role is Role.MODEL]
    assert finishes == [Finish.TOOL_CALL, Finish.TOOL_CALL, Finish.END]
    call = tree.segments[2].tool
    assert call is not None
    assert (call.name, dict(call.arguments), call.status) == ("python", {"code": "1+1"}, "ok")
    assert call.seconds > 0
    assert all(segment.policy_version == 7 for segment in tree.segments if segment.role is Role.MODEL)
    assert grower.counts.calls_executed == 2
    assert grower.counts.tokens_sampled == int(tree.trajectory(leaf).loss_mask.sum())


def test_python_session_follows_the_path_and_forks_copy_it(scripted_engine: Start, sandbox_url: str) -> None:
    plan = ("<python>n = [40]</python>", "<python>n.append(2); sum(n)</python>", "<python>len(n)</python>", "done")
    engine = scripted_engine(ScriptedEngine(planned(*plan)))
    policy = arpo(8, 2, beam_size=2, branch_probability=1.0, entropy_weight=0.0)
    tree, _ = grow(engine.url, sandbox_url, policy, limits=replace(LIMITS, sessions=True))
    assert len(tree.leaves()) == 8
    for leaf in tree.leaves():
        # Were the state shared by siblings, the sum and the length would grow with every one of them.
        assert texts(tree, leaf)[2:-1:2] == [RESULT_FRAME.text(""), RESULT_FRAME.text("42"), RESULT_FRAME.text("2")]
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1))
    assert "NameError" in texts(tree, tree.leaves()[0])[4]


def test_equal_calls_to_a_deterministic_tool_are_executed_once(scripted_engine: Start, sandbox_url: str) -> None:
    """With sessions, too: equal programs leave one state, and a call after a refused one finds it."""
    plan = ("<python>n = [40]</python>", "<python>n = [40]</python>", "<python>n.append(2); sum(n)</python>", "done")
    engine = scripted_engine(ScriptedEngine(planned(*plan)))
    policy = arpo(8, 2, beam_size=2, branch_probability=1.0, entropy_weight=0.0)
    limits = replace(LIMITS, sessions=True, refuse_repeated=("python",), deterministic_tools=("python",))
    tree, grower = grow(engine.url, sandbox_url, policy, limits=limits)
    assert {texts(tree, leaf)[-2] for leaf in tree.leaves()} == {RESULT_FRAME.text("42")}
    counts = grower.counts
    assert counts.calls_executed - counts.calls_cached == 2  # one for each program
    assert counts.calls_cached > 0 and counts.seconds_saved > 0


@dataclass
class OnceLateTools:
    """Its first call runs into the time limit. Of a deterministic program, only a slow machine would do that once."""

    states: list[tuple[str, str]] = field(default_factory=list)
    results: ResultCache = field(default_factory=ResultCache)

    async def call(self, _tool: str, arguments: dict[str, str], **_rest: Any) -> ToolAnswer:
        self.states.append((arguments["state"], arguments["keep"]))
        return ToolAnswer("", "ok" if len(self.states) > 1 else "timeout", 1.0, cached=False)


def test_path_after_a_timeout_does_not_start_from_the_state_of_another_tree(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(planned("<python>n = 1</python>", "<python>n + 1</python>", "done")))
    limits = replace(LIMITS, sessions=True, deterministic_tools=("python",))
    tools = OnceLateTools()
    late, _ = grow(engine.url, "", GrpoPolicy(2), limits=limits, other_tools=tools)
    tools.results = ResultCache()  # it belongs to the event loop of the first tree
    in_time, _ = grow(engine.url, "", GrpoPolicy(2), limits=limits, other_tools=tools)
    statuses = [[s.tool.status for s in tree.segments if s.tool] for tree in (late, in_time)]
    assert statuses == [["timeout", "ok"] * 2, ["ok"] * 4], "equal calls of a tree share a timeout"
    first, after_timeout, again, after = tools.states
    assert again == first and after[0] == first[1]
    assert after_timeout[0] == "" != after_timeout[1]
    assert after_timeout[1] not in (first[1], after[1])


def test_every_path_of_the_task_continues_a_shared_state(scripted_engine: Start, sandbox_url: str) -> None:
    def script(text: str, seed: int) -> str:
        *answered, current = text[text.index(PROMPT) + len(PROMPT) :].split("</result>")
        part = ("<python>n = 40</python>", f"<python>n + 2 + 0 * {seed}</python>", "done")[len(answered)]
        return part[len(current) :]

    engine = scripted_engine(ScriptedEngine(planned(*PLAN), seeded=script))
    limits = replace(LIMITS, sessions=True, deterministic_tools=("python",))
    tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(4), limits=limits)
    assert [texts(tree, leaf)[-2] for leaf in tree.leaves()] == [RESULT_FRAME.text("42")] * 4
    assert grower.counts.calls_executed - grower.counts.calls_cached == 5


def test_tree_spends_its_budget_and_keeps_the_beam_size(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    for samples, initial, beam in ((6, 2, 2), (9, 2, 3), (5, 4, 2), (3, 1, 2)):
        policy = arpo(samples, initial, beam_size=beam, branch_probability=1.0, entropy_weight=0.0)
        tree, grower = grow(engine.url, sandbox_url, policy)
        assert len(tree.leaves()) == samples
        assert max(fork_points(tree)) <= beam
        assert max(fork_points(tree)) > 1
        stats = rollout_stats([tree], grower.counts, [TreeStats.of(tree, policy)], failed=0, seconds=1.0)
        fresh = len(tree.children()[0])
        assert stats.totals.forks == samples - fresh
        assert stats.totals.calls_inherited + stats.counts.calls_executed == 2 * samples  # each trajectory made two
        assert stats.totals.calls_inherited > 0


def test_unused_budget_becomes_fresh_trajectories(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, _ = grow(engine.url, sandbox_url, arpo(5, 2, branch_probability=0.0, entropy_weight=0.0))
    assert len(tree.children()[0]) == len(tree.leaves()) == 5
    measured = [segment.branch for segment in tree.segments if segment.branch is not None]
    assert len(measured) == 4  # two results on each of the two measured paths, none on the late ones
    assert {record.why for record in measured} == {"draw"}


def test_decision_is_recorded_on_the_measured_segment(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, _ = grow(engine.url, sandbox_url, arpo(2, 1, branch_probability=1.0, entropy_weight=0.0))
    forked = fork_points(tree).index(2)
    tool = [index for index, segment in enumerate(tree.segments) if segment.role is Role.TOOL][forked]
    measured, sibling = (tree.segments[child] for child in tree.children()[tool])
    assert measured.branch is not None
    assert measured.branch.probability == 1.0
    assert sibling.branch is None
    assert measured.entropies is not None
    assert len(measured.entropies) == len(measured)  # both requests' entropies, in order
    assert measured.token_ids.tolist() == sibling.token_ids.tolist()


def test_partial_tree_has_all_sampled_segments(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN), delay_s=lambda text: 3.0 if "double" in text else 0.0))
    policy = arpo(2, 1, k=17, branch_probability=1.0, entropy_weight=0.0)  # the measured tokens end behind "double"

    async def run() -> RolloutTree:
        async with EngineClient(engine.url) as client, ToolClient(sandbox_url) as tools:
            context = RolloutContext(client, tools, CODEC, policy, Sampling(), LIMITS, SEED, 3, lambda _tokens: None)
            grower = TreeGrower("task-1", np.array(CODEC.encode(PROMPT), np.int32), context)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(grower.grow(), 1)
            return grower.partial_tree()

    tree = asyncio.run(run())
    (cut, *_others) = [leaf for leaf in tree.leaves() if tree.segments[leaf].finish is None]
    assert texts(tree, cut)[:3] == [PROMPT, PLAN[0], RESULT_FRAME.text("2")]
    assert texts(tree, cut)[3] == PLAN[1][:17]
    assert tree.segments[cut].branch is not None


def test_each_path_has_its_own_seed(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN), seeded=any_of))
    tree, _ = grow(engine.url, sandbox_url, arpo(12, 4, branch_probability=1.0, entropy_weight=0.0))
    places = {request["sampling_params"].get("sampling_seed") for request in engine.requests} - {None}
    assert len(places) == sum(segment.role is Role.MODEL for segment in tree.segments)


def test_siblings_start_before_the_measured_path_continues(scripted_engine: Start, sandbox_url: str) -> None:
    """Their requests are sent while the rest of the measured segment is being sampled."""
    resting = "<think>and double</think><pyth"

    def slow_rest(text: str) -> float:
        return 1.0 if text.endswith(resting[:10]) else 0.0

    engine = scripted_engine(ScriptedEngine(planned(*PLAN), delay_s=slow_rest))
    grow(engine.url, sandbox_url, arpo(2, 1, k=10, branch_probability=1.0, entropy_weight=0.0))
    asked = ["".join(map(chr, request["input_ids"])) for request in engine.requests]
    rest = next(index for index, text in enumerate(asked) if text.endswith(resting[:10]))
    after_result = [index for index, text in enumerate(asked) if text.endswith("2\n</result>")]
    assert len(after_result) == 2
    assert after_result[1] <= rest + 1
    third_segment = next(index for index, text in enumerate(asked) if text.endswith("4\n</result>"))
    assert third_segment > after_result[1]


@pytest.mark.parametrize("k", range(1, 48, 2))
def test_stop_string_is_found_across_requests(scripted_engine: Start, sandbox_url: str, k: int) -> None:
    """The engine searches one request's tokens only, and tags are many tokens here."""
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, _ = grow(engine.url, sandbox_url, arpo(2, 1, k=k, branch_probability=0.0, entropy_weight=0.0))
    assert texts(tree, tree.leaves()[0])[3] == PLAN[1]


def test_call_beyond_the_limit_ends_the_trajectory(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(2), limits=replace(LIMITS, max_tool_calls=1))
    assert grower.counts.calls_executed == 2
    for leaf in tree.leaves():
        assert tree.segments[leaf].finish is Finish.CALL_LIMIT
        assert texts(tree, leaf)[-1] == PLAN[1]  # nothing is added after it


def test_stop_at_answer_ends_the_trajectory(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned("<think>a</think><answer>4</answer> and more")))
    for stop_at_answer, last in ((False, "</answer> and more\0"), (True, "</answer>")):
        tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1), limits=replace(LIMITS, stop_at_answer=stop_at_answer))
        assert texts(tree, 1)[-1] == f"<think>a</think><answer>4{last}"
        assert tree.segments[1].finish is Finish.END


@pytest.mark.parametrize("name", ["aepo", "aepo_released", "arpo", "arpo_released", "random"])
def test_each_branching_policy_grows_whole_trees(scripted_engine: Start, sandbox_url: str, name: Any) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    config = AlgorithmConfig(branching=name, group_size=10, initial_rollouts=3, entropy_tokens=6)
    tree, _ = grow(
        engine.url, sandbox_url, make_branch_policy(config, vocabulary_size=CODEC.vocabulary_size, seed=SEED)
    )
    assert len(tree.leaves()) == 10
    records = [segment.branch for segment in tree.segments if segment.branch is not None]
    assert max(fork_points(tree)) == 2
    after_first_call = [tree.segments[i].branch for i in range(len(tree.segments)) if len(tree.path(i)) == 4]
    if name == "arpo_released":
        assert {record.dH for record in after_first_call if record is not None} == {0.0}
        assert any(record.dH != 0.0 for record in records)


def test_malformed_call_ends_the_trajectory(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned("<think>hm</think><search> </search>")))
    tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(1))
    assert tree.segments[1].finish is Finish.MALFORMED
    assert grower.counts.calls_executed == 0


def test_json_call_reaches_the_tool_and_invalid_json_gets_an_error(scripted_engine: Start, sandbox_url: str) -> None:
    plan = ("<python>{'code'}</python>", '<python>{"code": "6 * 7"}</python>', "<answer>\\boxed{42}</answer>")
    engine = scripted_engine(ScriptedEngine(planned(*plan)))
    limits = replace(LIMITS, protocol=TagProtocol((ToolDefinition("python"),)))
    tree, grower = grow(engine.url, sandbox_url, GrpoPolicy(1), limits=limits)
    first, second = (segment for segment in tree.segments if segment.role is Role.TOOL)
    assert first.tool is not None and second.tool is not None
    assert (first.tool.status, first.tool.arguments) == ("invalid_call", {})
    assert "Error: the text of <python> is not a JSON object" in CODEC.decode(first.token_ids.tolist())
    assert (second.tool.status, second.tool.arguments) == ("ok", {"code": "6 * 7"})
    assert CODEC.decode(second.token_ids.tolist()) == RESULT_FRAME.text("42")
    assert (grower.counts.calls_invalid, grower.counts.calls_executed) == (1, 1)


def test_tree_stays_on_the_engine_with_its_prefixes(scripted_engine: Start, sandbox_url: str) -> None:
    """With two engines and twelve trees, no prefix is computed on both, and none more often than on one engine."""
    engines = [scripted_engine(ScriptedEngine(planned(*PLAN))) for _ in range(2)]
    policy = arpo(5, 2, branch_probability=1.0, entropy_weight=0.0)

    async def run() -> list[tuple[RolloutTree, TreeGrower]]:
        async with EngineClient(*(engine.url for engine in engines)) as engine, ToolClient(sandbox_url) as tools:
            context = RolloutContext(engine, tools, CODEC, policy, Sampling(), LIMITS, SEED, 3, lambda _tokens: None)
            prompts = [f"{number} {PROMPT}" for number in range(12)]
            growers = [
                TreeGrower(f"t{n}", np.array(CODEC.encode(text), np.int32), context) for n, text in enumerate(prompts)
            ]
            return [(await grower.grow(), grower) for grower in growers]

    for number, (tree, grower) in enumerate(asyncio.run(run())):
        asked = [
            sum("".join(map(chr, request["input_ids"])).startswith(f"{number} What") for request in engine.requests)
            for engine in engines
        ]
        assert min(asked) == 0
        stats = rollout_stats([tree], grower.counts, [TreeStats.of(tree, policy)], failed=0, seconds=1.0)
        assert stats.prefill_over_unique <= 1.05
        assert stats.counts.prefilled_tokens - stats.totals.given_tokens <= stats.counts.requests
    assert all(engine.requests for engine in engines)


def test_tool_error_becomes_the_tools_answer(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned("<python>1/0</python>", "<answer>none</answer>")))
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1))
    record = tree.segments[2].tool
    assert record is not None
    assert record.status == "error"
    assert "ZeroDivisionError" in texts(tree, 3)[2]
    assert tree.segments[3].finish is Finish.END


class DenyingCodec(CharacterCodec):
    """Refuses all texts."""

    def encode_plain(self, text: str) -> list[int]:
        raise TypeError("not this text")


def test_untokenizable_tool_answer_fails_the_tree(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    with pytest.raises(TREE_FAILURES, match="cannot tokenize the answer of python, '2': not this text"):
        grow(engine.url, sandbox_url, GrpoPolicy(1), codec=DenyingCodec())


def test_token_limits_hold(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    for response in (1, 20, len(PLAN[0]), len(PLAN[0]) + 5, len(PLAN[0]) + len(RESULT_FRAME.text("2")) + 3):
        tree, _ = grow(engine.url, sandbox_url, arpo(4, 2), limits=replace(LIMITS, max_response_tokens=response))
        for leaf in tree.leaves():
            assert len(tree.path_tokens(leaf)) <= len(PROMPT) + response
            assert tree.segments[leaf].role is Role.MODEL
            assert tree.segments[leaf].finish is Finish.LENGTH
    limits = replace(LIMITS, max_tool_tokens=30)
    long = scripted_engine(ScriptedEngine(planned("<python>print('x' * 500)</python>", "<answer>x</answer>")))
    tree, _ = grow(long.url, sandbox_url, GrpoPolicy(1), limits=limits)
    assert len(tree.segments[2]) == 30
    assert texts(tree, 3)[2].startswith(" <result>\nxxx")
    assert texts(tree, 3)[2].endswith("x\n</result>")


def test_transient_engine_failure_is_retried(scripted_engine: Start, sandbox_url: str) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN), fail_first=3))
    tree, _ = grow(engine.url, sandbox_url, GrpoPolicy(1))
    assert texts(tree, tree.leaves()[0])[-1] == PLAN[2] + "\0"


def test_unreachable_engine_fails_the_tree(sandbox_url: str) -> None:
    with pytest.raises(EngineUnavailableError, match="does not answer"):
        grow("http://127.0.0.1:9", sandbox_url, GrpoPolicy(3), retry_for_s=0.5)


def test_unreachable_tool_service_fails_the_tree(scripted_engine: Start) -> None:
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    with pytest.raises(AllBranchesLostError, match="python: tool service at"):
        grow(engine.url, "http://127.0.0.1:9", GrpoPolicy(2), retry_for_s=0.5)


def test_prompt_without_room_for_an_answer_is_refused(sandbox_url: str) -> None:
    with pytest.raises(PromptTooLongError, match=f"{len(PROMPT)} tokens"):
        grow("http://127.0.0.1:9", sandbox_url, GrpoPolicy(1), limits=replace(LIMITS, max_length=len(PROMPT)))


def test_engine_without_entropies_is_refused(scripted_engine: Start, sandbox_url: str) -> None:
    class Plain(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            import json

            from aiohttp import web

            answer = json.loads((await super().generate(request)).body)
            del answer["meta_info"]["entropy"]
            return web.json_response(answer)

    engine = scripted_engine(Plain(planned(*PLAN)))
    with pytest.raises(EngineRefusedError, match=r"engine\.server\.main"):
        grow(engine.url, sandbox_url, GrpoPolicy(1))
