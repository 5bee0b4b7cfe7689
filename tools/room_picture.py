"""Take the picture of `workshop room` in the instructor's pages: python tools/room_picture.py writes img/room.png.

It starts a real `workshop room` on this machine, and a process for each of ten invented attendees, who report what
check cells would report, over two and a half minutes. Then it photographs the page in Chromium, which has to be
installed. Needs `make setup-test`.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "img/room.png"
EXERCISES = "exercises"  # the text in the file that has the heads of the columns, which a test compares with the checks
LASTS_S = 150
SIZE = {"width": 1040, "height": 600}  # in CSS pixels; the picture has twice as many
SEAT = """
import sys, time
from workshop_utils.exercises.reporting import report
begin = time.monotonic()
for line in sys.argv[1].split():
    second, notebook, exercise, state = line.split(",")
    time.sleep(max(0, begin + float(second) - time.monotonic()))
    report(notebook, exercise, state.replace("-", " "))
time.sleep(1)
"""
FIRST = "0,getting_started,total_bones,passed 1,getting_started,darkest,passed "
COUNTS, CULPRITS, NAMES = "dask_basics,careful_counts", "dask_basics,culprits", "single_inference,name_dogs"
SEATS = {  # what each reports, and at which second
    "Ada": f"{FIRST} 6,{COUNTS},passed 36,{CULPRITS},not-yet 72,{CULPRITS},passed 120,{NAMES},passed",
    "Alan": f"{FIRST} 12,{COUNTS},passed 18,{CULPRITS},not-yet 54,{CULPRITS},not-yet",
    "Barbara": f"{FIRST} 18,{COUNTS},not-yet 48,{COUNTS},passed 90,{CULPRITS},not-yet",
    "Edsger": f"{FIRST} 9,{COUNTS},passed 84,{CULPRITS},passed",
    "Grace": f"{FIRST} 7,{COUNTS},passed 42,{CULPRITS},passed 114,{NAMES},not-yet 138,{NAMES},passed",
    "Hedy": f"{FIRST} 24,{COUNTS},passed 96,{CULPRITS},solution",
    "Katherine": f"{FIRST} 15,{COUNTS},passed 60,{CULPRITS},not-yet 126,{CULPRITS},not-yet",
    "Linus": "3,getting_started,total_bones,passed 30,getting_started,darkest,solution 102,dask_basics,culprits,passed",
    "Margaret": f"{FIRST} 11,{COUNTS},passed 78,{CULPRITS},passed",
    "Zoë": f"{FIRST} 36,{COUNTS},solution 108,{CULPRITS},not-yet",
}


def main() -> None:
    """Write the picture; raise RuntimeError if not every attendee is on the page."""
    command = [Path(sys.executable).parent / "workshop", "room", "--port", "0"]
    with ExitStack() as stack:
        room = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        stack.callback(room.terminate)
        said = "".join(iter(room.stdout.readline, "Ctrl-C ends it.\n"))
        page, line = (re.search(form, said)[1] for form in (r"(http://\S+/#\S+)", r"export WORKSHOP_ROOM=(\S+)"))
        for name, what in SEATS.items():
            env = {**os.environ, "WORKSHOP_ROOM": line.replace("NICKNAME", name)}
            seat = subprocess.Popen([sys.executable, "-c", SEAT, what], env=env, cwd=ROOT)
            stack.callback(seat.kill)
        time.sleep(LASTS_S)
        photograph(page)


def photograph(address: str) -> None:
    """Write what Chromium shows of the page."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=2)
        page.goto(address)
        page.locator(f"tbody tr:nth-child({len(SEATS)})").wait_for()
        if page.locator("tbody tr").count() != len(SEATS):
            raise RuntimeError("not every attendee is on the page, or a stranger is")
        exercises = page.locator("thead th").all_text_contents()
        page.screenshot(path=PICTURE)
        browser.close()
    about = PngInfo()
    about.add_text(EXERCISES, "\n".join(exercises))
    with Image.open(PICTURE) as picture:
        picture.save(PICTURE, optimize=True, pnginfo=about)


if __name__ == "__main__":
    main()
