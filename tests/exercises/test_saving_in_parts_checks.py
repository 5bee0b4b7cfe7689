"""The deep dive about saving in parts: wrong answers get a hint, never a traceback, and right ones pass."""

import torch
import torch.distributed.checkpoint as dcp
from answers import judged
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from workshop_utils.exercises import saving_in_parts


def resume_both(path, model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def resume_as_the_notebook_does(path, model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return state["step"]


def resume_one_by_one(path, model, optimizer):
    state = {"model": get_model_state_dict(model), "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    moments = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(moments, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, moments["optimizer"])
    return torch.tensor(state["step"])


def resume_with_a_new_optimizer(path, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def resume_after_a_step_of_zero(path, model, optimizer):
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # makes the moments
    return resume_with_a_new_optimizer(path, model, optimizer)


def resume_the_model_alone(path, model, optimizer):
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    return state["step"]


def resume_without_set_state_dict(path, model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    dcp.load(state, checkpoint_id=path)  # fills the tensors in place
    return state["step"]


def resume_with_the_rate_by_hand(path, model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": 0}
    dcp.load(state, checkpoint_id=path)
    optimizer.param_groups[0]["lr"] = state["optimizer"]["param_groups"][0]["lr"]
    return state["step"]


def resume_without_the_model(path, model, optimizer):
    state = {"step": 0}
    dcp.load(state, checkpoint_id=path)
    return state["step"]


test_resume = judged(
    lambda resume, one_rank: saving_in_parts.check_resume(resume, None),
    (resume_both, "Correct"),
    (resume_as_the_notebook_does, "Correct"),
    (resume_one_by_one, "Correct"),
    (resume_with_the_rate_by_hand, "Correct"),
    (resume_without_set_state_dict, "learning rate is a new optimizer's"),
    (resume_with_a_new_optimizer, "moments are still those of a new optimizer"),
    (resume_after_a_step_of_zero, "the checkpoint has their names"),
    (resume_the_model_alone, "moments and its learning rate"),
    (resume_without_the_model, "does not have the saved weights"),
    (lambda *given: resume_both(*given) and None, "returned None"),
    (lambda path, model, optimizer: dcp.load({"weights": model.state_dict()}, checkpoint_id=path), "Missing key"),
)
