"""Each paper's claim put to the test on the embedded task, small enough to run on two CPU cores.

    python bench/claims.py                       run what is missing, then write the tables
    python bench/claims.py --claims clip --jobs 2
    python bench/claims.py --jobs 0              only the tables, from the kept runs

A claim is settled before it is run: CLAIMS below says what it is, what would count against it, and
what is compared. Every arm takes seeds 0-4, the same data, and the same completions per step; an
arm that two claims need is run once. Kept as results/claims/<arm>-<seed>.jsonl, the metrics of
the run; what is there already is not run again.

An effect is the mean over seeds of (arm − baseline), each seed paired with itself, with its 95 %
interval (Student's t). `shown` when the whole interval lies on the claimed side, `contradicted`
when it lies on the other side, `not shown` otherwise. For a claim of equality: shown when the
interval lies within ± the margin, contradicted when it lies outside. Many comparisons are made:
at 95 %, one of twenty is wrong by chance. Written: results/claims.csv (a row per run), the tables
of docs/results.md between their markers, and docs/claims-<claim>.png.
"""
import concurrent.futures
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import tyro
from curves import RESULTS, ROOT, T95, draw, interval

SEEDS = range(5)
ROLLOUTS = {"clip": 24}  # of a run; all others:
DEFAULT_ROLLOUTS = 40
COMMON = "--kl-coef 0 --eval-every 0 --save-every 0"
EIGHT = "--num-minibatches 4 --num-iterations 2"  # optimizer steps per rollout
ARMS = {  # name: script and options, besides COMMON
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "grpo, 8 updates": f"grpo {EIGHT}",
    "clip-higher, 8 updates": f"grpo --clip-high 0.28 {EIGHT}",
    "gspo, 8 updates": f"gspo {EIGHT}",
    "cispo, 8 updates": f"cispo {EIGHT}",
    "sapo, 8 updates": f"sapo {EIGHT}",
    "cispo, 1 update": "cispo --num-minibatches 1 --num-iterations 1",
}


@dataclass
class Check:
    """arm − baseline, by metric, is claimed to be above 0 (`more`), below (`less`) or `same`."""
    arm: str
    baseline: str
    metric: str
    claimed: str
    margin: float = 0.0


@dataclass
class Claim:
    title: str
    hypothesis: str
    against: str
    """what would count against it"""
    checks: list[Check]
    panels: list[tuple[str, str]]
    """(metric key, title) of each panel of the figure"""


BOUNDED = ["clip-higher, 8 updates", "gspo, 8 updates", "cispo, 8 updates", "sapo, 8 updates"]
CLAIMS = {
    "clip": Claim(
        "Eight updates per rollout: how the ratio is bounded",
        "With one update per rollout all ratios are 1 and the clip does nothing. With eight it "
        "matters: clip-higher keeps more entropy than the symmetric clip; CISPO, in which no token "
        "loses its gradient, learns faster; GSPO clips a far larger share and learns no worse; "
        "SAPO, without a hard clip, is as stable.",
        "No more entropy with the raised bound; a lower mean accuracy of CISPO, GSPO or SAPO than "
        "of GRPO's clip with the same updates; a larger fall from the best accuracy in SAPO.",
        [Check("grpo, 8 updates", "grpo", "mean accuracy", "more"),
         Check("cispo, 1 update", "grpo", "mean accuracy", "same", 0.05),
         Check("clip-higher, 8 updates", "grpo, 8 updates", "mean entropy", "more"),
         Check("clip-higher, 8 updates", "grpo, 8 updates", "mean accuracy", "same", 0.05),
         Check("gspo, 8 updates", "grpo, 8 updates", "clipped share", "more"),
         Check("gspo, 8 updates", "grpo, 8 updates", "mean accuracy", "same", 0.05),
         Check("cispo, 8 updates", "grpo, 8 updates", "mean accuracy", "more"),
         Check("sapo, 8 updates", "grpo, 8 updates", "mean accuracy", "same", 0.05),
         Check("sapo, 8 updates", "grpo, 8 updates", "largest fall", "same", 0.05)],
        [("accuracy", "accuracy of samples"), ("entropy", "entropy, nats"),
         ("clip_ratio/high_mean", "share clipped, A > 0"), ("ratio/max", "largest ratio")]),
    "length": Claim(
        "Dr. GRPO: wrong answers don't grow",
        "A mean per answer makes long wrong answers cheap per token, so under GRPO wrong answers "
        "grow; with Dr. GRPO's constant divisor they don't, at equal accuracy.",
        "Wrong answers as long or longer under Dr. GRPO, or a lower final accuracy.",
        [Check("dr_grpo", "grpo", "tokens of wrong answers", "less"),
         Check("dr_grpo", "grpo", "final accuracy", "same", 0.05),
         Check("dr_grpo", "grpo", "mean accuracy", "same", 0.05)],
        [("accuracy", "accuracy of samples"), ("completions/mean_length", "tokens per answer"),
         ("completions/mean_length_wrong", "tokens per wrong answer"),
         ("completions/clipped_ratio", "share cut off")]),
}


