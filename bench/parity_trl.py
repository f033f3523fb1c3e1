"""Loss and gradient of each script beside TRL's, on the same model, tokens, rewards and log-probs.

TRL computes everything with its own code: a GRPOTrainer is built, its
`_generate_and_score_completions` gives the advantages and the old, reference and sampler log-probs,
and its `_compute_loss` the loss. Only `_generate` is replaced, so that both sides see the same
completions. Ours goes through the script's three functions and common.py. fp32, on CPU.

TRL goes into an environment of its own that sees the packages of .venv, which stays as it is:

    python3 -m venv /tmp/trl
    echo "$(ls -d $PWD/.venv/lib/python3*/site-packages)" \\
        > "$(ls -d /tmp/trl/lib/python3*/site-packages)/project.pth"
    /tmp/trl/bin/pip install trl==1.16.0
    OMP_NUM_THREADS=1 /tmp/trl/bin/python bench/parity_trl.py > bench/results/parity_trl.md

Exits with 1 when a case differs that has no reason to, written beside it.
"""
import contextlib
import importlib.util
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402

import common  # noqa: E402
from common import Sample  # noqa: E402

PROMPTS, LIMIT, VOCABULARY, PAD = 4, 24, 30, 0
REWARDS = ("correct", "format")


# -------------------------------------------------------------------- the same data for both
def make_groups(group: int, flat: bool) -> list[list[Sample]]:
    """Random completions; `flat`: every group but the first gets equal rewards, 0.7 each."""
    rng, groups = random.Random(0), []
    for place in range(PROMPTS):
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(4, 9))]
        groups.append([])
        for i in range(group):
            length = rng.randint(1, LIMIT)
            rewards = [float(i == 0 or i > 1 and rng.random() < .5), float(rng.random() < .6)]
            groups[-1].append(Sample(
                prompt, [rng.randrange(3, VOCABULARY) for _ in range(length)],
                [rng.uniform(-4.5, -2) for _ in range(length)], length == LIMIT,
                rewards=[.7, .7] if flat and place else rewards))
    return groups


