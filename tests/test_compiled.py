"""Operations and memory of compiled programs, against what they must be by hand."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from wtdp_jax import compiled

Array = jax.Array


@pytest.fixture(autouse=True)
def optimized() -> Iterator[None]:
    """As programs are compiled for a run."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def _compile(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Any:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function, **options).lower(*arguments).compile()


def _flops(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    return compiled.matmul_flops(_compile(function, *shapes))


def _powers(times: int) -> Callable[[Array, Array], Array]:
    """x w ... w, in a loop."""
    return lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=times)[0]


def test_a_dot() -> None:
    # 3 x 7 entries, each a sum of 5 products: 5 multiplications and 5 additions.
    assert _flops(jnp.dot, (3, 5), (5, 7)) == 2 * 3 * 5 * 7


def test_a_large_dot() -> None:
    # Backends take such ones to other code than the smallest.
    assert _flops(jnp.dot, (300, 500), (500, 700)) == 2 * 300 * 500 * 700


def test_transposed_operands_contract_what_they_name() -> None:
    # x^T y^T for x (5, 3), y (7, 5).
    assert _flops(lambda x, y: x.T @ y.T, (5, 3), (7, 5)) == 2 * 3 * 5 * 7


def test_a_batched_dot() -> None:
    assert _flops(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (11, 3, 5), (11, 5, 7)) == 2 * 11 * 3 * 5 * 7


def test_dots_add_up() -> None:
    # (3 x 5)(5 x 7), and that by (7 x 2).
    assert _flops(lambda x, y, z: (x @ y) @ z, (3, 5), (5, 7), (7, 2)) == 2 * 3 * 5 * 7 + 2 * 3 * 7 * 2


def test_a_loop_counts_as_often_as_it_runs() -> None:
    assert _flops(_powers(9), (4, 8), (8, 8)) == 9 * 2 * 4 * 8 * 8


def test_nested_loops_multiply() -> None:
    def nested(x: Array, w: Array) -> Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(_powers(9)(x, w)), None), x, None, length=10)[0]

    assert _flops(nested, (4, 8), (8, 8)) == 10 * 9 * 2 * 4 * 8 * 8


def test_loops_of_one_body_each_count() -> None:
    def both(x: Array, w: Array) -> Array:
        return _powers(9)(jnp.tanh(_powers(9)(x, w)), w)

    assert _flops(both, (4, 8), (8, 8)) == 2 * 9 * 2 * 4 * 8 * 8


def test_a_loop_without_a_known_end_counts_once() -> None:
    def until(x: Array, w: Array) -> Array:
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ w, x)

    assert _flops(until, (4, 8), (8, 8)) == 2 * 4 * 8 * 8


def test_the_dearest_branch_counts() -> None:
    def either(flag: Array, x: Array, w: Array) -> Array:
        return jax.lax.cond(flag > 0, lambda: x @ w, lambda: x @ w @ w @ w)

    assert _flops(either, (), (4, 8), (8, 8)) == 3 * 2 * 4 * 8 * 8


def test_no_product_is_no_operation() -> None:
    assert _flops(lambda x: jnp.sum(jnp.exp(x) * 2), (40, 80)) == 0


def test_what_cannot_be_counted_is_refused() -> None:
    def convolve(x: Array, w: Array) -> Array:
        return jax.lax.conv(x, w, (1, 1), "SAME")

    with pytest.raises(ValueError, match="cannot count the matrix product convolution"):
        _flops(convolve, (1, 3, 9, 9), (4, 3, 3, 3))


def test_total_counts_each_byte_once() -> None:
    memory = compiled.Memory(arguments=10, outputs=7, temporaries=5, aliased=4)
    assert memory.total == 10 + 7 + 5 - 4


def test_memory_of_a_program() -> None:
    # 2^18 floats are 1 MiB: two arguments, and a result.
    memory = compiled.memory(_compile(jnp.add, (2**18,), (2**18,)))
    assert (memory.arguments, memory.outputs, memory.aliased) == (2 * 2**20, 2**20, 0)
    assert 3 * 2**20 <= memory.total < 3 * 2**20 + 2**12


def test_memory_of_a_donated_argument_counts_once() -> None:
    memory = compiled.memory(_compile(jnp.add, (2**18,), (2**18,), donate_argnums=0))
    assert (memory.arguments, memory.outputs, memory.aliased) == (2 * 2**20, 2**20, 2**20)
    assert 2 * 2**20 <= memory.total < 2 * 2**20 + 2**12


def test_temporaries_are_counted() -> None:
    # The sorted numbers, 1 MiB, must all be there before the first is multiplied by the last. (Products of
    # matrices won't do: what a library's fused ones hold between them is in no plan.)
    def function(x: Array) -> Array:
        ordered = jnp.sort(x)
        return jnp.sum(ordered * jnp.flip(ordered))

    memory = compiled.memory(_compile(function, (2**18,)))
    assert 2**20 <= memory.temporaries < 3 * 2**20
    assert memory.total == memory.arguments + memory.outputs + memory.temporaries
