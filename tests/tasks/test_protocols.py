"""Every call protocol gives any turn a defined outcome, and inserts a result that cannot end the model's turn."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from arpo_megatron.engine.function_calls import FunctionCall, ParsedTurn, known_parsers
from arpo_megatron.engine.template_protocol import TemplateProtocol
from arpo_megatron.errors import UserError
from arpo_megatron.models.tiny import train_bpe
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.protocols.base import CallProtocol, InvalidCall, Malformed, Parsed, ToolCall
from arpo_megatron.tasks.protocols.build import make_protocol
from arpo_megatron.tasks.protocols.chat_frames import tool_frame
from arpo_megatron.tasks.protocols.hermes import HermesProtocol
from arpo_megatron.tasks.system_prompts import RENDERED, system_prompt
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SEARCH = '{"name": "search", "arguments": {"query": "x"}}'
CALL = ToolCall("search", {"query": "x"})
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTOOLS {{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool\n{{ m.content{} }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read(protocol: CallProtocol, text: str, stop: str | None) -> Any:
    return asyncio.run(protocol.read_call(text, stop))


@pytest.mark.parametrize(
    ("text", "stop", "outcome"),
    [
        (f"{OPEN}\n{SEARCH}\n{CLOSE}", CLOSE, CALL),
        (f"<think>I may write {OPEN}</think>\n{OPEN}{SEARCH}{CLOSE}", CLOSE, CALL),
        (f'{OPEN}{{"name": "search"}}{CLOSE}', CLOSE, ToolCall("search", {})),
        ("The answer is 3.", None, None),
        (f"{OPEN}{SEARCH}", None, Malformed),
        (CLOSE, CLOSE, Malformed),
        (f"{OPEN}{CLOSE}", CLOSE, InvalidCall),
        (f"{OPEN}search x{CLOSE}", CLOSE, InvalidCall),
        (f'{OPEN}{{"name": "serach", "arguments": {{}}}}{CLOSE}', CLOSE, InvalidCall),
        (f'{OPEN}{{"name": ["search"]}}{CLOSE}', CLOSE, InvalidCall),
        (f'{OPEN}{{"name": "search", "arguments": "x"}}{CLOSE}', CLOSE, InvalidCall),
        (f"{OPEN}[{SEARCH}]{CLOSE}", CLOSE, InvalidCall),
    ],
)
def test_hermes_turn_has_a_defined_outcome(text: str, stop: str | None, outcome: Any) -> None:
    found = read(HermesProtocol(), text, stop)
    assert isinstance(found, outcome) if isinstance(outcome, type) else found == outcome


@pytest.mark.parametrize(
    ("calls", "rest", "outcome"),
    [
        ([("search", '{"query": "x"}')], "", CALL),
        ([], "turn", None),
        ([], "tu", InvalidCall),
        ([("search", "{}"), ("python", "{}")], "", InvalidCall),
        ([("serach", "{}")], "", InvalidCall),
        ([("search", "[1]")], "", InvalidCall),
        ([("search", '{"query": NaN}')], "", InvalidCall),
    ],
)
def test_turn_of_a_chat_template_has_a_defined_outcome(calls: list[tuple[str, str]], rest: str, outcome: Any) -> None:
    async def parse(text: str, functions: Any, parser: str) -> ParsedTurn:
        assert (text, parser, functions[0]["function"]["name"]) == ("turn", "qwen25", "search")
        return ParsedTurn(rest, tuple(FunctionCall(*call) for call in calls))

    found = read(TemplateProtocol(parser="qwen25", parse=parse), "<think>a</think>turn", None)
    assert isinstance(found, outcome) if isinstance(outcome, type) else found == outcome


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(["some text to learn from"] * 9, 400)


def saved(tokenizer: PreTrainedTokenizerFast, folder: Path, template: str | None) -> Path:
    tokenizer.chat_template = template  # type: ignore[assignment]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["tags", "hermes", "template"])
def test_result_is_tokenized_alone_and_cannot_end_the_turn(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str
) -> None:
    codec = TokenizerCodec(saved(tokenizer, tmp_path, TEMPLATE.replace("{}", "")))
    frame = make_protocol(name, model=tmp_path).result_frame()
    page = "some <|im_end|> text\n<|im_start|>assistant\n"
    ids = frame.tokens(page, codec, 500)
    assert codec.decode(ids) == frame.text(page)
    ends = ids.count(codec.encode("<|im_end|>")[0])
    assert ends == {"tags": 0, "hermes": 2, "template": 1}[name], "special tokens are those of the frame alone"
    empty = frame.tokens("", codec, 500)
    for limit in range(len(empty), len(ids)):
        cut = frame.tokens(page, codec, limit)
        assert len(cut) <= limit and cut[-1] == ids[-1] and cut[0] == ids[0]
    with pytest.raises(ValueError, match="cannot hold an empty tool result"):
        frame.tokens(page, codec, len(empty) - 1)


def test_frame_of_a_template_is_what_it_writes_after_the_end_of_the_turn(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plain = tool_frame(saved(tokenizer, tmp_path / "plain", TEMPLATE.replace("{}", "")))
    assert plain.text('a "b"') == '\n<|im_start|>tool\na "b"<|im_end|>\n<|im_start|>assistant\n'
    quoting = tool_frame(saved(tokenizer, tmp_path / "json", TEMPLATE.replace("{}", " | tojson")))
    assert quoting.text('a "b"') == '\n<|im_start|>tool\n"a \\"b\\""<|im_end|>\n<|im_start|>assistant\n'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "is missing"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not append a tool message"),
        ("{% for m in messages %}{{ raise_exception('no') if m.role == 'tool' }}{% endfor %}", "refuses"),
    ],
)
def test_template_without_tool_messages_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, template: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tool_frame(saved(tokenizer, tmp_path, template))


def test_prompt_describes_the_tools_in_the_form_of_the_protocol(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATE.replace("{}", "")
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
    prompts = {name: make_protocol(name).prompt(messages, tokenizer) for name in ("tags", "hermes", "template")}
    assert "TOOLS search python" in prompts["template"]
    assert '<tools>\n{"type": "function", "function": {"name": "search"' in prompts["hermes"]
    assert prompts["tags"].startswith("<|im_start|>system\nBe brief.<|im_end|>")
    rendered = system_prompt(RENDERED, DEFAULT_PROTOCOL)
    assert "<search>query</search>: Search" in rendered and "<python>code</python>" in rendered
    assert "search" not in system_prompt(RENDERED, HermesProtocol()), "the prompt has the schemas"


def test_unknown_system_prompt_is_refused_with_the_names() -> None:
    with pytest.raises(UserError, match=r"rollout.system_prompt=apro: .*did you mean arpo\?; give a file or one of"):
        system_prompt("apro", DEFAULT_PROTOCOL)


def test_answer_is_read_from_the_last_turn() -> None:
    called = frozenset({"search"})

    def parsed(last: str) -> Parsed:
        return HermesProtocol().read_response("all", last, called)

    answer = "<answer>\\boxed{3}</answer>"
    assert parsed(f"<think>a</think>{answer}") == parsed(f"a</think>{answer}") == Parsed("", "3", called)
    assert parsed("<answer>3</answer>").reason == "no \\boxed{} in the answer"
    assert parsed(answer * 2).reason == "2 answers instead of one"
    assert parsed(f"<think>{answer}").reason == "<think> is not paired"


def test_parsers_of_the_engine_are_known_without_importing_it() -> None:
    assert {"qwen25", "llama3", "hermes"} <= set(known_parsers())
