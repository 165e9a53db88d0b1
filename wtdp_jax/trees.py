"""Paths, splitting and joining of nested parameter dicts."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Params = Any


def leaf_paths(tree: Params) -> dict[str, Any]:
    """Leaves by path, "h/c_fc/kernel", in the tree's order; None is no leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_path = {_path(keys): leaf for keys, leaf in leaves}
    if len(by_path) < len(leaves):
        raise ValueError("keys of params must not contain '/': two leaves have one path")
    return by_path


def parent(path: str) -> str:
    """The path without its last part: a leaf's module."""
    return path.rpartition("/")[0]


def leaf_name(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


def map_with_path(function: Callable[[str, Any], Any], tree: Params) -> Params:
    """The tree with each leaf replaced by ``function(path, leaf)``."""
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: function(_path(keys), leaf), tree)


def partition(params: Params, trainable: Callable[[str], bool] | None) -> tuple[Params, Params]:
    """Splits params into what is trained and what is frozen.

    Args:
        params: nested dicts of arrays.
        trainable: says of a leaf's path, "h/c_fc/kernel", whether it is trained. None: all are.

    Returns:
        Two trees like params, with None in each where the other has the leaf. JAX and optax see no leaf in a
        None, so gradients, noise and optimizer state exist for the trained leaves alone.

    Raises:
        ValueError: when no leaf is trainable.
    """
    chosen = trainable or (lambda path: True)
    trained = map_with_path(lambda path, leaf: leaf if chosen(path) else None, params)
    if not jax.tree.leaves(trained):
        raise ValueError(f"trainable must choose at least one leaf, got none of {list(leaf_paths(params))}")
    return trained, map_with_path(lambda path, leaf: None if chosen(path) else leaf, params)


def merge(first: Params, second: Params) -> Params:
    """The inverse of `partition`: each leaf from the tree that has it."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda x: x is None)


def _path(keys: tuple) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def insert(tree: Params, additions: dict[str, dict[str, Any]], path: str = "") -> Params:
    """The tree with entries added to the dicts at given paths; where there is no dict, nothing is added.

    Args:
        tree: nested dicts.
        additions: path of a dict -> entries to add to it.
        path: of `tree` itself.
    """
    if not isinstance(tree, Mapping) or not additions:
        return tree
    inner = {key: insert(value, additions, f"{path}/{key}".lstrip("/")) for key, value in tree.items()}
    return inner | additions.get(path, {})
