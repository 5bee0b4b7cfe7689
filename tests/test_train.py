"""Training takes the same steps in one process and on many ranks, interrupted or not, and says what it cannot do."""

import math
import os
import re
import signal
import sys
import time
import uuid
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from samples import sign_in
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.models.resnet import BasicBlock

import daskrun
from daskrun import WorkerDied
from workshop_utils.checkpoint import load_checkpoint, save_checkpoint
from workshop_utils.dogs.breeds import HELD_OUT
from workshop_utils.labels import HEAD, check_agree
from workshop_utils.photos import ImageFolder, find_data, train_val_split
from workshop_utils.train import evaluate, learning_rate, prepare, train
from workshop_utils.training.batches import batch_loader
from workshop_utils.training.lock import CheckpointInUse
from workshop_utils.weights import load_resnet, with_new_head

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
FIVE_STEPS = {"batch_size": 16, "lr": 0.1}  # an epoch of 80 images


def noise(n_images=80, side=32):
    generator = torch.Generator().manual_seed(n_images)
    images = torch.randn(n_images, 3, side, side, generator=generator)
    return TensorDataset(images, torch.randint(0, 5, (n_images,), generator=generator))


def resnet():
    """Return a ResNet of two blocks, whose steps take milliseconds."""
    torch.manual_seed(0)
    down = nn.Sequential(nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16))
    stem = {"conv1": nn.Conv2d(3, 8, 3, stride=2, bias=False), "bn1": nn.BatchNorm2d(8), "relu": nn.ReLU()}
    layers = {"layer1": nn.Sequential(BasicBlock(8, 8)), "layer2": nn.Sequential(BasicBlock(8, 16, 2, down))}
    head = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(16, 5)}
    return nn.Sequential(OrderedDict(stem | layers | head))


def trained(images=None, model=None, **settings):
    """Return the numbers and the weights that training ends with."""
    model = model or resnet()
    return train(model, images or noise(), **settings), model.state_dict()


def difference(weights, others):
    return max((weights[name].double() - others[name].double()).abs().max().item() for name in weights)


def changed(weights, others):
    return {name for name in weights if not torch.equal(torch.as_tensor(weights[name]), others[name])}


def test_steps_are_those_of_sgd_with_momentum_and_decay_as_computed_by_hand():
    pictures, labels = noise(16).tensors
    ours, by_hand = resnet().double(), resnet().double().eval()
    weights = list(by_hand.parameters())
    velocities = [torch.zeros_like(weight) for weight in weights]
    for rate in (0.05, 0.025):  # 16 of the 32 images for which lr is meant, and a cosine over two steps
        loss = nn.functional.cross_entropy(by_hand(pictures.double()), labels)
        for weight, velocity, gradient in zip(weights, velocities, torch.autograd.grad(loss, weights), strict=True):
            velocity.mul_(0.9).add_(gradient + 1e-4 * weight.detach())
            weight.data -= rate * velocity
    train(ours, TensorDataset(pictures.double(), labels), epochs=2, batch_size=16, lr=0.1)
    for weight, other in zip(ours.parameters(), weights, strict=True):
        # Logits are float32. Without the decay, weights would differ by up to 1e-5.
        assert (weight - other).abs().max() < 2e-7


