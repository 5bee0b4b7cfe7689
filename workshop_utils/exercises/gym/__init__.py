"""A gym for finding faults: a training job with a hidden fault or none, and the looks that an engineer has at work.

>>> case = gym.start(client, seed=3)  # doctest: +SKIP
>>> print(case.explain())  # doctest: +SKIP
>>> case.diagnose(fault="slow rank", rank=1, step=12, cure="another machine")  # doctest: +SKIP
"""

from workshop_utils.exercises.gym.case import Case, start, today
from workshop_utils.exercises.gym.faults import CURES, FAULTS

__all__ = ["CURES", "FAULTS", "Case", "start", "today"]
