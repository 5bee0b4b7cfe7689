"""Film what JupyterLab shows while a rank is killed and the training goes on, from a real run in Chromium.

`make film` writes `img/kill.webm` and its still `img/kill.png`, and `img/lab.png`, JupyterLab on notebook 01. The run
has its own JupyterLab, home and folder. A caption says what happens, how long it took, and how much faster it is shown.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Browser, Page, expect, sync_playwright

from workshop_utils.tool.lab import FIRST, workspace

PROJECT = Path(__file__).parents[1]
CHROMIUM = Path("/usr/bin/chromium")
FILM = "notebooks/kill-a-worker.ipynb"
WIDTH, HEIGHT, CAPTION = 1280, 720, 64  # pixels of the film, and of these, the height of its caption
ZOOM = 1.15  # pixels of the film for each pixel that JupyterLab is laid out for
FIRST_S, LENGTH_S, FPS = 2, 8, 8  # what is shown begins so long before the kill, and is shown in this time at most
WAIT_MS = 180_000  # time limit of anything that the page waits for
KILL_AT = 5  # the step after which rank 1 is killed
DONE, KILLED = "Trained.", "Rank 1 killed"
AGAIN = 6  # the last step of attempt 1 that is shown
PREPARE = """\
import tempfile
import daskrun
from workshop_utils.cluster import start_cluster
from workshop_utils.photos import HELD_OUT, find_data
from workshop_utils.train import prepare, train

client = start_cluster(2)
source = find_data(64, HELD_OUT, light="dusk")
checkpoint = tempfile.mkdtemp() + "/resnet.pt"

def training():  # a checkpoint every 3 steps; begins with the last one there is
    model, images, _ = prepare(source)
    return train(model, images, batch_size=64, epochs=1, freeze_epochs=1, checkpoint=checkpoint, checkpoint_every=3)

def show(row):
    print("attempt {attempt}   step {step}   loss {loss:.2f}".format(**row))"""
KILL = """\
with daskrun.launch(client, training, max_restarts=1) as job:
    for row in job.rows():
        if row["rank"] == 0:
            if row["step"] == KILL_AT and row["attempt"] == 0:
                job.kill(rank=1)
            show(row)