def test_the_problem_is_the_same_wherever_it_is_prepared(monkeypatch, tmp_path):
    for name in ("WORKSHOP_DATA", "WORKSHOP_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    source = find_data(4, HELD_OUT, light="dusk")
    (one, train_set, val_set), (other, _, _), (scratch, _, _) = (
        prepare(source, image_size=64, pretrained=pretrained) for pretrained in (True, True, False)
    )
    assert (len(train_set), len(val_set)) == (36, 12) and not set(train_set.indices) & set(val_set.indices)
    assert train_set[0][0].shape == (3, 64, 64) and one.fc.out_features == 12
    assert not changed(one.state_dict(), other.state_dict())
    shipped = load_resnet("sketches")[0].state_dict()
    assert {"fc.weight", "fc.bias"} == changed({**one.state_dict(), "fc.weight": 0, "fc.bias": 0}, shipped)
    assert "conv1.weight" in changed(scratch.state_dict(), shipped)
    assert scratch.bn1.running_mean.abs().max() == 0, "BatchNorm's statistics are anew, too"


def test_a_checkpoint_of_the_problem_is_loaded_with_its_image_size_and_its_categories(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path))
    source = find_data(4, HELD_OUT, light="dusk")
    model, train_set, _ = prepare(source, image_size=64)
    train(model, train_set, freeze_epochs=1, checkpoint=tmp_path / "breeds.pt")
    learned, transform, categories = load_resnet(tmp_path / "breeds.pt")
    path, _ = train_set.dataset.samples[train_set.indices[0]]
    assert torch.equal(transform(Image.open(path)), train_set[0][0]) and learned.fc.out_features == 12
    assert categories == [breed.name.replace("_", " ") for breed in HELD_OUT]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads make such small batches slower, above all on a busy machine
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def alone():
    return trained(**FIVE_STEPS)


@pytest.fixture(scope="module")
def on_two_ranks(shared_cluster):
    return daskrun.run(shared_cluster.client, trained, kwargs=FIVE_STEPS, n_workers=2)


@pytest.mark.smoke
def test_two_ranks_end_with_the_weights_of_one_process(alone, on_two_ranks):
    for numbers, weights in on_two_ranks:
        assert difference(weights, alone[1]) <= 1e-5
        assert numbers["steps"] == alone[0]["steps"] == 5
    assert changed(alone[1], resnet().state_dict()) >= {"conv1.weight", "fc.weight"}


def test_ranks_that_drift_apart_are_found_at_the_next_comparison(client):
    def spoiled_at(step):
        model, seen = resnet(), []

        def spoil(*_):
            seen.append(0)
            if len(seen) == step and dist.get_rank() == 1:
                model.layer1[0].bn1.bias.data[3] += 1e-6

        model.register_forward_pre_hook(spoil)
        with pytest.raises(AssertionError, match="layer1.0.bn1.bias: rank 1 .* 1 of "):
            trained(model=model, check_every=2, lr=0.0, batch_size=16)
        return len(seen)

    assert daskrun.run(client, spoiled_at, 3, n_workers=2) == [4, 4]


def test_ranks_that_agree_pass_each_comparison_also_where_batchnorm_has_statistics_of_each_rank(client):
    settings = {**FIVE_STEPS, "check_every": 1, "freeze_batchnorm": False}
    (numbers, weights), (others, its_weights) = daskrun.run(client, trained, kwargs=settings, n_workers=2)
    assert numbers["steps"] == others["steps"] == 5
    assert not changed(weights, its_weights)  # in the end, these statistics are rank 0's, too


@pytest.mark.parametrize("n_images", [80, 87])
def test_at_each_step_all_world_sizes_see_the_same_images(client, n_images):
    def seen(n_images):
        images = TensorDataset(torch.zeros(n_images, 3, 32, 32), torch.zeros(n_images, dtype=torch.long))
        reads, tiny = Reads(images), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5))
        numbers = train(tiny, reads, batch_size=16, epochs=2)
        per_step = 16 // (dist.get_world_size() if dist.is_initialized() else 1)
        return [reads.indices[step * per_step :][:per_step] for step in range(numbers["steps"])]

    one, two = seen(n_images), daskrun.run(client, seen, n_images, n_workers=2)
    assert [set(step) for step in one] == [set(first + second) for first, second in zip(*two, strict=True)]
    assert len(one) == 10 and len(set(sum(one[:5], []))) == 80 and one[:5] != one[5:]


class Reads(Dataset):
    """A dataset that notes which images are read, and calls `at_read(count)` before each."""

    def __init__(self, images, at_read=lambda count: None):
        self.images, self.at_read, self.indices = images, at_read, []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.at_read(len(self.indices))
        self.indices.append(index)
        return self.images[index]


def states_of(checkpoint):
    saved = load_checkpoint(checkpoint)
    momenta = saved["optimizer"]["state"]
    return saved["state_dict"] | {str(index): state["momentum_buffer"] for index, state in momenta.items()}


