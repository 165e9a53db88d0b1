"""What tests do to a model folder."""

import json

import jax
import numpy as np
from safetensors.numpy import load_file, save_file


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(actual))


def edit_config(folder, **changes):
    """Changes entries of config.json; None takes one away."""
    path = folder / "config.json"
    entries = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))


def edit_tensors(folder, edit):
    """Rewrites the weights by a function on the dict of tensors, in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
