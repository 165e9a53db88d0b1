"""Repeating a batch without the rows that would spoil its sum.

A row whose gradient is not finite spoils a sum that is formed in a backward pass, whatever its factor: 0 x
NaN is NaN. Only the pass itself tells which rows these are. So where there are any, it runs again with them
replaced.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wtdp_jax.clipping import rows
from wtdp_jax.clipping.job import Job, Outcome


class _State(NamedTuple):
    """What a round hands on: whether it is the last, which rows are left out, and what has come out."""

    settled: Array
    left_out: Array
    outcome: Outcome


def until_settled(job: Job, one_round: Callable[[Job], Outcome]) -> Outcome:
    """The outcome of the first round that no row spoils; losses and norms are of all rows.

    Each other round leaves out one more row at least, so there are at most B + 1; where all rows are fine,
    one.

    Args:
        job: the job.
        one_round: gives a job's outcome. A row that spoils it has an infinite norm; whether it does may
            depend on nothing but itself. A round in which no row counts gives a sum of zeros.
    """

    def next_round(state: _State) -> _State:
        batch = rows.replace(job.batch, state.left_out)
        outcome = one_round(dataclasses.replace(job, batch=batch, is_padding=state.left_out))
        spoils = jnp.isinf(outcome.norm) & ~state.left_out
        known = state.left_out & ~job.is_padding
        return _State(
            settled=~jnp.any(spoils),
            left_out=state.left_out | spoils,
            outcome=Outcome(
                clipped_sum=outcome.clipped_sum,
                loss=jnp.where(known, state.outcome.loss, outcome.loss),
                norm=jnp.where(known, state.outcome.norm, outcome.norm),
            ),
        )

    start = _State(settled=jnp.zeros((), bool), left_out=job.is_padding, outcome=job.zero_outcome())
    return jax.lax.while_loop(lambda state: ~state.settled, next_round, start).outcome