def test_a_run_whose_rank_was_killed_ends_bit_equal_to_an_undisturbed_one(client, tmp_path):
    def doomed(checkpoint, marker):
        def die_in_step_10(count):
            if dist.get_rank() == 1 and count == 9 * 8 + 3 and not os.path.exists(marker):
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        images = Reads(noise(), die_in_step_10)
        numbers, _ = trained(images, epochs=3, checkpoint=checkpoint, checkpoint_every=4, **FIVE_STEPS)
        return numbers, len(images.indices)

    killed, undisturbed = str(tmp_path / "killed.pt"), str(tmp_path / "undisturbed.pt")
    marker = tmp_path / "marker"
    job = daskrun.launch(client, doomed, killed, str(marker), n_workers=2, max_restarts=1)
    for numbers, n_read in job.result():
        assert numbers["resumed_at"] == 8 and numbers["steps"] == 15  # epochs have 5 steps, so 8 is in the middle
        assert n_read == (15 - 8) * 8
    assert len(job.failures) == 1 and marker.exists()
    daskrun.run(client, doomed, undisturbed, str(marker), n_workers=2)
    states = states_of(killed)
    assert len(states) > len(resnet().state_dict()) and not changed(states, states_of(undisturbed))


def interrupted(checkpoint, at_step=3, dataset=Reads, **settings):
    def fail(count):
        if count == at_step * 16:
            raise InterruptedError("the power went off")

    with pytest.raises(InterruptedError):
        trained(dataset(noise(), fail), checkpoint=checkpoint, checkpoint_every=2, **FIVE_STEPS, **settings)


class Draws(Reads):
    """A dataset that changes its images at random, as a transform may."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + torch.randn(image.shape), label


def test_what_a_dataset_draws_follows_from_the_step_also_in_children_and_after_an_interruption(tmp_path):
    settings = {**FIVE_STEPS, "epochs": 2}
    _, weights = trained(Draws(noise()), **settings)
    interrupted(tmp_path / "run.pt", dataset=Draws, epochs=2)
    settings |= {"checkpoint_every": 2, "checkpoint": tmp_path / "run.pt"}
    numbers, gone_on = trained(Draws(noise()), num_workers=1, **settings)
    assert numbers["resumed_at"] == 2 and not changed(weights, gone_on)
    assert changed(weights, trained(epochs=2, **FIVE_STEPS)[1]), "it draws nothing"


def test_a_validation_set_that_draws_gives_the_same_loss_also_in_children_and_leaves_the_callers_draws_alone():
    model, images = resnet(), Draws(noise(10))
    one = evaluate(model, images)
    torch.manual_seed(2)
    expected = torch.rand(3).tolist()
    torch.manual_seed(2)
    assert evaluate(model, images, num_workers=1) == one and torch.rand(3).tolist() == expected


def test_a_run_that_was_interrupted_while_the_head_trained_alone_goes_on_with_the_same_model(tmp_path):
    settings = {**FIVE_STEPS, "epochs": 2, "freeze_epochs": 1}
    _, undisturbed = trained(**settings)
    settings |= {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 2}
    model, images = resnet(), noise().tensors[0]
    steps = iter(range(3))
    with pytest.raises(StopIteration):
        train(model, noise(), after_step=lambda *_: {"n": next(steps)}, **settings)
    model(images[:4]).sum().backward()  # gradients that are left must not enter the first step
    train(model, noise(), **settings)
    assert not changed(undisturbed, model.state_dict())


def test_training_leaves_the_callers_random_numbers_alone_also_on_a_rank_and_after_an_error(client):
    def drawn_around(seed, wrong):
        model, images = resnet(), noise()
        torch.manual_seed(seed)
        expected = torch.rand(3).tolist()
        torch.manual_seed(seed)
        with pytest.raises(FloatingPointError) if wrong else nullcontext():
            train(model, Draws(images), images, **FIVE_STEPS | wrong)
        return expected, torch.rand(3).tolist(), model.state_dict()

    for wrong in ({}, {"lr": 1e30}):
        one, other = drawn_around(1, wrong), drawn_around(2, wrong)
        on_ranks = daskrun.run(client, drawn_around, 3, wrong, n_workers=2, time_limit=240)
        for expected, found, _ in (one, other, *on_ranks):
            assert found == expected
        assert wrong or not changed(one[2], other[2]), "the run depends on what the caller has drawn"


class Sample(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class Unreadable(Exception):
    """An error whose class no process can import."""


class OfTheNotebook(TensorDataset):
    """A dataset of samples that nobody can import, either."""

    def __getitem__(self, index):
        if index == len(self) - 1:
            raise Unreadable("the last image")
        return Sample(*super().__getitem__(index))


def test_the_children_of_a_rank_read_a_dataset_that_they_cannot_import(client):
    images = TensorDataset(*noise(33).tensors)
    settings = {"batch_size": 16}
    (expected,) = daskrun.run(client, trained, Subset(images, range(32)), kwargs=settings, n_workers=1)
    own = OfTheNotebook(*images.tensors)
    settings["num_workers"] = 1
    (found,) = daskrun.run(client, trained, Subset(own, range(32)), kwargs=settings, n_workers=1)
    assert found[0]["train_loss"] == expected[0]["train_loss"] and not changed(found[1], expected[1])


@pytest.mark.weekly
def test_a_users_own_loader_reads_a_dataset_that_its_children_cannot_import(client):
    def read():
        own = OfTheNotebook(*noise(8).tensors)
        load = partial(DataLoader, batch_size=4, num_workers=1, collate_fn=lambda samples: samples)
        with pytest.raises(Unreadable, match="the last image"):
            list(load(own))
        samples = [sample for batch in load(Subset(own, range(7))) for sample in batch]
        return [type(sample) is Sample for sample in samples], torch.stack([sample.image for sample in samples])

    ((known, images),) = daskrun.run(client, read, n_workers=1)
    assert known == [True] * 7 and torch.equal(images, noise(8).tensors[0][:7])


class Family(Dataset):
    """A dataset of the processes that read it: (index, process, its parent)."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, os.getpid(), os.getppid()


