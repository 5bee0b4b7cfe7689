"""The deep dive about similar dogs: wrong answers get a hint, and right ones pass in any sensible form."""

import numpy as np
from answers import judged

from workshop_utils.exercises.similar_dogs import check_near_copies


def above(embeddings, threshold):
    return np.argwhere(embeddings @ embeddings.T > threshold)


def right(embeddings, threshold):
    return [(i, j) for i, j in above(embeddings, threshold) if i < j]


test_near_copies = judged(
    check_near_copies,
    (right, "Correct"),
    (lambda *given: [(int(i), int(j)) for i, j in right(*given)][::-1], "Correct"),
    (lambda *given: above(*given).tolist(), "tuple"),
    (lambda *given: above(*given), "a list"),
    (lambda *given: list(map(tuple, above(*given))), "diagonal"),
    (lambda *given: [(i, j) for i, j in above(*given) if i != j], "twice"),
    (lambda *given: [(i, j) for i, j in above(*given) if i > j], "smaller index first"),
    (lambda *given: right(*given)[1:], "first three"),
    (lambda embeddings, threshold: right(embeddings, 0.5), "threshold"),
)
