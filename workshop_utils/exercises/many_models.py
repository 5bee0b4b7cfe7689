"""Checks of notebook 08 · Many models."""

import math

import torch

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_survivors(function: Answer) -> None:
    six = {"a": 2.5, "b": 2.1, "c": 2.9, "d": 2.3, "e": math.inf, "f": 3.5}
    for losses, factor in [(six, 2), (six, 3), (six, 4), ({"a": 10.0, "b": 9.0}, 2), ({"a": 2.5}, 3)]:
        left = function(dict(losses), factor)
        expect(left is not None, "survivors returns None; return a list of names.")
        expect(not isinstance(left, str), f"survivors returns the text {left!r}; put the names into a list.")
        left = list(left)
        about = f"of {losses}, with factor {factor}, {left} survive"
        expect(left, f"{about}: at least one has to.")
        expect(set(left) <= set(losses), f"{about}: return the names, the keys of the dict.")
        n_left = max(1, len(losses) // factor)
        expect(len(left) == len(set(left)) == n_left, f"{about}: it should be {n_left} of {len(losses)}.")
        gone = [losses[name] for name in losses if name not in left]
        expect(max(losses[name] for name in left) <= min(gone, default=math.inf), f"{about}: a smaller loss is better.")
    passed("The best go on, and never nobody.")


@exercise
def check_at_temperature(function: Answer) -> None:
    for values in ([2.0, 1.0, -1.0], [0.0, 0.0], [300.0, 299.0, 0.0]):
        logits = torch.tensor(values)
        for temperature in (1.0, 0.5, 3.0):
            answer = function(logits.clone(), temperature)
            expect(answer is not None, "at_temperature returns None; return the probabilities.")
            found = torch.as_tensor(answer, dtype=torch.float32)
            expect(found.shape == logits.shape, f"its shape is {tuple(found.shape)}, not {tuple(logits.shape)}.")
            expect(not found.isnan().any(), "large logits overflow: use softmax, which takes care of them.")
            expect(found.min() >= 0 and abs(found.sum() - 1) < 1e-3, "probabilities are at least 0 and sum to 1.")
            swapped = torch.allclose(found, (logits * temperature).softmax(0), atol=1e-3)
            right = torch.allclose(found, (logits / temperature).softmax(0), atol=1e-3)
            expect(right or not swapped, "that is the other way round: a low temperature makes the likely likelier.")
            expect(right, "divide the logits by the temperature first, and then take the softmax.")
    passed("Below 1 the likely gets likelier; above 1 all come closer.")
