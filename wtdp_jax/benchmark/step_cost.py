"""What a training step costs: its programs, compiled for shapes alone or run on arrays.

`gradient` is a sum of gradients alone. `step` is one program of gradient, noise, division and adam, which
writes parameters and optimizer state over the old ones; its memory includes both. A non-private step has no
noise.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wtdp_jax import compiled
from wtdp_jax.noise import add_gaussian_noise, divide_by

Params = Any
GradFn = Callable[..., tuple[Params, Any]]
"""(params, batch, is_padding) -> (sum of gradients, values of each example)."""

# Costs don't depend on it; so small that thousands of noisy steps leave the parameters finite.
_LEARNING_RATE = 1e-6


class State(NamedTuple):
    """The arguments of a step, as arrays or as shapes.

    Attributes:
        params: the trained parameters.
        opt_state: of `optimizer`.
        batch: a tree of (B, ...) arrays.
        is_padding: (B,) bool.
        key: of the noise.
    """

    params: Params
    opt_state: Any
    batch: Any
    is_padding: Any
    key: Any


class Programs(NamedTuple):
    """Compiled functions.

    Attributes:
        gradient: of (params, batch, is_padding).
        step: of a `State`'s fields; returns parameters and optimizer state.
    """

    gradient: Any
    step: Any


def optimizer(batch_size: int, noise_key: Any, *, private: bool = True) -> optax.GradientTransformation:
    """Noise of standard deviation 1, division, adam.

    Args:
        batch_size: the expected one, by which the sum is divided.
        noise_key: the noise's key.
        private: whether there is noise; the state is of the same form without it.
    """
    noise = add_gaussian_noise(1.0, noise_key)
    if not private:
        noise = optax.GradientTransformation(noise.init, lambda updates, state, params=None: (updates, state))
    return optax.chain(noise, divide_by(batch_size), optax.adam(_LEARNING_RATE))


def initial_state(params: Params, batch: Any, noise_key: Any) -> State:
    """The state of a first step on a batch without padding."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    return State(params, optimizer(rows, noise_key).init(params), batch, jnp.zeros(rows, bool), noise_key)


def compile_gradient(grad_fn: GradFn, state: State) -> Any:
    """Compiles a gradient for a state's shapes; allocates nothing."""
    return jax.jit(grad_fn).lower(state.params, state.batch, state.is_padding).compile()


def compile_step(grad_fn: GradFn, state: State, *, private: bool) -> Any:
    """Compiles a whole step for a state's shapes; allocates nothing."""
    update = _update(state, private=private)

    def step(params: Params, opt_state: Any, batch: Any, is_padding: Any, key: Any) -> tuple[Params, Any]:
        return update(params, opt_state, grad_fn(params, batch, is_padding)[0], key)

    return jax.jit(step, donate_argnums=(0, 1)).lower(*state).compile()


def planned(programs: Programs) -> dict[str, int | None]:
    """Operations and temporary bytes of the gradient, and all bytes of the step, as the compiler plans them.

    Operations are None where products are a library's, as on a GPU, and can't be counted.
    """
    return {
        "flops": compiled.countable_matmul_flops(programs.gradient),
        "temp_bytes": compiled.memory(programs.gradient).temporaries,
        "step_bytes": compiled.memory(programs.step).total,
    }


class Arrays:
    """One model's arrays, for all its programs: each step takes the parameters that the last one left."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state.params)
        self._optimizer = jax.jit(_update(state, private=False), donate_argnums=(0, 1))

    def gradient(self, programs: Programs) -> Any:
        """Runs a gradient alone."""
        return programs.gradient(self.state.params, self.state.batch, self.state.is_padding)

    def step(self, programs: Programs) -> Any:
        """Runs a whole step."""
        return self._keep(programs.step(*self.state))

    def noise(self) -> Any:
        """Runs the noise alone."""
        self._total = _noised(self._total, self.state.key)
        return self._total

    def optimizer(self) -> Any:
        """Runs division and adam alone."""
        state = self.state
        return self._keep(self._optimizer(state.params, state.opt_state, self._total, state.key))

    def _keep(self, outputs: tuple[Params, Any]) -> tuple[Params, Any]:
        self.state = self.state._replace(params=outputs[0], opt_state=outputs[1])
        return outputs


def device_peak(call: Callable[[], Any]) -> int | None:
    """The device's peak in bytes, if it reports one and this call raised it; a lower one leaves no trace."""

    def peak() -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    if (before := peak()) == 0:
        return None
    jax.block_until_ready(call())
    return after if (after := peak()) > before else None


def _update(state: State, *, private: bool) -> Callable[..., tuple[Params, Any]]:
    """(params, opt_state, sum, key) -> (params, opt_state)."""

    def update(params: Params, opt_state: Any, total: Params, key: Any) -> tuple[Params, Any]:
        chain = optimizer(state.is_padding.shape[0], key, private=private)
        updates, opt_state = chain.update(total, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update


@functools.partial(jax.jit, donate_argnums=0)
def _noised(total: Params, key: Any) -> Params:
    noise = add_gaussian_noise(1.0, key)
    return noise.update(total, noise.init(total))[0]
