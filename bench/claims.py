"""Each paper's claim put to the test on the embedded task, small enough to run on two CPU cores.

    python bench/claims.py                       run what is missing, then write the tables
    python bench/claims.py --claims clip --jobs 2
    python bench/claims.py --jobs 0              only the tables, from the kept runs

A claim is settled before it is run: CLAIMS below says what it is, what would count against it, and
what is compared. Every arm takes seeds 0-4, the same data, and 128 completions per step (before
dapo.py refills); an arm that several claims need is run once. Kept is the run's metrics.jsonl as
results/claims/<arm>-<seed>.jsonl; what is there already is not run again. A worker process runs one
arm after the other, with one thread: the script's own `main`, in which an arm may replace a
function or the rewards.

An effect is the mean over seeds of (arm − baseline), each seed paired with itself, with its 95 %
interval (Student's t). `shown` when the whole interval lies on the claimed side, `contradicted`
when it lies on the other side, `not shown` otherwise. The claimed side of `same` is within ± the
margin, of `no less` above − the margin, of `no more` below it. Many comparisons are made:
at 95 %, one of twenty is wrong by chance. Written: results/claims.csv (a row per run), the tables
of docs/results.md between their markers, and docs/claims-<claim>.png.
"""
import contextlib
import csv
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import tyro
from curves import RESULTS, ROOT, T95, draw, interval

sys.path.insert(0, str(ROOT))

SEEDS = range(5)
ROLLOUTS = {"clip": 24, "dapo": 24, "gopo": 24}  # of a run; all others:
DEFAULT_ROLLOUTS = 32
COMMON = "--kl-coef 0 --adam-beta2 0.999 --eval-every 0 --save-every 0"


# -------------------------------------------------------------------- rewards that arms bring along
def correct(text: str, gold: str) -> float:
    import common

    return common.correct(text, gold)


def brief(text: str, gold: str) -> float:
    """A tenth for at most 40 characters: a worked sum of two or three digits fits, of four hardly
    ever. Easier than `correct`, on a tenth of its scale, and against it in a quarter of them."""
    return 0.1 * (len(text) <= 40)


def overlong(text: str, gold: str) -> float:
    """DAPO's soft punishment with L_max 64, L_cache 16, where a character is a token."""
    return max(-1.0, min(0.0, (48 - len(text)) / 16))


def graded(text: str, gold: str) -> float:
    """gopo.py's closeness: 1 for the right number, 1/2 for one that is a tenth off, 0 for none."""
    return importlib.import_module("gopo").closeness(text, gold)


def noisy(text: str, gold: str) -> float:
    """`graded` by an unreliable judge: off by N(0, 0.3), always the same for the same answer."""
    return graded(text, gold) + random.Random(f"{gold} {text}").gauss(0, 0.3)


def saturated(text: str, gold: str) -> float:
    """`graded` in the same order on another scale: a number ten times too large still gets 0.56."""
    return graded(text, gold) ** (1 / 8)


# -------------------------------------------------------------------- what arms replace in a script
def rewards(*functions):
    return lambda replace, script: replace(script, "REWARDS", list(functions))


def averaging(name):
    """Of tokens, as the script of that name does it."""
    return lambda replace, script: replace(
        script, "token_weights", importlib.import_module(name).token_weights)


def both(one, two):
    return lambda *places: (one(*places), two(*places))


def without_batch_step(replace, script):
    """GDPO's advantages before they are normalised over the batch."""
    rewards(correct, brief)(replace, script)

    def advantages(rewards, args):
        norm = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        norm[(rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)).expand_as(norm)] = 0
        return sum(w * part for w, part in zip(args.reward_weights, norm.unbind(-1), strict=True))
    replace(script, "advantages", advantages)


def stale(replace, script):
    """Only every eighth rollout is sampled with the newest weights, the next seven with the same.
    The check that stops such a run is taken out."""
    import common

    sync, calls = common.VllmSampler.sync, itertools.count()
    replace(common.VllmSampler, "sync", lambda self, weights: (
        None if next(calls) % 8 else sync(self, weights)))
    replace(common, "check_health", lambda *_: None)


@dataclass
class Arm:
    script: str
    options: str = ""
    """besides COMMON"""
    change: Callable | None = None
    """called with replace(owner, name, value), undone after the run, and the script"""


