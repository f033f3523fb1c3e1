"""A step of grpo.py beside its floor: what the engine and the model alone need for the same tokens.

    python bench/floor.py

Floor = generation by the bare engine (vllm.LLM.generate: same prompts, n and max_tokens, no seeds,
no log-probs) + the model's forward pass, cross-entropy on the completion tokens and backward pass
over the step's own padded micro-batches. Hypothesis: a step takes at most 1.15 times its floor, and
at most 2.1 times as long when group, length or model are twice as large.

The job: 2 prompts × 8 completions of a random Llama of 24 M parameters that never stops, so that
all completions have 512 tokens; β = 0. Beside it the same with half the group, half the length,
half the model. The floor is measured in the run itself, with its engine, weights and micro-batches,
behind each step and outside of its times, so step and floor see the same machine. The first
--warmup steps are left out. `rest` of a step is what lies outside its four phases: advantages,
metrics. Evaluation, checkpoints and the writing of logs are outside of time/step.

Written: results/floor.jsonl, a line per setting and turn, and results/floor.md.
"""
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import turns

ROOT = Path(__file__).resolve().parent.parent
# What is smaller than in the full job: options of grpo.py, and the model's layers.
SETTINGS = {"full": {}, "half the group": {"group_size": 4},
            "half the length": {"max_completion_tokens": 256}, "half the model": {"layers": 3}}
PHASES = ("sample", "score", "learn", "sync")


@dataclass
class Args:
    settings: tuple[str, ...] = tuple(SETTINGS)
    """settings that take turns"""
    rounds: int = 3
    """turns of each setting"""
    steps: int = 2
    """steps per turn"""
    warmup: int = 1
    """first steps of each setting that are not counted"""
    threads: int = 2
    """threads"""


def worker(name: str, folder: str) -> None:
    parent = turns.Parent()
    sys.path.insert(0, str(ROOT))
    import torch

    import common
    import grpo

    held = {}  # what the run uses, for the floor to use it too

    def keep(owner, function, name):
        """After each call of owner.function: held[name] = (arguments, result)."""
        original = getattr(owner, function)

        def wrapped(*arguments, **options):
            result = original(*arguments, **options)
            held[name] = arguments, result
            return result
        setattr(owner, function, wrapped)

    keep(common, "load_model", "model")
    keep(common, "minibatches", "minibatches")
    keep(common.VllmSampler, "generate", "generate")

    def floor(metrics, args, run, log):
        """In place of check_health, the last thing in a step before saving."""
        (sampler, prompt_ids, n, *_), outputs = held["generate"]
        model, micros = held["model"][1], sum(held["minibatches"][1], [])
        params = sampler.vllm.SamplingParams(n=n, max_tokens=args.max_completion_tokens,
                                             temperature=1.0, detokenize=False)
        sampler.llm.reset_prefix_cache()
        begin = time.perf_counter()
        made = sampler.llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], params,
                                    use_tqdm=False)
        generated = time.perf_counter()
        for micro in micros:
            logits = model(input_ids=micro.input_ids, use_cache=False).logits[micro.predicts]
            torch.nn.functional.cross_entropy(logits, micro.targets).backward()
        end = time.perf_counter()
        model.zero_grad()
        tokens = sum(len(tokens) for group in outputs for tokens, _, _ in group)
        assert tokens == sum(len(c.token_ids) for output in made for c in output.outputs)
        parent.tell({
            **{phase: metrics[f"time/{phase}"] for phase in (*PHASES, "step")},
            "generation": generated - begin, "passes": end - generated, "tokens": tokens,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "micro_batches": [list(micro.input_ids.shape) for micro in micros]})

    common.check_health = floor
    options = turns.LARGE | SETTINGS[name]
    turns.make_large(folder, options.pop("layers", 7))
    grpo.REWARDS = [grpo.correct, turns.spread]
    grpo.main(replace(
        grpo.Args(), **options, model=folder, dataset=f"{folder}/train.jsonl", kl_coef=0.0,
        eval_every=0, save_every=0, num_steps=10**6, output_dir=f"{folder}/run"))


def measure(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        commands = {name: [sys.executable, __file__, "worker", name, f"{folder}/{place}"]
                    for place, name in enumerate(args.settings)}
        for turn, name, rows in turns.in_turns(commands, args.rounds, args.steps, args.threads):
            for row in rows:
                turns.keep("floor", {"setting": name, "turn": turn, **row})
                print(f"turn {turn}, {name}: step {row['step']:.2f} s, floor "
                      f"{row['generation'] + row['passes']:.2f} s", flush=True)


def report(args: Args) -> None:
    lines = (turns.RESULTS / "floor.jsonl").read_text().splitlines()
    rows = {}
    for row in map(json.loads, lines):
        row["floor"] = row["generation"] + row["passes"]
        row["rest"] = row["step"] - sum(row[phase] for phase in PHASES)
        row["ratio"] = row["step"] / row["floor"]
        rows.setdefault(row["setting"], []).append(row)
    rows = {name: steps[args.warmup:] for name, steps in rows.items()}

    def median(name, key):
        return statistics.median(row[key] for row in rows[name])

    cells, grown = [], []
    for name, steps in rows.items():
        sequences, length = (max(values) for values in zip(*steps[0]["micro_batches"]))
        ratios = [row["ratio"] for row in steps]
        cells.append([
            name, f"{steps[0]['parameters'] / 1e6:.1f} M", steps[0]["tokens"],
            f"{len(steps[0]['micro_batches'])} of {sequences} × {length}", len(steps),
            *(f"{median(name, key):.2f}" for key in
              (*PHASES, "rest", "step", "generation", "passes", "floor")),
            f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"])
        if name != "full" and "full" in rows:
            grown.append([name.replace("half", "twice"), *(
                f"{median('full', key) / median(name, key):.2f}" for key in
                ("step", "sample", "learn", "floor", "generation", "passes"))])
    turns.write("floor", "A step beside its floor", args, [
        "Seconds, medians over steps. Floor = generation + passes (forward and backward).", "",
        *turns.table("setting | parameters | tokens sampled | micro-batches | steps | sample | "
                     "score | learn | sync | rest | **step** | generation | passes | **floor** | "
                     "step / floor (range)", cells),
        "How many times as long, against the setting with half of it:", "",
        *turns.table("twice as large | step | sample | learn | floor | generation | passes",
                     grown),
        "Hypotheses: step / floor at most 1.15 in the full job, a step at most 2.1 times as long.",
        ""])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        import tyro

        args = tyro.cli(Args, description=__doc__)
        (turns.RESULTS / "floor.jsonl").unlink(missing_ok=True)
        measure(args)
        report(args)
