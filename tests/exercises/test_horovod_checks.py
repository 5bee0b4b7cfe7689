"""Notebook 09: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

from functools import partial

import pytest
import torch
from answers import judged

from workshop_utils.exercises import NotYet, horovod
from workshop_utils.horovod import available


@pytest.fixture
def without_horovod(monkeypatch):
    monkeypatch.setattr(horovod, "available", lambda: False)


def unequal(model, of=torch.nn.Module.state_dict):
    """An answer, which is right unless `of` gives it something else to compare."""
    import horovod.torch as hvd

    mine = of(model)
    of_rank_0 = hvd.broadcast_object(mine, root_rank=0, name="state")
    return [name for name in mine if not torch.equal(mine[name], of_rank_0[name])]


def parameters(model):
    return {name: weight.detach() for name, weight in model.named_parameters()}


def sums(model):
    return {name: value.double().sum().round(decimals=3) for name, value in model.state_dict().items()}


def unequal_by_one_tensor_after_another(model):
    import horovod.torch as hvd

    for name, mine in model.state_dict().items():
        if not torch.equal(mine, hvd.broadcast(mine, 0, name=name)):
            yield name


def unequal_in_place(model):
    import horovod.torch as hvd

    mine = {name: value.clone() for name, value in model.state_dict().items()}
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return [name for name, value in model.state_dict().items() if not torch.equal(value, mine[name])]


def unequal_in_place_without_a_copy(model):
    import horovod.torch as hvd

    mine = model.state_dict()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return [name for name, value in model.state_dict().items() if not torch.equal(value, mine[name])]


def unequal_by_what_the_threads_lack(model):
    import horovod.torch as hvd

    mine = model.state_dict()
    handles = {name: hvd.broadcast_async(value, 0, name=name) for name, value in mine.items()}
    return [name for name, value in mine.items() if not torch.equal(value, hvd.synchronize(handles[name]))]


def buffers(model):
    return dict(model.named_buffers())


def unequal_on_any_rank(model):
    import horovod.torch as hvd

    states = hvd.allgather_object(model.state_dict(), name="states")
    return [name for name in states[0] if any((state[name] != states[0][name]).any() for state in states)]


test_unequal = pytest.mark.smoke(
    judged(
        lambda answer, without_horovod: horovod.check_unequal(answer, None),
        (unequal, "Correct"),
        (unequal_by_one_tensor_after_another, "Correct"),
        (unequal_in_place, "Correct"),
        (unequal_in_place_without_a_copy, "overwrites this rank's tensors"),
        (unequal_by_what_the_threads_lack, "not built here, has no 'broadcast_async'"),
        (lambda model: None, "a list of names, not None"),
        (lambda model: [model.state_dict()[name] for name in unequal(model)] or ["0.weights"], "no names"),
        (partial(unequal, of=parameters), "no parameters"),
        (partial(unequal, of=sums), "number by number"),
        (partial(unequal, of=buffers), "every tensor of model.state_dict"),
        (unequal_on_any_rank, "rank 0 is not unlike itself"),
        (lambda model: list(model.state_dict()) if unequal(model) else [], "equal to rank 0's"),
    )
)


def by_the_local_rank(answer):
    """Return an answer that only Horovod itself can judge: the threads have no local_rank."""

    def judged_by_horovod(model):
        import horovod.torch as hvd

        assert hvd.local_rank() in (0, 1)
        return answer(model)

    return judged_by_horovod


@pytest.mark.skipif(not available(), reason="Horovod is not built: make horovod")
@pytest.mark.timeout(240)
def test_on_a_cluster_right_answers_pass_and_horovod_has_the_last_word(client, capsys):
    for right in (unequal, by_the_local_rank(unequal)):
        horovod.check_unequal(right, client)
    assert capsys.readouterr().out.count("Correct. ") == 2
    with pytest.raises(NotYet, match="no parameters"):
        horovod.check_unequal(by_the_local_rank(partial(unequal, of=parameters)), client)
