import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from wtdp_jax.batching import Batcher
from wtdp_jax.evaluate import Evaluator, padded_batches


class _Table(nn.Module):
    """A stand-in for a language model: an example's logits are the row that its token names."""

    @nn.compact
    def __call__(self, ids, positions):
        logits = self.param("logits", nn.initializers.zeros, (3, 3))
        return jnp.take_along_axis(logits[ids], positions[:, None, None], axis=1)[:, 0]


def test_padding_is_counted_nowhere():
    # Label words 2 and 0; rows of logits over a vocabulary of 3.
    params = {"logits": jnp.array([[0.0, 9.0, 1.0], [1.0, 9.0, 0.0], [0.0, 9.0, 2.0]])}
    data = {
        "ids": np.array([[0], [1], [2], [1], [1]], np.int32),
        "positions": np.zeros(5, np.int32),
        # Predicted by the larger of logits 2 and 0: labels 0, 1, 0, 1, 1.
        "labels": np.array([0, 1, 1, 1, 0], np.int32),
        "value": np.array([1.0, 2.0, 3.0, 4.0, 100.0], np.float32),
    }
    for batch_size in (1, 2, 4, 5, 8):
        batches = Batcher(arrays=data, physical_batch_size=batch_size, length_multiple=None)
        evaluate = Evaluator(_Table(), lambda params, batch: batch["value"], (2, 0), batches)
        evaluation = evaluate(params)
        assert evaluation.loss == 110 / 5 and evaluation.accuracy == 3 / 5
        assert evaluate.example_values._cache_size() == 1


def test_padded_batches_keep_order_and_shape():
    data = {"a": np.arange(5), "b": np.arange(10).reshape(5, 2)}
    batches = list(padded_batches(data, 2))
    assert [batch["b"].shape for batch, _ in batches] == [(2, 2)] * 3
    real = np.concatenate([batch["a"][~is_padding] for batch, is_padding in batches])
    np.testing.assert_array_equal(real, data["a"])