@pytest.mark.gpu
def test_a_process_with_a_gpu_is_not_forked():
    ((indices, _, parents),) = batch_loader(Family(), [[7, 8]], num_workers=1)
    assert indices.tolist() == [7, 8] and os.getpid() not in parents.tolist()


@pytest.mark.smoke
def test_another_number_of_ranks_may_resume_a_run(client, alone, tmp_path):
    checkpoint = str(tmp_path / "run.pt")
    interrupted(checkpoint)
    settings = {**FIVE_STEPS, "checkpoint": checkpoint, "checkpoint_every": 2}
    for numbers, weights in daskrun.run(client, trained, kwargs=settings, n_workers=2):
        assert numbers["resumed_at"] == 2 and difference(weights, alone[1]) <= 1e-5


def test_images_per_s_counts_what_a_resumed_run_has_done_itself(tmp_path, monkeypatch):
    interrupted(tmp_path / "run.pt")
    rows = []
    monkeypatch.setattr("workshop_utils.train.log_metrics", lambda **row: rows.append(row))
    numbers, _ = trained(checkpoint=tmp_path / "run.pt", checkpoint_every=2, **FIVE_STEPS)
    seconds = sum(row["load_s"] + row["compute_s"] + row["comm_s"] for row in rows)
    assert numbers["images_per_s"] == pytest.approx(16 * (5 - numbers["resumed_at"]) / seconds)
    assert numbers["resumed_at"] == 2


def test_a_finished_run_is_not_repeated(tmp_path):
    settings = {**FIVE_STEPS, "val_set": noise(7), "checkpoint": tmp_path / "run.pt"}
    numbers, weights = trained(**settings)
    images = Reads(noise())
    again, weights_again = trained(images, **settings)
    assert again == {**numbers, "resumed_at": 5} and not images.indices and not changed(weights, weights_again)


