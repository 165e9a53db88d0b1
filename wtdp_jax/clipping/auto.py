"""Chooses an engine by what the compiled programs of each would cost."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from wtdp_jax import compiled
from wtdp_jax.clipping.job import Job, Outcome

Engines = Mapping[str, Callable[[Job], Outcome]]

Chosen = Literal["bookkeeping", "ghost", "microbatched"]

CANDIDATES: tuple[Chosen, ...] = get_args(Chosen)
"""From the least operations, as a rule, to the least memory.

The last takes no more operations than the first, but its products are so small that they leave a device idle:
it is the last resort.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one engine would cost.

    Attributes:
        engine: its name.
        flops: operations of its matrix products; None where they cannot be counted.
        memory: bytes of its program: arguments, outputs and temporaries.
    """

    engine: Chosen
    flops: int | None
    memory: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The engine that was chosen; as text, why.

    Attributes:
        engine: its name.
        memory_budget: bytes that its program had to fit in.
        candidates: what there was to choose from.
    """

    engine: Chosen
    memory_budget: int
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        """One line."""
        told = "; ".join(_tell(candidate) for candidate in self.candidates)
        budget = f"{self.memory_budget / 1e9:.3g} GB"
        why = "the last resort" if self.engine == "microbatched" else "the fewest operations"
        return f"engine {self.engine}: {why} within {budget} ({told})"


def choose(job: Job, engines: Engines, memory_budget: int | None) -> Choice:
    """The engine, of those whose program fits, that takes the fewest operations on the whole batch at once.

    Args:
        job: the job; only shapes and types of its arrays matter.
        engines: all engines by name.
        memory_budget: bytes for the program's arguments, results and temporaries; parameters count, optimizer
            state doesn't. None: what the device, or on a CPU the machine, has.

    Raises:
        ValueError: when none fits.
    """
    budget = compiled.device_memory() if memory_budget is None else memory_budget
    candidates = tuple(_cost(name, engines[name], job) for name in CANDIDATES)
    fitting = [candidate for candidate in candidates if candidate.memory <= budget]
    if not fitting:
        told = "; ".join(_tell(candidate) for candidate in candidates)
        raise ValueError(f"no engine fits in memory_budget={budget}: {told}")
    best = min(fitting, key=lambda c: (c.engine == "microbatched", c.flops or 0))
    return Choice(engine=best.engine, memory_budget=budget, candidates=candidates)


def _cost(name: Chosen, engine: Callable[[Job], Outcome], job: Job) -> Candidate:
    arrays = (job.trained, job.frozen, job.batch, job.is_padding)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), arrays)

    def run(trained: Any, frozen: Any, batch: Any, is_padding: Any) -> Outcome:
        arrays = {"trained": trained, "frozen": frozen, "batch": batch, "is_padding": is_padding}
        return engine(dataclasses.replace(job, **arrays))

    program = jax.jit(run).lower(*shapes).compile()
    flops, memory = compiled.countable_matmul_flops(program), compiled.memory(program)
    return Candidate(engine=name, flops=flops, memory=memory.total)


def _tell(candidate: Candidate) -> str:
    flops = "unknown operations" if candidate.flops is None else f"{candidate.flops / 1e9:.3g} GFLOP"
    return f"{candidate.engine} {flops} in {candidate.memory / 1e9:.3g} GB"
