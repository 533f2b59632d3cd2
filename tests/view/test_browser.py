"""The page in headless Chromium: campaigns, because a browser takes seconds and is not installed everywhere."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.monitor.metrics import MetricsLog
from arpo_megatron.monitor.tree_store import read_trees, step_file, write_trees
from arpo_megatron.serving import TOKEN_VARIABLE
from arpo_megatron.tree import Role
from tests.engine.scripted import ScriptedEngine
from tests.serving.test_serve import TOKEN, Start
from tests.serving.test_serve import served as agent_served
from tests.view.browser import Page, browser
from tests.view.stored_run import STEPS, decode, grown, make_run, scored, write_step
from tests.view.test_grow import ANSWER, NOWHERE, RunCodec

pytestmark = pytest.mark.slow_campaign

DRAWN = "document.querySelector('svg.tree')"
TEXT = "document.body.textContent"
CURVES = "document.querySelector('.chart path.line')"


def with_browser(work: Callable[[Page], Awaitable[Any]]) -> Page:
    """Run `work` with a page, on which nothing may go wrong; returns the page, with what it requested."""

    async def run() -> Page:
        async with browser() as page:
            await work(page)
            assert page.problems == []
            return page

    return asyncio.run(run())


@contextmanager
def served(run: Path, *options: str) -> Iterator[str]:
    """Serve a run directory with `arpo view`; yields the address."""
    command = [sys.executable, "-m", "arpo_megatron", "view", str(run), "--port", "0", *options]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "run")


async def check_trees(page: Page, address: str, run: RunDirectory) -> None:
    """Compare drawn leaves, segments and forks of a step with those of its file."""
    for number, item in enumerate(read_trees(step_file(run, STEPS))):
        await page.open(f"{address}#/trees/run/{STEPS}/{number}", f"{DRAWN} && document.title.startsWith('run')")
        tree = item.tree
        assert await page.value("document.querySelectorAll('svg.tree .leaf').length") == len(tree.leaves())
        assert await page.value("document.querySelectorAll('svg.tree .segment').length") == len(tree.segments)
        decisions = [segment for segment in tree.segments if segment.branch is not None]
        assert await page.value("document.querySelectorAll('svg.tree .fork').length") == len(decisions)
        forked = sum(
            tree.segments[index].role is Role.TOOL and len(below) > 1 for index, below in enumerate(tree.children())
        )
        assert await page.value("document.querySelectorAll('svg.tree .fork.taken').length") == forked


def test_pages_show_the_run_and_request_nothing_else(run: RunDirectory) -> None:
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(address, CURVES)
            assert "finished" in await page.value("document.querySelector('h1').textContent")
            await check_trees(page, address, run)
            assert await page.value("document.querySelectorAll('script').length") == 1
            assert await page.value("document.querySelectorAll('img, iframe, object').length") == 0
            text = await page.value("document.body.textContent")
            assert "<script>alert(1)</script>" in text
            assert "\\u202e" in text and "\u202e" not in text and "\x1b" not in text

        page = with_browser(work)
    own = (address, "about:", "data:,")
    assert [url for url in page.requests if not url.startswith(own)] == []


def test_several_runs_are_overlaid_and_their_configs_compared(run: RunDirectory, tmp_path: Path) -> None:
    make_run(tmp_path / "second", seed=5)
    with served(tmp_path) as address:

        async def work(page: Page) -> None:
            lines = "document.querySelector('.chart').querySelectorAll('path.line').length"
            await page.open(f"{address}#/run/{run.path.name}", f"{lines} == 2")
            assert "2 keys with different values" in await page.value("document.body.textContent")
            await page.value("document.querySelector('[data-key=\"with second\"]').click()")
            await page.until(f"{lines} == 1")

        with_browser(work)


def test_values_of_several_runs_fit_into_their_charts(tmp_path: Path) -> None:
    for number in range(5):
        make_run(tmp_path / f"run-{number}", seed=number)
    with served(tmp_path) as address:

        async def work(page: Page) -> None:
            await page.size(1180, 860)
            await page.open(address, "document.querySelector('.chart').querySelectorAll('path.line').length == 5")
            edges = "[e.getBoundingClientRect().right, e.closest('figure').getBoundingClientRect().right]"
            outside = f"[...document.querySelectorAll('.chart figcaption *')].map(e => {edges})"
            assert all(own <= card for own, card in await page.value(outside))

        with_browser(work)


def test_damaged_files_and_trees_are_named(run: RunDirectory) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {STEPS + 1}, "reward": "high"}}\n')
    path = step_file(run, STEPS)
    table = pq.read_table(path)
    rows = [row | ({"rewards": None} if number == 1 else {}) for number, row in enumerate(table.to_pylist())]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(address, CURVES)
            text = await page.value("document.body.textContent")
            assert "1 row of metrics.jsonl left out; the first is line 5: reward is no finite number" in text
            await page.open(f"{address}#/trees/run/{STEPS}", DRAWN)
            assert await page.value("document.querySelectorAll('.list li').length") == 2
            assert "Tree 1 is damaged: rewards is null." in await page.value("document.body.textContent")

        with_browser(work)


def test_damaged_file_of_trees_is_named_next_to_the_other_steps(run: RunDirectory) -> None:
    step_file(run, 2).write_text("PAR1")
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(f"{address}#/trees/run/2", "document.querySelector('.problem')")
            assert "step_000002.parquet is not a file of trees" in await page.value(TEXT)
            await page.press("]")
            await page.until(f"location.hash.includes('/3') && {DRAWN}")
            await page.press("[")
            await page.until("document.querySelector('.problem')")
            await page.until("document.querySelector('[data-key=\"select step\"]').value == '2'")
            page.problems.clear()  # Chromium logs the answer 404

        with_browser(work)


def test_permalink_to_what_is_not_there_says_so(run: RunDirectory) -> None:
    with served(run.path) as address:

        async def work(page: Page) -> None:
            for place, note in (
                ("trees/run/9/1", f"No trees of step 9 are here; these are those of step {STEPS}."),
                ("trees/run/held-out-3", "No trees of held-out tasks after step 3 are here"),
                ("trees/run/1/99", "No tree 99 of step 1 is here; this is tree 0."),
                ("trees/other/1/0", "No run other is shown here; this is run."),
                ("run/other", "No run other is shown here; this is run."),
            ):
                await page.open(f"{address}#/{place}", f"{TEXT}.includes('{note}')")
            await page.open(f"{address}#/trees/run/1/99", DRAWN)
            await page.press("j")
            await page.until("!document.querySelector('#main .note')")

        with_browser(work)


def test_keys_that_are_pressed_while_a_tree_loads_count(run: RunDirectory) -> None:
    slow = """
        window.fetch = async (...given) => {
            if (/trees.\\d+.\\d/.test(window.asked = given[0])) await new Promise((done) => setTimeout(done, 1500));
            return own(...given);
        };
    """
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(f"{address}#/trees/run/1/0", DRAWN)
            await page.value(f"(() => {{ const own = window.fetch; {slow} }})()")
            await page.press("]")
            await page.until("window.asked.endsWith('trees/2/0')")
            await page.press("j")
            await page.press("j")
            assert await page.value("location.hash") == "#/trees/run/2/2"
            await page.press("n")
            await page.until("location.hash.endsWith('?leaf=0')")
            await page.until("document.querySelector('[data-key=\"tree 2\"]').getAttribute('aria-current') === 'true'")

        with_browser(work)


def test_verdicts_and_the_numbers_of_tokens_are_shown(run: RunDirectory) -> None:
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(f"{address}#/trees/run/1/0?leaf=0", DRAWN)
            assert "judgeright" in await page.value("document.querySelector('.scores').textContent")
            over = "new PointerEvent('pointerover', {bubbles: true})"
            await page.value(f"document.querySelector('.card.model .t').dispatchEvent({over})")
            shown = await page.value("document.getElementById('tooltip').textContent")
            for name in ("token", "log-prob", "probability", "entropy", "ratio", "advantage"):
                assert name in shown
            await page.open(f"{address}#/trees/run/1/0?leaf=2", DRAWN)
            await page.until("document.querySelector('.scores').textContent.includes('judgewrong')")

        with_browser(work)


def test_exported_file_shows_the_same(run: RunDirectory, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    command = [sys.executable, "-m", "arpo_megatron", "view", str(run.path), "--html", str(file), "--trees", "99"]
    subprocess.run(command, check=True, timeout=300)

    async def work(page: Page) -> None:
        await page.open(f"file://{file}", CURVES)
        await check_trees(page, f"file://{file}", run)

    page = with_browser(work)
    assert [url for url in page.requests if not url.startswith((f"file://{file}", "about:", "data:,"))] == []


def test_page_follows_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, last=False)
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(address, CURVES)
            await page.until("document.body.textContent.includes('step 2 of 4')")
            with (run.path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "rew')
            await asyncio.sleep(4)  # a poll of the page
            assert await page.value("document.body.textContent.includes('step 2 of 4')")
            write_step(run, MetricsLog(run.path, resolve.load(run.config)), EventLog(run.events), 3)
            await page.until("document.body.textContent.includes('step 3 of 4')")

        with_browser(work)


def test_result_of_a_megabyte_is_folded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    long = scored(grown("long", tool_text="<b>x</b> " * 120_000))
    write_trees(step_file(run, 1), 1, [long], decode)
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(f"{address}#/trees/run/1/0", DRAWN)
            assert await page.value("document.querySelector('.card.tool').textContent.length") < 20_000
            await page.value("[...document.querySelectorAll('.card.tool button')].pop().click()")
            await page.until("document.querySelector('.card.tool').textContent.length > 1000000")
            assert await page.value("document.querySelectorAll('.card.tool b').length") == 1  # the card's own title

        with_browser(work)


def test_branch_is_grown_again_from_the_page(run: RunDirectory, scripted_engine: Start) -> None:
    rest = "".join(map(chr, RunCodec().encode(ANSWER)))
    engine = scripted_engine(ScriptedEngine(lambda _text: rest))
    with (
        agent_served(engine.url, NOWHERE, codec=RunCodec(), concurrency=16) as agent,
        served(run.path, "--grow", f"{agent}/v1") as address,
    ):

        async def work(page: Page) -> None:
            await page.open(f"{address}#/trees/run/1/0", DRAWN)
            assert await page.value("document.querySelectorAll('svg.tree .leaf').length") == 3
            await page.value("document.querySelector('[data-key=\"grow 2\"]').click()")
            await page.until("document.querySelectorAll('svg.tree .leaf.grown').length === 4")
            shown = await page.value("document.querySelector('.growth').textContent")
            assert "4 continuations by export, step 4, temperature 1" in shown
            assert "Mean reward +1.00; of the stored trajectories below, +0.75" in shown
            assert "grown again" in await page.value("[...document.querySelectorAll('.card.model')].pop().textContent")
            await page.value("document.querySelector('[data-key^=\"compare\"]').click()")
            await page.until("document.querySelectorAll('.column').length === 2")

        with_browser(work)


def test_thousand_steps_of_64_trees_are_usable(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, last=False)
    write_trees(step_file(run, 1), 1, [scored(grown(f"task-{number}")) for number in range(64)], decode)
    for step in range(2, 1001):
        os.link(step_file(run, 1), step_file(run, step))
    metrics = MetricsLog(run.path, resolve.load(run.config))
    for step in range(2, 1001):
        metrics.log({"step": step, **{f"metric/{number}": step / (number + 1) for number in range(80)}, "reward": step})
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(address, CURVES)
            await page.open(f"{address}#/trees/run/1000/5", DRAWN)
            assert await page.value("document.querySelectorAll('.list li').length") == 64
            await page.until("document.querySelectorAll('.facts a').length == 30")  # the same task in the nearest steps
            near = await page.value("[...document.querySelectorAll('.facts')].at(-1).textContent")
            assert "step 970 (" in near and "step 999 (" in near and near.endswith("969 more")
            await page.press("[")
            await page.until("location.hash.includes('/999')")
            await page.press("]")
            await page.until("location.hash.includes('/1000')")

        with_browser(work)


def test_keyboard_reaches_everything(run: RunDirectory) -> None:
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.open(f"{address}#/trees/run/2/0", DRAWN)
            for key, place in (("j", "/2/1"), ("k", "/2/0"), ("]", "/trees/run/3"), ("f", "flat=1"), ("s", "shade=")):
                await page.press(key)
                await page.until(f"location.hash.includes('{place}')")
            await page.press("n")
            await page.until("location.hash.includes('leaf=')")
            reached: set[str] = set()
            for _ in range(60):
                await page.press("Tab")
                reached.add(await page.value("document.activeElement.getAttribute('data-key') ?? ''"))
            assert {"theme", "help", "select step", "find", "tree 0", "leaf 0"} <= reached
            await page.value("document.querySelector('[data-key=\"leaf 1\"]').focus()")
            await page.press("Enter")
            await page.until("location.hash.includes('leaf=1')")
            assert await page.value("document.activeElement.getAttribute('data-key')") == "leaf 1"
            await page.value("document.querySelector('[data-key=\"leaf 0\"]').focus()")
            await page.press(" ")
            await page.until("location.hash.includes('leaf=0')")
            await page.press("?")
            await page.until("document.querySelector('dl.keys')")
            await page.press("g")
            await page.until(CURVES)

        with_browser(work)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_in_both_schemes(run: RunDirectory, scheme: str) -> None:
    with served(run.path) as address:

        async def work(page: Page) -> None:
            await page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            for width in (390, 1280):
                await page.size(width, 800)
                for place, ready in (("", CURVES), ("#/trees/run/2/0", DRAWN)):
                    await page.open(address + place, ready)
                    assert await page.value("document.documentElement.scrollWidth") <= width
            color = await page.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, color[4:-1].split(","))) > 384) == (scheme == "light")

        with_browser(work)
