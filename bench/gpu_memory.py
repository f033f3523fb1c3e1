"""Memory per GPU of `grpo.py gsm8k`, computed, not measured: what fits where, by which options.

    python bench/gpu_memory.py             print the table
    python bench/gpu_memory.py --write     and put it into README.md

What is counted, in bytes, with P parameters, R of them in the embedding and the head, P_l in a
layer; h, i, v: sizes of the hidden states, the MLP, and keys or values of a token; W GPUs:

- weights 4, AdamW 8, gradients 4: 16 P / W (fp32). Reference: 2 P / W, bf16.
- Autocast's bf16 copy of every layer's weights, on every GPU: 2 (P − R). Autograd keeps it for the
  backward pass; with --gradient-checkpointing it is gone after the forward pass.
- FSDP2, where W > 1: it gathers in fp32 the root's parameters, 4 R, which stay until the backward
  pass, two layers and one layer's gradient twice, 16 P_l; and the reference's root, 2 R.
- Activations of a micro-batch: (30 h + 8 i + 4 v + 4 heads + 8) a token and layer. With
  --gradient-checkpointing 4 h, and all of them for one layer at a time.
- Log-probs: 6 chunks of logits in fp32; and for the head 12 bytes a weight (what is summed, what
  is added, both in fp32; bf16 copies of it and of the weight).
- vLLM: its share of the GPU, which holds another 2 P of weights, and its cache. (--vllm-sleep
  gives most of it back while the policy learns; not counted here.)
- 3 GiB for CUDA, NCCL, and memory that is free in pieces.

The peak is the largest of: while the model is loaded, whole, before it is sharded; the end of the
forward pass; the head's backward pass; a layer's.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
import grpo  # noqa: E402

GIB = 2**30
GPU = 79  # GiB that a GPU of 80 GB has
OTHER = 3
MACHINES = {"1 GPU": 1, "8 GPUs": 8, "2 × 8 GPUs": 16}


@dataclass
class Shape:
    """Of a Qwen2.5 model."""
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    @property
    def kv(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        return self.head * (1 if self.tied else 2) + self.hidden

    @property
    def layer(self) -> int:  # q, o; k, v; biases of q, k, v; MLP; two norms
        h = self.hidden
        return 2 * h * h + 2 * h * self.kv + h + 2 * self.kv + 3 * h * self.mlp + 2 * h

    @property
    def parameters(self) -> int:
        return self.root + self.layers * self.layer

    @property
    def activations(self) -> int:
        """Bytes that a layer keeps of a token for the backward pass, under bf16 autocast."""
        return 30 * self.hidden + 8 * self.mlp + 4 * self.kv + 4 * self.heads + 8


QWEN = {"0.5 B": Shape(896, 4864, 24, 14, 2, 151_936, True),
        "1.5 B": Shape(1536, 8960, 28, 12, 2, 151_936, True),
        "7 B": Shape(3584, 18944, 28, 28, 4, 152_064, False)}
# In the order in which to try them.
OPTIONS = [{}, {"gradient_checkpointing": True},
           {"gradient_checkpointing": True, "vllm_memory_share": 0.3},
           {"gradient_checkpointing": True, "vllm_memory_share": 0.3, "micro_batch_tokens": 4096}]


def gib(shape: Shape, world: int, **options) -> dict[str, float]:
    """What a GPU holds at the peak of learning, in GiB, and the most it ever holds as `total`."""
    preset = grpo.PRESETS["gsm8k"]
    tokens = options.get("micro_batch_tokens", preset.micro_batch_tokens)
    checkpointing = options.get("gradient_checkpointing", preset.gradient_checkpointing)
    P, sharded = shape.parameters, world > 1
    always = {
        "training": 16 * P / world, "reference": 2 * P / world,
        "vLLM": options.get("vllm_memory_share", preset.vllm_memory_share) * GPU * GIB,
        "other": OTHER * GIB}
    whole_layer = tokens * shape.activations
    kept = shape.layers * (tokens * 4 * shape.hidden if checkpointing else whole_layer)
    copies = 2 * shape.layers * shape.layer
    chunks = 6 * 4 * common.LOGITS_AT_ONCE
    stages = [
        {"activations": kept, "copies": copies, "log-probs": chunks + 2 * shape.head},
        {"activations": kept, "copies": 0 if checkpointing else copies,
         "log-probs": chunks + 12 * shape.head},
        {"activations": kept + whole_layer * checkpointing, "log-probs": 4 * shape.head,
         "copies": 2 * shape.layer if checkpointing else copies}]
    peak = max(stages, key=lambda stage: sum(stage.values()))
    peak["copies"] += sharded * (6 * shape.root + 16 * shape.layer)  # FSDP's
    found = {name: value / GIB for name, value in (always | peak).items()}
    loading = (always["vLLM"] + always["other"] + 4 * P) / GIB
    return found | {"total": max(sum(found.values()), loading)}


def table() -> str:
    names = ["training", "reference", "copies", "activations", "log-probs", "vLLM"]
    lines = ["| model | on | weights, gradients, AdamW | reference | FSDP's and bf16 copies | "
             "activations | log-probs | vLLM | sum | fits in 79 |",
             "|---|---|" + "--:|" * 7 + "---|"]
    for model, shape in QWEN.items():
        for machine, world in MACHINES.items():
            tried = [(options, gib(shape, world, **options)) for options in OPTIONS]
            fitting = [pair for pair in tried if pair[1]["total"] <= GPU]
            options, found = (fitting or tried[-1:])[0]
            verdict = " ".join(
                f"`--{name.replace('_', '-')}{'' if value is True else f' {value}'}`"
                for name, value in options.items()) or "yes"
            cells = [f"{found[name]:.1f}" for name in names] + [f"{found['total']:.0f}"]
            lines.append(f"| {model} | {machine} | {' | '.join(cells)} | "
                         f"{verdict if fitting else 'no'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    if sys.argv[1:] == ["--write"]:
        readme = ROOT / "README.md"
        before, rest = readme.read_text("utf-8").split("<!-- memory -->\n")
        after = rest.split("<!-- /memory -->")[1]
        readme.write_text(f"{before}<!-- memory -->\n{table()}\n<!-- /memory -->{after}", "utf-8")
