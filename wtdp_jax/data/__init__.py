"""Tasks, their rows, and the arrays a model is trained on.

::

    task = load_task("sst2")
    train = encode(load_split(task, "train", data_dir), task, load_tokenizer(model_folder), max_length=1024)
"""

from wtdp_jax.data.encoding import Encoded, Objective, encode, encode_text, label_token_ids
from wtdp_jax.data.known_tasks import TASK_NAMES, load_task
from wtdp_jax.data.sources import load_split
from wtdp_jax.data.tasks import HubSource, Rows, Split, Task, held_out_size, hold_out
from wtdp_jax.data.tokenizer import load_tokenizer

__all__ = [
    "TASK_NAMES",
    "Encoded",
    "HubSource",
    "Objective",
    "Rows",
    "Split",
    "Task",
    "encode",
    "encode_text",
    "held_out_size",
    "hold_out",
    "label_token_ids",
    "load_split",
    "load_task",
    "load_tokenizer",
]
