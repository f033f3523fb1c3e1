"""Learning curves of every script on the embedded task: same data, same budget of completions.

    python bench/curves.py                       every script × seeds 0-4, one run at a time
    python bench/curves.py --scripts grpo --seeds 0 1 --jobs 2

Each run is `python <script>.py --seed <k> --eval-every 20` with the script's own defaults. Its
metrics.jsonl is kept as results/curves/<script>-<seed>.jsonl; what is there already is not run
again. Curves are cut at the completions that grpo.py samples by default. Written from the kept
files: results/curves.csv (a row per run), results/curves.md (a row per script) and curves.png.
With --jobs above 1 the runs share the cores, one thread each, so their times mean nothing and are
left out: `timed` in each row says which. Those kept here have seed 4 timed, all in one sitting.
"""
import concurrent.futures
import csv
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCRIPTS = ("grpo", "dr_grpo", "dapo", "grpo2", "gdpo", "gopo", "gspo", "cispo", "sapo")
BUDGET = 80 * 128  # completions: grpo.py's default run
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999",
           "#882255")  # told apart by the colour-blind
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's t for a 95 % interval, by number of runs


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS
    """scripts to run"""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """one run each"""
    jobs: int = 1
    """runs at a time; with more than one, times are not reported"""


def run(script: str, seed: int, timed: bool) -> None:
    kept = RESULTS / "curves" / f"{script}-{seed}.jsonl"
    if kept.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{script}.py", "--seed", str(seed), "--eval-every", "20", "--save-every", "0",
                   "--output-dir", folder]
        environment = os.environ | ({} if timed else {"OMP_NUM_THREADS": "1"})
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True,
                       capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    kept.parent.mkdir(parents=True, exist_ok=True)
    aside = kept.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(row | {"timed": timed}) + "\n" for row in rows))
    shutil.move(aside, kept)
    print(f"python {' '.join(command[:-2])}: {rows[0]['eval/accuracy']:.3f} -> "
          f"{rows[-1]['eval/accuracy']:.3f}", flush=True)


def read() -> dict[tuple[str, int], list[dict]]:
    """The kept rows of each (script, seed), cut at BUDGET completions. In timed ones `seconds` is
    the time spent so far, evaluations left out."""
    found = {}
    for path in sorted((RESULTS / "curves").glob("*.jsonl")):
        script, seed = path.stem.rsplit("-", 1)
        rows, seconds = [{"num_completions": 0} | json.loads(line) for line in path.open()], 0.0
        for row in rows:
            seconds += row.get("time/step", 0.0)
            row |= {"seconds": seconds} if row["timed"] else {}
        found[script, int(seed)] = [row for row in rows if row["num_completions"] <= BUDGET]
    return found


def summary(rows: list[dict]) -> dict:
    """What one run came to."""
    evals = [row for row in rows if "eval/accuracy" in row]
    steps = [row for row in rows if row["step"]]
    lengths = [row["completions/mean_length"] for row in steps]
    reached = [row["num_completions"] for row in steps if row["accuracy"] >= 0.8
               and "dapo/rounds" not in row]  # dapo.py knows the accuracy of what it kept alone
    return {"start": evals[0]["eval/accuracy"], "final": evals[-1]["eval/accuracy"],
            "pass@8": evals[-1]["eval/pass_at_k"],
            "completions_to_0.8": reached[0] if reached else "",
            "length_first": statistics.mean(lengths[:5]),
            "length_last": statistics.mean(lengths[-5:]),
            "truncated": statistics.mean(row["completions/clipped_ratio"] for row in steps[-5:]),
            "entropy_last": statistics.mean(row["entropy"] for row in steps[-5:]),
            "max_logp_difference": max(r["sampling/sampling_logp_difference/max"] for r in steps),
            "seconds": sum(row["time/step"] for row in steps) if rows[0]["timed"] else "",
            "seconds_per_step": statistics.median(row["time/step"] for row in steps)
            if rows[0]["timed"] else ""}


