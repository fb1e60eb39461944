"""The site in a real browser without a window: no error in its console, and no page is wider than a phone."""

import functools
import html
import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sample]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SHOWN = (
    "",
    "getting-started/",
    "meshes-and-placements/",
    "performance/",
    "rule-table/",
    "cookbook/fsdp/",
    "changelog/",
)
WIDTHS = (1280, 390)

# Shows each page in frames of both widths, and writes down what a reader would see of it.
HARNESS = """<!doctype html><body><script>
const seen = [];
async function show(page, width) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = "/" + page;
  await new Promise(done => { frame.onload = done; document.body.append(frame); });
  await new Promise(done => setTimeout(done, 300));
  const it = frame.contentDocument, root = it.documentElement;
  seen.push({
    page, width, title: it.title, words: it.body.innerText.split(/\\s+/).length, wide: root.scrollWidth,
    broken: [...it.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    search: !!it.querySelector("input.md-search__input, [data-md-component=search-query], #mkdocs-search-query"),
  });
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await show(page, width);
  document.body.textContent = JSON.stringify(seen);
})();
</script></body>"""


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on the path")
    return path


@pytest.fixture(scope="module")
def site(docs, tmp_path_factory):
    """The site, with a page that shows its pages, served to this machine alone."""
    pytest.importorskip("material", reason="the site needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(folder)]
    subprocess.run(build, cwd=docs.ROOT, check=True, timeout=240)
    pages = [page for page in SHOWN if (folder / page / "index.html").exists()]
    assert pages == list(SHOWN)
    text = HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (folder / "harness.html").write_text(text)
    (folder / "broken.html").write_text("<script>no_such_function()</script>")
    handler = functools.partial(SilentHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    """Serves files and writes no log."""

    def log_message(self, *_args):
        """Nothing."""


def opened(browser, url, folder):
    """What a page's document becomes, and the lines of its console."""
    # A container lets no process make the sandbox that the browser wants.
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    more = (f"--user-data-dir={folder}", "--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom")
    done = subprocess.run([browser, *flags, *more, url], capture_output=True, text=True, timeout=240, check=False)
    return done.stdout, re.findall(r"CONSOLE[:(]\S* (.*)", done.stderr)


def test_pages_are_readable_at_both_widths_and_say_nothing_in_the_console(browser, site, tmp_path):
    document, console = opened(browser, f"{site}/harness.html", tmp_path)
    assert console == []
    body = re.search(r"<body>(.*)</body>", document, re.DOTALL)[1]
    seen = json.loads(html.unescape(body))
    assert [(s["page"], s["width"]) for s in seen] == [(page, width) for page in SHOWN for width in WIDTHS]
    wrong = [s for s in seen if s["wide"] > s["width"] or s["broken"] or s["words"] < 50 or not s["search"]]
    assert wrong == []


def test_an_error_of_a_page_is_seen(browser, site, tmp_path):
    _, console = opened(browser, f"{site}/broken.html", tmp_path)
    assert any("no_such_function is not defined" in line for line in console), console