@dataclass
class Args:
    claims: tuple[str, ...] = tuple(CLAIMS)
    """claims to run"""
    jobs: int = 1
    """runs at a time, one thread each; 0: none, only the tables"""


# -------------------------------------------------------------------- runs
def rollouts(claim: str) -> int:
    return ROLLOUTS.get(claim, DEFAULT_ROLLOUTS)


def arms(claim: str) -> list[str]:
    """Those that the claim compares, baselines first."""
    checks = CLAIMS[claim].checks
    return list(dict.fromkeys([c.baseline for c in checks] + [c.arm for c in checks]))


def kept(arm: str, seed: int):
    return RESULTS / "claims" / f"{re.sub(r'[^a-z0-9_]+', '-', arm)}-{seed}.jsonl"


def run(arm: str, seed: int, steps: int) -> None:
    path = kept(arm, seed)
    if path.exists() and len(path.read_text().splitlines()) > steps:
        return
    script, *options = ARMS[arm].split()
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{script}.py", *options, *COMMON.split(), "--num-steps", str(steps), "--seed",
                   str(seed), "--output-dir", folder]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{folder}/metrics.jsonl", path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    print(f"{arm}, seed {seed}: {measures(arm, seed, steps)}", flush=True)


# -------------------------------------------------------------------- what came of them
def rows(arm: str, seed: int, steps: int) -> list[dict]:
    lines = kept(arm, seed).read_text().splitlines() if kept(arm, seed).exists() else []
    return [row for row in map(json.loads, lines) if 1 <= row["step"] <= steps]


def measures(arm: str, seed: int, steps: int) -> dict[str, float]:
    """What one run came to, by metric; final: over the last five rollouts."""
    found = rows(arm, seed, steps)
    if len(found) < steps:
        return {}
    of = lambda key: [row[key] for row in found if key in row]  # noqa: E731
    accuracy = of("accuracy")
    smooth = [statistics.mean(accuracy[i:i + 5]) for i in range(len(accuracy) - 4)]
    return {"final accuracy": smooth[-1], "mean accuracy": statistics.mean(accuracy),
            "largest fall": max(max(smooth[:i + 1]) - smooth[i] for i in range(len(smooth))),
            "mean entropy": statistics.mean(of("entropy")),
            "final entropy": statistics.mean(of("entropy")[-5:]),
            "clipped share": statistics.mean(of("clip_ratio/high_mean")) + statistics.mean(
                of("clip_ratio/low_mean")),
            "largest ratio": max(of("ratio/max")), "smallest ratio": min(of("ratio/min")),
            "tokens": statistics.mean(of("completions/mean_length")[-5:]),
            "tokens of wrong answers": statistics.mean(of("completions/mean_length_wrong")[-10:]),
            "cut off": statistics.mean(of("completions/clipped_ratio"))}


