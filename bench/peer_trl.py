"""Step time, tokens per second, memory and learning, beside TRL's GRPOTrainer on the same job.

    python bench/peer_trl.py --trl-python /tmp/trl/bin/python

TRL is in an environment of its own: the docstring of bench/parity_trl.py says how to make one.
Hypothesis: the loop written out here is no slower than TRL's, with either sampler, and learns as
much in as many steps.

Four arms: TRL with vLLM (colocate) and with its own generate; grpo.py with --sampler vllm and hf.
Two sizes: `tiny` is the default job, 8 prompts × 16 completions of up to 96 tokens; `large`, for a
random Llama of 24 M parameters that never stops, 2 prompts × 8 completions of 512 tokens. For all
arms the same: weights, prompts and their order, rewards (`correct` and `format`; for `large`
`correct` and `spread`, so that all groups have a signal), GRPO's loss with β = 0 and clip 0.2,
importance weights capped at 2 with vLLM, an AdamW step per rollout at 1e-4, clip norm 1, fp32.

Each arm is a process that stays alive and rests while the others have their turn. One stopwatch for
all: torch's hook behind an optimizer step, wall clock from one to the next with all that lies
between; the first --warmup steps of an arm don't count. No evaluations, no checkpoints; metrics are
written every step here, never by TRL. Accuracy is that of the samples. TRL is set up to be quick:
templates applied beforehand, no shuffling, no gradient checkpointing, its default fused AdamW, and
the sequences per backward pass that were quickest (AT_ONCE). It compiles its vLLM, so grpo.py does
too (--vllm-compile). Two patches, explained at `sync`, give TRL's vLLM fp32 on a CPU.

Written: results/peer_trl.jsonl, a line per size, turn and arm, and results/peer_trl.md. With
--sizes or --arms only those are measured anew.
"""
import functools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import turns

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("trl-vllm", "ours-vllm", "trl-hf", "ours-hf")
AT_ONCE = {"tiny": 32, "large": 4}  # sequences of a backward pass in TRL
LAST = 10  # steps whose accuracy is reported


@dataclass
class Args:
    trl_python: str = "/tmp/trl/bin/python"
    """python of the environment that has TRL"""
    sizes: tuple[str, ...] = ("tiny", "large")
    """sizes to run"""
    arms: tuple[str, ...] = ARMS
    """arms that take turns"""
    rounds: int = 4
    """turns of each arm"""
    tiny_steps: int = 12
    """steps per turn"""
    large_steps: int = 1
    """steps per turn"""
    warmup: int = 2
    """first steps of each arm that are not counted"""
    threads: int = 2
    """threads of every arm"""


# -------------------------------------------------------------------- the arms, in their processes
def ours(args, seen: dict) -> None:
    import common
    import grpo

    score = common.score

    def scored(groups, *rest):
        score(groups, *rest)
        samples = [sample for group in groups for sample in group]
        seen.update(tokens=sum(len(s.completion_ids) for s in samples),
                    accuracy=statistics.mean(s.correct for s in samples))

    common.score = scored
    grpo.main(args)


def sync(self) -> None:
    """In place of TRL's own on vLLM's CPU backend. TRL leaves the engine's precision to vLLM, which
    takes bf16 for an fp32 model. In fp32 that backend packs its layers, and TRL's way to load
    weights into them raises; so they go in as in common.py."""
    import common

    weights = {"weights_iterator": self._iter_named_params()}
    self.llm.collective_rpc("reload_weights", kwargs=weights)
    self.llm.apply_model(common.repack_head)
    self.llm.reset_prefix_cache()


def trl(args, seen: dict, at_once: int) -> None:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    import common
    import grpo

    run = common.Run(args, [], "trl")
    tokenizer, train, _ = common.load_data(args, run)
    rows = [row for _ in range(500) for row in common.next_rows(train, args, run)]
    texts = [tokenizer.decode(row["prompt_ids"]) for row in rows]
    assert tokenizer(texts)["input_ids"] == [row["prompt_ids"] for row in rows]

    def of_batch(function):
        def reward(completions, completion_ids, gold, **_):
            values = [float(function(text, answer)) for text, answer in zip(completions, gold)]
            if function is common.correct:
                seen.update(tokens=sum(map(len, completion_ids)), accuracy=statistics.mean(values))
            return values
        reward.__name__ = function.__name__
        return reward

    config = GRPOConfig(
        output_dir=args.output_dir, max_steps=500, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", shuffle_dataset=False, seed=args.seed,
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_dropout=True,
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=at_once,
        gradient_accumulation_steps=args.prompts_per_step * args.group_size // at_once,
        num_generations=args.group_size, max_completion_length=args.max_completion_tokens,
        temperature=args.temperature, num_iterations=1, beta=0.0, epsilon=args.clip_low,
        loss_type="grpo", scale_rewards="group", reward_weights=list(args.reward_weights),
        learning_rate=args.learning_rate, lr_scheduler_type="constant", adam_beta2=args.adam_beta2,
        weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm,
        use_vllm=args.sampler == "vllm", vllm_mode="colocate",
        vllm_max_model_length=args.max_prompt_tokens + args.max_completion_tokens,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=args.tis_cap)
    data = [{"prompt": text, "gold": row["gold"]} for text, row in zip(texts, rows)]
    if args.sampler == "vllm":
        from trl.generation import vllm_generation

        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32")
        vllm_generation.VLLMGeneration.sync_weights = sync
    GRPOTrainer(model=common.locate(args.model), args=config, processing_class=tokenizer,
                reward_funcs=[of_batch(function) for function in grpo.REWARDS],
                train_dataset=datasets.Dataset.from_list(data)).train()


