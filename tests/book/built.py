"""Builds the book, and takes its pages apart as a browser does."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(folder, *options):
    """Build the book into a folder as `make book` does, without what this machine says of its repository."""
    env = {**os.environ, "WORKSHOP_REPOSITORY": ""}
    env.pop("GITHUB_REPOSITORY", None)
    command = [sys.executable, "-m", "sphinx", "-q", "-c", "docs", "-b", "html", *options, ".", folder]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


class Page(HTMLParser):
    """What the tests ask of a page: each tag with its attributes, the ids, and the text of the article."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.text = [], set(), text
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.ids |= {attributes.get("id"), attributes.get("name")}

    def all(self, tag, name=""):
        return [attributes for found, attributes in self.tags if found == tag and name in attributes.get("class", "")]