def moved(model, seed: int, scale: float) -> None:
    """A small step away from where the model is, the same for both sides."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)


def result(model, loss: float, adv) -> SimpleNamespace:
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    return SimpleNamespace(loss=loss, gradient=gradient, adv=torch.as_tensor(adv).flatten())


# -------------------------------------------------------------------- ours
def ours(name: str, case, groups, folders) -> SimpleNamespace:
    script = importlib.import_module(name)
    args = replace(script.Args(), model=folders[0], group_size=len(groups[0]), prompts_per_step=4,
                   max_prompt_tokens=16, max_completion_tokens=LIMIT, temperature=case.temperature,
                   reward_weights=(1.0, 0.5), micro_batch_tokens=160, kl_coef=case.kl,
                   tis_cap=2.0 * case.tis, num_minibatches=1)
    run = common.Run(args, list(REWARDS), f"{name}.py")
    policy = common.load_model(args, run)
    reference = common.load_model(replace(args, model=folders[1]), run, frozen=True)
    rewards, _ = common.gather_rewards(groups, args, run)
    adv = script.advantages(rewards, args)
    common.set_advantages(groups, adv)
    minibatch, = common.minibatches(groups, args, run)
    with torch.no_grad():
        for micro in minibatch:
            micro.old_logp, _ = policy.token_logprobs(micro, args.temperature)
            micro.ref_logp, _ = reference.token_logprobs(micro, args.temperature)
    moved(policy, 2, case.step)
    num_sequences, num_tokens = common.totals(minibatch, run)
    total = 0.0
    for micro in minibatch:
        logp, _ = policy.token_logprobs(micro, args.temperature)
        loss = script.token_loss(logp, micro.old_logp, micro.adv, micro.mask, args)
        loss = loss * common.importance_weights(micro, args.tis_cap)
        x = micro.ref_logp - logp
        loss = loss + args.kl_coef * (torch.exp(x) - x - 1)
        weights = script.token_weights(micro.mask, num_sequences, num_tokens, args)
        loss = (weights * loss).sum()
        loss.backward()
        total += loss.item()
    return result(policy, total, adv)


# -------------------------------------------------------------------- TRL's
def trl(case, groups, folders, args) -> SimpleNamespace:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    samples = [sample for group in groups for sample in group]
    size = len(samples)

    def reward(index, name):
        def function(completions, **kwargs):
            return [sample.rewards[index] for sample in samples]
        function.__name__ = name
        return function

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
            per_device_train_batch_size=size // case.split, gradient_accumulation_steps=case.split,
            num_generations=len(groups[0]), num_iterations=2 if case.step else 1,
            max_completion_length=LIMIT, temperature=case.temperature, beta=case.kl,
            epsilon=args.clip_low, gradient_checkpointing=False, reward_weights=[1.0, 0.5],
            vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
            **({"epsilon_high": args.clip_high, "use_bias_correction_kl": False} | case.trl))
        trainer = GRPOTrainer(
            model=folders[0], args=config, processing_class=tokenizer(),
            reward_funcs=[reward(i, name) for i, name in enumerate(REWARDS)],
            train_dataset=datasets.Dataset.from_list([{"prompt": "1"}] * size))
    if case.kl:
        trainer.ref_model.load_state_dict(
            transformers.AutoModelForCausalLM.from_pretrained(folders[1]).state_dict())
    trainer.use_vllm = case.tis  # only says that sampler log-probs came with the completions
    trainer._generate = lambda prompts: (
        [s.prompt_ids for s in samples], [s.completion_ids for s in samples], None, [""] * size,
        [s.sampler_logp for s in samples] if case.tis else None, {}, None, None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = case.split
    batch = trainer._generate_and_score_completions([{"prompt": "1"} for _ in samples])
    moved(trainer.model, 2, case.step)
    total = 0.0
    for part in range(case.split):
        rows = slice(part * size // case.split, (part + 1) * size // case.split)
        inputs = {key: value[rows] if value.dim() else value for key, value in batch.items()}
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
    return result(trainer.model, total, batch["advantages"])


def tokenizer():
    path = Path(__file__).resolve().parent.parent / "tiny" / "model"
    loaded = transformers.AutoTokenizer.from_pretrained(path)
    loaded.pad_token = loaded.pad_token or loaded.eos_token
    return loaded


# -------------------------------------------------------------------- the cases
def case(name, script, trl, note="", kl=0.0, step=0.0, tis=False, temperature=1.0, split=1,
         group=4, flat=False):
    """`step`: how far the weights are from those that sampled; 0 is the first update, ρ = 1."""
    return SimpleNamespace(**locals())


GRPO, DAPO = {"loss_type": "grpo"}, {"loss_type": "dapo"}
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
GSPO = GRPO | {"importance_sampling_level": "sequence"}
CISPO, SAPO = {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "sapo"}
GDPO = GRPO | {"multi_objective_aggregation": "normalize_then_sum"}
FLAT = "equal rewards: A is exactly 0 here; rounding, divided by std + 1e-4, in TRL"
CASES = [
    case("first update", "grpo", GRPO, kl=.04),
    case("later update, ρ ≠ 1", "grpo", GRPO, kl=.04, step=.01),
    case("later, temperature 0.7", "grpo", GRPO, kl=.04, step=.01, temperature=.7),
    case("later, TIS cap 2", "grpo", GRPO, kl=.04, step=.01, tis=True),
    case("later, in 4 micro-batches", "grpo", GRPO, kl=.04, step=.01, split=4),
    case("three of four groups without signal, G = 7", "grpo", GRPO, FLAT, flat=True, group=7),
    case("first update", "grpo", GRPO | {"use_bias_correction_kl": True},
         "TRL's default: k3 times ρ, from a later paper; here k3 alone, as in eq. 4", kl=.04),
    case("first update", "dapo", DAPO),
    case("later update, TIS cap 2", "dapo", DAPO, step=.01, tis=True),
    case("later, in 4 micro-batches", "dapo", DAPO, step=.01, split=4),
    case("first update", "dr_grpo", DR_GRPO),
    case("later update, TIS cap 2", "dr_grpo", DR_GRPO, step=.01, tis=True),
    case("later, in 4 micro-batches", "dr_grpo", DR_GRPO, step=.01, split=4),
    case("first update", "gdpo", GDPO, kl=.04),
    case("later update", "gdpo", GDPO, kl=.04, step=.01),
    case("three of four groups without signal, G = 7", "gdpo", GDPO, FLAT, flat=True, group=7),
    case("first update, G = 2", "grpo2", GRPO,
         "population std, as in the paper: √2 of TRL's n − 1 std", group=2),
    case("first update", "gspo", GSPO),
    case("later update, TIS cap 2", "gspo", GSPO, step=.001, tis=True),
    case("later, in 4 micro-batches", "gspo", GSPO, step=.001, split=4),
    case("first update", "cispo", CISPO),
    case("later update, TIS cap 2", "cispo", CISPO, step=.03, tis=True),
    case("later, in 4 micro-batches", "cispo", CISPO, step=.03, split=4),
    case("first update", "sapo", SAPO),
    case("later update, TIS cap 2", "sapo", SAPO, step=.01, tis=True),
    case("later, in 4 micro-batches", "sapo", SAPO, step=.01, split=4),
]


HEAD = """# Parity with TRL {trl}

