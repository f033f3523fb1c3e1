"""What bench/claims.py concludes, on differences that are known."""
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
claims = importlib.import_module("claims")

CLEAR, NONE = [0.10, 0.11, 0.12, 0.11, 0.10], [0.10, -0.10, 0.05, -0.06, 0.01]


@pytest.mark.parametrize("gaps, claimed, margin, verdict", [
    (CLEAR, "more", 0.0, "shown"), (CLEAR, "less", 0.0, "contradicted"),
    (NONE, "more", 0.0, "not shown"), (NONE, "less", 0.0, "not shown"),
    (CLEAR, "same", 0.05, "contradicted"), (CLEAR, "same", 0.2, "shown"),
    (NONE, "same", 0.05, "not shown"), (CLEAR, "no less", 0.05, "shown"),
    (CLEAR, "no more", 0.05, "contradicted"), ([-gap for gap in CLEAR], "no less", 0.05,
                                               "contradicted"),
    ([-gap for gap in CLEAR], "no more", 0.05, "shown"), (NONE, "no less", 0.05, "not shown"),
])
def test_verdicts(monkeypatch, gaps, claimed, margin, verdict):
    found = {"arm": gaps, "baseline": [0.0] * 5}
    monkeypatch.setattr(claims, "measures", lambda arm, seed, _: {"accuracy": found[arm][seed]})
    check = claims.Check("arm", "baseline", "accuracy", claimed, margin)
    mean, half, said = claims.effect(check, 1)
    assert said == verdict and mean == pytest.approx(sum(gaps) / 5)
    if gaps is CLEAR:  # 2.776 × 0.008367 / √5, worked out by hand
        assert half == pytest.approx(0.01039, abs=1e-4)


def test_no_verdict_on_fewer_than_five_pairs(monkeypatch):
    monkeypatch.setattr(claims, "measures", lambda arm, seed, _: {"accuracy": 1.0} if seed else {})
    assert claims.effect(claims.Check("a", "b", "accuracy", "more"), 1)[2] == "4 of 5 pairs run"


def test_measures_of_a_run(monkeypatch):
    """Accuracy rises, falls by 0.3 over five rollouts, and is whole again at the end."""
    accuracy = [0.0] * 5 + [0.5] * 5 + [0.2] * 5 + [1.0] * 5
    rows = [{"step": i + 1, "accuracy": a, "bench/weight_of_extremes": a, "completions/distinct": 1,
             "completions/mean_length_wrong": 10 if a == 0.5 else 20, "num_completions": 128 * i,
             **dict.fromkeys(("entropy", "clip_ratio/high_mean", "clip_ratio/low_mean", "ratio/max",
                              "ratio/min", "completions/mean_length", "completions/clipped_ratio",
                              "useful_groups"), 1.0)} for i, a in enumerate(accuracy)]
    monkeypatch.setattr(claims, "rows", lambda *_: rows)
    found = claims.measures("arm", 0, 20)
    assert found["final accuracy"] == 1.0 and found["mean accuracy"] == pytest.approx(0.425)
    assert found["largest fall"] == pytest.approx(0.3)
    assert found["tokens of wrong answers"] == pytest.approx((5 * 0.5 * 10 + 5 * 0.8 * 20) / 6.5)
    assert found["weight of extremes"] == pytest.approx(0.35)  # where accuracy is 0.2 or 0.5
    assert claims.measures("arm", 0, 21) == {}  # not finished


def test_every_check_names_arms_and_metrics():
    for claim in claims.CLAIMS.values():
        for check in claim.checks:
            assert {check.arm, check.baseline} <= claims.ARMS.keys()
            assert check.metric in claims.COLUMNS, check.metric
            assert bool(check.margin) == (check.claimed in ("same", "no less", "no more"))
