"""The page in a real browser: it opens without a complaint, draws, switches and fits a phone.

A script of the test is put into the page, and what it saw comes back in the text of the page. The
page stands in a frame, because no window is as narrow as a phone.
"""

import html
import json
import re
import shutil
import subprocess

import pytest
from row_cases import page_sources, published

from cosformer.report.page import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FIRST = """<script>
const complaints = [];
addEventListener("error", (event) => complaints.push(event.message));
addEventListener("unhandledrejection", (event) => complaints.push(String(event.reason)));
console.error = console.warn = (...words) => complaints.push(words.join(" "));
const all = (words) => [...document.querySelectorAll(words)];
const lines = (id) => all(`#${id} .plot path.drawn`).length;
</script>"""
LAST = """<script>
addEventListener("load", () => {
  const found = (() => { %s })();
  const seen = parent.document.getElementById("seen");
  seen.textContent = JSON.stringify({ complaints, ...found });
});
</script>"""
FRAME = """<!doctype html><body style="margin: 0"><output id="seen"></output>
<iframe width="%d" height="800" style="border: 0; display: block" srcdoc="%s"></iframe>"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser on the PATH: one of {', '.join(BROWSERS)}")
    return found


@pytest.fixture
def visit(browser, tmp_path, rows):
    """What a script sees in the page; of rows of every kind, unless sources are given."""

    def look(script, sources=None, *, width=1100, is_dark=False):
        text = page(sources or page_sources(rows)).replace("<body>", f"<body>{FIRST}")
        text = text.replace("</body>", f"{LAST % script}</body>")
        path = tmp_path / "frame.html"
        path.write_text(FRAME % (width, html.escape(text)))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        flags += [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1200,900"]
        flags += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"]
        command = [browser, *flags, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "CONSOLE" not in done.stderr
        (told,) = re.findall(r'<output id="seen">(.*?)</output>', done.stdout, re.DOTALL)
        found = json.loads(html.unescape(told))
        assert found.pop("complaints") == []
        return found

    return look


def test_it_opens_and_every_chart_and_map_is_drawn(visit):
    found = visit("""
      const inked = (canvas) => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return pixels.some((value, n) => n % 4 === 3 && value > 0);
      };
      const charts = all("figure.chart").map((figure) => figure.id);
      return {
        tables: all("table").length,
        empty: charts.filter((id) => !lines(id)),
        charts: charts.length,
        maps: all("canvas").map(inked),
        distances: lines("maps-of-heads"),
      };
    """)
    assert found == {"tables": 14, "empty": [], "charts": 6, "maps": [True] * 4, "distances": 4}


def test_lines_are_switched_by_mouse_and_views_by_choice(visit):
    found = visit("""
      const counts = [lines("chart-time")];
      all("#chart-time input").find((box) => box.checked).click();
      counts.push(lines("chart-time"));
      const [every, none] = all("#chart-time .control button");
      none.click();
      counts.push(lines("chart-time"));
      const said = document.querySelector("#chart-time .plot").textContent;
      every.click();
      counts.push(lines("chart-time"));
      const choice = document.getElementById("view-time");
      choice.value = 1;
      choice.dispatchEvent(new Event("change"));
      const label = document.querySelector("#chart-time .plot svg").getAttribute("aria-label");
      return { counts, said, label, crossings: document.querySelector(".crossings").textContent };
    """)
    assert found["counts"] == [2, 1, 0, 2]
    assert found["said"] == "no line is switched on"
    assert found["label"] == "Time of attention, forward, Test processor: cosformer, softmax"
    assert found["crossings"] == "Below softmax, in circles: cosformer from about 510 tokens on."


def test_a_number_opens_its_rows_and_a_slider_and_keys_move_through_maps(visit):
    found = visit("""
      all("button.rows").find((button) => button.textContent.startsWith("38.0")).click();
      const dialog = document.getElementById("rows");
      const rows = dialog.querySelector("pre").textContent;
      const opened = dialog.open;
      dialog.querySelector("button").click();
      const label = () => document.querySelector("canvas").getAttribute("aria-label");
      const before = label();
      const slider = document.getElementById("layer");
      slider.value = 2;
      slider.dispatchEvent(new Event("input"));
      for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"])
        document.querySelector("canvas").dispatchEvent(new KeyboardEvent("keydown", { key }));
      const weight = document.getElementById("weight").textContent;
      return { opened, closed: !dialog.open, rows, layers: [before, label()], weight };
    """)
    assert found["opened"]
    assert found["closed"]
    assert "config.reason" not in found["rows"]
    assert found["rows"].count('"what": "accuracy"') == 5
    assert '"file": "reproduce-lra"' in found["rows"]
    assert [label[:18] for label in found["layers"]] == ["cosFormer, layer 1", "cosFormer, layer 2"]
    assert re.match(r'cosFormer, head 1: "w2 " \(3\) gives 0\.\d+ to "w1 " \(2\)', found["weight"])


PHONE = """
  const wide = all(".table").filter((each) => each.scrollWidth > each.clientWidth).length;
  const ground = getComputedStyle(document.body).backgroundColor;
  const root = document.documentElement;
  return { window: innerWidth, beyond: root.scrollWidth - root.clientWidth, wide, ground };
"""


@pytest.mark.parametrize("is_dark", [False, True])
def test_a_phone_scrolls_tables_and_never_the_page(visit, is_dark):
    found = visit(PHONE, width=360, is_dark=is_dark)
    assert (found["window"], found["beyond"]) == (360, 0)
    assert found["wide"] > 0
    assert found["ground"] == ("rgb(21, 24, 27)" if is_dark else "rgb(255, 255, 255)")


def test_the_published_rows_are_shown_on_a_phone(visit):
    found = visit(PHONE, published(), width=360)
    assert (found["window"], found["beyond"]) == (360, 0)
