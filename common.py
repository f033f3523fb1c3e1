"""Plumbing in which no algorithm differs: options, data, log-probs, samplers, rewards, metrics,
checkpoints. Every script holds its own loop and its own three functions; read a script first.
"""
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

# Before vLLM is imported: its CPU backend runs torch on one thread unless OMP_NUM_THREADS is set.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
for _name, _value in {
        "OMP_NUM_THREADS": max(1, CORES // int(os.environ.get("LOCAL_WORLD_SIZE", 1))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": 0,  # the engine lives in this process
        "VLLM_CPU_KVCACHE_SPACE": 2,  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" wants a NUMA node for each rank
        "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(_name, str(_value))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import answers  # noqa: E402
from answers import correct  # noqa: E402  (a reward: 1 for a right answer)

HERE = Path(__file__).resolve().parent
LOGITS_AT_ONCE = 2**25  # elements of a [tokens, vocabulary] chunk of logits: 128 MiB in fp32


def format(text: str, gold: str) -> float:
    """Reward: 1 when the completion holds a balanced `\\boxed{…}`, whatever is in it."""
    return float(answers.format_ok(text))


class RunError(Exception):
    """What the user can mend: launch() prints this one line, no traceback, and exits with 1."""


# -------------------------------------------------------------------- command line and options
def launch(main, presets: dict) -> None:
    """`python script.py [preset] [--option value …]`; the first preset is the default."""
    import tyro

    argv = sys.argv[1:]
    default = presets[argv.pop(0) if argv and argv[0] in presets else next(iter(presets))]
    parse = functools.partial(tyro.cli, type(default), args=argv,
                              description=f"Give a preset as the first word: {', '.join(presets)}.")
    args = parse(default=default)
    try:
        if args.resume:  # the run's own options are the defaults: only what is typed can differ
            saved = {name: tuple(value) if isinstance(value, list) else value for name, value in
                     saved_args(args.resume, Path(sys.argv[0]).stem).items()
                     if hasattr(default, name)}  # check_resume names an option that is gone
            args = parse(default=dataclasses.replace(default, **saved))
        main(args)
    except RunError as error:
        if int(os.environ.get("RANK", 0)):  # when all ranks say the same, rank 0's line is enough:
            time.sleep(10)  # torchrun ends the others
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def saved_args(folder: str, script: str) -> dict:
    """The options that a run of this script was started with."""
    path = Path(folder) / "args.json"
    if not path.is_file():
        raise RunError(f"--resume {folder}: no args.json there; give the folder of a run")
    saved = json.loads(path.read_text())
    if saved["script"] != script:
        raise RunError(f"--resume {folder}: is a run of {saved['script']}.py, not of {script}.py")
    return saved["args"]


def locate(path: str) -> str:
    """A path as given, or beside the scripts, so that the defaults work from any folder."""
    return path if os.path.exists(path) or not (HERE / path).exists() else str(HERE / path)


def is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and name[0] not in "./~" and Path(name).suffix not in FORMATS


def check_args(args, parts: list[str], world: int) -> None:
    """Refuse whatever can be refused without loading anything."""
    def need(fine, name, remedy):
        if not fine:
            value = getattr(args, name)
            value = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            raise RunError(f"--{name.replace('_', '-')} {value}: {remedy}")

    need(args.group_size != 1, "group_size", "a group of one has no mean to compare with; take 2 "
         "or more, 8 is usual")
    for name in ("group_size", "prompts_per_step", "num_steps", "num_minibatches", "num_iterations",
                 "micro_batch_tokens", "max_prompt_tokens", "max_completion_tokens",
                 "max_gen_batches", "max_empty_steps"):  # these two are dapo.py's
        need(getattr(args, name, 1) >= 1, name, "must be at least 1")
    for name in ("warmup_steps", "weight_decay", "clip_low", "clip_high", "kl_coef", "tis_cap",
                 "eval_every", "save_every", "keep_checkpoints"):
        need(getattr(args, name) >= 0, name, "must not be negative")
    for name in ("learning_rate", "max_grad_norm", "rank_scale", "tau_pos", "tau_neg"):
        need(getattr(args, name, 1) > 0, name, "must be above 0")
    need(args.clip_low <= 1, "clip_low", "must be at most 1; 0.2 is usual")
    need(0 < args.vllm_memory_share < 1, "vllm_memory_share", "must be between 0 and 1")
    need(args.temperature >= 0.05, "temperature", "training needs at least 0.05, 1.0 is usual: "
         "greedily a group is one answer G times (evaluation is greedy anyway)")
    need(args.prompts_per_step % (args.num_minibatches * world) == 0, "prompts_per_step",
         f"must be a multiple of --num-minibatches × ranks = {args.num_minibatches} × {world}, "
         "because minibatches hold whole groups")
    longest = args.max_prompt_tokens + args.max_completion_tokens
    need(args.micro_batch_tokens >= longest, "micro_batch_tokens",
         f"must hold --max-prompt-tokens + --max-completion-tokens = {longest}")
    need(len(args.reward_weights) == len(parts), "reward_weights",
         f"give one weight for each of the {len(parts)} reward parts: {', '.join(parts)}")
    need(args.sampler in ("vllm", "hf"), "sampler", "choose vllm or hf")
    need(args.sampler == "hf" or importlib.util.find_spec("vllm"), "sampler", "vLLM is not "
         "installed: pip install -r requirements.txt (GPU) or requirements-cpu.txt (Linux), or use "
         "--sampler hf")
    need(not args.vllm_sleep or args.sampler == "vllm" and torch.cuda.is_available(), "vllm_sleep",
         "vLLM sleeps on a GPU only; leave it out")
    need(not args.vllm_compile or args.sampler == "vllm" and not torch.cuda.is_available(),
         "vllm_compile", "is for vLLM on a CPU; on a GPU it always compiles; leave it out")
    need(not args.vllm_compile or shutil.which(os.environ.get("CXX", "g++")), "vllm_compile",
         "needs a C++ compiler: install g++, or leave it out")


def check_model(args) -> int:
    """Refuse what is no model, and a learning rate that would ruin a large one. -> parameters"""
    from transformers import AutoConfig, AutoModelForCausalLM

    for option, name in (("--model", args.model), ("--reward-model", args.reward_model)):
        folder = Path(locate(name))
        if name and not (folder / "config.json").is_file() and (folder.exists()
                                                                or not is_hub_name(name)):
            raise RunError(f"{option} {name}: not a Hugging Face model directory (no config.json), "
                           "nor a hub name (owner/name)")
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(locate(args.model))
            size = AutoModelForCausalLM.from_config(config).num_parameters()
    except Exception as error:
        raise RunError(f"--model {args.model}: can't be opened as a causal language model"
                       f"{offline_hint()} ({first_line(error)})") from None
    if size > 50e6 and args.learning_rate >= 1e-4:
        raise RunError(f"--learning-rate {args.learning_rate}: suits the tiny model, and ruins one "
                       f"of {size / 1e6:.0f} M parameters; take about 1e-6, or use preset gsm8k")
    return size


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def offline_hint() -> str:
    return ", and the hub can't be reached" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""


def go_offline_without_network() -> None:
    """Without a network, hub names resolve from the cache or fail at once, not after retries."""
    import urllib.error
    import urllib.request

    from huggingface_hub import constants
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


# -------------------------------------------------------------------- the state of a run
class Run:
    """Where the run stands, this process's place among the ranks, and the sums of the step."""

    STATE = ("step", "position", "num_tokens", "num_completions", "bad_gradients",
             "skipped_updates", "baseline", "flat", "totals")  # what a checkpoint keeps

    def __init__(self, args, parts: list[str], script: str):
        self.parts, self.script = parts, Path(script).stem
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
        self.dtype = torch.bfloat16 if cuda else torch.float32  # of all but the master weights
        self.step = self.position = self.num_tokens = self.num_completions = 0
        self.bad_gradients = self.skipped_updates = 0
        self.baseline = None  # sampler difference in the first step: what a fresh sync looks like
        self.signalled = self.stopping = False  # by Ctrl-C: here, on any rank
        self.counts = collections.Counter()  # what this rank dropped or saw fail, by name
        self.totals = collections.Counter()  # the same over all ranks
        self.flat = 0  # steps in a row without a useful group
        self.output_dir = Path(args.resume or args.output_dir
                               or f"runs/{self.script}-{time.strftime('%Y%m%d-%H%M%S')}")

    def start_step(self) -> None:
        self.sums, self.times, self.extra = collections.Counter(), {}, {}
        self.started = self.clock = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap goes to `time/<name>`, in seconds."""
        passed = time.perf_counter() - self.clock
        self.times[f"time/{name}"] = self.times.get(f"time/{name}", 0.0) + passed
        self.clock = time.perf_counter()

    def add(self, name: str, values: torch.Tensor) -> None:
        value = values.sum().item()
        self.sums[name] += value if math.isfinite(value) else 0.0  # its gradient is counted

    def add_clipped(self, token_loss, logp, micro, args) -> None:
        """Count tokens left without gradient, ∂token_loss/∂logp = 0, by the advantage's sign, and
        keep the extremes of the ratio."""
        leaf = logp.detach().requires_grad_()
        log_ratio = ((leaf.detach() - micro.old_logp) * micro.mask).clamp(-20, 20)
        for name, values in (("log_ratio_max", log_ratio), ("minus_log_ratio_min", -log_ratio)):
            if values.numel():
                self.sums[name] = max(self.sums[name], values.amax().item())
        loss = token_loss(leaf, micro.old_logp, micro.adv, micro.mask, args).sum()
        still = (torch.autograd.grad(loss, leaf)[0] == 0) & (micro.mask > 0)
        self.add("clipped_high", still & (micro.adv > 0)[:, None])
        self.add("clipped_low", still & (micro.adv < 0)[:, None])

    def set_learning_rate(self, optimizer, args) -> None:
        """Linear warm-up over args.warmup_steps steps, then constant."""
        warm = min(1.0, (self.step + 1) / max(1, args.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate = args.learning_rate * warm

    def finite(self, grad_norm: float) -> bool:
        """Whether this gradient may be used; those that may not are counted, and those in a row."""
        good = math.isfinite(grad_norm)
        self.sums["updates"] += 1
        self.sums["grad_norm"] += grad_norm if good else 0.0
        self.bad_gradients = 0 if good else self.bad_gradients + 1
        self.skipped_updates += not good
        return good

    def must_stop(self) -> bool:
        """After Ctrl-C on any rank, or the third bad gradient in a row: save, then stop()."""
        self.stopping = any(self.gather_objects(self.signalled))
        return self.stopping or self.bad_gradients >= 3

    def stop(self) -> None:
        if self.bad_gradients >= 3:
            raise RunError(
                f"step {self.step}: {self.bad_gradients} gradients in a row were NaN or infinite. "
                f"They were not applied, and {self.output_dir}/checkpoints holds the weights. "
                "Lower --learning-rate, or look in samples.jsonl for broken rewards")
        raise KeyboardInterrupt

    def gather_objects(self, value) -> list:
        """The values of all ranks, in rank order."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def print(self, text: str) -> None:
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


def start(args, rewards: list, script: str, more_parts: tuple[str, ...] = ()) -> Run:
    """Check the options, join the other ranks, make the output folder. Nothing slow happens here.

    Reward parts are those of `rewards`, the reward model's if there is one, then `more_parts`.
    """
    parts = [reward.__name__ for reward in rewards] + ["reward_model"] * bool(args.reward_model)
    run = Run(args, parts + list(more_parts), script)
    check_args(args, run.parts, run.world)
    if any(name and not os.path.exists(locate(name)) and is_hub_name(name)
           for name in (args.model, args.dataset, args.reward_model)):
        go_offline_without_network()
    size = check_model(args)
    if args.resume:
        check_resume(args, run)
    elif (run.output_dir / "metrics.jsonl").exists():
        raise RunError(f"--output-dir {run.output_dir}: holds a run already; --resume "
                       f"{run.output_dir} continues it, or choose another folder")
    try:
        if run.rank == 0:  # the others write nothing, and their clock may name another folder
            (run.output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            # Resumed with other options: they hold from now on.
            options = dataclasses.asdict(args) | {"resume": "", "resume_with_changes": False}
            text = json.dumps({"script": run.script, "args": options}, indent=1)
            write_whole(run.output_dir / "args.json", text + "\n")
    except OSError as error:
        raise RunError(f"--output-dir {run.output_dir}: can't write there ({error.strerror}); "
                       "choose another folder") from None
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's, of old torch names
    if run.device.type == "cuda":
        torch.cuda.set_device(run.device)
    if run.world > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if run.device.type == "cuda" else "gloo")

    def on_interrupt(signum, frame):
        if run.signalled:
            raise KeyboardInterrupt
        run.signalled = True
        run.print("\nCtrl-C: will save and stop after this step; press again to stop at once")

    with contextlib.suppress(ValueError):  # in a thread other than the main one there's no handler
        signal.signal(signal.SIGINT, on_interrupt)
    run.print(f"{run.script}: {args.model}, {size / 1e6:.2f} M parameters, on {run.world} × "
              f"{run.device}; {args.prompts_per_step} prompts × {args.group_size} = "
              f"{args.prompts_per_step * args.group_size} completions a step, at most "
              f"{args.num_minibatches * args.num_iterations} optimizer steps each; "
              f"output in {run.output_dir}")
    return run


# -------------------------------------------------------------------- data
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_data(args, run: Run):
    """-> tokenizer, training rows, held-out rows; rows have question, gold and prompt_ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(locate(args.model),
                                              clean_up_tokenization_spaces=False)
    if args.chat_template and not tokenizer.chat_template:
        raise RunError(f"--chat-template: {args.model} has none; use --no-chat-template")
    train = prepare(read_split(args, args.train_split), tokenizer, args, run)
    held_out = read_split(args, args.eval_split, optional=True)
    if held_out:
        return tokenizer, train, prepare(held_out, tokenizer, args, run, "held-out")
    cut = len(train) - min(500, len(train) // 10)
    run.print(f"data: no split {args.eval_split!r}: the last {len(train) - cut} rows are held out")
    return tokenizer, train[:cut], train[cut:]


def read_split(args, split: str, optional: bool = False) -> list[dict]:
    """The rows of a file (all is `train`), of a folder with a file per split, or of a hub name."""
    import datasets

    path = Path(locate(args.dataset))
    try:
        if path.exists():
            files = sorted(path.glob(f"{split}.*")) if path.is_dir() else [path] * (not optional)
            files = [file for file in files if file.suffix in FORMATS]
            if not files and not optional:
                raise RunError(f"--dataset {args.dataset}: no {split}{f', {split}'.join(FORMATS)}")
            if files and files[0].suffix == ".jsonl":  # rows needn't agree on their columns' types
                lines = files[0].read_text("utf-8").split("\n")  # U+2028 may stand in a text
                rows = [json.loads(line) for line in lines if line.strip()]
            else:
                rows = [row for file in files[:1] for row in datasets.load_dataset(
                    FORMATS[file.suffix], data_files=str(file), split="train")]
        elif is_hub_name(args.dataset):
            config = args.dataset_config or None
            known = not optional or split in datasets.get_dataset_split_names(args.dataset, config)
            rows = list(datasets.load_dataset(args.dataset, config, split=split)) if known else []
        else:
            raise RunError(f"--dataset {args.dataset}: no such file or folder, nor a hub name")
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"--dataset {args.dataset}: can't read split {split!r}{offline_hint()} "
                       f"({first_line(error)})") from None
    if not rows and not optional:
        raise RunError(f"--dataset {args.dataset}: split {split!r} is empty")
    return rows


def prepare(rows: list[dict], tokenizer, args, run: Run, kind: str = "training") -> list[dict]:
    """Reduce golds, write and tokenize prompts; drop rows that can't be used, and count them."""
    def column(row, option, name):
        for key in name.split("."):
            if not isinstance(row, dict) or key not in row:
                raise RunError(f"{option} {name}: {args.dataset} has no such column, but "
                               f"{', '.join(map(str, rows[0]))}")
            row = row[key]
        return row

    dropped, kept, texts = collections.Counter(), [], []
    for row in rows:
        question = column(row, "--prompt-column", args.prompt_column)
        answer = column(row, "--gold-column", args.gold_column)
        gold = None if answer is None else answers.reduce_gold(str(answer))
        if not question or gold is None:
            dropped["gold_unparsed" if question else "prompt_empty"] += 1
            continue
        turns = question
        if not isinstance(question, list):
            turns = [{"role": "user", "content": str(question)}]
        turns = turns[:-1] + [{**turns[-1], "content": turns[-1]["content"] + args.instruction}]
        texts.append(
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            if args.chat_template else "\n".join(turn["content"] for turn in turns))
        opening = re.search(r"<think(ing)?>(?=\s*$)", texts[-1])  # then no completion has that tag
        kept.append({"question": turns[-1]["content"], "gold": gold,
                     "opening": opening[0] if opening else ""})
    # A chat template writes its own special tokens; to a bare prompt the tokenizer adds its BOS.
    ids = tokenizer(texts, add_special_tokens=not args.chat_template)["input_ids"] if texts else []
    usable = [{**row, "prompt_ids": list(prompt)} for row, prompt in zip(kept, ids)
              if 0 < len(prompt) <= args.max_prompt_tokens]
    dropped["prompt_too_long"] = len(kept) - len(usable)
    if kind == "training" and run.rank == 0:
        run.counts.update({f"data/{reason}": count for reason, count in dropped.items() if count})
    why = ", ".join(f"{count} × {reason}" for reason, count in (+dropped).items())
    run.print(f"data: {len(usable)} {kind} rows from {args.dataset}; dropped: {why or 'none'}")
    if not usable:
        raise RunError(f"--dataset {args.dataset}: no usable {kind} row ({why}); look at "
                       f"--prompt-column {args.prompt_column}, --gold-column {args.gold_column} "
                       f"({str(answer)[:60]!r}), --max-prompt-tokens {args.max_prompt_tokens}")
    return usable


@functools.lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(count), count)


def next_rows(train: list[dict], args, run: Run) -> list[dict]:
    """This rank's share of the next prompts. Their order depends on seed and position alone; every
    epoch is shuffled anew, and the data never runs dry."""
    positions = range(run.position + run.rank, run.position + args.prompts_per_step, run.world)
    run.position += args.prompts_per_step
    places = [shuffled(len(train), args.seed, p // len(train))[p % len(train)] for p in positions]
    return [{**train[place], "position": p} for place, p in zip(places, positions)]


# -------------------------------------------------------------------- model and log-probs
def load_model(args, run: Run, frozen: bool = False):
    """The policy with fp32 master weights (on --resume the checkpoint's), or the frozen reference
    in inference precision. Several ranks: sharded with FSDP2."""
    from transformers import AutoModelForCausalLM

    path = locate(args.model) if frozen or not args.resume else last_checkpoint(run.output_dir)
    dtype = run.dtype if frozen else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(run.device)
    for module in model.modules():  # no dropout: old and new log-probs are of one distribution
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
    model.train(not frozen).requires_grad_(not frozen)  # gradient checkpointing needs train()
    if args.gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_head(model, args, run)
    model.token_logprobs = token_logprobs.__get__(model)
    if run.world > 1:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for module in model.modules():
            if type(module).__name__ in (model._no_split_modules or ()):
                fully_shard(module)
        register_fsdp_forward_method(fully_shard(model), "token_logprobs")
    return model


def token_logprobs(model, micro, temperature: float):
    """-> log-probs of the completion tokens under the sampling distribution, and its entropy, both
    [sequences, tokens]: logits ÷ temperature, then log-softmax in fp32.

    One function for new, old and reference. Only completion positions reach the LM head, in chunks.
    The backward pass recomputes them if there are several, so [batch, tokens, vocabulary] never
    exists.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def of_chunk(hidden, targets):  # [chunk, hidden], [chunk]
        logits = head(hidden).float()
        if cap:
            logits = cap * torch.tanh(logits * (scale / cap)) / temperature
        elif scale != temperature:  # each pass over the vocabulary takes time
            logits = logits / (temperature / scale)
        log_z = logits.logsumexp(-1)
        logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
        with torch.no_grad():
            entropy = log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)
        return logp, entropy  # [chunk] each

    device = micro.input_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        # No attention mask: padding is on the right, where causal attention doesn't look.
        hidden = model.base_model(input_ids=micro.input_ids, use_cache=False).last_hidden_state
        size = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
        parts = list(zip(hidden[micro.predicts].split(size), micro.targets.split(size)))
        chunks = [checkpoint(of_chunk, *part, use_reentrant=False) if len(parts) > 1
                  else of_chunk(*part) for part in parts]  # one alone would be needed at once
    where = micro.sampled.nonzero(as_tuple=True)
    empty = torch.zeros(micro.sampled.shape, device=hidden.device)
    return tuple(empty.index_put(where, torch.cat(values)) for values in zip(*chunks))


def check_head(model, args, run: Run) -> None:
    """Refuse a model whose own log-probs aren't token_logprobs': one with an unknown scale, say."""
    ids = list(range(8))
    micro = pack([Sample(ids[:4], ids[4:], [0.0] * 4)], args, run)
    device = run.device.type
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=micro.input_ids, use_cache=False).logits[0, 3:7].float()
        theirs = (logits / args.temperature).log_softmax(-1).gather(-1, micro.targets[:, None])
        ours, _ = token_logprobs(model, micro, args.temperature)
    gap = (theirs[:, 0] - ours[0]).abs().max().item()
    if not gap < (1e-3 if device == "cpu" else 0.1):
        raise RunError(f"--model {args.model}: {type(model).__name__} does something to its logits "
                       f"that is not known here (log-probs differ by {gap:.2g}); choose another")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_gradients(model, max_norm: float) -> float:
    """Scale the gradients down to max_norm. -> their norm before, over all ranks"""
    return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)).item()


def named_weights(model):
    """(name, whole tensor) of each parameter; a tied one once."""
    return ((name, whole(weight.detach())) for name, weight in model.named_parameters())


# -------------------------------------------------------------------- samples and micro-batches
@dataclasses.dataclass
class Sample:
    """One completion. Lengths and masks come from here, not from token values: pad may be EOS."""
    prompt_ids: list[int]
    completion_ids: list[int]  # the stop token included, if it was reached
    sampler_logp: list[float]  # of each completion token
    truncated: bool = False  # the sampler stopped for length
    row: dict = dataclasses.field(default_factory=dict)
    text: str = ""
    rewards: list[float] = dataclasses.field(default_factory=list)  # the parts, unweighted
    correct: bool = False
    advantage: float = 0.0
    in_loss: bool = True

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclasses.dataclass
class Micro:
    """A micro-batch, padded on the right; [sequences, tokens] is over completion tokens."""
    input_ids: torch.Tensor  # [sequences, length]
    predicts: tuple  # (sequence, place) of the hidden state that predicts each completion token …
    targets: torch.Tensor  # [completion tokens] … and that token
    sampled: torch.Tensor  # [sequences, tokens] True on completion tokens
    mask: torch.Tensor  # [sequences, tokens] 1.0 on those that count in the loss
    adv: torch.Tensor  # [sequences]
    sampler_logp: torch.Tensor  # [sequences, tokens]
    num_sequences: int
    learns: bool  # whether a gradient can come from it
    old_logp: torch.Tensor = None  # [sequences, tokens], these three filled in by the loop
    ref_logp: torch.Tensor = None
    entropy: torch.Tensor = None


def pack(samples: list[Sample], args, run: Run) -> Micro:
    def pad(lists, dtype):
        longest = max(map(len, lists))
        rows = [list(values) + [0] * (longest - len(values)) for values in lists]
        return torch.tensor(rows, dtype=dtype, device=run.device)

    ids = pad([s.prompt_ids + s.completion_ids for s in samples], torch.long)
    sampled = pad([[1] * len(s.completion_ids) for s in samples], torch.bool)
    row, token = sampled.nonzero(as_tuple=True)
    place = torch.tensor([len(s.prompt_ids) for s in samples], device=run.device)[row] + token
    adv, in_loss = (torch.tensor(values, dtype=torch.float32, device=run.device) for values in
                    ([s.advantage for s in samples], [s.in_loss for s in samples]))
    return Micro(ids, (row, place - 1), ids[row, place], sampled, sampled * in_loss[:, None], adv,
                 pad([s.sampler_logp for s in samples], torch.float32), len(samples),
                 any(learns(s, args) for s in samples))


def learns(sample: Sample, args) -> bool:
    """Whether a gradient can come from it: not where the advantage is 0 and there's no KL."""
    return args.kl_coef > 0 or bool(sample.advantage) and sample.in_loss


def micro_batches(samples: list[Sample], args, run: Run) -> list[Micro]:
    """Cut length-sorted samples so that each cut has at most micro_batch_tokens padded tokens."""
    cuts = []
    for sample in sorted(samples, key=len, reverse=True):
        if not cuts or (len(cuts[-1]) + 1) * len(cuts[-1][0]) > args.micro_batch_tokens:
            cuts.append([])
        cuts[-1].append(sample)
    return [pack(cut, args, run) for cut in cuts]


def minibatches(groups: list[list[Sample]], args, run: Run) -> list[list[Micro]]:
    """Per optimizer step, of whole groups, its micro-batches; those without gradient come last.

    Every rank gets equally many, filled up with ones that weigh nothing: under FSDP all ranks must
    go forward and backward together.
    """
    result, n = [], args.num_minibatches
    for i in range(n):
        part = groups[len(groups) * i // n:len(groups) * (i + 1) // n]
        samples = [sample for group in part for sample in group]
        micros = []
        for kind in (True, False):
            mine = micro_batches([s for s in samples if learns(s, args) is kind], args, run)
            filler = pack([Sample([0, 0], [], [])], args, run)
            filler = dataclasses.replace(filler, num_sequences=0, learns=kind)
            most = max(run.gather_objects(len(mine)))
            micros += mine + [filler] * (most - len(mine))
        if micros:
            result.append(micros)
    return result


def totals(minibatch: list[Micro], run: Run) -> tuple[int, int]:
    """-> sequences and loss tokens of a whole optimizer step: all micro-batches of all ranks."""
    mine = sum(m.num_sequences for m in minibatch), sum(int(m.mask.sum()) for m in minibatch)
    return tuple(max(1, sum(counts)) for counts in zip(*run.gather_objects(mine)))


def importance_weights(micro: Micro, cap: float) -> torch.Tensor:
    """Truncated importance sampling: min(π_old(trainer)/π(sampler), cap) per token, no gradient,
    since the sampler's kernels aren't the trainer's. A cap of 0: off. [sequences, tokens]"""
    ratio = torch.exp((micro.old_logp - micro.sampler_logp).clamp(-20, 20))
    return ratio.clamp(max=cap) if cap else torch.ones_like(ratio)


def gather_rewards(groups: list[list[Sample]], args, run: Run) -> tuple[torch.Tensor, slice]:
    """-> the rewards of all ranks, [prompts, group, parts], and where this rank's lie in them."""
    ranks = run.gather_objects([[sample.rewards for sample in group] for group in groups])
    before = sum(map(len, ranks[:run.rank]))
    rewards = torch.tensor(sum(ranks, []), dtype=torch.float32)
    return rewards.view(-1, args.group_size, len(run.parts)), slice(before, before + len(groups))


def set_advantages(groups: list[list[Sample]], adv: torch.Tensor) -> None:
    for group, values in zip(groups, adv.tolist(), strict=True):
        for sample, value in zip(group, values, strict=True):
            sample.advantage = value


# -------------------------------------------------------------------- samplers
def stop_ids(tokenizer, path: str) -> list[int]:
    """All that ends an answer: EOS of tokenizer and generation config, and what the chat template
    writes behind an assistant's turn. Any one of the three is wrong for some model family."""
    from transformers import GenerationConfig

    found = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):
        eos = GenerationConfig.from_pretrained(path).eos_token_id
        found |= set(eos if isinstance(eos, list) else [eos])
    with contextlib.suppress(Exception):  # no template, or one that wants other turns
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
        tail = tokenizer.apply_chat_template(turns, tokenize=False).rsplit("ANSWER", 1)[1].strip()
        first = tokenizer(tail, add_special_tokens=False)["input_ids"][0]
        found |= {first} & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return sorted(found - {None})


@contextlib.contextmanager
def open_sampler(args, run: Run, tokenizer):
    """The sampler, closed on the way out whatever happens."""
    path = str(last_checkpoint(run.output_dir)) if args.resume else locate(args.model)
    stops = stop_ids(tokenizer, path)
    if not stops:
        raise RunError(f"--model {args.model}: its files name no stop token")
    sampler = (VllmSampler if args.sampler == "vllm" else HfSampler)(args, run, path, stops)
    names = ", ".join(f"{stop} {tokenizer.convert_ids_to_tokens(stop)!r}" for stop in stops)
    run.print(f"sampler: {sampler.name}, temperature {args.temperature}, top-p 1, top-k off, no "
              f"penalties, at most {args.max_completion_tokens} tokens, stop ids {names}")
    try:
        yield sampler
    finally:
        sampler.close()
        answers.close()


class VllmSampler:
    """vLLM in this process: token ids in; token ids and log-probs as sampled out."""

    def __init__(self, args, run: Run, path: str, stops: list[int]):
        logging.getLogger("vllm").setLevel(logging.ERROR)  # it complains while it is imported
        import vllm

        self.vllm, self.run, self.stops, self.name = vllm, run, stops, f"vLLM {vllm.__version__}"
        options = {"distributed_executor_backend": "external_launcher"} if run.world > 1 else {}
        if run.device.type == "cpu":  # a seeded prompt can't be prefilled in two parts there
            options |= {"enable_chunked_prefill": False, "enforce_eager": not args.vllm_compile}
        self.sleeps = args.vllm_sleep
        self.llm = vllm.LLM(
            model=path, skip_tokenizer_init=True, dtype=run.dtype, generation_config="vllm",
            max_model_len=args.max_prompt_tokens + args.max_completion_tokens,
            logprobs_mode="processed_logprobs", enable_prefix_caching=True, use_tqdm_on_load=False,
            gpu_memory_utilization=args.vllm_memory_share, enable_sleep_mode=self.sleeps, **options)
        if self.sleeps:  # does it wake up as it was? The first call puts it to sleep
            before, after = (self.generate([stops], 1, [0], 0.0, 8) for _ in range(2))
            if before[0][0][0] != after[0][0][0]:
                raise RunError("--vllm-sleep: after its first sleep vLLM answers differently; "
                               "leave it out")

    def wake(self, *tags: str) -> None:
        if self.sleeps:
            torch.cuda.empty_cache()  # of what the learn phase left reserved
            for tag in tags:
                self.llm.wake_up([tag])  # does nothing if it is awake

    def generate(self, prompt_ids, n: int, seeds, temperature: float, max_tokens: int):
        """-> per prompt, n × (completion ids, their log-probs, truncated). Completion i of a prompt
        is sampled with its seed + i, whatever else is in the batch and on how many ranks. With
        --vllm-sleep the weights go to host memory afterwards, and the KV cache goes altogether."""
        params = [self.vllm.SamplingParams(
            n=n, seed=seed, temperature=temperature, top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, max_tokens=max_tokens, stop_token_ids=self.stops, logprobs=0,
            flat_logprobs=True, detokenize=False) for seed in seeds]
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        self.wake("weights", "kv_cache")
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        if self.sleeps:
            self.llm.sleep(level=1)
        return [[(list(c.token_ids), list(c.logprobs.logprobs), c.finish_reason == "length")
                 for c in sorted(output.outputs, key=lambda c: c.index)] for output in outputs]

    def sync(self, named_parameters) -> None:
        """Load (name, tensor) pairs, drop the prefix cache that the old weights filled, and read
        one tensor back. Raises RunError when the engine doesn't hold the new weights."""
        read_back = {}

        def watched():
            for name, weight in named_parameters:
                if weight.dim() == 1:  # a norm's: not fused with others in the engine
                    read_back.update(name=name, weight=weight.to(self.run.dtype, copy=True))
                yield name, weight

        self.wake("weights")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": watched()})
        if self.run.device.type == "cpu":
            self.llm.apply_model(repack_head)
        if not self.llm.reset_prefix_cache():
            raise RunError("weight sync: vLLM kept its prefix cache; answers would mix old and new")
        name, weight = read_back["name"], read_back["weight"]
        held = self.llm.apply_model(lambda model: dict(model.named_parameters()).get(name))[0]
        if held is None or not torch.equal(held.to(weight.device), weight):
            raise RunError(f"weight sync: {name} in vLLM is not the trainer's")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None


def repack_head(model) -> None:
    """vLLM's CPU backend packs a tied LM head when it loads, and reload_weights leaves it stale."""
    if hasattr(model, "lm_head") and hasattr(model.lm_head, "quant_method"):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class HfSampler:
    """transformers' generate on a copy of the model: slower, but runs anywhere."""

    def __init__(self, args, run: Run, path: str, stops: list[int]):
        import transformers

        self.hf, self.run, self.stops = transformers, run, stops
        self.name = f"transformers {transformers.__version__} generate"
        longest = args.max_prompt_tokens + args.max_completion_tokens
        # The KV cache of a token takes far less than what a backward pass keeps of it.
        self.rows_at_once = 16 * args.micro_batch_tokens // longest
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=run.dtype)
        self.model = model.to(run.device).eval().requires_grad_(False)
        self.model.generation_config = transformers.GenerationConfig()  # sampling options are ours

    def generate(self, prompt_ids, n: int, seeds, temperature: float, max_tokens: int):
        """As VllmSampler's, but the samples of a prompt depend on the batch it is in."""
        jobs = [ids for ids in prompt_ids for _ in range(n)]
        done = [([], [], True) for _ in jobs]  # completion ids, their log-probs, not at an end yet
        with torch.random.fork_rng([self.run.device] if self.run.device.type == "cuda" else []):
            torch.manual_seed(seeds[0] if seeds else 0)
            for quarter in range(4):  # then those that have ended no longer take part
                tokens = max_tokens * (quarter + 1) // 4 - max_tokens * quarter // 4
                going = [i for i, (_, _, unfinished) in enumerate(done) if unfinished]
                batches = math.ceil(len(going) / self.rows_at_once)
                for b in range(batches if tokens else 0):
                    now = going[len(going) * b // batches:len(going) * (b + 1) // batches]
                    prompts = [jobs[i] + done[i][0] for i in now]
                    for i, (ids, logp, cut) in zip(
                            now, self.generate_batch(prompts, temperature, tokens)):
                        done[i] = done[i][0] + ids, done[i][1] + logp, cut
        return [done[i * n:(i + 1) * n] for i in range(len(prompt_ids))]

    @torch.no_grad()
    def generate_batch(self, prompts, temperature, max_tokens):
        width, last, columns = max(map(len, prompts)), None, []
        left = [[0] * (width - len(prompt)) for prompt in prompts]
        ids = torch.tensor([pad + p for pad, p in zip(left, prompts)], device=self.run.device)
        seen = torch.tensor([p + [1] * (width - len(p)) for p in left], device=ids.device)

        def record(ids, logits):  # keeps the log-prob of each token instead of all logits
            nonlocal last
            if last is not None:
                columns.append(last.gather(-1, ids[:, -1:]))
            logits = logits.float() / (temperature or 1.0)
            last = logits.log_softmax(-1)
            return logits

        ours = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        config = self.hf.GenerationConfig(
            **(ours if temperature else {"do_sample": False}), max_new_tokens=max_tokens,
            eos_token_id=self.stops, pad_token_id=self.stops[0])
        ids = self.model.generate(ids, attention_mask=seen, generation_config=config,
                                  logits_processor=self.hf.LogitsProcessorList([record]))
        logp = torch.cat(columns + [last.gather(-1, ids[:, -1:])], 1)
        results = []
        for tokens, values in zip(ids[:, width:].tolist(), logp.tolist()):
            stop = next((i + 1 for i, token in enumerate(tokens) if token in self.stops), None)
            results.append((tokens[:stop], values[:stop], stop is None))
        return results

    def sync(self, named_parameters) -> None:
        """Copy (name, tensor) pairs into the sampler's model. Raises RunError on a name too many or
        too few."""
        mine = dict(self.model.named_parameters())
        for name, weight in named_parameters:
            if name not in mine:
                raise RunError(f"weight sync: the sampler's model has no {name}")
            mine.pop(name).copy_(weight)
        if mine:
            raise RunError(f"weight sync: the sampler got no {', '.join(mine)}")

    def close(self) -> None:
        self.model = None


def sampling_seeds(rows_at, n: int, args, purpose: str = "train") -> list[int]:
    """A seed per prompt, from the run's seed and the prompt's place; neighbours are n apart,
    because completion i of a prompt takes seed + i."""
    first = random.Random(f"{args.seed} {purpose}").getrandbits(60)
    return [first + place * n for place in rows_at]


def sample_groups(sampler, tokenizer, rows, args, run, purpose="train") -> list[list[Sample]]:
    """args.group_size completions for each row."""
    seeds = sampling_seeds([row["position"] for row in rows], args.group_size, args, purpose)
    outputs = sampler.generate([row["prompt_ids"] for row in rows], args.group_size, seeds,
                               args.temperature, args.max_completion_tokens)
    groups = [[Sample(row["prompt_ids"], *completion, row) for completion in completions]
              for row, completions in zip(rows, outputs)]
    for row, group in zip(rows, groups):
        run.sums["num_tokens"] += sum(map(len, group))
        run.sums["num_completions"] += len(group)
        for sample, text in zip(group, decode(tokenizer, row, [s.completion_ids for s in group])):
            sample.text = text
    return groups


def decode(tokenizer, row: dict, completions: list[list[int]]) -> list[str]:
    """What the rewards read: the text, behind the think tag that the prompt opened, if it did."""
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [row["opening"] + text for text in texts]


# -------------------------------------------------------------------- rewards
def score(groups: list[list[Sample]], rewards: list, reward_model, run: Run) -> None:
    """Fill in the reward parts of every sample. What raises, or isn't a finite number, pays 0 and
    is counted as `reward/<name>_error`."""
    samples = [sample for group in groups for sample in group]

    def finite(value, name):
        with contextlib.suppress(Exception):
            if math.isfinite(value := float(value())):
                return value
        run.counts[f"reward/{name}_error"] += 1
        return 0.0

    for s in samples:
        s.rewards = [finite(lambda: reward(s.text, s.row["gold"]), reward.__name__)
                     for reward in rewards]
        s.correct = bool(s.rewards[rewards.index(correct)] if correct in rewards
                         else correct(s.text, s.row["gold"]))
    for s, value in zip(samples, reward_model(samples) if reward_model else ()):
        s.rewards.append(finite(lambda: value, "reward_model"))


def load_reward_model(args, run: Run):
    """-> a function from samples to the scores of a sequence-classification model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = locate(args.reward_model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=run.dtype)
    model = model.to(run.device).eval()
    model.config.pad_token_id = tokenizer.pad_token_id
    if model.config.num_labels != 1:
        raise RunError(f"--reward-model {args.reward_model}: gives {model.config.num_labels} scores"
                       " per text; a reward model gives 1")

    @torch.no_grad()
    def scores(samples):
        values = []
        for start in range(0, len(samples), 32):
            turns = [[{"role": "user", "content": s.row["question"]},
                      {"role": "assistant", "content": s.text}] for s in samples[start:start + 32]]
            texts = [tokenizer.apply_chat_template(turn, tokenize=False) if tokenizer.chat_template
                     else "\n".join(part["content"] for part in turn) for turn in turns]
            inputs = tokenizer(texts, padding=True, return_tensors="pt",
                               return_token_type_ids=False,
                               add_special_tokens=not tokenizer.chat_template)
            values += model(**inputs.to(run.device)).logits[:, 0].float().tolist()
        return values

    return scores


# -------------------------------------------------------------------- evaluation, metrics, logs
def due(step: int, every: int, args) -> bool:
    """Whether what is done every so many steps, and after the last one, is due."""
    return step == args.num_steps or bool(every) and step % every == 0


def pass_at_k(n: int, c: int, k: int) -> float:
    """P(one of k samples is right), from c right of n: 1 - C(n-c, k)/C(n, k). arXiv 2107.03374"""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def evaluate(sampler, tokenizer, rows: list[dict], args, run: Run) -> dict:
    """`eval/accuracy`: greedy, all held-out rows. `eval/pass_at_k`: k = 8 of 16 samples, the first
    64 rows. Both are of correctness alone, whatever the rewards."""
    if not args.eval_every or not rows:
        return {}
    if run.step == 0:
        run.print(f"evaluation: greedily on {len(rows)} held-out rows, and 16 samples of "
                  f"{min(64, len(rows))} for pass@8")
    begin, right = time.perf_counter(), []
    for count, n, temperature in ((len(rows), 1, 0.0), (64, 16, args.temperature)):
        mine = range(run.rank, min(count, len(rows)), run.world)
        outputs = sampler.generate(
            [rows[i]["prompt_ids"] for i in mine], n, sampling_seeds(mine, n, args, "eval"),
            temperature, args.max_completion_tokens)
        counts = []
        for i, group in zip(mine, outputs):
            texts = decode(tokenizer, rows[i], [completion for completion, _, _ in group])
            counts.append(sum(correct(text, rows[i]["gold"]) for text in texts))
        right.append([count for rank in run.gather_objects(counts) for count in rank])
    return {"eval/accuracy": sum(right[0]) / len(right[0]),
            "eval/pass_at_k": sum(pass_at_k(16, c, 8) for c in right[1]) / len(right[1]),
            "time/eval": time.perf_counter() - begin}


def rollout_metrics(groups, minibatches, rewards, adv, args, run: Run) -> dict:
    """The metrics of a step, over all ranks; docs/metrics.md says what each means."""
    for micro in sum(minibatches, []):
        gap = (micro.old_logp - micro.sampler_logp).abs() * micro.sampled
        run.add("gap", gap)
        run.sums["gap_max"] = max(run.sums["gap_max"], gap.amax().item() if gap.numel() else 0.0)
        run.add("entropy", micro.entropy)
        run.add("capped", (importance_weights(micro, args.tis_cap) >= args.tis_cap) & micro.sampled)
    samples = [sample for group in groups for sample in group]
    ranks = run.gather_objects({
        "lengths": [len(s.completion_ids) for s in samples], "cut": [s.truncated for s in samples],
        "correct": [s.correct for s in samples],
        "distinct": [len({tuple(s.completion_ids) for s in g}) / len(g) for g in groups],
        "sums": run.sums, "counts": run.counts,
        "checks": {f"reward/{name}": count for name, count in answers.counts.items()}})
    run.counts, answers.counts = collections.Counter(), collections.Counter()
    lengths, cut, right, distinct = (
        torch.tensor([float(value) for rank in ranks for value in rank[name]])
        for name in ("lengths", "cut", "correct", "distinct"))
    sums = sum((rank["sums"] for rank in ranks), collections.Counter())
    for rank in ranks:
        run.totals.update(rank["counts"])
        run.totals.update(rank["checks"])
    loss = sum(rank["sums"]["loss"] for rank in ranks)  # Counter addition drops what isn't positive
    tokens, updates = max(1.0, lengths.sum().item()), max(1, run.sums["updates"])
    run.num_tokens += sums["num_tokens"]
    run.num_completions += sums["num_completions"]
    total = sum(w * part for w, part in zip(args.reward_weights, rewards.unbind(-1)))
    p, G = right.mean().item(), args.group_size
    metrics = {
        "reward": total.mean(), "reward_std": total.std(1).mean(), "reward_std_batch": total.std(),
        **{f"rewards/{name}/mean": rewards[..., i].mean() for i, name in enumerate(run.parts)},
        "frac_reward_zero_std": (total.amax(1) == total.amin(1)).float().mean(), "accuracy": p,
        "useful_groups": (adv != 0).any(1).float().mean(),
        "useful_groups_expected": 1 - p**G - (1 - p)**G,
        "completions/mean_length": lengths.mean(), "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(), "completions/clipped_ratio": cut.mean(),
        "completions/distinct": distinct.mean(), "entropy": sums["entropy"] / tokens,
        "clip_ratio/high_mean": sums["clipped_high"] / tokens / args.num_iterations,
        "clip_ratio/low_mean": sums["clipped_low"] / tokens / args.num_iterations,
        "ratio/max": math.exp(max(rank["sums"]["log_ratio_max"] for rank in ranks)),
        "ratio/min": math.exp(-max(rank["sums"]["minus_log_ratio_min"] for rank in ranks)),
        "sampling/sampling_logp_difference/mean": sums["gap"] / tokens,
        "sampling/sampling_logp_difference/max": max(rank["sums"]["gap_max"] for rank in ranks),
        "sampling/capped_ratio": sums["capped"] / tokens if args.tis_cap else 0.0,
        "loss": loss / updates, "grad_norm": run.sums["grad_norm"] / updates,
        "learning_rate": run.learning_rate, "num_tokens": run.num_tokens,
        "num_completions": run.num_completions,
        "skipped_updates": run.skipped_updates}
    if not right.all():
        metrics["completions/mean_length_wrong"] = lengths[right == 0].mean()
    if args.kl_coef:
        metrics["kl"] = sums["kl"] / tokens / args.num_iterations
    metrics = {k: v.item() if torch.is_tensor(v) else v for k, v in metrics.items()}
    run.times["time/step"] = time.perf_counter() - run.started
    return metrics | run.totals | run.extra | run.times


def check_health(metrics: dict, args, run: Run, log) -> None:
    """Stop when the sampler lost the trainer's weights; warn of what users watch for hours."""
    gap = metrics["sampling/sampling_logp_difference/mean"]
    run.baseline = gap if run.baseline is None else run.baseline
    if run.dtype == torch.float32 and gap > max(10 * run.baseline, 5e-6):
        raise RunError(f"step {run.step}: weight sync failed: trainer and sampler log-probs differ "
                       f"by {gap:.1e} on average, by {run.baseline:.1e} in the first step")
    log.warn(gap > 0.1, f"trainer and sampler log-probs differ by {gap:.2g} on average: keep "
             "--tis-cap 2, and try --sampler hf to see whether the engine is at fault")
    log.warn(metrics["completions/clipped_ratio"] >= 0.9, "nearly all completions were cut off, so "
             f"they can't be right: raise --max-completion-tokens {args.max_completion_tokens}")
    run.flat = 0 if metrics["useful_groups"] else run.flat + 1
    log.warn(run.flat >= 3, "for three steps no group had both better and worse answers: nothing "
             "is learned. All wrong: easier data, a larger --group-size. All right: harder data")
    log.warn(metrics.get("rewards/format/mean") == 0, "format hit rate 0%: no completion holds "
             "\\boxed{…}: ask for it with --instruction")
    log.warn(any(name.startswith("reward/") for name in metrics), "some rewards failed and paid 0: "
             "see reward/… in metrics.jsonl")
    if run.step == 1 and args.num_minibatches * args.num_iterations == 1:
        log.note("one optimizer step per rollout: every ratio is 1, so the clip ratios are 0, and "
                 "the loss is near 0 or means nothing. The gradient isn't 0: watch grad_norm and "
                 "reward (docs/metrics.md)")


class Log:
    """metrics.jsonl, samples.jsonl, a progress bar, curves.png; wandb with --track. Rank 0 only."""

    def __init__(self, args, run: Run):
        from tqdm import tqdm

        self.run, self.warned, self.wandb = run, set(), None
        begin = int(last_checkpoint(run.output_dir).name[5:]) if args.resume else 0
        self.bar = tqdm(total=args.num_steps, initial=begin, disable=run.rank > 0, unit="step",
                        desc=run.script, dynamic_ncols=True)
        if args.track and run.rank == 0:
            import wandb

            if not (os.environ.get("WANDB_API_KEY") or Path("~/.netrc").expanduser().exists()):
                os.environ.setdefault("WANDB_MODE", "offline")
            self.wandb = wandb.init(project="grpo", name=run.output_dir.name,
                                    dir=str(run.output_dir), config=dataclasses.asdict(args))

    def __enter__(self):
        return self

    def write(self, step: int, metrics: dict, groups: list[list[Sample]] = ()) -> None:
        """All of a step in one row. A NaN is an error here, not a value."""
        if self.run.rank:
            return
        self.append("metrics", {"step": step, **metrics})
        for s in groups[0] if groups else ():  # one group a step
            self.append("samples", {
                "step": step, "question": s.row["question"], "completion": s.text,
                "answer": answers.extract(s.text), "gold": s.row["gold"], "correct": s.correct,
                "rewards": s.rewards, "advantage": s.advantage, "truncated": s.truncated})
        if self.wandb:
            self.wandb.log(metrics, step=step)
        if step == 1:  # a prompt, the best and the worst of its completions, as the rewards saw it
            self.note(f"prompt {groups[0][0].row['question']!r}, gold {groups[0][0].row['gold']!r}")
            ranked = sorted(groups[0], key=lambda s: s.advantage)
            for s in (ranked[-1], ranked[0]):
                self.note(f"  {s.text!r} ({'cut off' if s.truncated else 'stopped'}): answer "
                          f"{answers.extract(s.text)!r}, {'right' if s.correct else 'wrong'}, "
                          f"advantage {s.advantage:+.2f}")
        if "eval/accuracy" in metrics:
            self.note(f"step {step}: held-out accuracy {metrics['eval/accuracy']:.3f}, pass@8 "
                      f"{metrics['eval/pass_at_k']:.3f}")
        if step == 0:
            self.bar.unpause()  # the evaluation doesn't count in the time per step
        if step:
            self.bar.set_postfix_str(
                f"reward {metrics['reward']:.2f}, accuracy {metrics['accuracy']:.2f}, "
                f"length {metrics['completions/mean_length']:.0f}")
            self.bar.update(step - self.bar.n)

    def append(self, name: str, row: dict) -> None:
        with open(self.run.output_dir / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def note(self, text: str) -> None:
        if self.run.rank == 0:
            self.bar.write(text, file=sys.stderr)

    def warn(self, bad: bool, text: str) -> None:
        """Say it once a run."""
        if bad and text[:25] not in self.warned:
            self.warned.add(text[:25])
            self.note(f"warning: step {self.run.step}: {text}")

    def __exit__(self, kind, error, trace) -> None:
        self.bar.close()
        path = self.run.output_dir / "metrics.jsonl"
        if self.run.rank == 0 and path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            draw_curves(rows, self.run.output_dir / "curves.png")
            evals = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
            if evals and kind is None:
                spent = sum(row.get("time/step", 0) for row in rows)
                self.run.print(f"held-out accuracy {evals[0]:.3f} -> {evals[-1]:.3f} after "
                               f"{spent:.0f} s of training; metrics.jsonl, curves.png and "
                               f"checkpoints/ are in {self.run.output_dir}")
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))


def draw_curves(rows: list[dict], path: Path) -> None:
    """Reward, accuracy, length and entropy over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3), layout="constrained")
    keys = ("reward", "accuracy", "completions/mean_length", "entropy")
    for axis, key in zip(figure.subplots(1, 4), keys):
        for name, style in ((key, "-"), ("eval/accuracy", "o"))[:1 + (key == "accuracy")]:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axis.plot(*zip(*points), style, label=name)
                axis.legend()
        axis.set(xlabel="step", title=key)
    figure.savefig(path, dpi=110)


# -------------------------------------------------------------------- checkpoints
def save(args, run: Run, policy, tokenizer, optimizer) -> None:
    """checkpoints/step-N: a Hugging Face directory, and trainer.pt. Written aside, then renamed:
    it is whole or it isn't there. Older ones go afterwards."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp.get_model_state_dict(policy, options=options) if run.world > 1 else None
    moments = dcp.get_optimizer_state_dict(policy, optimizer, options=options)
    rng = run.gather_objects((random.getstate(), torch.get_rng_state()))
    folder = run.output_dir / "checkpoints"
    aside, final = folder / f".step-{run.step}", folder / f"step-{run.step}"
    if run.rank == 0:
        try:
            for path in (*folder.glob(".step-*"), final):
                shutil.rmtree(path, ignore_errors=True)
            policy.generation_config.do_sample = True  # temperature without sampling can't be saved
            policy.save_pretrained(aside, state_dict=weights)
            tokenizer.save_pretrained(aside)
            state = {name: getattr(run, name) for name in run.STATE}
            torch.save({"optimizer": moments, "run": state, "rng": rng}, aside / "trainer.pt")
            os.sync()
            aside.rename(final)
        except (OSError, RuntimeError) as error:  # a full disk is either, by who wrote
            shutil.rmtree(aside, ignore_errors=True)
            raise RunError(f"step {run.step}: can't write {final} ({first_line(error)}). Earlier "
                           "checkpoints are whole: make room, then continue with --resume "
                           f"{run.output_dir}") from None
        if args.keep_checkpoints:
            for path in checkpoints(run.output_dir)[:-args.keep_checkpoints]:
                # Renamed first: a kill leaves no half of one under a checkpoint's name.
                shutil.rmtree(path.rename(path.with_name(f".{path.name}")))
    run.gather_objects(None)  # nobody goes on before it is written


def write_whole(path: Path, text: str) -> None:
    """A kill at any moment leaves the file as it was, or as it is to be."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text)
    aside.replace(path)


def checkpoints(output_dir: Path) -> list[Path]:
    found = (path.parent for path in output_dir.glob("checkpoints/step-*/trainer.pt"))
    return sorted(found, key=lambda path: int(path.name[5:]))


def last_checkpoint(output_dir: Path) -> Path:
    """The newest whole checkpoint; one that was being written as the run died has another name."""
    if not checkpoints(output_dir):
        raise RunError(f"--resume {output_dir}: no whole checkpoint there; start the run "
                       "anew, in another folder")
    return checkpoints(output_dir)[-1]


# Options that a resumed run may change: its steps stay the same.
FREE = {"resume", "resume_with_changes", "output_dir", "track", "num_steps", "eval_every",
        "save_every", "keep_checkpoints", "vllm_memory_share", "vllm_sleep"}


def check_resume(args, run: Run) -> None:
    """Refuse to continue under options that would make it another run."""
    saved = saved_args(args.resume, run.script)
    now = json.loads(json.dumps(dataclasses.asdict(args)))
    saved = json.loads(json.dumps(dataclasses.asdict(type(args)()))) | saved  # newer options
    changed = [f"--{name.replace('_', '-')} {saved[name]} -> {now.get(name, 'gone')}"
               for name in saved if name not in FREE and saved[name] != now.get(name, "gone")]
    if changed and not args.resume_with_changes:
        raise RunError(f"--resume {args.resume}: options differ from the run's: "
                       f"{', '.join(changed)}; leave them out, or add --resume-with-changes")
    last_checkpoint(run.output_dir)


def resume(args, run: Run, policy, optimizer) -> None:
    """With --resume: restore optimizer, counters and RNG, and cut the logs back to that step."""
    if not args.resume:
        return
    from torch.distributed.checkpoint import state_dict as dcp

    state = torch.load(last_checkpoint(run.output_dir) / "trainer.pt", weights_only=False)
    dcp.set_optimizer_state_dict(policy, optimizer, state["optimizer"],
                                 options=dcp.StateDictOptions(full_state_dict=True))
    vars(run).update(state["run"])
    run.counts.clear()  # data/…: counted before the break already
    python, cpu = state["rng"][run.rank % len(state["rng"])]
    random.setstate(python)
    torch.set_rng_state(cpu)
    for name in ("metrics", "samples") if run.rank == 0 else ():
        path = run.output_dir / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole_lines = [line for line in lines if line.endswith("}\n")]  # a kill can leave half
        kept = [line for line in whole_lines if json.loads(line)["step"] <= run.step]
        write_whole(path, "".join(kept))
    run.print(f"resumed after step {run.step}")