def interval(values: list[float]) -> str:
    """mean ± half of the 95 % interval over runs."""
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else "–"
    half = T95[min(5, len(values))] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def write_tables(found) -> None:
    runs = [{"script": script, "seed": seed, **summary(rows)}
            for (script, seed), rows in found.items()]
    with open(RESULTS / "curves.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(runs[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in r.items()}
                         for r in runs)
    lines = [f"`python bench/curves.py`: held-out accuracy in the last evaluation within {BUDGET} "
             "completions (dapo.py: about 8000), mean ± 95 % interval over seeds", "",
             "| script | runs | accuracy before | after | runs ≥ 0.85 | completions to 0.8 | "
             "pass@8 | tokens per answer | truncated | s per step |", "|" + "---|" * 10]
    for script in dict.fromkeys(run["script"] for run in runs):
        mine = [run for run in runs if run["script"] == script]
        of = lambda key: [run[key] for run in mine if run[key] != ""]  # noqa: E731
        median = lambda key, digits: (  # noqa: E731
            f"{statistics.median(of(key)):.{digits}f}" if of(key) else "–")
        mean = lambda key, digits: f"{statistics.mean(of(key)):.{digits}f}"  # noqa: E731
        cells = [script, len(mine), mean("start", 3), interval(of("final")),
                 sum(value >= 0.85 for value in of("final")), median("completions_to_0.8", 0),
                 interval(of("pass@8")), f"{mean('length_first', 0)} → {mean('length_last', 0)}",
                 mean("truncated", 3), median("seconds_per_step", 2)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    (RESULTS / "curves.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def draw(found: dict, panels: list[tuple], path: Path, window: int = 512) -> None:
    """A panel for each (key, title): per name its mean over seeds, with the range between the
    lowest and the highest, against completions, or what else the panel names with the width of a
    window of it. `found`: {(name, seed): rows}"""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for name, _ in found))
    down = math.ceil(len(panels) / 4)
    figure = Figure(figsize=(14, 3 * down + 0.8), layout="constrained")
    for axis, (key, title, *against) in zip(figure.subplots(down, 4, squeeze=False).flat, panels):
        x, width = against or ("num_completions", window)
        for i, (name, colour) in enumerate(zip(names, COLOURS)):
            windows = {}  # {its centre: {seed: values}}
            for (script, seed), rows in found.items():
                for row in rows if script == name else ():
                    if key in row and x in row:
                        centre = math.ceil(row[x] / width) * width - (width / 2 if row[x] else 0)
                        windows.setdefault(centre, {}).setdefault(seed, []).append(row[key])
            means = {x: [statistics.mean(values) for values in seeds.values()]
                     for x, seeds in sorted(windows.items())}
            axis.plot(list(means), [statistics.mean(values) for values in means.values()],
                      color=colour, label=name, linestyle=("-", "--", ":")[i // 3 % 3])
            axis.fill_between(list(means), [min(values) for values in means.values()],
                              [max(values) for values in means.values()], color=colour,
                              alpha=0.12, lw=0)
        axis.set(title=title, xlabel="completions" if x == "num_completions" else x)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", frameon=False,
                  ncols=9 if sum(map(len, names)) < 80 else 4)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: run(*job, args.jobs == 1),
                      [(script, seed) for seed in args.seeds for script in args.scripts]))
    write_tables(read())
    draw(read(), [("eval/accuracy", "held-out accuracy, greedy"),
                  ("accuracy", "accuracy of samples"),
                  ("reward", "reward, each script's own"),
                  ("completions/mean_length", "tokens per answer"), ("entropy", "entropy, nats"),
                  ("useful_groups", "share of useful groups"),
                  ("eval/accuracy", "held-out accuracy, seed 4", "seconds", 5),
                  ("accuracy", "accuracy of samples, seed 4", "seconds", 5)],
         RESULTS / "curves.png")
    shutil.copy(RESULTS / "curves.png", ROOT / "docs" / "curves.png")