EIGHT = "--num-minibatches 4 --num-iterations 2"  # optimizer steps per rollout
SCARCE = "--group-size 8 --prompts-per-step 16 --max-completion-tokens 64"
PAIRS = "--group-size 2 --prompts-per-step 64 --max-completion-tokens 64"
ARMS = {
    "grpo": Arm("grpo", "--eval-every 1000"),  # before and after
    "dr_grpo": Arm("dr_grpo"),
    "grpo2": Arm("grpo2", "--eval-every 1000"),
    "grpo, 8 updates": Arm("grpo", EIGHT),
    "clip-higher, 8 updates": Arm("grpo", f"--clip-high 0.28 {EIGHT}"),
    "gspo, 8 updates": Arm("gspo", EIGHT),
    "cispo, 8 updates": Arm("cispo", EIGHT),
    "sapo, 8 updates": Arm("sapo", EIGHT),
    "grpo, token mean, 8 updates": Arm("grpo", EIGHT, averaging("cispo")),
    # All ratios are 1: its gradient is that of GRPO with the mean over all tokens of the step.
    "cispo, 1 update": Arm("cispo", "--num-minibatches 1"),
    # Right answers alone pay, in small groups, under a limit that cuts ramblers off.
    "scarce": Arm("grpo", f"{SCARCE} --reward-weights 2", rewards(correct)),
    "scarce, dynamic sampling": Arm(
        "dapo", f"{SCARCE} --reward-weights 2 0 --overlong-cache 0 --clip-high 0.2",
        averaging("grpo")),
    "scarce, overlong": Arm("grpo", f"{SCARCE} --reward-weights 2 1", rewards(correct, overlong)),
    # At most half of all pairs are useful, at any pass rate: 2 p (1 - p).
    "pairs": Arm("grpo", f"{PAIRS} --reward-weights 2", rewards(correct)),
    "pairs, dynamic sampling": Arm(
        "dapo", f"{PAIRS} --reward-weights 2 0 --overlong-cache 0 --clip-high 0.2",
        averaging("grpo")),
    "grpo, 10 : 1": Arm("grpo", "--reward-weights 1 1", rewards(correct, brief)),
    "grpo, 1 : 1": Arm("grpo", "--reward-weights 1 10", rewards(correct, brief)),
    "gdpo, 10 : 1": Arm("gdpo", "--reward-weights 1 1", rewards(correct, brief)),
    "gdpo without batch step, 10 : 1": Arm("gdpo", "--reward-weights 1 1", without_batch_step),
    "grpo, graded": Arm("grpo", "--reward-weights 1", rewards(graded)),
    "gopo, graded": Arm("gopo", "--reward-weights 1", both(rewards(graded), averaging("grpo"))),
    "grpo, noisy": Arm("grpo", "--reward-weights 1", rewards(noisy)),
    "gopo, noisy": Arm("gopo", "--reward-weights 1", both(rewards(noisy), averaging("grpo"))),
    "grpo, saturated": Arm("grpo", "--reward-weights 1", rewards(saturated)),
    "dr_grpo, saturated": Arm("dr_grpo", "--reward-weights 1",
                              both(rewards(saturated), averaging("grpo"))),
    "groups of 8": Arm("grpo", "--group-size 8 --prompts-per-step 16"),
    "groups of 32": Arm("grpo", "--group-size 32 --prompts-per-step 4"),
    "temperature 0.6": Arm("grpo", "--temperature 0.6 --eval-every 1000"),
    "temperature 1.2": Arm("grpo", "--temperature 1.2 --eval-every 1000"),
    "KL 0.1": Arm("grpo", "--kl-coef 0.1"),
    "stale": Arm("grpo", "--tis-cap 2", stale),
    "stale, no TIS": Arm("grpo", "--tis-cap 0", stale),
}


@dataclass
class Check:
    """arm − baseline, by metric, is claimed to be above 0 (`more`), below (`less`), within ± the
    margin (`same`), above − the margin (`no less`) or below the margin (`no more`)."""
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


