"""Memory: the peak of a forward and backward pass, and the resident size over 200 steps.

    python bench/memory.py                     both; on one thread about three minutes
    python bench/memory.py --parts peak        only the first

`peak`: log-probs of 8 × 512 completion tokens over a vocabulary of 151,936, and their gradients,
once with common.token_logprobs (the LM head in checkpointed chunks) and once with the plain
`model(…).logits.log_softmax(-1)`. A model with 128 hidden units, so that the logits are what
counts. Each in a process of its own: the largest resident size, less that before the pass.

`flat`: grpo.py's own main on the tiny task with 2 prompts × 4 completions a step, with each
sampler. A third reward with weight 0 returns the resident size in MiB, so that metrics.jsonl
has it. Growth is counted from the mean of steps 16–25 to that of the last ten.

Raw numbers go to results/memory.jsonl, the summary to results/memory.md.
"""
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
MIB = 2**20
VOCABULARY, SEQUENCES, TOKENS, PROMPT = 151_936, 8, 512, 16
sys.path.insert(0, str(ROOT))


@dataclass
class Args:
    parts: tuple[str, ...] = ("peak", "flat")
    """what to measure"""
    steps: int = 200
    """of the second measurement"""
    samplers: tuple[str, ...] = ("hf", "vllm")
    """of the second measurement"""
    child: str = ""
    """used by the script itself: what this process measures, and the file that it writes"""
    out: str = ""


def resident(text="", gold="") -> float:
    """A reward: the resident size of this process in MiB."""
    return psutil.Process().memory_info().rss / MIB


# -------------------------------------------------------------------- the two measurements
def pass_of(kind: str, out: str) -> dict:
    """One forward and backward pass, `chunked` or `plain`; the gradients go to `out`."""
    import torch
    import transformers

    import common
    import grpo

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    args = replace(grpo.Args(), micro_batch_tokens=SEQUENCES * (PROMPT + TOKENS))
    ids = torch.randint(VOCABULARY, (SEQUENCES, PROMPT + TOKENS)).tolist()
    samples = [common.Sample(row[:PROMPT], row[PROMPT:], [0.0] * TOKENS) for row in ids]
    micro = common.pack(samples, args, common.Run(args, [], "grpo.py"))
    weights = torch.randn(SEQUENCES, TOKENS) / SEQUENCES / TOKENS
    before, begin = resident(), time.process_time()
    if kind == "chunked":
        logp, _ = common.token_logprobs(model, micro, 1.0)
    else:
        logp = model(input_ids=micro.input_ids, use_cache=False).logits.log_softmax(-1)
        logp = logp[:, PROMPT - 1:-1].gather(-1, micro.input_ids[:, PROMPT:, None])[..., 0]
    (weights * logp).sum().backward()
    seconds = time.process_time() - begin  # others may use the cores too
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    torch.save({name: weight.grad for name, weight in model.named_parameters()}, out)
    return {"part": "peak", "kind": kind, "before_mib": before, "peak_mib": peak - before,
            "seconds": seconds}


def steps_with(sampler: str, steps: int) -> dict:
    """main() of grpo.py in this process -> the resident size in each step."""
    import grpo

    grpo.REWARDS.append(resident)
    with tempfile.TemporaryDirectory() as folder:
        grpo.main(replace(
            grpo.Args(), sampler=sampler, num_steps=steps, prompts_per_step=2, group_size=4,
            reward_weights=(1.0, 0.5, 0.0), eval_every=0, save_every=0, output_dir=folder))
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    sizes = [row["rewards/resident/mean"] for row in rows[1:]]
    return {"part": "flat", "kind": sampler, "resident_mib": sizes}


# -------------------------------------------------------------------- running and reporting
def measure(kind: str, steps: int, out: str) -> dict:
    command = [sys.executable, __file__, "--child", kind, "--out", out, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
                          stdout=subprocess.PIPE, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print({k: v for k, v in row.items() if k != "resident_mib"}, file=sys.stderr)
    return row


def difference(one: str, two: str) -> float:
    """The largest |Δ| between two files of gradients, relative to the largest gradient."""
    import torch

    a, b = torch.load(one), torch.load(two)
    return max(((a[name] - b[name]).abs().amax() / b[name].abs().amax()).item() for name in a)


def growth(sizes: list[float]) -> float:
    early, late = sum(sizes[15:25]) / 10, sum(sizes[-10:]) / 10
    return late / early - 1


def report(rows: list[dict]) -> str:
    lines = ["`python bench/memory.py`, one thread on a CPU", ""]
    peak = {row["kind"]: row for row in rows if row["part"] == "peak"}
    if peak:
        share = peak["chunked"]["peak_mib"] / peak["plain"]["peak_mib"]
        lines += [f"Forward and backward pass over {SEQUENCES} × {TOKENS} completion tokens, "
                  f"vocabulary {VOCABULARY:,}:", "",
                  "| log-probs | peak, MiB | CPU s |", "|---|---|---|"]
        lines += [f"| {kind} | {row['peak_mib']:.0f} | {row['seconds']:.1f} |"
                  for kind, row in peak.items()]
        lines += ["", f"Chunked is {share:.3f} of plain. The largest difference between gradients "
                  f"is {peak['chunked']['difference']:.1e} of a parameter's largest gradient.", ""]
    flat = [row for row in rows if row["part"] == "flat"]
    if flat:
        at = (1, 20, 50, 100, 150, 200)
        lines += ["Resident size of a run of grpo.py, MiB:", "",
                  f"| sampler | {' | '.join(f'step {i}' for i in at)} | growth after step 20 |",
                  "|---" * (len(at) + 2) + "|"]
        for row in flat:
            sizes = row["resident_mib"]
            cells = [f"{sizes[i - 1]:.0f}" if i <= len(sizes) else "–" for i in at]
            lines.append(f"| {row['kind']} | {' | '.join(cells)} | {100 * growth(sizes):.2f} % |")
    return "\n".join(lines).rstrip() + "\n"


def main(args: Args) -> None:
    raw = RESULTS / "memory.jsonl"
    kept = [json.loads(line) for line in raw.open()] if raw.exists() else []
    rows = [row for row in kept if row["part"] not in args.parts]
    with tempfile.TemporaryDirectory() as folder:
        if "peak" in args.parts:
            files = {kind: str(Path(folder) / kind) for kind in ("plain", "chunked")}
            found = [measure(kind, 0, out) for kind, out in files.items()]
            found[1]["difference"] = difference(files["chunked"], files["plain"])
            rows += found
        if "flat" in args.parts:
            rows += [measure(sampler, args.steps, "") for sampler in args.samplers]
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (RESULTS / "memory.md").write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.child in ("plain", "chunked"):
        print(json.dumps(pass_of(args.child, args.out)))
    elif args.child:
        print(json.dumps(steps_with(args.child, args.steps)))
    else:
        main(args)
