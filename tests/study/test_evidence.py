import pytest

from tests.study import fakes
from wtdp_jax.study import arms as a
from wtdp_jax.study import claims, contrasts, evidence
from wtdp_jax.study.evidence import Evidence, difference
from wtdp_jax.study.folder import Costs


def _rows(runs: list, arm: str) -> dict:
    (row,) = [row for row in evidence.accuracy_rows(Evidence(runs), fakes.PLACE) if row["arm"] == arm]
    return row


def test_an_accuracy_has_mean_deviation_and_folders() -> None:
    rights = (140, 145, 150)
    row = _rows([fakes.run(a.TIED_EXACT, value, seed=s) for s, value in enumerate(rights)], a.TIED_EXACT)
    assert row["accuracy"] == pytest.approx(72.5) and row["deviation"] == pytest.approx(2.5)
    assert row["low"] < 72.5 < row["high"] and row["majority"] == 50 and row["seeds"] == 3
    assert row["examples"] == 25600 and row["says"] == "–" and len(row["folders"]) == 3
    assert (row["epsilon"], row["learning_rate"], row["l2_clip_norm"]) == (8.0, 1e-3, 3.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rights": 105}, "cannot tell: not above the majority rate; single seed"),
        ({"rights": 60}, "cannot tell: not above the majority rate; single seed"),
        ({"rights": 150, "steps": 78}, "demonstration; single seed"),  # 78 x 256 = 19,968
        ({"rights": 150, "steps": 79}, "single seed"),
        ({"rights": 150, "arm": a.TIED_NONPRIVATE, "steps": 1}, "single seed"),
        ({"rights": 105, "arm": a.TIED_STANDARD}, "short run, for the update alone; single seed"),
    ],
)
def test_what_an_accuracy_does_not_show_is_said(changes: dict, says: str) -> None:
    run = fakes.run(**{"arm": a.TIED_EXACT, **changes})
    assert _rows([run], run.cell["arm"])["says"] == says


def test_a_difference_is_paired_by_seed() -> None:
    runs = [fakes.run(a.UNTIED_EXACT, 150 + seed, seed=seed) for seed in range(3)]
    runs += [fakes.run(a.TIED_EXACT, 140 + seed, seed=seed) for seed in (0, 2, 5)]
    found = difference(Evidence(runs), fakes.PLACE, a.UNTIED_EXACT, a.TIED_EXACT, 8.0)
    assert found is not None and found.seeds == [0, 2] and found.interval.mean == pytest.approx(5.0)
    assert all("seed-1" not in folder for folder in found.folders) and len(found.folders) == 4
    # Ten examples in 200 differ, all one way: 5 +- 1.96 sqrt(10 190 / 200^3) 100 = 5 +- 3.0
    assert found.interval.low == pytest.approx(2.0, abs=0.6)
    assert contrasts.verdict(found) == "untied-exact is better"
    assert difference(Evidence(runs), fakes.PLACE, a.UNTIED_EXACT, a.TIED_NAIVE, 8.0) is None


def test_the_signal_is_measured_in_norms_of_the_noise() -> None:
    whole = fakes.run(a.TIED_EXACT, 150, losses=(1.0, 0.5))
    evidence_ = Evidence([whole, fakes.run(a.TIED_STANDARD, 150)])
    (row,) = evidence.signal_rows(evidence_, fakes.PLACE)
    # sigma C sqrt(parameters) = 0.5 x 3 x 4 = 6
    assert row["noise_norm"] == 6.0 and row["non_private_signal_to_noise"] == 1.0
    assert row["non_private_clipped_fraction"] == 0.75  # the mean of 1 and 1 / 2


@pytest.mark.parametrize(("last", "same"), [(0.50009, True), (0.5002, False)])
def test_a_short_run_is_compared_step_by_step(last: float, same: bool) -> None:
    whole = fakes.run(a.TIED_EXACT, 150, losses=(1.0, 0.5, 0.4))
    short = fakes.run(a.TIED_MATERIALIZE, 150, losses=(1.0, last))
    (row,) = evidence.same_update_rows(Evidence([whole, short]), fakes.PLACE)
    assert row["steps"] == 2 and row["same"] is same and row["reference"] == a.TIED_EXACT
    assert row["non_private_largest_loss_difference"] == pytest.approx(last - 0.5)


def test_an_interval_of_an_accuracy_is_one() -> None:
    row = _rows([fakes.run(a.TIED_EXACT, 140 + 59 * seed, seed=seed) for seed in range(2)], a.TIED_EXACT)
    assert (row["low"], row["high"]) == (0.0, 100.0)
    assert row["says"] == "cannot tell: not above the majority rate"


def test_a_single_seed_tells_nothing_of_a_difference() -> None:
    found = difference(
        Evidence([fakes.run(a.UNTIED_EXACT, 160), fakes.run(a.TIED_EXACT, 130)]),
        *(fakes.PLACE, a.UNTIED_EXACT, a.TIED_EXACT, 8.0),
    )
    assert found is not None and contrasts.verdict(found) == "cannot tell: a single seed"


