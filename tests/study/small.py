"""A small grid."""

from wtdp_jax.study import arms as a
from wtdp_jax.study.grid import Grid

GRID = Grid(
    models=("small=some/folder", "embedded"),
    tasks=("sst2",),
    arms=(
        a.TIED_EXACT,
        a.TIED_NAIVE,
        a.TIED_NONPRIVATE,
        a.TIED_STANDARD,
        a.UNTIED_EXACT,
        a.UNTIED_TIED_CHOICE,
    ),
    epsilons=(3.0, 8.0),
    seeds=2,
    learning_rates=(1e-3, 1e-2),
    clip_norms=(0.1, 1.0, 10.0),
    batch_size=100,
    nonprivate_batch_size=20,
    epochs=2.0,
    selection_share=0.25,
    short_steps=3,
)