ACCURACY = ("accuracy", "accuracy of samples")
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
         Check("clip-higher, 8 updates", "grpo, 8 updates", "mean accuracy", "no less", 0.05),
         Check("gspo, 8 updates", "grpo, 8 updates", "clipped share", "more"),
         Check("gspo, 8 updates", "grpo, 8 updates", "mean accuracy", "no less", 0.05),
         Check("cispo, 8 updates", "grpo, 8 updates", "mean accuracy", "more"),
         # Added when two seeds had been run: the mean over tokens alone makes a difference.
         Check("cispo, 8 updates", "grpo, token mean, 8 updates", "mean accuracy", "more"),
         Check("sapo, 8 updates", "grpo, 8 updates", "mean accuracy", "no less", 0.05),
         Check("sapo, 8 updates", "grpo, 8 updates", "largest fall", "no more", 0.05)],
        [ACCURACY, ("entropy", "entropy, nats"), ("clip_ratio/high_mean", "share clipped, A > 0"),
         ("ratio/max", "largest ratio")]),
    "length": Claim(
        "Dr. GRPO: wrong answers don't grow",
        "A mean per answer makes long wrong answers cheap per token, so under GRPO wrong answers "
        "grow; with Dr. GRPO's constant divisor they don't, at equal accuracy. And division by the "
        "std gives groups that are nearly all right or all wrong more weight.",
        "Wrong answers as long or longer under Dr. GRPO; a lower accuracy; as much of the "
        "advantage on groups with a pass rate below 0.2 or above 0.8.",
        [Check("dr_grpo", "grpo", "tokens of wrong answers", "less"),
         Check("dr_grpo", "grpo", "final accuracy", "no less", 0.05),
         Check("dr_grpo", "grpo", "mean accuracy", "no less", 0.05),
         Check("dr_grpo", "grpo", "weight of extremes", "less")],
        [ACCURACY, ("completions/mean_length", "tokens per answer"),
         ("completions/mean_length_wrong", "tokens per wrong answer"),
         ("bench/weight_of_extremes", "share of |A| on extreme groups")]),
    "dapo": Claim(
        "DAPO, part by part",
        "Clip-higher keeps entropy over several updates. Dynamic sampling learns more per update "
        "where most groups are useless. Soft overlong punishment lowers the share that is cut off. "
        "The mean over all tokens, in which long answers weigh more, keeps wrong answers shorter.",
        "No more entropy; no higher mean accuracy over the same updates; as much cut off, or less "
        "accuracy; wrong answers as long.",
        [Check("clip-higher, 8 updates", "grpo, 8 updates", "mean entropy", "more"),
         Check("scarce, dynamic sampling", "scarce", "mean accuracy", "more"),
         # Added when `scarce` had turned out to have 88 % useful groups.
         Check("pairs, dynamic sampling", "pairs", "mean accuracy", "more"),
         Check("scarce, overlong", "scarce", "cut off", "less"),
         Check("scarce, overlong", "scarce", "mean accuracy", "no less", 0.05),
         Check("cispo, 1 update", "grpo", "tokens of wrong answers", "less")],
        [ACCURACY, ("entropy", "entropy, nats"), ("useful_groups", "share of useful groups"),
         ("completions/clipped_ratio", "share cut off")]),
    "pairs": Claim(
        "2-GRPO: pairs do as well as groups of 16",
        "At equal completions, 64 prompts × 2 learn as fast as 8 × 16 and lose no pass@8. The "
        "paper's saving of time is not looked for: here both sample as many completions.",
        "A mean or final accuracy, or pass@8, that is lower.",
        [Check("grpo2", "grpo", "mean accuracy", "no less", 0.05),
         Check("grpo2", "grpo", "final accuracy", "no less", 0.05),
         Check("grpo2", "grpo", "pass@8", "no less", 0.02),
         Check("grpo2", "grpo", "useful groups", "less")],
        [ACCURACY, ("entropy", "entropy, nats"), ("useful_groups", "share of useful groups"),
         ("completions/mean_length", "tokens per answer")]),
    "gdpo": Claim(
        "GDPO: the weaker of two rewards survives",
        "`correct` pays 1, `brief` 0.1 for at most 40 characters, which is easy and in a quarter "
        "of the problems at odds with a right answer. GRPO's sum drowns `brief`; GDPO normalises "
        "each and keeps it, at no price in accuracy. Without the batch step it is less stable.",
        "No larger share of brief answers than under GRPO; a lower accuracy; no difference without "
        "the batch step. If GRPO with rewards scaled to 1 : 1 does the same, scaling was all.",
        [Check("gdpo, 10 : 1", "grpo, 10 : 1", "brief", "more"),
         Check("gdpo, 10 : 1", "grpo, 10 : 1", "mean accuracy", "no less", 0.05),
         Check("gdpo, 10 : 1", "grpo, 1 : 1", "brief", "more"),
         Check("gdpo, 10 : 1", "grpo, 1 : 1", "mean accuracy", "same", 0.05),
         Check("gdpo without batch step, 10 : 1", "gdpo, 10 : 1", "mean accuracy", "less"),
         Check("gdpo without batch step, 10 : 1", "gdpo, 10 : 1", "largest fall", "more")],
        [ACCURACY, ("rewards/brief/mean", "brief: 0.1 × share"),
         ("completions/mean_length", "tokens per answer"), ("entropy", "entropy, nats")]),
    "gopo": Claim(
        "GOPO: only the order of rewards counts",
        "With a clean graded reward (how close the number is) ranks do no worse than values. With "
        "a noisy one they do better. On a saturating scale that keeps the order they do better "
        "still, for nothing changes for them: there `gopo, graded` is its own run.",
        "A lower accuracy of GOPO with the clean reward; no higher one with noise, or against GRPO "
        "and Dr. GRPO on the saturating scale.",
        [Check("gopo, graded", "grpo, graded", "mean accuracy", "no less", 0.05),
         Check("gopo, noisy", "grpo, noisy", "mean accuracy", "more"),
         Check("gopo, graded", "grpo, saturated", "mean accuracy", "more"),
         Check("gopo, graded", "dr_grpo, saturated", "mean accuracy", "more"),
         Check("grpo, saturated", "grpo, graded", "mean accuracy", "less")],
        [ACCURACY, ("entropy", "entropy, nats"), ("useful_groups", "share of useful groups"),
         ("completions/mean_length", "tokens per answer")]),
    "dials": Claim(
        "Group size, temperature, KL",
        "At equal completions a larger group is useful more often, and costs prompts: accuracy is "
        "the same from 2 to 32. A lower temperature makes groups less diverse and less useful, a "
        "higher one more diverse. KL keeps entropy, and slows learning.",
        "No more useful groups at 32 than at 8; accuracies that differ; as many distinct answers "
        "at 0.6 or 1.2 as at 1.0; no more entropy with KL 0.1 at the end.",
        [Check("groups of 32", "groups of 8", "useful groups", "more"),
         Check("groups of 32", "groups of 8", "mean accuracy", "same", 0.05),
         Check("grpo2", "groups of 8", "mean accuracy", "same", 0.05),
         Check("temperature 0.6", "grpo", "distinct", "less"),
         Check("temperature 0.6", "grpo", "held-out accuracy", "less"),
         Check("temperature 1.2", "grpo", "distinct", "more"),
         Check("temperature 1.2", "grpo", "held-out accuracy", "less"),
         Check("KL 0.1", "grpo", "final entropy", "more"),
         Check("KL 0.1", "grpo", "mean accuracy", "less")],
        [ACCURACY, ("entropy", "entropy, nats"), ("useful_groups", "share of useful groups"),
         ("completions/distinct", "distinct answers per group")]),
    "stale": Claim(
        "Truncated importance sampling mends a stale sampler",
        "The sampler gets new weights only after every eighth rollout. Weighing tokens by "
        "π_old / π_sampler, capped at 2, then learns faster than taking the samples as one's own.",
        "An accuracy without the weights that is as high, in the rollouts (9, 17, 25) that are "
        "sampled with new weights in all arms.",
        [Check("stale", "stale, no TIS", "fresh accuracy", "more"),
         Check("stale", "grpo", "fresh accuracy", "less")],
        [ACCURACY, ("entropy", "entropy, nats"), ("grad_norm", "gradient norm"),
         ("sampling/sampling_logp_difference/mean", "|Δ log-prob|, trainer and sampler")]),
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
    return RESULTS / "claims" / f"{re.sub(r'[^a-z0-9_]+', '-', arm.lower())}-{seed}.jsonl"


