from wtdp_jax.study import arms as a
from wtdp_jax.study.presets import PRESETS


def test_presets_are_fair_but_for_the_smallest() -> None:
    assert {name for name, grid in PRESETS.items() if not grid.is_fair} == {"smoke"}
    assert all(grid.to_json()["models"] == list(grid.models) for grid in PRESETS.values())
    assert set(PRESETS["paper"].arms) == set(a.ARMS) and PRESETS["paper"].seeds == 5
    laptop = PRESETS["laptop"]
    assert (laptop.steps or 0) * laptop.batch_size >= 20_000


def test_standard_arms_train_where_whole_per_example_gradients_would_not_fit() -> None:
    microbatched = {name for name, grid in PRESETS.items() if grid.standard_engine == "microbatched"}
    assert microbatched == {"colab", "paper"}
