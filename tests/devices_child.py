"""One step's noise and clipped sum on several devices; run by test_devices.py in a process of its own.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.devices_child OUT.npz
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.clipping import small
from wtdp_jax.clipping import clipped_grad
from wtdp_jax.losses import next_token_loss
from wtdp_jax.noise import add_gaussian_noise, key_from_seed

DEVICES = 4
SHAPE = (64, 1250)
ENGINES = ("ghost", "bookkeeping")


def main(out: str) -> None:
    """Writes each array as every device holds it, and as one device computes it."""
    assert len(jax.devices()) == DEVICES
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    found = {"alone": _noise(jnp.zeros(SHAPE))["sum"]}
    for name, sharding in (("split", split), ("whole", whole)):
        noised = _noise(jax.device_put(jnp.zeros(SHAPE), sharding))["sum"]
        assert noised.sharding.is_equivalent_to(sharding, 2), noised.sharding
        found |= {f"{name} {s.device.id}": s.data for s in noised.addressable_shards}
    for engine in ENGINES:
        params, batch, grad_fn = _gradient(engine)
        found[f"{engine} alone"] = jnp.concatenate(_leaves(grad_fn(params, batch)))
        placed = jax.device_put(params, whole), jax.device_put(batch, split)
        found[f"{engine} split"] = jnp.concatenate(_leaves(grad_fn(*placed)))
    np.savez(out, **{name: np.asarray(value) for name, value in found.items()})


def _noise(zeros: Any) -> Any:
    """Noise of one step alone, in a compiled program that keeps the leaf where it is."""
    noise = add_gaussian_noise(1.0, key_from_seed(3, "noise"))
    update = jax.jit(lambda u, s: noise.update(u, s)[0], out_shardings={"sum": zeros.sharding})
    return update({"sum": zeros}, noise.init(None))


def _gradient(engine: Any) -> tuple[Any, Any, Any]:
    """A tied model, a batch of two rows a device, and their compiled clipped sum."""
    model = small.gpt2(tie=True)
    batch = small.token_batch(2 * DEVICES, dtype=jnp.float32)
    params = small.random_params(model, batch["ids"], dtype=jnp.float32)
    grad_fn = clipped_grad(next_token_loss(model), engine=engine, l2_clip_norm=0.5)
    return params, batch, jax.jit(lambda p, b: grad_fn(p, b)[0])


def _leaves(tree: Any) -> list[Any]:
    return [leaf.ravel() for leaf in jax.tree.leaves(tree)]


if __name__ == "__main__":
    main(sys.argv[1])
