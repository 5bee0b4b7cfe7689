"""The slides, as `make book` builds them; their numbers are read from benchmarks/results."""

import json
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def numbers():
    """Return what the slides say was measured, each as it is printed there."""
    inference, seconds, rows = result("cpu2-inference"), result("cpu2-ddp")["seconds"], result("cpu2-launchers")["rows"]
    rates, killed = inference["images_per_s"], {"torchrun": rows["torchrun"], "dask": rows["this on Dask"]}
    naive = next(rate for name, rate in rates.items() if name.startswith("upstream"))
    loop = max(rate for name, rate in rates.items() if name.startswith("DataLoader, bf16"))
    shown = {
        "photos": f"{inference['photos']:,}",
        "naive": f"{naive:.0f}",
        "loop": f"{loop:.0f}",
        "classify": f"{rates['classify']:.0f}",
        "bound": f"{rates['bound']:.0f}",
        "times": f"{rates['classify'] / naive:.1f}",
        "machine": f"{inference['machine']['cores']} cores of an {inference['machine']['processor']}, no GPU",
    }
    for tool in ("torchrun", "dask"):
        shown[f"{tool}_start"] = f"{seconds[tool]['function runs']:.2f} s"
        shown[f"{tool}_step"] = f"{seconds[tool]['step']:.2f} s"
        shown[f"{tool}_knows"] = f"{killed[tool]['knows_s']:.1f} s"
        shown[f"{tool}_again"] = f"{killed[tool]['again_s']:.0f} s"
    for name in ("naive", "loop", "classify", "bound"):
        shown[f"bar_{name}"] = f'<span class="bar" style="width: {float(shown[name]) / rates["bound"]:.0%}"></span>'
    return shown


def print_pdf(app, error):
    """Print the slides as slides.pdf beside them, where there is a Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if error or app.builder.name != "revealjs" or not chromium:
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.add_init_script("addEventListener('pdf-ready', () => window.laidOut = true)")
        page.goto(f"{Path(app.outdir, 'index.html').as_uri()}?print-pdf")
        page.wait_for_function("window.laidOut")
        page.pdf(path=Path(app.outdir, "slides.pdf"), prefer_css_page_size=True, print_background=True)
        browser.close()


def setup(app):
    app.connect("build-finished", print_pdf)


project = "Dask-accelerated deep learning"
html_title = project
extensions = ["myst_parser", "sphinx_revealjs"]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "substitution"]
myst_substitutions = numbers()
highlight_language = "python"
revealjs_style_theme = "white"
revealjs_static_path = ["_static"]
revealjs_css_files = ["slides.css"]
revealjs_script_plugins = [
    {"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"},
    {"name": "RevealHighlight", "src": "revealjs/plugin/highlight/highlight.js"},
]
revealjs_script_conf = {
    "width": 1280,
    "height": 720,
    "margin": 0.04,
    "center": False,
    "hash": True,
    "slideNumber": True,
    "transition": "none",
    "pdfSeparateFragments": False,
    "showNotes": False,
}
