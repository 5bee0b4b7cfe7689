"""The code of the cheat sheet runs, from top to bottom, as in a notebook."""

import re
from pathlib import Path

import torch

import daskrun
from workshop_utils.checkpoint import load_checkpoint
from workshop_utils.shared import new_shared_folder

PAGE = (Path(__file__).parents[2] / "docs/cheat-sheet.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_runs_from_top_to_bottom():
    names = {"__name__": "__main__"}  # functions go by value to the workers
    try:
        for block in BLOCKS:
            exec(block, names)
        assert names["future"].result() == 1024 and names["plan"].compute() == 6
        assert set(names["job"].metrics().columns) >= {"rank", "epoch", "loss"}
        goes_on_as_if_undisturbed(names["client"], names["train"])
    finally:
        names["client"].shutdown()


def goes_on_as_if_undisturbed(client, train):
    whole, parts = (f"{new_shared_folder()}/model.pt" for _ in range(2))
    daskrun.run(client, train, 4, whole, wait_for_workers=60)
    assert daskrun.run(client, train, 2, parts) == [2] * len(client.nthreads())
    daskrun.run(client, train, 4, parts)  # as after a death: with the momentum that it had
    assert daskrun.run(client, train, 4, parts) == [0] * len(client.nthreads())
    torch.testing.assert_close(load_checkpoint(parts), load_checkpoint(whole), rtol=0, atol=1e-6)