def measure_more(replace) -> None:
    """Into each row of metrics: the accuracy of all that was sampled, also of groups that dapo.py
    then drops, and the share of Σ|A| on groups with a pass rate below 0.2 or above 0.8."""
    import common

    score, metrics, right = common.score, common.rollout_metrics, []

    def scored(groups, *rest):
        score(groups, *rest)
        right.extend(s.correct for group in groups for s in group)

    def rollout_metrics(groups, minibatches, rewards, adv, *rest):
        rate = [sum(s.correct for s in group) / len(group) for group in groups]
        weights = adv.abs().sum(1).tolist()
        extreme = sum(w for w, p in zip(weights, rate, strict=True) if p < 0.2 or p > 0.8)
        more = {"bench/accuracy": statistics.mean(right),
                "bench/weight_of_extremes": extreme / max(sum(weights), 1e-9)}
        right.clear()
        return metrics(groups, minibatches, rewards, adv, *rest) | more
    replace(common, "score", scored)
    replace(common, "rollout_metrics", rollout_metrics)


def run(arm: str, seed: int, steps: int) -> None:
    path = kept(arm, seed)
    if path.exists() and len(path.read_text().splitlines()) > steps:
        return
    script, change = importlib.import_module(ARMS[arm].script), ARMS[arm].change
    with contextlib.ExitStack() as stack:
        def replace(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        measure_more(replace)
        if change:
            change(replace, script)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        argv = [*COMMON.split(), *ARMS[arm].options.split(), "--num-steps", str(steps), "--seed",
                str(seed), "--output-dir", f"{folder}/run"]
        with open(f"{folder}/log", "w") as log, contextlib.redirect_stderr(log):
            try:
                script.main(tyro.cli(script.Args, args=argv))
            except Exception as error:  # the other runs go on
                print(f"{arm}, seed {seed}: {type(error).__name__}: {error}", flush=True)
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{folder}/run/metrics.jsonl", path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    print(f"{arm}, seed {seed}: {measures(arm, seed, steps)}", flush=True)


# -------------------------------------------------------------------- what came of them
def rows(arm: str, seed: int, steps: int) -> list[dict]:
    lines = kept(arm, seed).read_text().splitlines() if kept(arm, seed).exists() else []
    return [row | {"accuracy": row.get("bench/accuracy", row["accuracy"])}
            for row in map(json.loads, lines) if 1 <= row["step"] <= steps]


def measures(arm: str, seed: int, steps: int) -> dict[str, float]:
    """What one run came to, by metric. Final: over the last five rollouts; largest fall: of the
    mean accuracy over five rollouts, from its highest so far; tokens of wrong answers and weight of
    extremes: over the rollouts with an accuracy between 0.2 and 0.7, so that runs compare."""
    found = rows(arm, seed, steps)
    if len(found) < steps:
        return {}
    of = lambda key: [row[key] for row in found if key in row]  # noqa: E731
    mean = statistics.mean
    accuracy = of("accuracy")
    smooth = [mean(accuracy[i:i + 5]) for i in range(len(accuracy) - 4)]
    values = {
        "final accuracy": smooth[-1], "mean accuracy": mean(accuracy),
        "largest fall": max(max(smooth[:i + 1]) - smooth[i] for i in range(len(smooth))),
        "mean entropy": mean(of("entropy")), "final entropy": mean(of("entropy")[-5:]),
        "clipped share": mean(of("clip_ratio/high_mean")) + mean(of("clip_ratio/low_mean")),
        "largest ratio": max(of("ratio/max")), "smallest ratio": min(of("ratio/min")),
        "tokens": mean(of("completions/mean_length")[-5:]),
        "cut off": mean(of("completions/clipped_ratio")),
        "useful groups": mean(of("useful_groups")), "distinct": mean(of("completions/distinct")),
        "completions": found[-1]["num_completions"],
        "fresh accuracy": mean(accuracy[i] for i in (8, 16, 24) if i < len(accuracy))}
    middle = [row for row, a in zip(found, accuracy, strict=True) if 0.2 <= a <= 0.7]
    if middle:
        wrong = [1 - row["accuracy"] for row in middle]
        values["tokens of wrong answers"] = sum(
            w * row["completions/mean_length_wrong"]
            for w, row in zip(wrong, middle, strict=True)) / sum(wrong)
        values["weight of extremes"] = mean(row["bench/weight_of_extremes"] for row in middle)
    for name, key, scale in (("brief", "rewards/brief/mean", 10), ("pass@8", "eval/pass_at_k", 1),
                             ("held-out accuracy", "eval/accuracy", 1)):
        if of(key):
            values[name] = scale * mean(of(key)[-5:])
    return values


def effect(check: Check, steps: int) -> tuple[float, float, str]:
    """-> mean of the paired differences, half of its 95 % interval, verdict."""
    pairs = [(measures(check.arm, seed, steps), measures(check.baseline, seed, steps))
             for seed in SEEDS]
    gaps = [one[check.metric] - two[check.metric] for one, two in pairs
            if check.metric in one and check.metric in two]
    if len(gaps) < len(SEEDS):
        return 0.0, 0.0, f"{len(gaps)} of {len(SEEDS)} pairs run"
    mean = statistics.mean(gaps)
    half = T95[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
    low, high = mean - half, mean + half
    if check.claimed in ("less", "no more"):
        low, high = -high, -low
    if check.claimed == "same":
        shown = -check.margin < low and high < check.margin
        against = low > check.margin or high < -check.margin
    else:
        shown, against = low > -check.margin, high < -check.margin
    return mean, half, "shown" if shown else "contradicted" if against else "not shown"


COLUMNS = ["final accuracy", "mean accuracy", "largest fall", "mean entropy", "final entropy",
           "clipped share", "largest ratio", "smallest ratio", "tokens", "tokens of wrong answers",
           "cut off", "useful groups", "distinct", "weight of extremes", "brief", "pass@8",
           "held-out accuracy", "fresh accuracy", "completions"]
MORE = {"clip": ("final entropy", "largest ratio", "smallest ratio"), "gdpo": ("tokens",),
        "dapo": ("useful groups", "completions"), "dials": ("final entropy",),
        "pairs": ("mean entropy",)}  # columns of a claim, besides those that it compares


def begun(claim: str) -> bool:
    """Whether each of its arms has been run with a seed at least."""
    return all(any(kept(arm, seed).exists() for seed in SEEDS) for arm in arms(claim))


def tables(claim: str) -> str:
    """What docs/results.md says of the claim: what each arm came to, and each comparison."""
    steps, used = rollouts(claim), [column for column in COLUMNS if column in {
        check.metric for check in CLAIMS[claim].checks} | {"final accuracy", *MORE.get(claim, ())}]
    if not begun(claim):
        return "Not run yet."
    lines = [f"| arm | runs | {' | '.join(used)} |", "|" + "---|" * (len(used) + 2)]
    for arm in arms(claim):
        runs = [m for m in (measures(arm, seed, steps) for seed in SEEDS) if m]
        cells = [interval([m[column] for m in runs if column in m]) for column in used]
        lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
    lines += ["", "| compared | by | claimed | arm − baseline | verdict |", "|" + "---|" * 5]
    for check in CLAIMS[claim].checks:
        mean, half, verdict = effect(check, steps)
        claimed = check.claimed + (f" (± {check.margin})" if check.margin else "")
        gap = "–" if "pairs" in verdict else f"{mean:+.3f} ± {half:.3f}"
        lines.append(f"| {check.arm} − {check.baseline} | {check.metric} | {claimed} | {gap} | "
                     f"**{verdict}** |")
    return "\n".join([*lines, "", f"![{CLAIMS[claim].title}](claims-{claim}.png)"])


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
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    with multiprocessing.get_context("spawn").Pool(max(1, args.jobs), maxtasksperchild=10) as pool:
        pool.starmap(run, [(*job, steps) for job, steps in longest.items()], chunksize=1)
    write_csv()
    page = ROOT / "docs" / "results.md"
    page.write_text(write_page(page.read_text("utf-8")), "utf-8")
    for claim in CLAIMS:
        if begun(claim):
            found = {(arm, seed): rows(arm, seed, rollouts(claim)) for arm in arms(claim)
                     for seed in SEEDS}
            draw({k: v for k, v in found.items() if v}, CLAIMS[claim].panels,
                 ROOT / "docs" / f"claims-{claim}.png", window=128)
        print(f"{CLAIMS[claim].title}\n{tables(claim)}\n")
