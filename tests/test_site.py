"""The documentation as a reader sees it: built, served by this machine alone, and opened in Chromium.

Screenshots of every page, wide and narrow, light and dark, stay in the test's temporary folder: look at them.
"""

from __future__ import annotations

import base64
import functools
import http.server
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urlsplit
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
PATIENCE = 60.0
"""Seconds that Chromium may take for one answer: not to hang."""

WIDE, NARROW = (1280, 900), (360, 740)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    *[
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ["mkdocs", "material", "mkdocstrings"]
    ],
]

# Chromium takes commands from descriptor 3 and answers through 4, which only the program started last can have free.
LAUNCH = """
import fcntl, os, sys
theirs, ours = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(theirs, 3), os.dup2(ours, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
OPTIONS = [
    "--headless=new",
    "--no-sandbox",  # for root
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-breakpad",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


class Browser:
    """One tab of Chromium, driven by its DevTools protocol."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = to, of
        self._text = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Network", "Runtime", "Log"]:
            self.do(f"{domain}.enable")
        self.do("Page.setLifecycleEventsEnabled", enabled=True)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        left = memoryview(json.dumps(message).encode() + b"\0")
        while left:
            left = left[os.write(self._to, left) :]
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._text:
            ready, _, _ = select.select([self._of], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {PATIENCE:.0f} s"
            chunk = os.read(self._of, 1 << 20)
            assert chunk, "Chromium has ended"
            self._text += chunk
        line, _, self._text = self._text.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, url: str) -> None:
        """Go to a page and stay until it has loaded, and whatever its scripts ask for, too."""
        self.events.clear()
        loader = self.do("Page.navigate", url=url)["loaderId"]
        at_rest = {"loaderId": loader, "name": "networkIdle"}
        while not any(at_rest.items() <= event.get("params", {}).items() for event in self.events):
            self.events.append(self._next())

    def parameters(self, method: str) -> list[dict[str, Any]]:
        """Of all events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, once its promise is kept."""
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def look(self, size: tuple[int, int], scheme: str) -> None:
        width, height = size
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask(SETTLE)

    def photograph(self, path: Path) -> None:
        """All of the page, not only what the window shows."""
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        picture = self.do("Page.captureScreenshot", captureBeyondViewport=True, clip=size | {"scale": 1})
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    theirs, to = os.pipe()
    of, ours = os.pipe()
    command = [
        sys.executable,
        "-c",
        LAUNCH,
        str(theirs),
        str(ours),
        str(CHROMIUM),
        *OPTIONS,
        f"--user-data-dir={folder}",
    ]
    process = subprocess.Popen(command, pass_fds=(theirs, ours), stderr=subprocess.DEVNULL)
    os.close(theirs), os.close(ours)
    try:
        browser = Browser(to, of)
        yield browser
        browser._session = None
        browser.do("Browser.close")
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait(PATIENCE)
        os.close(to), os.close(of)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Page(NamedTuple):
    """What a page says of itself: where its links lead, what can be linked to, pictures that show nothing."""

    links: list[str]
    places: list[str]
    empty: list[str]


READ = """(async () => {
    for (const image of document.images) image.loading = "eager";
    await Promise.allSettled([...document.images].map(image => image.decode()));
    return [
        [...document.querySelectorAll("a[href]")].map(link => link.href),
        [...document.querySelectorAll("[id]")].map(element => element.id),
        [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
    ];
})()"""
SETTLE = """(async () => {
    for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
    for (const animation of document.getAnimations()) animation.finish();
    await new Promise(requestAnimationFrame);
    return null;
})()"""
WIDER = """(() => {
    const images = [...document.images].map(image => image.getBoundingClientRect().right);
    return [document.documentElement.scrollWidth, ...images].filter(width => width > innerWidth + 1);
})()"""


def faults(browser: Browser, home: str) -> list[str]:
    """What went wrong on the open page, and what it wanted from elsewhere."""
    found = [f"console: {e['entry']['text']}" for e in browser.parameters("Log.entryAdded")]
    found += [f"script: {e['exceptionDetails']['text']}" for e in browser.parameters("Runtime.exceptionThrown")]
    calls = [e for e in browser.parameters("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
    found += [f"console: {[a.get('value') for a in e['args']]}" for e in calls]
    answers = [e["response"] for e in browser.parameters("Network.responseReceived")]
    found += [f"{a['status']}: {a['url']}" for a in answers if a["status"] >= 400]
    found += [f"failed: {e['errorText']}" for e in browser.parameters("Network.loadingFailed")]
    asked = [e["request"]["url"] for e in browser.parameters("Network.requestWillBeSent")]
    return found + [f"from elsewhere: {url}" for url in asked if not url.startswith((home, "data:", "blob:"))]


def test_every_page_loads_alone_and_every_link_leads_somewhere(site: Path, tmp_path: Path) -> None:
    pages: dict[str, Page] = {}
    with served(site) as home, chromium(tmp_path / "chromium") as browser:
        to_see = [home]
        while to_see:
            url = to_see.pop()
            browser.open(url)
            page = pages[url] = Page(*browser.ask(READ))
            assert faults(browser, home) == [], url
            assert page.empty == [], url
            inside = {urldefrag(link).url for link in page.links if link.startswith(home)}
            to_see += sorted(link for link in inside - {*pages, *to_see} if link.endswith("/"))
        files = {urldefrag(link).url for page in pages.values() for link in page.links if link.startswith(home)} - {
            *pages
        }
        for file in files:
            with urlopen(file, timeout=PATIENCE) as answer:
                assert answer.status == 200
    for url, page in pages.items():
        assert [link for link in page.links if not link.startswith((home, "https://"))] == [], url
        places = [(target, unquote(place)) for target, place in map(urldefrag, page.links) if place and target in pages]
        assert [(target, place) for target, place in places if place not in pages[target].places] == [], url
    seen = {urlsplit(url).path.strip("/") for url in pages}
    assert seen == {str(p.parent.relative_to(site)).removeprefix(".") for p in site.rglob("index.html")}


def test_pages_fit_on_wide_and_narrow_screens_and_are_dark_where_asked(site: Path, tmp_path: Path) -> None:
    paths = sorted(str(p.parent.relative_to(site)) for p in site.rglob("index.html"))
    with served(site) as home, chromium(tmp_path / "chromium") as browser:
        for path in paths:
            browser.open(home if path == "." else f"{home}{path}/")
            browser.ask(READ)
            for name, size in {"wide": WIDE, "narrow": NARROW}.items():
                for scheme, colours in {"light": "default", "dark": "slate"}.items():
                    browser.look(size, scheme)
                    assert browser.ask(f"document.body.dataset.mdColorScheme == {colours!r}"), (path, scheme)
                    assert browser.ask(WIDER) == [], f"{path} is wider than {size[0]} pixels"
                    browser.photograph(tmp_path / f"{'index' if path == '.' else path}-{name}-{scheme}.png")
