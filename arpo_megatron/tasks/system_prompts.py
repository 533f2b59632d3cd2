r"""System prompts by name: those that ARPO's authors released, and one that is rendered from a job's tools.

The released ones are from evaluation/src/prompt_manager.py of github.com/RUC-NLPIR/ARPO; `arpo` is also that of the
training files, where a backspace stands for the backslash of \boxed.
"""

from collections.abc import Mapping
from pathlib import Path

from arpo_megatron.errors import UserError, did_you_mean
from arpo_megatron.tasks.protocols.base import CallProtocol

RENDERED = "tools"
"""Name of the prompt that is rendered from the tools of the job."""

_HELPER = "You are a helpful assistant that can solve the given question step by step"
_GIVEN = (
    "Given a question, you need to first think about the reasoning process in the mind and then provide the answer. "
)
_DURING = "During thinking, you can invoke the"
_ENCLOSED = (
    "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags respectively"
)
_QUERY = (
    ", and the search query and result are enclosed within <search> </search> and <result> </result> tags respectively"
)
_FACTS = "for fact information about specific topics if needed."
_THINK = "<think> This is the reasoning process. </think> "
_SEARCH = "<search> search query here </search> <result> search result here </result> "
_PYTHON = "<python> python code here </python> <result> python interpreter result here </result> "
_ANSWER = (
    "<answer> The final answer is \\[ \\boxed{answer here} \\] </answer>. "
    "In the last part of the answer, the final exact answer is enclosed within \\boxed{} with latex format."
)

ARPO_PROMPTS: Mapping[str, str] = {
    "arpo": (
        f"{_HELPER} with the help of the wikipedia search tool and python interpreter tool. {_GIVEN}"
        f"{_DURING} wikipedia search tool to search and python interpreter tool to calculate the math problem {_FACTS} "
        f"{_ENCLOSED}{_QUERY}. For example, {_THINK}{_SEARCH}{_THINK}{_PYTHON}{_THINK}{_ANSWER}"
    ),
    "arpo_search": (
        f"{_HELPER} with the help of the wikipedia search tool. {_GIVEN}"
        f"{_DURING} wikipedia search tool to search {_FACTS} "
        f"{_ENCLOSED}{_QUERY}. For example, {_THINK}{_SEARCH}{_THINK}{_ANSWER}"
    ),
    "arpo_python": (
        f"{_HELPER} with the help of the python interpreter tool. {_GIVEN}"
        f"{_DURING} python interpreter tool to calculate the math problem {_FACTS} "
        f"{_ENCLOSED}. For example, {_THINK}{_PYTHON}{_THINK}{_ANSWER}"
    ),
    "arpo_no_tools": f"{_HELPER}. {_GIVEN}{_ENCLOSED}. For example, {_THINK}{_ANSWER}",
}


def system_prompt(named: str, protocol: CallProtocol) -> str:
    """Return the text of a system prompt.

    Args:
        named: `rollout.system_prompt`: a name, or a text file.
        protocol: the protocol with the tools of the job.

    Raises:
        UserError: there is no such name or file.
    """
    if named == RENDERED:
        return _rendered(protocol)
    if named in ARPO_PROMPTS:
        return ARPO_PROMPTS[named]
    known = [RENDERED, *ARPO_PROMPTS]
    hint = f"{did_you_mean(named, known)}; give a file or one of {', '.join(known)}"
    return read_prompt(Path(named), f"rollout.system_prompt={named}", hint)


def read_prompt(path: Path, where: str, hint: str = "") -> str:
    """Return the text of a file. Raises UserError, which begins with `where`, and with `hint` if there is no file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: not UTF-8 text") from None


def _rendered(protocol: CallProtocol) -> str:
    parts = [
        "Answer the question step by step. Put your reasoning between <think> and </think>.",
        protocol.describe(),
        "Give the final answer, and nothing else, as <answer>\\boxed{answer}</answer>.",
    ]
    return "\n".join(part for part in parts if part)
