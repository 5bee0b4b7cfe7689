"""The check of the deep dive about similar dogs."""

import numpy as np

from workshop_utils.exercises import Function, exercise, expect, passed, shown

COSINES = (1.0, 0.999, 0.96, 0.6, -0.8)  # of five pictures with the first one
RIGHT = [(0, 1), (0, 2), (1, 2)]  # above 0.95


@exercise
def check_near_copies(near_copies: Function) -> None:
    """Check the pairs among five pictures, three of which are alike."""
    angles = np.arccos(COSINES)
    pairs = near_copies(np.stack([np.cos(angles), np.sin(angles)], axis=1), 0.95)
    expect(isinstance(pairs, list), f"near_copies should return a list, not {shown(pairs)}.")
    expect(
        all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs),
        f"each pair should be a tuple (i, j), and the list is {shown(pairs)}.",
    )
    expect(all(i != j for i, j in pairs), "a picture is paired with itself: leave the diagonal out.")
    once = {(min(pair), max(pair)) for pair in pairs}
    expect(len(once) == len(pairs), "there are pairs twice, as (i, j) and as (j, i): take one half of the matrix.")
    expect(once >= set(RIGHT), f"of five pictures, the first three are alike, and you found {shown(sorted(pairs))}.")
    expect(once == set(RIGHT), f"{shown(sorted(once - set(RIGHT)))} aren't above the threshold.")
    expect(set(pairs) == once, "write each pair with the smaller index first.")
    passed("Three pairs among five pictures, each of them once.")