def _all_arms(**rights: int) -> Evidence:
    return Evidence(
        [fakes.run(name.replace("_", "-"), value, seed=s) for name, value in rights.items() for s in range(3)]
    )


def test_arms_that_predict_the_same_are_not_told_apart() -> None:
    found = _all_arms(tied_exact=150, tied_naive=150, untied_exact=160)
    same = difference(found, fakes.PLACE, a.TIED_EXACT, a.TIED_NAIVE, 8.0)
    assert same is not None and contrasts.verdict(same) == "the same predictions: nothing to tell apart"
    exact, naive = claims.accuracy_claims(found)
    assert naive["verdict"].endswith("says nothing of its norm")
    assert not exact["verdict"].endswith("says nothing of its norm")


def test_a_path_is_over_the_seeds_that_all_its_arms_have() -> None:
    arms = {a.TIED_NAIVE: 140, a.TIED_EXACT: 144, a.TIED_DOUBLE_NOISE: 138, a.UNTIED_EXACT: 160}
    runs = [
        fakes.run(arm, value + 3 * seed * (arm == a.TIED_EXACT), seed=seed)
        for arm, value in arms.items()
        for seed in range(2 if arm == a.TIED_NAIVE else 4)
    ]
    rows = contrasts.factor_rows(Evidence(runs), fakes.PLACE, 8.0)
    *path, gap = [row for row in rows if row["part"] != "by itself"]
    assert {row["seeds"] for row in (*path, gap)} == {2}
    assert sum(row["points"] for row in path) == pytest.approx(gap["points"])
    runs = [run for run in runs if run.cell["arm"] != a.TIED_DOUBLE_NOISE]
    rows = contrasts.factor_rows(Evidence(runs), fakes.PLACE, 8.0)
    part = [row for row in rows if row["part"] != "by itself"]
    assert [row["minus"] for row in part] == [a.TIED_NAIVE, a.TIED_NAIVE]
    assert all(row["share"] is None and row["seeds"] == 2 for row in part)


def test_the_paths_factors_add_up_to_the_gap() -> None:
    found = _all_arms(tied_naive=140, tied_exact=144, tied_double_noise=138, untied_exact=160)
    rows = contrasts.factor_rows(found, fakes.PLACE, 8.0)
    path = [row for row in rows if row["part"] == "adds up to the gap"]
    (gap,) = [row for row in rows if row["part"] == "the gap"]
    assert [row["points"] for row in path] == [2.0, -3.0, 11.0] and gap["points"] == 10.0
    assert [row["share"] for row in path] == pytest.approx([20.0, -30.0, 110.0]) and gap["share"] == 100


def test_without_a_gap_there_are_no_shares() -> None:
    found = _all_arms(tied_naive=140, tied_exact=144, tied_double_noise=138, untied_exact=141)
    assert all(row["share"] is None for row in contrasts.factor_rows(found, fakes.PLACE, 8.0))


@pytest.mark.parametrize(
    ("tied", "untied", "verdict"),
    [
        (140, 160, "reproduced in direction, as large as the paper's is possible"),
        (140, 142, "did not reproduce: no gain shown, and one of 4.74 is excluded"),
        (160, 140, "did not reproduce: the tied arm is better"),
        (102, 160, "could not be tested: tied-exact not shown to exceed the majority rate"),
    ],
)
def test_the_papers_gain_is_judged(tied: int, untied: int, verdict: str) -> None:
    rows = claims.accuracy_claims(_all_arms(tied_exact=tied, untied_exact=untied))
    exact, naive = rows
    assert exact["verdict"] == verdict and exact["baseline"] == a.TIED_EXACT
    assert naive["verdict"] == "could not be tested: its runs are missing"


def test_memory_is_judged_against_each_baseline() -> None:
    sizes = {
        "tied nonprivate": 100,
        "untied nonprivate": 120,
        "tied standard": 1000,
        "untied standard": 1500,
        "tied ghost": 110,
        "untied ghost": 130,
        "tied ghost, materialized norm": 400,
    }
    cost = {
        **{"physical_batch_size": 8, "length": 16, "tied_parameters": 1_500_000},
        "rows": [{"name": name, "step_bytes": size} for name, size in sizes.items()],
    }
    rows = claims.memory_claims([Costs("costs/m/t/lm.json", cost)])
    assert [round(row["saving"], 1) for row in rows] == [-20.0, -50.0, 67.5, -18.2, 87.0]
    verdicts = [row["verdict"].partition(" ")[0] for row in rows]
    assert verdicts == ["did", "did", "reproduced", "did", "reproduced"]
    assert {row["size"] for row in rows} == {"B 8, T 16, 1.5M tied parameters"}
    assert {row["place"] for row in rows} == {"m, t, lm"} and rows[0]["folders"] == ["costs/m/t/lm.json"]
