"""The script finds what it claims to find; its own reference is checked by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import check_norms
from wtdp_jax import rules

_SMALLEST = check_norms.CheckConfig(engines=("bookkeeping",), models=("tied",), batch_size=2, length=4)


def test_an_exact_engine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_norms.main(_SMALLEST) == 0
    heading, line, summary = capsys.readouterr().out.splitlines()
    assert line.split()[:5] == ["tied", "next_token", "bookkeeping", "cross_term", "flat"]
    assert line.endswith("ok") and summary.startswith("1 of 1 within 1e-04")
    assert heading.split()[-2:] == ["norms", "sum"]


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rules, "cross_term", lambda d, c: jnp.zeros((), d.dtype))
    assert check_norms.main(_SMALLEST) == 1
    line, summary = capsys.readouterr().out.splitlines()[1:]
    assert line.endswith("OFF") and summary.startswith("0 of 1")


@pytest.mark.parametrize("errors", [(np.nan, 0.0), (0.0, np.nan), (0.0, 1.1e-4)])
def test_any_error_above_the_limit_fails(
    errors: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_norms, "worst_errors", lambda config, case: errors)
    assert check_norms.main(_SMALLEST) == 1


def test_cases_are_told_apart_only_where_they_differ() -> None:
    config = check_norms.CheckConfig(losses=("lm",), tied_norms=("cross_term", "materialize"))
    cases = check_norms.cases(config)
    # Four engines each, and two of them twice where the matrix is tied.
    assert [case.model for case in cases] == ["tied"] * 6 + ["untied"] * 4
    assert len(set(cases)) == 10


@pytest.fixture
def reference() -> check_norms.Reference:
    """Two examples, a module of one slice and one of two: three groups.

    The first example's gradients are 3, (4, 0): norm 5. The second's are 0, (0, 1): norm 1. The median is 3.
    """
    return check_norms.Reference(
        {
            "a/kernel": np.array([[3.0], [0.0]], np.float32),
            "h/b/bias": np.array([[[4.0], [0.0]], [[0.0], [1.0]]], np.float32),
        }
    )


_THIRD = 3 / np.sqrt(3)
_BY_HAND = {
    # Factors 3/5 and 1.
    "flat": (3 * 0.6, 4 * 0.6, 1.0),
    # Factors 3/5.01 and 3/1.01.
    "automatic": (3 * 3 / 5.01, 4 * 3 / 5.01, 3 / 1.01),
    # Each group is clipped to 3 / sqrt(3) = 1.73; the second example's group of norm 1 is below it.
    "per_layer": (_THIRD, _THIRD, 1.0),
}


@pytest.mark.parametrize("clipping", _BY_HAND)
def test_the_reference_clips_as_worked_by_hand(reference: check_norms.Reference, clipping: str) -> None:
    np.testing.assert_allclose(reference.norms, [5, 1])
    kernel, first, second = _BY_HAND[clipping]
    clipped_sum = reference.clipped_sum(clipping)
    np.testing.assert_allclose(clipped_sum["a/kernel"], [kernel])
    np.testing.assert_allclose(clipped_sum["h/b/bias"], [[first], [second]])


def test_errors_are_relative_and_padding_must_have_norm_0(reference: check_norms.Reference) -> None:
    right = {"a": {"kernel": np.array([1.8])}, "h": {"b": {"bias": np.array([[2.4], [1.0]])}}}

    def errors(norms: list[float], kernel: float = 1.8) -> tuple[float, float]:
        found = {**right, "a": {"kernel": np.array([kernel])}}
        return reference.errors(found, SimpleNamespace(norm=np.array(norms)), "flat")

    np.testing.assert_allclose(errors([5, 1, 0]), [0, 0], atol=1e-15)
    np.testing.assert_allclose(errors([5.5, 1, 0]), [0.1, 0], atol=1e-15)
    np.testing.assert_allclose(errors([5, 1, 0.3]), [0.3, 0], atol=1e-15)
    np.testing.assert_allclose(errors([5, 1, 0], kernel=3.6), [0, 1], atol=1e-15)
    assert np.isnan(errors([5, 1, 0], kernel=np.nan)[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 65}, r"length must be in \[2, 64\], got 65"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"tolerance": 0.0}, "tolerance must be positive and finite, got 0.0"),
        ({"preset": "huge"}, "preset must be one of .*, got 'huge'"),
        ({"engines": ()}, "engines must name at least one, got none"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_norms.CheckConfig(**settings)