@pytest.mark.smoke
@pytest.mark.parametrize("n_images", [1, 7])
def test_evaluation_counts_each_image_once(client, n_images):
    def evaluated():
        return evaluate(resnet(), noise(n_images), batch_size=2)

    alone = evaluated()
    assert alone["n_images"] == n_images
    for n_workers in (1, 2):
        for scores in daskrun.run(client, evaluated, n_workers=n_workers):
            assert scores == {**alone, "loss": pytest.approx(alone["loss"])}


def test_images_that_the_ranks_cannot_share_are_named_on_all_ranks(client):
    many = noise(24)
    cases = [
        (lambda rank: train(resnet(), many, noise(0), batch_size=12), "0 images"),
        (lambda rank: train(resnet(), many, noise(rank), batch_size=12), r"n_val_images: \[0, 1"),
        (lambda rank: train(resnet(), noise(24 - rank), batch_size=24), r"n_images: \[24, 23"),
        (lambda rank: train(resnet(), noise(0), batch_size=12), "0 images.*bring more images"),
        (lambda rank: train(resnet(), noise(5), batch_size=12), "5 images.* one batch of 12"),
        (lambda rank: train(resnet(), many, batch_size=13), "13 .* 2 ranks"),
        (lambda rank: train(resnet(), many, batch_size=12, check_every=rank), r"check_every: \[0, 1"),
        (lambda rank: evaluate(resnet(), noise(5 * rank)), r"n_images: \[0, 5"),
        (lambda rank: evaluate(resnet(), noise(5 + rank)), r"n_images: \[5, 6"),
    ]

    def refused():
        return [str(pytest.raises(ValueError, case, dist.get_rank()).value) for case, _ in cases]

    first, second = daskrun.run(client, refused, n_workers=2, time_limit=240)
    assert first == second
    for sentence, (_, said) in zip(first, cases, strict=True):
        assert re.search(said, sentence)


