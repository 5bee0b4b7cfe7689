"""The log of heads that notebook 07 compares: many rounds of a new head on features that were computed once.

    python benchmarks/heads.py [--rounds N]

A frozen network gives an image the same features in every epoch, so it sees each image once, and a round of training
takes a fraction of a second. The problem is that of notebook 06, with as many training images and 504 for validation.
`statistics` says which ones BatchNorm has in the frozen network: those stored with the weights ("stored"), or the mean
over the training images ("own"). `schedule` says what a rate means: the same in each step ("constant"), or the peak of
`train`'s warm-up and cosine ("warm-up, cosine"). A round draws first weights and an order of the images; all runs of
the round share them. The data are the sketches at dusk, or what WORKSHOP_DATA and WORKSHOP_WEIGHTS name; see notebook
01.
"""

from itertools import product

import click
import torch
from record import RESULTS, write_result
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from workshop_utils.photos import HELD_OUT, find_data, train_val_split
from workshop_utils.train import BATCHNORMS, learning_rate, prepare

PER_BREED, VAL_SHARE = 66, 42 / 66  # sketches; notebook 06 trains on as many of a breed, and validates on fewer
RATES = (0.003, 0.01, 0.03, 0.1)
EPOCHS, BATCH_SIZE, WARMUP_STEPS = 4, 32, 3  # as in benchmarks/runs.py
SCHEDULES = ("constant", "warm-up, cosine")
STATISTICS = ("stored", "own")


@click.command()
@click.option("--rounds", default=16, show_default=True, help="How often each head is trained.")
def main(rounds):
    source = find_data(PER_BREED, HELD_OUT, light="dusk")
    model, train_set, _ = prepare(source)
    train_set, val_set = train_val_split(train_set.dataset, VAL_SHARE, seed=0)
    runs = []
    for statistics in STATISTICS:
        if statistics == "own":
            estimate_anew(model, train_set)
        train_part, val_part = features(model, train_set), features(model, val_set)
        for round_ in range(rounds):
            for schedule, rate in product(SCHEDULES, RATES):
                accuracy = taught(train_part, val_part, schedule, rate, round_)
                run = {"round": round_, "statistics": statistics, "schedule": schedule, "lr": rate}
                runs.append(run | {"accuracy": round(accuracy, 4)})
    sizes = {"n_train": len(train_set), "n_val": len(val_set), "epochs": EPOCHS, "batch_size": BATCH_SIZE}
    sizes["warmup_steps"] = WARMUP_STEPS
    path = write_result("heads", {"data": source.noun, "rounds": rounds, **sizes, "runs": runs})
    print(f"written to {path.relative_to(RESULTS.parents[1])}: {len(runs)} runs")


@torch.no_grad()
def estimate_anew(model, images):
    """Set BatchNorm's statistics to the plain mean over batches of `images`."""
    for layer in model.modules():
        if isinstance(layer, BATCHNORMS):
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean
    model.train()
    for batch, _ in DataLoader(images, BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(0)):
        model(batch)


@torch.no_grad()
def features(model, images):
    """Return (features (n, 512), labels (n,)) of `images`: what the head is given."""
    head, model.fc = model.fc, torch.nn.Identity()
    batches = [(model.eval()(batch), labels) for batch, labels in DataLoader(images, 64)]
    model.fc = head
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def taught(train_part, val_part, schedule, rate, seed):
    """Train a new head; return its accuracy."""
    torch.manual_seed(seed)
    (x, y), (val_x, val_y) = train_part, val_part
    head = torch.nn.Linear(x.shape[1], len(HELD_OUT))
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    batches = [batch for _ in range(EPOCHS) for batch in torch.randperm(len(x)).split(BATCH_SIZE)]
    for step, batch in enumerate(batches):
        if schedule != "constant":
            optimizer.param_groups[0]["lr"] = learning_rate(step, len(batches), rate, BATCH_SIZE, WARMUP_STEPS)
        loss = cross_entropy(head(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (head(val_x).argmax(1) == val_y).float().mean().item()


if __name__ == "__main__":
    main()
