"""That as many cases are planned as a run is said to have, and that they are counted."""

from collections import Counter

import pytest

from tests.fuzz import cases


def test_at_least_two_thousand_cases_are_planned() -> None:
    assert sum(cases.PLANNED.values()) >= 2000


def test_cases_are_listed_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "RUN", Counter())
    assert cases.summary() is None
    cases.count("plans", 2)
    cases.count("tables")
    cases.count("plans")
    assert cases.summary() == "fuzz: tables 1, plans 3; in all 4"
    with pytest.raises(ValueError, match="kind must be one of engine batches, .*, got 'tabels'"):
        cases.count("tabels")