def test_evaluation_is_right_and_leaves_the_model_as_it_was():
    model, images = resnet().train(), noise(10)
    model.layer1.eval()
    logits = resnet().eval()(images.tensors[0])
    scores = evaluate(model, images, batch_size=4)
    assert scores["accuracy"] == (logits.argmax(1) == images.tensors[1]).sum().item() / 10
    assert scores["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, images.tensors[1]).item())
    assert model.training and model.layer2.training and not model.layer1[0].bn1.training
    assert not changed(model.state_dict(), resnet().state_dict())


def test_first_the_head_alone_is_trained_then_everything(client):
    before, (_, first), (_, second) = resnet().state_dict(), *(trained(epochs=n, freeze_epochs=1) for n in (1, 2))
    assert changed(before, first) == {"fc.weight", "fc.bias"}
    assert changed(before, second) == {name for name, _ in resnet().named_parameters()}  # and no running statistics
    for _, weights in daskrun.run(client, trained, kwargs={"epochs": 2, "freeze_epochs": 1}, n_workers=2):
        assert difference(weights, second) <= 1e-5


def test_a_compiled_model_is_trained_as_the_plain_one():
    settings = {"epochs": 2, "freeze_epochs": 1}
    compiled, (_, weights) = torch.compile(resnet(), backend="eager"), trained(**settings)
    train(compiled, noise(), **settings)
    assert difference(compiled._orig_mod.state_dict(), weights) <= 1e-5


def test_weights_that_the_caller_froze_stay_frozen():
    model = resnet()
    model.conv1.requires_grad_(False)
    train(model, noise(), epochs=2, freeze_epochs=1)
    assert changed(model.state_dict(), resnet().state_dict()) >= {"layer1.0.conv1.weight"}
    assert torch.equal(model.conv1.weight, resnet().conv1.weight)
    assert {name for name, weight in model.named_parameters() if not weight.requires_grad} == {"conv1.weight"}


def test_ranks_log_each_step_with_its_times_and_rank_0_each_epoch(client):
    settings = {**FIVE_STEPS, "epochs": 2, "val_set": noise(7), "warmup_steps": 3}
    job = daskrun.launch(client, trained, kwargs=settings, n_workers=2)
    (numbers, _), _ = job.result()
    rows = job.metrics()
    steps, epochs = rows[rows.images.notna()], rows[rows.images.isna()]
    assert sorted(zip(steps["rank"], steps.step, steps.epoch, strict=True)) == [
        (rank, step, (step - 1) // 5) for rank in (0, 1) for step in range(1, 11)
    ]
    assert (steps.images == 8).all() and (steps[["load_s", "compute_s", "comm_s"]] > 0).all(axis=None)
    expected = [learning_rate(step, 10, FIVE_STEPS["lr"], 16, warmup_steps=3) for step in range(10)]
    assert steps[steps["rank"] == 1].sort_values("step").lr.tolist() == expected
    assert epochs["rank"].tolist() == [0, 0] and epochs.step.tolist() == [5, 10]
    assert epochs.val_accuracy.tolist()[-1] == numbers["accuracy"] and epochs.val_loss.tolist()[-1] == numbers["loss"]


def test_what_after_step_returns_is_logged_with_the_step(client):
    def length(model, optimizer, images):
        return {"n_images": len(images), "weights": sum(weight.norm().item() for weight in model.parameters())}

    job = daskrun.launch(client, trained, kwargs={**FIVE_STEPS, "after_step": length}, n_workers=2)
    job.result()
    rows = job.metrics()
    assert len(rows) == 10 and (rows.n_images == rows.images).all()
    assert (rows.groupby("step").weights.nunique() == 1).all() and rows.weights.nunique() == 5


def test_compressed_gradients_give_nearly_the_same_weights_equal_on_all_ranks(client, on_two_ranks):
    settings = {**FIVE_STEPS, "compression": "fp16"}
    (_, weights), (_, others) = daskrun.run(client, trained, kwargs=settings, n_workers=2)
    assert not changed(weights, others)
    assert 1e-7 < difference(weights, on_two_ranks[0][1]) < 1e-2  # without compression a run repeats to the bit


def test_bf16_computes_in_bf16_and_keeps_weights_in_float32(alone):
    model, dtypes = resnet(), set()
    model.fc.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    train(model, noise(), precision="bf16", **FIVE_STEPS)
    assert dtypes == {torch.bfloat16} and {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert 1e-5 < difference(model.state_dict(), alone[1]) < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 81}, "80.* 81"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"lr": -1}, "lr is -1"),
        ({"lr": math.inf}, "lr is inf"),
        ({"freeze_batchnorm": "False"}, "freeze_batchnorm is 'False'"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"precision": "fp8"}, "fp8.*bf16"),
        ({"compression": "gzip"}, "gzip.*bf16"),
    ],
)
def test_settings_that_cannot_be_are_named_with_the_cure(settings, message):
    with pytest.raises(ValueError, match=message):
        trained(**settings)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epoch", "no setting 'epoch': did you mean epochs?"),
        ("checkpoint_evry", "did you mean checkpoint_every?"),
        ("learning_rate", "no setting 'learning_rate': did you mean lr\\?"),
    ],
)
def test_a_setting_that_there_is_not_is_named_with_the_right_one(setting, message):
    with pytest.raises(TypeError, match=message):
        trained(**{setting: 3})


def test_a_loss_that_explodes_ends_training_before_it_is_saved(tmp_path):
    with pytest.raises(FloatingPointError, match="lower lr, 10000.0"):
        trained(lr=1e4, epochs=10, batch_size=16, checkpoint=tmp_path / "run.pt", checkpoint_every=1)
    assert all(tensor.isfinite().all() for tensor in load_checkpoint(tmp_path / "run.pt")["state_dict"].values())


def test_weights_that_another_rank_spoiled_are_not_saved(client, tmp_path):
    def half_spoiled():
        images, labels = noise(32).tensors
        images[:] = torch.nan if dist.get_rank() == 1 else 0
        return trained(TensorDataset(images, labels), checkpoint=tmp_path / "run.pt", checkpoint_every=1)

    with pytest.raises(FloatingPointError):
        daskrun.run(client, half_spoiled, n_workers=2)
    assert not (tmp_path / "run.pt").exists()


