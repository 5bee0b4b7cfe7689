"""Checks of notebook 04 · Parallel inference."""

import pandas as pd

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_confusion(answer: Answer, frame: pd.DataFrame) -> None:
    expect(answer is not None, "confusion is still None.")
    expect(isinstance(answer, tuple) and len(answer) == 2, "confusion should be a tuple (breed, prediction).")
    counts = frame[frame.correct.eq(False).fillna(False)].value_counts(["breed", "prediction"])
    expect(answer in counts.index, f"{answer!r} never happened in `seen`: (breed, prediction), in this order.")
    expect(counts[answer] == counts.max(), f"{answer!r} is there {counts[answer]} time(s); another is commoner.")
    passed(f"{answer[0]}, taken for {answer[1]}: {counts.max()} of them.")


@exercise
def check_bad_files(answer: Answer, paths: list[str]) -> None:
    expect(answer is not None, "bad is still None.")
    expect(isinstance(answer, pd.DataFrame), "bad should be a DataFrame, some of the rows that classify returned.")
    expect({"path", "error"} <= set(answer), "bad should have all the columns of classify.")
    expect(len(answer) < len(paths), "these are all the rows; keep those where error is not missing.")
    expect(len(answer) and answer.error.notna().all(), "use error.notna() to choose the rows.")
    expect({path.split("/")[-1] for path in answer.path} == {"empty.jpg", "letter.jpg"}, "there are other bad files.")
    passed(f"{len(answer)} bad files named, {len(paths) - len(answer)} classified all the same.")
