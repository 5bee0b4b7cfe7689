"""Notebook 11: wrong answers get a hint, never a traceback, and right ones pass in any sensible form."""

import pytest
import torch
from answers import judged
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from workshop_utils.exercises import larger_models


def sharded(parts=lambda model: model.body, *, root="last", **settings):
    """Return a `shard_evenly` that is right by default; its arguments bring in mistakes."""

    def shard(model, mesh):
        roots = [model] if root else []
        units = [*parts(model), *roots] if root == "last" else [*roots, *parts(model)]
        for unit in units:
            fully_shard(unit, mesh=mesh, **({} if unit is model else settings))

    return shard


def with_weights(model):
    return [part for part in [*model.modules()][:0:-1] if next(part.parameters(recurse=False), None) is not None]


def in_slices(model):
    return [model.body[:3], model.body[3:]]


def in_bf16_first(model, mesh):
    sharded()(model.to(torch.bfloat16), mesh)


def and_halve_it(model, mesh):
    sharded()(model, mesh)
    model.body.register_forward_hook(lambda module, inputs, outputs: outputs / 2)


def with_a_unit_of_both_ends(model, mesh):
    sharded(lambda model: [*model.body, [model.first, model.last]])(model, mesh)


def and_keep_gradients_apart(model, mesh):
    sharded()(model, mesh)
    model.set_requires_gradient_sync(False)


def and_double_gradients(model, mesh):
    sharded()(model, mesh)
    model.set_gradient_divide_factor(0.5)


def and_freeze_the_body(model, mesh):
    sharded()(model, mesh)
    model.body.requires_grad_(False)


test_shard_evenly = pytest.mark.smoke(
    judged(
        lambda shard, one_rank: larger_models.check_shard_evenly(shard, None),
        (sharded(), "Correct"),
        (sharded(lambda model: [*model.body, model.first, model.last]), "Correct"),  # the ends as units of their own
        (sharded(lambda model: model.children()), "'body' gathers"),
        (with_a_unit_of_both_ends, "Correct"),
        (sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "Correct"),
        (sharded(reshard_after_forward=False), "a unit stays gathered after its forward pass"),
        (sharded(lambda model: [[*model.body[:2]], *model.body[2:]]), r"'body\.0 and body\.1' gathers"),
        (sharded(lambda model: model.body[1:-1]), "make one of each block first"),
        (sharded(lambda model: [*model.body[:2], *model.body[3:]]), r"no unit was made of body\.2"),
        (sharded(in_slices), "new nn.Sequential"),
        (sharded(in_slices, root=None), "new nn.Sequential"),
        (sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "computes in torch.bfloat16"),
        (in_bf16_first, "computes in torch.bfloat16"),
        (sharded(lambda model: [model.first, *model.body, model.last], root=None), "model itself is no unit"),
        (sharded(root="first"), "begin with the inner ones"),
        (sharded(root=None), "first.weight.*whole"),
        (lambda model, mesh: None, "no part of the model is sharded"),
        (sharded(with_weights), "units: each costs messages"),
        (and_halve_it, "other answers than before"),
        (sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)), r"not those .*, in body\.0"),
        (and_keep_gradients_apart, "no gradient to first.weight"),
        (and_double_gradients, r"gradients are not those .*, in first\.weight and"),
        (and_freeze_the_body, r"no gradient is asked for body\.0\.wide\.weight and"),
        (sharded(lambda model: [*model.body, *model.body]), "called twice on the same module"),
    )
)


def test_several_modules_of_one_unit_count_once(one_rank, capsys):
    larger_models.check_shard_evenly(with_a_unit_of_both_ends, None)
    assert "8 units" in capsys.readouterr().out  # six blocks, both ends, and the model
