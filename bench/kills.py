"""SIGKILL at random moments: is the resumed run the one that was never stopped?

    python bench/kills.py                    20 kills of runs with vLLM, on one thread
    python bench/kills.py --sampler hf --kills 8

A reference run of grpo.py is left alone. Others of the same seed are killed, up to four times
each, resumed with --resume after each kill, and left to finish after the last. Every other kill
comes at a moment drawn from the whole run, start-up included, in seconds of CPU time, so that other
work on the machine doesn't matter. The rest are aimed at a checkpoint that is being written.
Where there was no checkpoint yet, --resume has to say so in one line; the run is then started anew.

Exact: metrics.jsonl equal in all but time/*, samples.jsonl equal, the final weights and each whole
checkpoint that a kill left equal to the reference's, byte by byte, and no process left over. A
line per kill goes to results/kills.jsonl, and what is there already is not run again;
results/kills.md is the summary.
"""
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
LEFT_OVER_SECONDS = 10  # that helper processes get to notice that their parent is gone


@dataclass
class Args:
    kills: int = 20
    """at least so many"""
    kills_per_run: int = 4
    """before a run may finish"""
    num_steps: int = 8
    """of each run; a checkpoint after each"""
    sampler: str = "vllm"
    """or hf"""
    seed: int = 0
    """of the moments, and of the runs"""


class Process:
    """A run of grpo.py, new in `folder` or resumed there."""

    def __init__(self, folder: Path, data: str, args: Args, *options: str, resume=False):
        new = ["--dataset", data, "--sampler", args.sampler, "--num-steps", str(args.num_steps),
               "--prompts-per-step", "2", "--group-size", "4", "--max-completion-tokens", "48",
               "--eval-every", "3", "--save-every", "1", "--seed", str(args.seed),
               "--output-dir", str(folder), *options]
        self.errors, self.begin = tempfile.TemporaryFile("w+"), time.perf_counter()
        self.popen = psutil.Popen(
            [sys.executable, "grpo.py", *(["--resume", str(folder)] if resume else new)], cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=self.errors, stderr=self.errors)

    def cpu(self) -> float:
        return sum(self.popen.cpu_times()[:2])

    def running(self) -> bool:
        return self.popen.poll() is None

    def end(self) -> str:
        """-> what it wrote to stderr, once it has ended."""
        self.popen.wait()
        self.errors.seek(0)
        return self.errors.read()


def watch(process: Process, done) -> float:
    """Wait until done() or the end. -> CPU seconds at that moment"""
    seconds = 0.0
    while process.running() and not done():
        seconds = process.cpu()
        time.sleep(0.001)
    return seconds


def written(folder: Path, step: int, begin: float) -> bool:
    """Whether the checkpoint of this step, or of a later one if that was missed, is being written;
    not one that an earlier kill left so."""
    for path in folder.glob("checkpoints/.step-*"):
        with contextlib.suppress(FileNotFoundError):
            if int(path.name[6:]) >= step and path.stat().st_mtime > begin:
                return True
    return False


# -------------------------------------------------------------------- what is on disk
def on_disk(folder: Path) -> dict:
    checkpoints = sorted(int(path.parent.name[5:]) for path in
                         folder.glob("checkpoints/step-*/trainer.pt"))
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return {"args": (folder / "args.json").exists(), "rows": text.count("\n"),
            "half_row": not text.endswith("\n") and text != "", "checkpoints": checkpoints,
            "aside": sorted(path.name for path in folder.glob("checkpoints/.*"))}


def differs(folder: Path, whole: Path, finished: bool) -> str:
    """The first difference from the reference run, or nothing."""
    checkpoints = list(folder.glob("checkpoints/step-*"))
    for path in checkpoints:
        name = f"checkpoints/{path.name}/model.safetensors"
        if not (path / "trainer.pt").exists():
            return f"{path.name} has a checkpoint's name and is not whole"
        if (folder / name).read_bytes() != (whole / name).read_bytes():
            return f"weights of {path.name}"
    if not finished:
        return ""
    if max((path.name for path in whole.glob("checkpoints/step-*"))) not in {
            path.name for path in checkpoints}:
        return "no final checkpoint"
    mine, reference = ([{k: v for k, v in json.loads(line).items() if not k.startswith("time/")}
                        for line in (path / "metrics.jsonl").open()] for path in (folder, whole))
    if mine != reference:
        return f"metrics.jsonl: {len(mine)} rows, {sum(row in reference for row in mine)} equal"
    if (folder / "samples.jsonl").read_bytes() != (whole / "samples.jsonl").read_bytes():
        return "samples.jsonl"
    return ""


