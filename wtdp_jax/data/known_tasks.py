"""The tasks that have a name, and the way to the user's own."""

from pathlib import Path

from wtdp_jax.data.task_file import read_task
from wtdp_jax.data.tasks import HubSource, Task


def _glue(name: str) -> HubSource:
    return HubSource(path="nyu-mll/glue", config=name)


_GLUE_TASKS = (
    Task(
        name="sst2",
        prompt="{sentence} It was",
        label_words={"0": " terrible", "1": " great"},
        folder="SST-2",
        hub=_glue("sst2"),
    ),
    Task(
        name="qnli",
        prompt="Question: {question} Sentence: {sentence} Answered:",
        label_words={"entailment": " yes", "not_entailment": " no"},
        folder="QNLI",
        hub=_glue("qnli"),
    ),
    Task(
        name="qqp",
        prompt="Question 1: {question1} Question 2: {question2} Same:",
        label_words={"0": " no", "1": " yes"},
        label_column="is_duplicate",
        folder="QQP",
        hub=_glue("qqp"),
    ),
)
_EMBEDDED = "reviews"

TASK_NAMES = (_EMBEDDED, *(task.name for task in _GLUE_TASKS))


def load_task(name: str) -> Task:
    """Returns a known task by its name, or the user's own from a JSON file (see ``read_task``).

    Args:
      name: one of ``TASK_NAMES``, or a path that ends in ``.json``.

    Raises:
      ValueError: if the task is not known, or the file is missing or not a valid task.
    """
    if name.endswith(".json"):
        return read_task(Path(name))
    if name == _EMBEDDED:
        from wtdp_jax import embedded  # Imported late: it is built from this package.

        return embedded.TASK
    for task in _GLUE_TASKS:
        if task.name == name:
            return task
    raise ValueError(f"task must be one of {', '.join(TASK_NAMES)} or a .json file, got {name!r}")