print("Trained.")""".replace("KILL_AT", str(KILL_AT))


def main() -> None:
    """Write the film, its still, and the picture of JupyterLab."""
    need("ffmpeg", "apt install ffmpeg")
    need(str(CHROMIUM), "apt install chromium")
    with sync_playwright() as playwright, TemporaryDirectory(prefix="workshop-film-") as folder:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        with running_lab(Path(folder, "film")) as url:
            film(browser, url, Path(folder), PROJECT / "img" / "kill.webm")
        with running_lab(Path(folder, "lab")) as url:
            picture_of_lab(browser, url, PROJECT / "img" / "lab.png")
        browser.close()


def need(command: str, cure: str) -> None:
    """End the program with the line to type where `command` is not installed."""
    if not shutil.which(command):
        sys.exit(f"{command} is not installed, and the film needs it: {cure}")


@contextmanager
def running_lab(home: Path) -> Iterator[str]:
    """Run `workshop lab` on a copy of the notebooks in the new folder `home`; yield its address with the token."""
    project = home / "workshop"
    shutil.copytree(PROJECT / "notebooks", project / "notebooks", ignore=shutil.ignore_patterns(".*"))
    shutil.copytree(PROJECT / "img", project / "img")
    cells = [new_code_cell(PREPARE), new_code_cell(KILL)]
    nbformat.write(new_notebook(cells=cells, metadata=nbformat.read(project / FIRST, 4).metadata), project / FILM)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WORKSHOP_", "DASK_"))}
    env |= {"HOME": str(home), "WORKSHOP_CACHE": str(home / "cache"), "TQDM_DISABLE": "1"}
    command = [Path(sys.executable).parent / "workshop", "lab", "--no-browser"]
    with (
        (home / "lab.log").open("w") as log,
        subprocess.Popen(command, cwd=project, env=env, stderr=log, text=True) as running,
    ):
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:\S+token=\w+", (home / "lab.log").read_text())):
                if running.poll() is not None:
                    sys.exit((home / "lab.log").read_text())
                time.sleep(0.5)
            yield found.group()
        finally:
            running.terminate()


def picture_of_lab(browser: Browser, url: str, target: Path) -> None:
    """Write a picture of JupyterLab while notebook 01 trains, after its kill, 1440 x 810 pixels."""
    page = browser.new_page(viewport={"width": 1440, "height": 810})
    open_notebook(page, url)
    sources = [cell.source for cell in nbformat.read(PROJECT / FIRST, 4).cells]
    watched = next(index for index, source in enumerate(sources) if "job.kill(" in source)
    run_first(page)  # cell 1; cell 0 is text
    for _ in range(watched - 1):
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(100)
    kill = page.locator(".jp-CodeCell", has_text="job.kill(").first
    expect(kill.locator(".jp-Cell-outputArea")).to_contain_text("died")
    kill.scroll_into_view_if_needed()
    page.wait_for_timeout(6000)  # of the 8 s in which the cell lets one watch the second attempt
    page.screenshot(path=target)
    page.close()


def film(browser: Browser, url: str, folder: Path, target: Path) -> None:
    """Write the film to `target` (.webm) and a still beside it (.png), both WIDTH x HEIGHT; frames go to `folder`."""
    size = {"width": round(WIDTH / ZOOM), "height": round((HEIGHT - CAPTION) / ZOOM)}
    page = browser.new_page(viewport=size, device_scale_factor=ZOOM)
    address, _, token = url.partition("?token=")
    headers = {"Authorization": f"token {token}"}
    layout = address.replace("/lab/workspaces/workshop", "/lab/api/workspaces/film")
    page.request.put(layout, data=layout_of_the_film(), headers=headers)
    open_notebook(page, url.replace("/workspaces/workshop", "/workspaces/film"))
    run_first(page)
    expect(page.locator(".jp-InputPrompt").first).to_have_text("[1]:")
    page.locator("iframe").first.wait_for()
    page.wait_for_timeout(6000)  # until the panes draw
    page.evaluate("document.querySelectorAll('.jp-CodeCell')[1].scrollIntoView()")
    page.keyboard.press("Control+Enter")
    frames = watch(page, folder)
    page.close()
    cut(frames, folder, target)


def layout_of_the_film() -> dict:
    """Return the workshop's layout, with the film's notebook, without its contents; its pane shows the ranks."""
    content = workspace(0)
    data = content["data"]
    content["metadata"]["id"] = "film"
    layout = data["layout-restorer:data"]
    layout["left"] = layout["right"]
    layout["main"]["current"] = f"notebook:{FILM}"
    notebook, panes = layout["main"]["dock"]["children"]
    notebook["widgets"] = [f"notebook:{FILM}"]
    data[f"notebook:{FILM}"] = {"data": {"path": FILM, "factory": "Notebook"}}
    del data[f"notebook:{FIRST}"]
    panes["children"], panes["sizes"] = panes["children"][1:2], [1]  # the ranks alone
    layout["main"]["dock"]["sizes"] = [0.55, 0.45]
    return content


def open_notebook(page: Page, url: str) -> None:
    """Open JupyterLab, and wait until its notebook has a kernel."""
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    page.goto(url)
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(state="attached")  # it may be hidden
    page.wait_for_timeout(2000)


def run_first(page: Page) -> None:
    """Run the first code cell and select the next, as often as it takes: a pane that just opened may take the focus."""
    cell = page.locator(".jp-CodeCell").first
    while cell.locator(".jp-InputPrompt").inner_text() == "[ ]:":
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(1000)


def watch(page: Page, folder: Path) -> list[tuple[float, str]]:
    """Photograph the page until two seconds after the training, as folder/00000.png and so on.

    Returns for each picture the seconds since the first, and what the cell had printed.
    """
    frames: list[tuple[float, str]] = []
    begun, left = time.monotonic(), 8
    while left:
        said = page.locator(".jp-CodeCell").last.locator(".jp-Cell-outputArea").text_content() or ""
        frames.append((time.monotonic() - begun, said))
        page.screenshot(path=folder / f"{len(frames) - 1:05}.png", caret="initial")
        left -= DONE in said
        page.wait_for_timeout(250)  # the cores are for the training
    return frames


def cut(frames: list[tuple[float, str]], folder: Path, target: Path) -> None:
    """Write the pictures around the kill as a WebM with VP9, each shown until the next, and the last as a still.

    frames: what `watch` returned. The film begins FIRST_S before the kill and ends with step AGAIN of attempt 1, as a
    page shows it again and again.
    """
    killed = next(index for index, (_, said) in enumerate(frames) if caption(said).startswith(KILLED))
    first = next(index for index, (time_s, _) in enumerate(frames) if time_s >= frames[killed][0] - FIRST_S)
    last = next(index for index, (_, said) in enumerate(frames) if re.search(rf"attempt 1 +step {AGAIN} ", said))
    begun_s = frames[first][0]
    speed = max(1.0, round((frames[last][0] - begun_s) / LENGTH_S, 1))
    shown = f"   ({speed:g} times as fast)" if speed > 1 else ""
    lines = []
    for index in range(first, last + 1):
        time_s, said = frames[index]
        picture = folder / f"{index:05}.png"
        write_caption(picture, caption(said), f"{time_s - begun_s:.0f} s{shown}")
        next_s = frames[index + 1][0] if index < last else time_s + speed
        lines += [f"file {picture.name}", f"duration {(next_s - time_s) / speed:.3f}"]
    shutil.copy(folder / f"{last:05}.png", target.with_suffix(".png"))  # with its caption
    (folder / "frames.txt").write_text("\n".join([*lines, lines[-2]]), encoding="utf-8")
    source = ["-f", "concat", "-i", str(folder / "frames.txt")]
    video = ["-vf", f"fps={FPS}", "-c:v", "libvpx-vp9", "-pix_fmt", "yuv420p", "-an"]
    small = ["-crf", "28", "-b:v", "0", "-g", "200", "-deadline", "good", "-cpu-used", "3"]
    subprocess.run(["ffmpeg", "-v", "error", "-y", *source, *video, *small, str(target)], check=True)


def caption(said: str) -> str:
    """Return what happens where the cell has printed `said`.

    >>> caption("attempt 0   step 5   loss 1.00\\nattempt 1   step 4   loss 1.10")
    'It goes on from the checkpoint of step 3.'
    """
    if again := re.search(r"attempt 1 +step (\d+)", said):
        return f"It goes on from the checkpoint of step {int(again[1]) - 1}."
    if f"step {KILL_AT} " in said:
        return f"{KILLED}. Both ranks end, and start again."
    return "Two workers train one ResNet, and save every 3 steps."


def write_caption(picture: Path, left: str, right: str) -> None:
    """Write two texts below the picture in a file, which then is HEIGHT pixels high."""
    font = ImageFont.load_default(size=30)
    whole = Image.new("RGB", (WIDTH, HEIGHT), "#a3161b" if left.startswith(KILLED) else "#22313f")
    with Image.open(picture) as page:
        whole.paste(page.crop((0, 0, WIDTH, HEIGHT - CAPTION)))
    draw, y = ImageDraw.Draw(whole), HEIGHT - CAPTION // 2
    draw.text((20, y), left, "white", font, anchor="lm")
    draw.text((WIDTH - 20, y), right, "white", font, anchor="rm")
    whole.save(picture, optimize=True)


if __name__ == "__main__":
    main()
