"""Named grids, from two minutes on two cores to the paper's models and tasks."""

from wtdp_jax.study.arms import (
    TIED_CLIPPED,
    TIED_DOUBLE_NOISE,
    TIED_EXACT,
    TIED_MATERIALIZE,
    TIED_NAIVE,
    TIED_NAIVE_EXACT_CHOICE,
    TIED_NONPRIVATE,
    TIED_STANDARD,
    UNTIED_CLIPPED,
    UNTIED_EXACT,
    UNTIED_FROZEN_EMBEDDING,
    UNTIED_FROZEN_HEAD,
    UNTIED_NONPRIVATE,
    UNTIED_STANDARD,
    UNTIED_TIED_CHOICE,
)
from wtdp_jax.study.grid import EMBEDDED, Grid

_MAIN_ARMS = (
    TIED_NONPRIVATE,
    UNTIED_NONPRIVATE,
    TIED_EXACT,
    UNTIED_EXACT,
    TIED_NAIVE,
    TIED_STANDARD,
    UNTIED_STANDARD,
    TIED_MATERIALIZE,
)
_SEPARATING_ARMS = (
    TIED_NAIVE_EXACT_CHOICE,
    TIED_DOUBLE_NOISE,
    UNTIED_FROZEN_HEAD,
    UNTIED_FROZEN_EMBEDDING,
    UNTIED_TIED_CHOICE,
)
_NOISELESS_ARMS = (TIED_CLIPPED, UNTIED_CLIPPED)

PRESETS: dict[str, Grid] = {
    "smoke": Grid(
        models=(EMBEDDED,),
        tasks=("reviews",),
        arms=(*_MAIN_ARMS, TIED_DOUBLE_NOISE),
        seeds=1,
        learning_rates=(3e-3, 3e-2),
        clip_norms=(1.0,),
        batch_size=128,
        nonprivate_batch_size=32,
        steps=6,
        selection_share=0.5,
        short_steps=6,
        engine="bookkeeping",
        measured=("standard", "bookkeeping"),
        repeats=3,
        keep_models=True,
        isolate=False,
        quick_compilation=True,
    ),
    "laptop": Grid(
        models=("small=experiments/results/pretrain/model",),
        tasks=("sst2",),
        arms=(*_MAIN_ARMS, *_SEPARATING_ARMS),
        epsilons=(3.0, 8.0),
        # Many small steps: as many examples in few large ones learn the label words' shares and little else.
        # Clip norms about 15, which the label words' rows alone bring a gradient's norm to: far below, all
        # examples weigh the same, and the majority's label wins. A rate that falls, as those shares swing.
        learning_rates=(1e-3, 2e-3, 4e-3, 8e-3),
        schedule="linear",
        clip_norms=(10.0, 15.0, 25.0),
        batch_size=256,
        nonprivate_batch_size=128,
        # Small, for rows of like lengths to come together in a batch.
        physical_batch_size=16,
        steps=160,
        selection_share=0.5,
        held_out_fraction=0.04,
        max_length=48,
        length_multiple=8,
        engine="bookkeeping",
        isolate=False,
    ),
    "colab": Grid(
        models=("distilgpt2",),
        tasks=("sst2",),
        losses=("next_token",),
        arms=(*_MAIN_ARMS, *_SEPARATING_ARMS),
        seeds=3,
        learning_rates=(1e-4, 3e-4, 1e-3, 3e-3),
        batch_size=1024,
        epochs=1.0,
        max_length=64,
        # A T4 has 16 GB, less than whole per-example gradients of 32 examples need (17 GB, tied).
        standard_engine="microbatched",
        remat=True,
    ),
    "paper": Grid(
        models=("gpt2", "distilgpt2"),
        tasks=("sst2", "qnli", "qqp"),
        losses=("next_token",),
        arms=(*_MAIN_ARMS, *_SEPARATING_ARMS, *_NOISELESS_ARMS),
        epsilons=(1.0, 3.0, 8.0),
        seeds=5,
        learning_rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        batch_size=1024,
        epochs=3.0,
        max_length=128,
        # Standard clipping's update in little memory; its costs are measured of the materialized engine.
        standard_engine="microbatched",
        remat=True,
    ),
}
"""Named grids."""
