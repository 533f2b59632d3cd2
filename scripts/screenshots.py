"""Take the pictures of the README and docs/ of the pages of `arpo view`: scripts/screenshots.py RUN_DIR STEP TREE.

Needs Chromium (`apt-get install chromium`). Starts an engine with the run's export, which grows a branch again. With a
folder as a fourth argument, no engine is started, the pictures go there, and every page is taken light, dark and 390
pixels wide, to look at them after a change.
"""

import asyncio
import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.view.browser import Page, browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
DRAWN = {"run": "document.querySelector('.chart path.line')", "tree": "document.querySelector('svg.tree')"}
WIDE, NARROW = (1180, 860), (390, 844)


async def take(page: Page, file: Path, *, whole: bool = False) -> None:
    """Write a PNG of the window, or of the whole page."""
    answer = await page.send("Page.captureScreenshot", captureBeyondViewport=whole)
    image = Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")
    image.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size // 1024} kB, {image.width} x {image.height}")


async def scheme(page: Page, name: str) -> None:
    """Show pages light or dark."""
    await page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


async def pictures(address: str, run: str, step: str, tree: str, folder: Path | None) -> None:
    """Take the pictures of a served run."""
    places = {"run": f"{address}#/run/{run}", "tree": f"{address}#/trees/{run}/{step}/{tree}"}
    async with browser() as page:
        await page.send("Emulation.setScrollbarsHidden", hidden=True)
        await page.size(*WIDE)
        if folder is None:
            for kind, file in (("run", "view-run.png"), ("tree", "view.png")):
                await page.open(places[kind], DRAWN[kind])
                await take(page, IMAGES / file)
            await page.value("document.querySelector('[data-key=\"grow 0\"]').click()")
            await page.until("document.querySelector('.growth')")
            await take(page, IMAGES / "view-grown.png")
            return
        folder.mkdir(parents=True, exist_ok=True)
        for colors in ("light", "dark"):
            await scheme(page, colors)
            for kind, size in ((kind, size) for kind in places for size in (WIDE, NARROW)):
                await page.size(*size)
                await page.open(places[kind], DRAWN[kind])
                await take(page, folder / f"{kind}-{colors}-{size[0]}.png", whole=True)


@contextmanager
def served(*words: str) -> Iterator[str]:
    """Run `arpo view WORDS` inside the block; yield its address."""
    command = [sys.executable, "-m", "arpo_megatron", "view", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def main() -> None:
    """Serve the run, take the pictures, and stop the server."""
    if len(sys.argv) not in (4, 5):
        sys.exit("usage: scripts/screenshots.py RUN_DIR STEP TREE [FOLDER]")
    run, step, tree, *folder = sys.argv[1:]
    with served(run, *([] if folder else ["--grow", run])) as address:
        asyncio.run(pictures(address, Path(run).resolve().name, step, tree, Path(folder[0]) if folder else None))


if __name__ == "__main__":
    main()
