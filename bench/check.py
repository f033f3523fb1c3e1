"""Has a change to the code changed how the scripts learn? A short run of each against its curves.

    python bench/check.py                          every script: about five minutes on two cores
    python bench/check.py --scripts dapo gdpo

Each script runs STEPS steps with its defaults and a seed that no stored curve has. The mean over
the last half of them must lie where the stored runs (results/curves, bench/curves.py) lead one
to expect one more run: inside their 99 % prediction interval, mean ± t s √(1 + 1/n), never
narrower than TOLERANCE. Prints a line for each script and measure; exit 1 if one has moved.
With 27 measures one in four checks will name a healthy one: run it again with another --seed.
"""
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from curves import ROOT, SCRIPTS, read

STEPS = 10
TOLERANCE = {"accuracy": 0.03, "completions/mean_length": 1.0, "entropy": 0.01}
T99 = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60}  # Student's t for 99 %, by number of stored runs


@dataclass
class Args:
    scripts: tuple[str, ...] = SCRIPTS
    """scripts to run"""
    seed: int = 5
    """of the fresh runs"""


def measures(rows: list[dict]) -> dict[str, float]:
    late = [row for row in rows if STEPS // 2 < row["step"] <= STEPS]
    return {key: statistics.mean(row[key] for row in late) for key in TOLERANCE}


def fresh(script: str, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [f"{script}.py", "--seed", str(seed), "--num-steps", str(STEPS), "--eval-every",
                   "0", "--save-every", "0", "--output-dir", folder]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return measures([json.loads(line) for line in lines])


def band(values: list[float], tolerance: float) -> tuple[float, float]:
    """Where one more run is expected."""
    n, mean = len(values), statistics.mean(values)
    half = T99[min(n, 5)] * statistics.stdev(values) * (1 + 1 / n) ** 0.5
    return mean - max(half, tolerance), mean + max(half, tolerance)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    stored, moved = read(), 0
    for script in args.scripts:
        runs = [measures(rows) for (name, _), rows in stored.items() if name == script]
        if len(runs) < 2:
            print(f"{script}: no stored curves to compare with; python bench/curves.py makes them")
            continue
        for key, value in fresh(script, args.seed).items():
            low, high = band([run[key] for run in runs], TOLERANCE[key])
            moved += not low <= value <= high
            print(f"{script:8} {key:24} {value:8.3f}  expected {low:.3f} to {high:.3f}"
                  f"{'' if low <= value <= high else '  MOVED'}", flush=True)
    sys.exit(moved > 0)
