"""A bag-of-words baseline: what a task yields to someone who ignores the order of words.

Dimension key: N examples, V words.
"""

import numpy as np
from jaxtyping import Float

from wtdp_jax.data import Encoded

_L2_PENALTY = 1e-3
_NEWTON_STEPS = 10


def bag_of_words_accuracy(train: Encoded, dev: Encoded) -> float:
    """Fits a logistic regression on the prompts' token counts and returns its accuracy on ``dev``.

    For two labels and a small vocabulary: it solves a system as large as the vocabulary.

    Raises:
      ValueError: if the task has not two labels.
    """
    if len(train.label_ids) != 2:
        raise ValueError(f"bag of words must have two labels to tell apart, got {len(train.label_ids)}")
    num_words = 1 + max(int(data.arrays["ids"].max()) for data in (train, dev))
    weights = _fit(_counts(train, num_words), train.arrays["labels"])
    predicted = _counts(dev, num_words) @ weights > 0
    return float(np.mean(predicted == dev.arrays["labels"]))


def _counts(data: Encoded, num_words: int) -> Float[np.ndarray, "N V"]:
    """How often each word stands in each prompt; the prompt's fixed words serve as the constant feature."""
    ids, positions = data.arrays["ids"], data.arrays["positions"]
    row, column = np.nonzero(np.arange(ids.shape[1]) <= positions[:, None])
    counts = np.zeros((len(ids), num_words))
    np.add.at(counts, (row, ids[row, column]), 1.0)
    return counts


def _fit(x: Float[np.ndarray, "N V"], y: np.ndarray) -> Float[np.ndarray, " V"]:
    """Minimizes the penalized logistic loss by Newton's method."""
    weights = np.zeros(x.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = 1 / (1 + np.exp(-x @ weights))
        gradient = x.T @ (p - y) / len(y) + _L2_PENALTY * weights
        hessian = (x.T * (p * (1 - p))) @ x / len(y) + _L2_PENALTY * np.eye(x.shape[1])
        weights -= np.linalg.solve(hessian, gradient)
    return weights