# -------------------------------------------------------------------- the runs
def reference_run(folder: Path, data: str, args: Args) -> dict:
    """-> CPU seconds of start-up and of a step, and seconds that a checkpoint takes to write."""
    process = Process(folder, data, args, "--keep-checkpoints", "0")
    start = watch(process, lambda: on_disk(folder)["rows"])
    total = watch(process, lambda: False)
    errors = process.end()
    assert process.popen.returncode == 0, errors
    writes = [path.stat().st_ctime - min(file.stat().st_mtime for file in path.iterdir())
              for path in folder.glob("checkpoints/step-*")]  # first file to renaming
    return {"start": start, "step": (total - start) / args.num_steps,
            "write": sorted(writes)[len(writes) // 2]}


def killed_run(number: int, folder: Path, whole: Path, data: str, times: dict, args: Args) -> list:
    """-> a row per kill; the run is exact in all of them or in none."""
    rng, kills = random.Random(f"{args.seed} {args.sampler} {number}"), []
    process = Process(folder, data, args)
    for k in range(args.kills_per_run):
        last = max(on_disk(folder)["checkpoints"], default=0)
        if last == args.num_steps:
            break
        begin, aimed = time.time(), (number + k) % 2 == 0
        if aimed:
            step = rng.randint(last + 1, min(last + 3, args.num_steps))
            cpu = watch(process, lambda: written(folder, step, begin))
            time.sleep(rng.uniform(0, 1.3 * times["write"]))
        else:
            moment = rng.uniform(0, times["start"] + times["step"] * (args.num_steps - last))
            cpu = watch(process, lambda: process.cpu() >= moment)
        children = process.popen.children(recursive=True) if process.running() else []
        if not process.running():  # faster than the reference
            break
        process.popen.kill()
        process.end()
        found = on_disk(folder)
        row = {"sampler": args.sampler, "run": number, "kill": k,
               "kind": "checkpoint" if aimed else "any moment",
               "seconds": round(time.perf_counter() - process.begin, 2), "cpu_seconds": cpu,
               **found, "resumed_from": max(found["checkpoints"], default=None)}
        row["difference"] = differs(folder, whole, finished=False)
        if psutil.wait_procs(children, LEFT_OVER_SECONDS)[1]:
            row["difference"] = row["difference"] or "processes left over"
        kills.append(row)
        process = Process(folder, data, args, resume=True)
        if not found["checkpoints"]:
            row["refusal"] = process.end().strip()
            if "\n" in row["refusal"] or not row["refusal"].startswith("error: --resume"):
                row["difference"] = row["difference"] or "no clear refusal"
            shutil.rmtree(folder, ignore_errors=True)
            process = Process(folder, data, args)
    errors = process.end()
    end = errors[-300:] if process.popen.returncode else differs(folder, whole, finished=True)
    for row in kills:
        row["difference"] = row["difference"] or end
        row["exact"] = not row["difference"]
        row["refusal"] = row.get("refusal", "").replace(str(folder), "DIR")
    return kills


def report(rows: list[dict]) -> str:
    lines = ["`python bench/kills.py`: runs killed with SIGKILL and resumed, against one of the "
             "same seed that was left alone", "",
             "| sampler | kills | within a checkpoint | resumed | started anew | exact |",
             "|---|---|---|---|---|---|"]
    for sampler in sorted({row["sampler"] for row in rows}):
        mine = [row for row in rows if row["sampler"] == sampler]
        resumed = sum(row["resumed_from"] is not None for row in mine)
        hit = sum(row["kind"] == "checkpoint" and row["aside"] != [] for row in mine)
        lines.append(f"| {sampler} | {len(mine)} | {hit} | "
                     f"{resumed} | {len(mine) - resumed} | {sum(row['exact'] for row in mine)} |")
    lines += ["", "| sampler | run, kill | aimed at | CPU s | on disk | goes on after | exact |",
              "|---|---|---|---|---|---|---|"]
    for row in rows:
        step = row["resumed_from"]
        disk = [f"{row['rows']} rows" + " and a half" * row["half_row"], *row["aside"],
                *(f"step-{n}" for n in row["checkpoints"])]
        lines.append(f"| {row['sampler']} | {row['run']}, {row['kill']} | {row['kind']} | "
                     f"{row['cpu_seconds']:.1f} | {', '.join(disk)} | "
                     f"{'none: anew' if step is None else f'step {step}'} | "
                     f"{'yes' if row['exact'] else row['difference']} |")
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    raw = RESULTS / "kills.jsonl"
    rows = [json.loads(line) for line in raw.open()] if raw.exists() else []
    done = lambda: [row for row in rows if row["sampler"] == args.sampler]  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for split, count in (("train", 64), ("test", 16)):
            lines = (ROOT / "tiny" / f"{split}.jsonl").read_text().splitlines(keepends=True)
            (folder / "data").mkdir(exist_ok=True)
            (folder / "data" / f"{split}.jsonl").write_text("".join(lines[:count]))
        data, number = str(folder / "data"), max((row["run"] for row in done()), default=-1)
        if len(done()) < args.kills:
            times = reference_run(folder / "whole", data, args)
            print({name: round(value, 3) for name, value in times.items()}, flush=True)
        while len(done()) < args.kills:
            number += 1
            found = killed_run(number, folder / str(number), folder / "whole", data, times, args)
            rows += found
            with raw.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
            print(*found, sep="\n", flush=True)
    text = report([json.loads(line) for line in raw.open()])
    (RESULTS / "kills.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
