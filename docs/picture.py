"""Draw report.png, the picture in the README: python docs/picture.py RUN/report.html."""

import sys
import tempfile
from base64 import b64decode
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "report"))
from browser import Browser, find_browser  # noqa: E402  # found by the line above

WIDTH, HEIGHT = 960, 1240


def main() -> None:
    """Save a screenshot of the top of the page, in light colors."""
    program = find_browser()
    if program is None:
        sys.exit("needs chromium or chrome on the path, or its path in TACIT_BROWSER")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        Browser(program, Path(profile)) as browser,
    ):
        browser.open(Path(sys.argv[1]).resolve(), scheme="light", width=WIDTH, height=HEIGHT)
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        shot = browser.call("Page.captureScreenshot", clip=clip)
    (HERE / "report.png").write_bytes(b64decode(shot["data"]))


if __name__ == "__main__":
    main()
