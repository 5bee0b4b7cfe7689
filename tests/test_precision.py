"""Float32 keeps all its digits while a model computes, and PyTorch's settings come back as the user left them."""

import subprocess
import sys
import threading

import pytest
import torch
from samples import classified
from test_train import noise, resnet

from workshop_utils.precision import ieee_float32, precision_of
from workshop_utils.train import evaluate, train

CHOICES = (
    "pass",
    "backends.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('medium')",
    "backends.fp32_precision = 'tf32'",
    "backends.cudnn.fp32_precision = 'tf32'",
    "backends.cudnn.conv.fp32_precision = 'ieee'",
    "backends.mkldnn.matmul.fp32_precision = 'bf16'",
)
# After PyTorch's old settings a process cannot use the new ones, nor the reverse: each choice has its own process.
PROGRAM = f"""
import os
import torch
from torch import backends
from workshop_utils.precision import ieee_float32

PARTS = ("", "cudnn.", "cudnn.conv.", "cudnn.rnn.", "cuda.matmul.", "mkldnn.conv.", "mkldnn.matmul.")
NEW = ["backends." + part + "fp32_precision" for part in PARTS]
OLD = ("backends.cudnn.allow_tf32", "backends.cuda.matmul.allow_tf32", "torch.get_float32_matmul_precision()")

def read(name):
    try:
        return eval(name)
    except RuntimeError:  # an old setting cannot be read where a new one has been made
        return "cannot be read"

def settings():
    return [read(name) for name in (*NEW, *OLD)]

def follows():
    backends.fp32_precision = "tf32"
    return settings()

def compute():
    with ieee_float32():
        assert settings()[: len(NEW)] == ["ieee"] * len(NEW)

for choice in {CHOICES!r}:
    if not os.fork():
        try:
            exec(choice)
            before = settings()
            compute()
            assert settings() == before, (before, settings())
            followed = follows()
            backends.fp32_precision = "ieee"
            compute()
            assert follows() == followed, (followed, settings())
        except BaseException as error:
            print(choice, repr(error), flush=True)
        os._exit(0)
    os.wait()
"""


def test_float32_keeps_its_digits_inside_and_the_users_choice_comes_back():
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stdout + finished.stderr


@pytest.fixture
def tf32_for_all():
    torch.backends.fp32_precision = "tf32"
    yield
    torch.backends.fp32_precision = "none"


@pytest.mark.usefixtures("tf32_for_all")
def test_pytorchs_new_setting_breaks_neither_training_nor_evaluation_nor_inference(dogs, weights):
    model, seen = resnet(), set()
    backends = torch.backends
    model.fc.register_forward_hook(
        lambda *_: seen.add((backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision))
    )
    train(model, noise(16), noise(7), batch_size=16)
    evaluate(model, noise(7))
    assert seen == {("ieee", "ieee")}
    photo = str(next(dogs.glob("*/*.jpg")))
    _, ((_, _, prediction, _, _, error),) = classified([[photo]], weights=weights, precision="fp32")
    assert prediction and error is None
    with pytest.raises(ValueError, match="0 images"):
        evaluate(model, noise(0))
    assert backends.fp32_precision == backends.cudnn.conv.fp32_precision == "tf32"


@pytest.mark.usefixtures("tf32_for_all")
def test_a_thread_that_leaves_first_changes_nothing_for_one_that_still_computes():
    inside, leave = threading.Event(), threading.Event()

    def compute():
        with ieee_float32():
            inside.set()
            leave.wait(120)

    first = threading.Thread(target=compute)
    first.start()
    assert inside.wait(120)
    with ieee_float32():
        leave.set()
        first.join()
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_precision_is_as_asked_or_what_the_machine_is_fast_in(monkeypatch):
    assert (precision_of("fp32"), precision_of("bf16")) == ("fp32", "bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    amd, intel = {"cpu_name": "AMD EPYC"}, {"cpu_name": "Intel Xeon"}
    for has, expected in (
        (amd | {"avx512_bf16": True, "amx_bf16": False}, "bf16"),
        (amd | {"avx512_bf16": False, "amx_bf16": False}, "fp32"),
        (intel | {"avx512_bf16": True, "amx_bf16": True}, "bf16"),
        (intel | {"avx512_bf16": True, "amx_bf16": False}, "fp32"),
        ({}, "fp32"),  # as on other kinds of processors
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda has=has: has)
        assert precision_of() == expected, has


@pytest.mark.parametrize(("capability", "best"), [((7, 5), "fp32"), ((8, 0), "bf16"), ((12, 0), "bf16")])
def test_a_gpu_computes_in_bf16_if_it_has_that(capability, best, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert (precision_of("auto"), precision_of("fp32")) == (best, "fp32")