Made by `python bench/parity_trl.py`; its docstring says how. Python {python}, torch {torch},
transformers {transformers}, fp32 on CPU.

A random Llama of two layers, {prompts} prompts, completions of 1 to {limit} random tokens, two
rewards weighted 1 and 0.5. Δ is the largest absolute difference of any advantage, of the loss, of
any entry of the gradient; behind the last, the largest entry. Rows without a reason agree to fp32
rounding. TRL has no counterpart of gopo.py, nor of DAPO's sampling until the batch is full.

| script | TRL's options | case | loss, TRL | loss, ours | Δ adv. | Δ loss | Δ gradient (of) | why |
|---|---|---|---|---|---|---|---|---|"""


def save_models(folder: str) -> list[str]:
    """Two random Llamas, the policy and its reference. -> their folders"""
    folders = [f"{folder}/{seed}" for seed in range(2)]
    for seed, path in enumerate(folders):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, head_dim=16,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            initializer_range=0.2, max_position_embeddings=64)).save_pretrained(path)
    return folders


def compare(case, folders) -> tuple[str, bool]:
    """-> the case's row of the table, and whether it is as it should be"""
    groups = make_groups(case.group, case.flat)
    mine = ours(case.script, case, groups, folders)
    theirs = trl(case, groups, folders, importlib.import_module(case.script).Args())
    adv = (mine.adv - theirs.adv).abs().max().item()
    gradient = (mine.gradient - theirs.gradient).abs().max().item()
    largest = theirs.gradient.abs().max().item()
    loss = abs(mine.loss - theirs.loss)
    options = ", ".join(f"{key} {value}" for key, value in case.trl.items())
    losses = [f"{round(side.loss, 6) + 0.0:.6f}" for side in (theirs, mine)]  # + 0.0: no -0
    row = (case.script, options, case.name, *losses, f"{adv:.0e}", f"{loss:.0e}",
           f"{gradient:.0e} ({largest:.0e})", case.note)
    agree = adv < 1e-5 and loss < 1e-5 and gradient < 1e-4 * largest
    return f"| {' | '.join(row)} |", agree != bool(case.note)


def main() -> None:
    import trl as trl_package

    print(HEAD.format(trl=trl_package.__version__, python=sys.version.split()[0],
                      torch=torch.__version__, transformers=transformers.__version__,
                      prompts=PROMPTS, limit=LIMIT), flush=True)
    surprises = []
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            folders = save_models(folder)
        for case in CASES:
            if importlib.util.find_spec(case.script):
                with contextlib.redirect_stdout(sys.stderr):
                    row, fine = compare(case, folders)
                print(row, flush=True)
                surprises += [] if fine else [f"{case.script}, {case.name}"]
    sys.exit("unexpected: " + "; ".join(surprises) if surprises else 0)


if __name__ == "__main__":
    main()