def test_a_model_without_a_head_cannot_train_it_alone():
    with pytest.raises(ValueError, match="Sequential has no head"):
        train(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5)), noise(), freeze_epochs=1)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The checkpoint of an interrupted run, to be left as it is."""
    checkpoint = tmp_path_factory.mktemp("stopped") / "run.pt"
    interrupted(checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        ({"lr": 0.02, "warmup_steps": 3}, "lr 0.1, now 0.02, warmup_steps 0, now 3"),
        ({"images": noise(81)}, "n_images 80, now 81"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_settings_that_differ(stopped, other, message):
    checkpoint = stopped
    with pytest.raises(ValueError, match=f"'{checkpoint}'.*{message}"):
        trained(checkpoint=checkpoint, **{**FIVE_STEPS, **other})


def test_a_checkpoint_of_another_model_is_refused_with_the_weight_that_differs(stopped):
    model = resnet()
    model.fc = nn.Linear(16, 7)
    with pytest.raises(ValueError, match=f"(?s)'{stopped}'.*another model.*fc.weight.*Delete it"):
        trained(model=model, checkpoint=stopped, **FIVE_STEPS)


def test_a_checkpoint_that_training_did_not_write_is_refused_and_kept(tmp_path):
    checkpoint = tmp_path / "run.pt"
    save_checkpoint(checkpoint, arch="resnet18", num_classes=5, state_dict=resnet().state_dict())
    with pytest.raises(ValueError, match=f"'{checkpoint}'"):
        trained(checkpoint=checkpoint)
    assert load_checkpoint(checkpoint)["arch"] == "resnet18"


def test_all_ranks_resume_from_what_rank_0_reads_also_if_another_sees_it_late(client, tmp_path):
    def with_own(*checkpoints):
        return trained(checkpoint=checkpoints[dist.get_rank()], checkpoint_every=2, check_every=1, **FIVE_STEPS)[0]

    interrupted(tmp_path / "resumed.pt")
    paths = tmp_path / "resumed.pt", tmp_path / "unseen.pt"
    numbers = daskrun.run(client, with_own, *paths, n_workers=2, time_limit=240)
    assert [of_rank["resumed_at"] for of_rank in numbers] == [2, 2] and not paths[1].exists()
    with pytest.raises(ValueError, match="checkpoint: .*False"):
        daskrun.run(client, with_own, paths[0], None, n_workers=2, time_limit=240)


@pytest.mark.parametrize("where", ["disk", "S3"])
def test_a_checkpoint_has_one_run_at_a_time_and_a_killed_one_blocks_nobody(
    where, client, tmp_path, request, monkeypatch
):
    def trains(checkpoint, waits):
        os.environ |= account  # of S3

        def after_step(*_):
            daskrun.log_metrics(pid=os.getpid())
            while waits and not Path(waits).exists():
                time.sleep(0.05)
            return {}

        return trained(checkpoint=checkpoint, checkpoint_every=1, after_step=after_step, **FIVE_STEPS)[0]

    checkpoint, account = tmp_path / "run.pt", {}
    if where == "S3":
        sign_in(monkeypatch, request.getfixturevalue("s3"))
        account = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        checkpoint = f"s3://workshop/models/{uuid.uuid4().hex}.pt"
    with daskrun.launch(client, trains, checkpoint, tmp_path / "go", n_workers=1) as first:
        pid = next(first.rows())["pid"]
        with pytest.raises(CheckpointInUse) as refused:
            daskrun.run(client, trains, checkpoint, None, n_workers=1)
        assert first.name in refused.value.owner and not first.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            first.result()
    assert daskrun.run(client, trains, checkpoint, None, n_workers=1)[0]["steps"] == 5
    numbers = daskrun.run(client, trains, checkpoint, None, n_workers=2)  # after one that ended
    assert [of_rank["resumed_at"] for of_rank in numbers] == [5, 5]
    if where == "disk":
        assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_second_thread_of_the_process_does_not_get_the_checkpoint_either(tmp_path):
    def again(*_):
        with pytest.raises(CheckpointInUse):
            trained(checkpoint=tmp_path / "run.pt", **FIVE_STEPS)
        return {}

    assert trained(checkpoint=tmp_path / "run.pt", after_step=again, **FIVE_STEPS)[0]["steps"] == 5
    assert trained(checkpoint=tmp_path / "run.pt", **FIVE_STEPS)[0]["resumed_at"] == 5


class LeavesOut(TensorDataset):
    """A dataset that leaves out an image it cannot read, the first."""

    def __getitems__(self, indices):
        return [self[index] for index in indices if index]


class EndsEarly(TensorDataset):
    """A dataset that raises what a DataLoader takes for the end of an epoch."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index else next(iter(()))


