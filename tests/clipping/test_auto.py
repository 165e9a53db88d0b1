"""Engine "auto": chosen from shapes and a memory budget, by what the compiled programs cost."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.clipping import oracle, small
from wtdp_jax.clipping import ClippedGrad, auto, clipped_grad
from wtdp_jax.losses import next_token_loss


def _setting() -> tuple[Any, Any, Any]:
    # Longer than the engines' own tests: records must outweigh what else a program holds.
    model = small.gpt2(tie=True, remat=True)
    batch = small.token_batch(64, tokens=9, dtype=jnp.float32)
    return next_token_loss(model), small.random_params(model, batch["ids"], dtype=jnp.float32), batch


def _grad_fn(loss_fn: Any, **settings: Any) -> ClippedGrad:
    return clipped_grad(loss_fn, engine="auto", l2_clip_norm=0.5, **settings)


@pytest.mark.slow
def test_memory_decides() -> None:
    loss_fn, params, batch = _setting()
    ample = _grad_fn(loss_fn).choose(params, batch)
    assert ample.engine == "bookkeeping"
    one_pass, two_passes, one_by_one = ample.candidates
    assert one_pass.flops < two_passes.flops and one_pass.memory > two_passes.memory > one_by_one.memory

    def chosen(budget: int) -> str:
        choice = dataclasses.replace(_grad_fn(loss_fn), memory_budget=budget).choose(params, batch)
        assert str(choice).startswith(f"engine {choice.engine}: ")
        return choice.engine

    assert chosen(one_pass.memory) == "bookkeeping"
    assert chosen(one_pass.memory - 1) == "ghost"
    assert chosen(two_passes.memory - 1) == "microbatched"
    with pytest.raises(ValueError, match=r"no engine fits in memory_budget=1000: bookkeeping .* GFLOP in"):
        chosen(1000)


@pytest.mark.slow
def test_it_is_the_engine_that_it_chooses() -> None:
    loss_fn, params, batch = _setting()
    total, per_example = jax.jit(_grad_fn(loss_fn))(params, batch)
    same, _ = jax.jit(clipped_grad(loss_fn, engine="bookkeeping", l2_clip_norm=0.5))(params, batch)
    assert oracle.relative_error(total, jax.tree.map(jnp.asarray, same)) < 1e-6
    assert per_example.norm.shape == (64,)


def test_a_choice_is_remembered_for_its_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_for = []

    def cost(name: Any, engine: Any, job: Any) -> auto.Candidate:
        compiled_for.append((name, job.num_rows))
        return auto.Candidate(engine=name, flops=1, memory=1)

    monkeypatch.setattr(auto, "_cost", cost)
    loss_fn, params, batch = _setting()
    grad_fn = _grad_fn(loss_fn)
    assert grad_fn.choose(params, batch) is grad_fn.choose(params, jax.eval_shape(lambda: batch))
    grad_fn.choose(params, jax.tree.map(lambda leaf: leaf[:5], batch))
    assert compiled_for == [(name, rows) for rows in (64, 5) for name in auto.CANDIDATES]


def test_what_is_refused_is_refused_here_too() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return batch["x"] @ params["w"]  # no layer: no rule

    params, batch = {"w": jnp.ones(3)}, {"x": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match='uncovered="error" and no rule covers w'):
        _grad_fn(loss_fn, uncovered="error").choose(params, batch)


def test_the_naive_norm_keeps_its_sensitivity() -> None:
    assert _grad_fn(lambda p, b: b["x"], tied_norm="omit").sensitivity > 0.5


def test_the_budget_is_checked() -> None:
    with pytest.raises(ValueError, match="memory_budget must be at least 1 byte, got 0"):
        _grad_fn(lambda p, b: b["x"], memory_budget=0)
