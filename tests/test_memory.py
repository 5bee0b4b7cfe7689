"""A limit for the memory of a training, and what its tensors hold."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from workshop_utils.gpt import CONTEXT, GPT, Block, encode, init_weights, next_letter_loss
from workshop_utils.memory import activations_mb, held_mb, peak_memory

WITHIN_A_LIMIT = """
import torch
from workshop_utils.memory import peak_memory

torch.set_num_threads(8)
kept = []
try:
    with peak_memory(limit_mb=100) as memory:
        for _ in range(4):
            kept.append(torch.ones(10_000_000))  # 40 MB
except RuntimeError as error:
    print(len(kept), 75 < memory["peak MB"] < 100, "allocate" in str(error))
kept.append(torch.ones(40_000_000))  # the limit is gone
"""


@pytest.mark.skipif(sys.platform != "linux" and not torch.cuda.is_available(), reason="this system has no such limit")
def test_what_exceeds_the_limit_raises_in_the_line_that_allocates():
    done = subprocess.run([sys.executable, "-c", WITHIN_A_LIMIT], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("2 True True\n", 0), done.stderr


def test_adamw_holds_sixteen_bytes_a_parameter():
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    held = held_mb(model, optimizer)
    assert held == pytest.approx({"parameters": 4, "gradients": 4, "optimizer": 8}, rel=1e-3)


def test_activations_grow_with_the_batch_and_the_parameters_do_not_count():
    block = Block(64)
    one, eight = (activations_mb(block, torch.randn(n, 25, 64, requires_grad=True)) for n in (1, 8))
    assert 7 < eight / one < 9


def test_a_gpt_learns_names():
    codes = encode(["rex", "maggie may"])
    assert codes.shape == (2, CONTEXT)
    with torch.device("meta"):
        model = GPT(64, 1)
    init_weights(model, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = next_letter_loss(model, codes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
    with pytest.raises(ValueError, match="R2-D2"):
        encode(["R2-D2"])


def test_a_block_of_code_without_a_limit_is_measured():
    with peak_memory() as memory:
        numbers = torch.ones(12_500_000)
    assert 45 < memory["peak MB"] < 80 and numbers.nbytes == 50_000_000