@pytest.mark.parametrize("dataset", [LeavesOut, EndsEarly])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_does_not_give_all_images_is_refused_in_training_and_evaluation(dataset, num_workers):
    images = dataset(*noise().tensors)
    with pytest.raises(ValueError, match="images"):
        train(resnet(), images, num_workers=num_workers, **FIVE_STEPS)
    with pytest.raises(ValueError, match="images"):
        evaluate(resnet(), images, num_workers=num_workers)


def test_ranks_do_not_part_where_a_dataset_leaves_an_image_out(client):
    dataset = LeavesOut(*noise().tensors)
    with pytest.raises(ValueError, match="7 images instead of 8"):
        daskrun.run(client, trained, dataset, kwargs=FIVE_STEPS, n_workers=2, time_limit=240)


@pytest.mark.weekly
def test_a_real_resnet_50_learns_six_breeds_of_real_photos(shared_folder, imagenet_weights):
    model, transform, _ = load_resnet(imagenet_weights)
    photos = ImageFolder(str(shared_folder / "data/stanford-dogs/Images"), transform, breeds=HELD_OUT[:6])
    train_set, val_set = train_val_split(photos, 0.25, seed=0)
    torch.manual_seed(0)
    with_new_head(model, 6)
    settings = {"freeze_epochs": 1, "batch_size": 8, "lr": 0.1, "precision": "auto"}
    assert train(model, train_set, val_set, **settings)["accuracy"] >= 0.9


@pytest.mark.gpu
def test_a_gpu_takes_the_same_steps_as_the_cpu(monkeypatch, tmp_path):
    on_gpu = trained(checkpoint=tmp_path / "run.pt", **FIVE_STEPS)
    assert {weight.device.type for weight in on_gpu[1].values()} == {"cuda"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = trained(**FIVE_STEPS)
    assert difference({name: weight.cpu() for name, weight in on_gpu[1].items()}, on_cpu[1]) < 1e-3
    again, _ = trained(checkpoint=tmp_path / "run.pt", **FIVE_STEPS)  # written on the GPU, read on the CPU
    assert again["resumed_at"] == 5


@pytest.mark.gpu
def test_two_ranks_that_share_a_gpu_end_with_the_weights_of_one_process():
    from distributed import Client, LocalCluster

    def on_gpu():
        numbers, weights = trained(val_set=noise(7), epochs=2, **FIVE_STEPS)
        return numbers, {name: weight.cpu() for name, weight in weights.items()}

    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**settings) as cluster, Client(cluster) as client:
        job = daskrun.launch(client, on_gpu, n_workers=2, backend="gloo", virtual_local_rank=True)
        (numbers, weights), _ = job.result()
    assert difference(weights, on_gpu()[1]) < 1e-3 and math.isfinite(numbers["loss"])
    assert (job.metrics().comm_s.dropna() > 0).all()


def test_a_head_that_contradicts_the_validation_set_is_refused_where_the_training_set_names_nothing():
    names = {"train_set": None, "val_set": {0: "pug", 1: "boxer"}, HEAD: {0: "boxer", 1: "pug"}}
    with pytest.raises(ValueError, match="label 0 is 'pug' in val_set, and 'boxer' in the model's head"):
        check_agree(names, lambda values: None)
