"""Writes docs/report.png: what `cosformer report` leaves in out/report.html, as a browser shows it.

    cosformer report && python docs/report_picture.py

Some of the page is left out, so that the picture is no longer than a screen.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1100, 1150)
SHOWN = """<style>
nav, details, section:not(#maps-of-heads), #maps-of-heads > .origin { display: none }
main { padding-top: 1.5rem } h2 { margin-top: 1.5rem }
</style>"""


def write_picture(report: Path, picture: Path) -> None:
    """A picture of the top of the page and of the maps of heads."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"needs a browser on the PATH: one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder) / "report.html"
        shown.write_text(report.read_text("utf-8").replace("</head>", f"{SHOWN}</head>"), "utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}/browser", f"--window-size={SIZE[0]},{SIZE[1]}"]
        flags += [f"--screenshot={picture.resolve()}", "--virtual-time-budget=5000"]
        subprocess.run([browser, *flags, shown.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    write_picture(ROOT / "out" / "report.html", ROOT / "docs" / "report.png")
