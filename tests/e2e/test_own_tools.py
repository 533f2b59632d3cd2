"""A job trains with tools that the user's file adds: a plug-in, an MCP server, web search and browse."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from safetensors.torch import load_file, save_file

from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.tags.calls import RESULT_FRAME
from tests.e2e.jobs import SHORT, TWO_RANKS, quickstart, rows_of, run_to_end, trained, undocumented
from tests.tools_sandbox.helpers.served import serving
from tests.tools_sandbox.test_added_tools import SERVER
from tools_sandbox.config import load_config

pytestmark = [pytest.mark.timeout(1600), pytest.mark.slow_campaign]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "count_words_tool"
TAGS = {"python": ("count_words", "reverse"), "search": ("search", "browse")}
"""Tags of the trained model, and those that take their place with equal probability."""
UNUSED = "~`^|"
"""Characters of the vocabulary that become tags."""
SITE = "<html><body><article><p>Page %s of a local site, whose text is long enough to read.</p></article></body></html>"


def with_more_tags(model: Path, copy: Path) -> None:
    """Copy a model that calls python and search. Its tags get other names, and each has a twin with equal weights."""
    shutil.copytree(model, copy)
    tokenizer = copy / "tokenizer.json"
    ids = json.loads(tokenizer.read_text())["model"]["vocab"]
    known = {token["content"]: token["id"] for token in json.loads(tokenizer.read_text())["added_tokens"]}
    weights = load_file(copy / "model.safetensors")
    unused = iter(UNUSED)
    for old, (_, twin) in TAGS.items():
        for tag in (f"<{old}>", f"</{old}>"):
            token = next(unused)
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                weights[name][ids[token]] = weights[name][known[tag]]
            ids[tag.replace(old, twin)] = ids.pop(token)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    data = json.loads(tokenizer.read_text())
    data["model"]["vocab"] = ids
    tokenizer.write_text(json.dumps(data))
    for path in copy.glob("*.json"):
        text = path.read_text()
        for old, (first, _) in TAGS.items():
            text = text.replace(f"<{old}>", f"<{first}>").replace(f"</{old}>", f"</{first}>")
        path.write_text(text)


def test_policy_trains_with_plugin_mcp_web_search_and_browse(
    sft_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "installed", tmp_path / "source"], check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    with_more_tags(sft_run / "sft", tmp_path / "model")
    asked: Counter[str] = Counter()

    async def searxng(request: web.Request) -> web.Response:
        asked[request.query["q"]] += 1
        if sum(asked.values()) == 2:
            return web.Response(status=429, headers={"Retry-After": "1"})
        return web.json_response({"results": [{"content": f"about {request.query['q']}"}]})

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=SITE % request.match_info["name"], content_type="text/html")

    app = web.Application()
    app.router.add_get("/search", searxng)
    app.router.add_get("/site/{name:.*}", page)
    run = tmp_path / "run"
    with serving(app) as port:
        local = f"http://127.0.0.1:{port}"
        engine = {"provider": "searxng", "url": f"{local}/search", "requests_per_s": 50, "max_requests": 10_000}
        values = {
            "plugins": [{"name": "count_words"}],
            "mcp": {"texts": {**SERVER, "tools": ["reverse"]}},
            "search": {"engine": "web", "web": engine},
            "browse": {"enabled": True, "allow_networks": ["127.0.0.0/8"], "base_url": f"{local}/site/"},
        }
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump(values))
        overrides = [f"model.path={tmp_path / 'model'}", "sft.steps=0", "train.steps=1", *SHORT]
        # Enough trajectories for each tool: in half of the calls the closing tag is that of the twin.
        overrides += ["train.tasks_per_step=12", "evaluation.after=true", "evaluation.tasks=4"]
        overrides += ["rollout.at_limit=answer_now", *TWO_RANKS, "sync.transport=ipc"]
        overrides += [f"sandbox.file={tmp_path / 'tools.yaml'}", "rollout.tools=[count_words,reverse,search,browse]"]
        run_to_end(quickstart("train", run, *overrides), run)

    trees, decode = trained(run), TokenizerCodec(tmp_path / "model").decode
    answers = [segment for item in trees for segment in item.tree.segments if segment.tool is not None]
    called = [segment for segment in answers if segment.tool is not None and segment.tool.status == "ok"]
    assert {segment.tool.name for segment in called if segment.tool} == {
        each for names in TAGS.values() for each in names
    }
    for segment in called:
        assert segment.tool is not None
        (text,) = segment.tool.arguments.values()
        expected = {
            "count_words": str(len(text.split())),
            "reverse": text[::-1],
            "search": f"Page 1: about {text}",
            "browse": "",
        }[segment.tool.name]
        shown = decode(segment.token_ids.tolist())
        if segment.tool.name == "browse":
            assert shown.startswith(" <result>\nPage ") and "of a local site" in shown
        elif len(expected) < 40:  # not cut
            assert shown == RESULT_FRAME.text(expected)
    assert any(reward >= 0 for item in trees for reward in item.rewards), "the reward knows the tags"
    (row,) = rows_of(run / "metrics.jsonl")
    assert row["tool_calls_executed"] > 0 and row["tool_calls_invalid"] == 0 and not undocumented(row)
    assert row["tool_calls_failed"] == 0 and row["updates_skipped"] == 0 and row["logprob_gap"] < 1e-3
    assert sum(asked.values()) == len(asked) + 1, "a query is paid once, and again after the 429"
    assert int((run / "paid_requests").read_text()) == sum(asked.values())
    assert (run / "tool_answers.sqlite").is_file()
    assert (run / "sandbox_user.yaml").read_text() == (tmp_path / "tools.yaml").read_text()
    assert load_config(run / "sandbox.yaml").search.sources == ()