def worker(arm: str, size: str, folder: str) -> None:
    parent = turns.Parent()
    sys.path.insert(0, str(ROOT))
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import grpo  # before anything imports vLLM: common.py sets its environment

    seen, begin = {}, time.perf_counter()

    def stepped(*_):
        nonlocal begin
        seen["seconds"] = time.perf_counter() - begin
        seen["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        parent.tell(seen)
        begin = time.perf_counter()

    register_optimizer_step_post_hook(stepped)
    side, sampler = arm.split("-")
    args = replace(grpo.Args(), kl_coef=0.0, eval_every=0, save_every=0, num_steps=10**6,
                   sampler=sampler, vllm_compile=arm == "ours-vllm")
    if size == "large":
        args = replace(args, **turns.LARGE, model=folder, dataset=f"{folder}/train.jsonl")
        grpo.REWARDS = [grpo.correct, turns.spread]
    with tempfile.TemporaryDirectory() as output:
        args = replace(args, output_dir=f"{output}/run")
        ours(args, seen) if side == "ours" else trl(args, seen, AT_ONCE[size])


# -------------------------------------------------------------------- all of it, and the report
def measure(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        turns.make_large(folder)
        for size in args.sizes:
            commands = {arm: [args.trl_python if arm.startswith("trl") else sys.executable,
                              __file__, "worker", arm, size, folder] for arm in args.arms}
            steps = args.tiny_steps if size == "tiny" else args.large_steps
            for turn, arm, rows in turns.in_turns(commands, args.rounds, steps, args.threads):
                lists = {k: [row[k] for row in rows] for k in ("seconds", "tokens", "accuracy")}
                turns.keep("peer_trl", {"size": size, "turn": turn, "arm": arm, **lists,
                                        "mib": rows[-1]["mib"]})
                print(f"{size}, turn {turn}, {arm}: {statistics.median(lists['seconds']):.2f} s "
                      "a step", flush=True)


def report(args: Args) -> None:
    steps = {}  # {(size, arm): [(turn, MiB, seconds, tokens, accuracy) of each step]}
    for line in (turns.RESULTS / "peer_trl.jsonl").open():
        row = json.loads(line)
        for values in zip(row["seconds"], row["tokens"], row["accuracy"]):
            arm = steps.setdefault((row["size"], row["arm"]), [])
            arm.append((row["turn"], row["mib"], *values))
    steps = {key: rows[args.warmup:] for key, rows in steps.items() if len(rows) > args.warmup + 1}

    def middle(key, turns):
        return statistics.median(row[2] for row in steps[key] if row[0] in turns)

    cells, ratios = [], []
    for (size, arm), rows in steps.items():
        of_turn, mib, seconds, tokens, accuracy = zip(*rows)
        low, _, high = statistics.quantiles(seconds, n=4)
        cells.append([size, arm, len(rows),
                      f"{statistics.median(seconds):.2f} ({low:.2f} to {high:.2f})",
                      f"{sum(tokens) / sum(seconds):.0f}", f"{max(mib):.0f}", "–"
                      if size == "large" else f"{statistics.mean(accuracy[-LAST:]):.3f}"])
        key, other = (size, arm), (size, arm.replace("ours", "trl"))
        if arm.startswith("ours") and other in steps:
            common = set(of_turn) & {row[0] for row in steps[other]}
            each = [middle(key, [turn]) / middle(other, [turn]) for turn in common]
            ratios.append([f"{size}, {arm} / {other[1]}",
                           f"**{middle(key, common) / middle(other, common):.2f}**",
                           f"{min(each):.2f} to {max(each):.2f}"])
    version = subprocess.run([args.trl_python, "-c", "import importlib.metadata as m; "
                              "print(m.version('trl'))"], capture_output=True, text=True).stdout
    turns.write("peer_trl", f"Beside TRL {version.strip()}", args, [
        *turns.table("size | arm | steps | s per step: median (middle half) | completion tokens "
                     f"per s | peak memory, MiB | accuracy, last {LAST} steps", cells),
        "Ratio of the medians over the turns that both sides had, and the range of it by turn.", "",
        *turns.table("ratio | median | range", ratios)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        import tyro

        args = tyro.cli(Args, description=__doc__)
        path = turns.RESULTS / "peer_trl.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if not (
            (row := json.loads(line))["size"] in args.sizes and row["arm"] in args.arms)))
        measure(args)
        report(args)
