"""Headless Chromium, driven over its DevTools protocol.

Not by Playwright: it can be installed and would use the system's Chromium, but its wheel (53 MB) brings a Node.js of
its own, and the tests need no more of it than the methods of `Page`.
"""

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--no-first-run", "--remote-debugging-port=0", "--disable-dev-shm-usage"),
)


class Page:
    """One page: what it requested, what went wrong on it, and its content by JavaScript."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.problems: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._waiting.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog opened: {params['message']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._waiting[number], 60)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        for _ in range(int(10 * seconds)):
            if await self.value(f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not true after {seconds} s: {expression}; problems: {self.problems}")

    async def open(self, url: str, ready: str) -> None:
        """Load an address from the beginning and wait for `ready`."""
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        await self.until(ready)

    async def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Tab": 9, "Enter": 13, "Escape": 27}.get(key, 0)
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def size(self, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """Yield a page of a new browser. AssertionError: Chromium is missing."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program is not None, "Chromium is missing: apt-get install chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program, *FLAGS, f"--user-data-dir={folder}", "about:blank", stderr=asyncio.subprocess.PIPE
        )
        try:
            address = await asyncio.wait_for(_devtools(process), 60)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address}/json/list") as answer:
                    target = next(each for each in await answer.json() if each["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.send(f"{domain}.enable")
                    await page.size(1280, 900)
                    yield page
                    listening.cancel()
        finally:
            process.kill()
            await process.wait()


async def _devtools(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if b"DevTools listening on ws://" in line:
            return line.decode().partition("ws://")[2].partition("/")[0]
    raise AssertionError("Chromium ended at once")