def effect(check: Check, steps: int) -> tuple[float, float, str]:
    """-> mean of the paired differences, half of its 95 % interval, verdict."""
    pairs = [(measures(check.arm, seed, steps), measures(check.baseline, seed, steps))
             for seed in SEEDS]
    gaps = [one[check.metric] - two[check.metric] for one, two in pairs if one and two]
    if len(gaps) < len(SEEDS):
        return 0.0, 0.0, f"{len(gaps)} of {len(SEEDS)} pairs run"
    mean = statistics.mean(gaps)
    half = T95[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
    low, high = mean - half, mean + half
    if check.claimed == "less":
        low, high = -high, -low
    if check.claimed == "same":
        shown = -check.margin < low and high < check.margin
        against = low > check.margin or high < -check.margin
    else:
        shown, against = low > 0, high < 0
    return mean, half, "shown" if shown else "contradicted" if against else "not shown"


COLUMNS = ["final accuracy", "mean accuracy", "largest fall", "mean entropy", "final entropy",
           "clipped share", "largest ratio", "smallest ratio", "tokens", "tokens of wrong answers",
           "cut off"]


def tables(claim: str) -> str:
    """What docs/results.md says of the claim: what each arm came to, and each comparison."""
    steps, used = rollouts(claim), [column for column in COLUMNS if column in {
        check.metric for check in CLAIMS[claim].checks} | {"final accuracy"}
        or claim == "clip" and column in ("final entropy", "largest ratio", "smallest ratio")]
    if not any(rows(arm, seed, steps) for arm in arms(claim) for seed in SEEDS):
        return "Not run yet."
    lines = [f"| arm | runs | {' | '.join(used)} |", "|" + "---|" * (len(used) + 2)]
    for arm in arms(claim):
        runs = [m for m in (measures(arm, seed, steps) for seed in SEEDS) if m]
        cells = [interval([m[column] for m in runs]) for column in used]
        lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
    lines += ["", "| compared | by | claimed | arm − baseline | verdict |", "|" + "---|" * 5]
    for check in CLAIMS[claim].checks:
        mean, half, verdict = effect(check, steps)
        claimed = check.claimed + (f" (± {check.margin})" if check.margin else "")
        gap = f"{mean:+.3f} ± {half:.3f}" if half else "–"
        lines.append(f"| {check.arm} − {check.baseline} | {check.metric} | {claimed} | {gap} | "
                     f"**{verdict}** |")
    return "\n".join(lines)


def write_page(page: str) -> str:
    """docs/results.md with its tables made anew."""
    for claim in CLAIMS:
        page = re.sub(rf"(<!-- claim {claim} -->\n).*?(<!-- /claim -->)",
                      lambda m: f"{m[1]}{tables(claim)}\n{m[2]}", page, flags=re.DOTALL)  # noqa: B023
    return page


def write_csv() -> None:
    with open(RESULTS / "claims.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["claim", "arm", "seed", *COLUMNS], lineterminator="\n")
        writer.writeheader()
        for claim in CLAIMS:
            for arm in arms(claim):
                for seed in SEEDS:
                    found = measures(arm, seed, rollouts(claim))
                    if found:
                        writer.writerow({"claim": claim, "arm": arm, "seed": seed,
                                         **{k: f"{v:.6g}" for k, v in found.items()}})


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    jobs = [(arm, seed, rollouts(claim)) for claim in args.claims for seed in SEEDS
            for arm in arms(claim)] if args.jobs else []
    longest = {(arm, seed): max(n for a, s, n in jobs if (a, s) == (arm, seed))
               for arm, seed, _ in jobs}  # an arm of two claims is run once, at the longer
    with concurrent.futures.ThreadPoolExecutor(max(1, args.jobs)) as pool:
        list(pool.map(lambda job: run(*job, longest[job]), longest))
    write_csv()
    page = ROOT / "docs" / "results.md"
    page.write_text(write_page(page.read_text("utf-8")), "utf-8")
    for claim in CLAIMS:
        found = {(arm, seed): rows(arm, seed, rollouts(claim)) for arm in arms(claim)
                 for seed in SEEDS}
        if any(found.values()):
            draw({k: v for k, v in found.items() if v}, CLAIMS[claim].panels,
                 ROOT / "docs" / f"claims-{claim}.png", window=128)
        print(f"{CLAIMS[claim].title}\n{tables(claim)}\n")
