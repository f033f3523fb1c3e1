"""What main() of every script does to a real model, against the papers' formulas written out in
float64 with loops over sequences and tokens.

`drive` runs the script's own main() on completions made by hand: only sampling, scoring and
writing are replaced. Nothing here calls advantages, token_weights or token_loss.
"""
import contextlib
import copy
import gc
import math
import random
import statistics
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from scripts import SCRIPTS, load

import common
from common import Sample

every_script = pytest.mark.parametrize("name", SCRIPTS)
TOKEN_MEAN = ("dapo", "gopo", "cispo")
VOCABULARY, LIMIT = 40, 12
SMALL = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, head_dim=8, initializer_range=0.3,
             max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1)


def save_model(folder, config, seed=0):
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two small random Llamas: the policy, and a reference that differs from it."""
    folder = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(**SMALL)
    return [save_model(folder / str(seed), config, seed) for seed in (0, 1)]


def options(name, models, **changes):
    """Small, and with everything on that a loss can hold."""
    args = dict(model=models[0], num_steps=1, eval_every=0, save_every=0, prompts_per_step=4,
                group_size=2 if name == "grpo2" else 4, max_prompt_tokens=8, temperature=0.7,
                max_completion_tokens=LIMIT, kl_coef=0.1, micro_batch_tokens=64, num_minibatches=1)
    if name == "dapo":
        args["overlong_cache"] = 6
    return replace(load(name).Args(), **(args | changes))


def make_groups(args, parts, seed=0, prompts=4):
    """Groups with both right and wrong answers, but for the second: there all parts are equal."""
    rng, groups = random.Random(seed), []
    for place in range(prompts):
        group, prompt = [], [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 6))]
        for i in range(args.group_size):
            length = rng.randint(1, LIMIT)
            right = i == 0 or i > 1 and rng.random() < .5
            values = [1.0, 0.0, 0.3][:parts] if place == 1 else [
                float(right), float(rng.random() < .5), rng.random()][:parts]
            group.append(Sample(
                prompt, [rng.randrange(VOCABULARY) for _ in range(length)],
                [rng.uniform(-4, -3) for _ in range(length)], length == LIMIT,
                {"position": place, "question": "", "gold": ""}, rewards=values,
                correct=bool(values[0])))
        groups.append(group)
    return groups


# -------------------------------------------------------------------- the script's own loop
class Updates(list):
    """One entry per optimizer step: its gradients, and the weights that it was taken at."""
    metrics: dict
    policy: torch.nn.Module


def drive(monkeypatch, name, args, groups, reference=None, policy=None, **more):
    """main(args) on these groups. -> Updates

    `reference` and `policy` stand in for what load_model would load from args.model: a folder for
    the first, or modules. `more` replaces further functions of common.
    """
    updates, groups = Updates(), copy.deepcopy(groups)
    real_load, real_clip = common.load_model, common.clip_gradients

    def start(args, rewards, file, more_parts=()):
        run = common.Run(args, [reward.__name__ for reward in rewards] + list(more_parts), file)
        common.check_args(replace(args, sampler="hf"), run.parts, run.world)
        return run

    class Log(contextlib.nullcontext):
        def __init__(self, args, run):
            super().__init__(self)

        def write(self, step, metrics, groups=()):
            updates.metrics = metrics

        def warn(self, bad, text):
            assert not bad, text

    def load_model(args, run, frozen=False):
        model = reference if frozen else policy
        if model is None or isinstance(model, str):
            model = real_load(replace(args, model=model or args.model), run, frozen)
        if not frozen:
            updates.policy = model
        return model

    def clip_gradients(model, max_norm):
        updates.append(SimpleNamespace(
            weights={key: common.whole(value.detach()).clone()
                     for key, value in model.named_parameters()},
            gradients={key: common.whole(torch.zeros_like(value) if value.grad is None
                                         else value.grad).clone()
                       for key, value in model.named_parameters()}))
        return real_clip(model, max_norm)

    sampler = contextlib.nullcontext(SimpleNamespace(sync=lambda weights: None))
    replaced = dict(start=start, Log=Log, load_model=load_model, clip_gradients=clip_gradients,
                    load_data=lambda args, run: (None, [], []), open_sampler=lambda *_: sampler,
                    next_rows=lambda *_: [], sample_groups=lambda *_: groups, score=lambda *_: None,
                    save=lambda *_: None, check_health=lambda *_: None) | more
    with monkeypatch.context() as patch:
        for function, stub in replaced.items():
            patch.setattr(common, function, stub)
        load(name).main(args)
    return updates


def close(gradients, expected, tolerance=1e-5):
    """All of them, relative to the largest entry."""
    assert gradients.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values())
    assert largest > 1e-4, "no gradient to compare"
    for key in expected:
        gap = (gradients[key].double() - expected[key].double()).abs().max().item()
        assert gap <= tolerance * largest, f"{key}: {gap / largest:.1e}"


# -------------------------------------------------------------------- the papers, written out
def paper_advantages(name, groups, args):
    """[[A of each completion] of each group], from lists of reward parts."""
    def normalised(values):
        if max(values) == min(values):
            return [0.0] * len(values)
        mean, std = statistics.mean(values), statistics.stdev(values)
        return [(value - mean) / (std + 1e-4) for value in values]

    def of_group(rewards):
        mean = statistics.mean(rewards)
        if name == "dr_grpo":  # arXiv 2503.20783
            return [reward - mean for reward in rewards]
        if name == "grpo2":  # arXiv 2510.00977
            first, second = rewards
            return [float((first > second) - (first < second)),
                    float((second > first) - (second < first))]
        if name == "gopo":  # arXiv 2602.03876
            ranks = [1 + sum(other < reward for other in rewards)
                     + (rewards.count(reward) - 1) / 2 for reward in rewards]
            return [2 * (2 * (rank - 1) / (len(rewards) - 1) - 1) for rank in ranks]
        return normalised(rewards)  # arXiv 2402.03300, 2503.14476

    def parts(sample):
        if name != "dapo":
            return sample.rewards
        over = len(sample.completion_ids) - (LIMIT - args.overlong_cache)
        return [*sample.rewards, -max(0.0, over / args.overlong_cache)]

    if name != "gdpo":
        return [of_group([sum(w * part for w, part in zip(args.reward_weights, parts(sample)))
                          for sample in group]) for group in groups]
    sums = []  # arXiv 2601.05242, eq. 4 to 6
    for group in groups:
        columns = [normalised(list(column)) for column in zip(*(s.rewards for s in group))]
        sums.append([sum(w * value for w, value in zip(args.reward_weights, row))
                     for row in zip(*columns)])
    batch = [value for group in sums for value in group]
    mean, std = statistics.mean(batch), statistics.stdev(batch)
    return [[(value - mean) / (std + 1e-4) for value in group] if any(group)
            else [0.0] * len(group) for group in sums]


def float64(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def paper_logprobs(model, sample, temperature):
    """log π of each completion token: the sequence alone, no padding, the model's own logits."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = model(input_ids=ids).logits[0] / temperature
    return [logits[len(sample.prompt_ids) + t - 1].log_softmax(-1)[token]
            for t, token in enumerate(sample.completion_ids)]


def paper_surrogates(name, args, logps, olds, adv):
    """What the papers maximise, at each token of one sequence."""
    if name == "gspo":  # arXiv 2507.18071, eq. 5 and 7: of the sequence, so the same at each token
        ratio = (sum(logps) / len(logps) - sum(olds) / len(olds)).exp()
        return [min(ratio * adv, max(1 - 3e-4, min(1 + 4e-4, ratio)) * adv)] * len(logps)
    ratios = [(logp - before).exp() for logp, before in zip(logps, olds)]
    if name == "cispo":  # arXiv 2506.13585, eq. 4, with the cap of arXiv 2510.13786
        return [min(ratio.item(), 5.0) * adv * logp for ratio, logp in zip(ratios, logps)]
    if name == "sapo":  # arXiv 2511.20347; 1/(1 + e^−x) is σ(x)
        tau = 1.0 if adv > 0 else 1.05
        return [adv * 4 / tau / (1 + (-tau * (ratio - 1)).exp()) for ratio in ratios]
    low, high = 1 - args.clip_low, 1 + args.clip_high
    return [min(ratio * adv, max(low, min(high, ratio)) * adv) for ratio in ratios]


def paper_loss(name, args, policy, old, reference, groups, advantages):
    """The loss of one optimizer step."""
    sequences = [(sample, adv) for group, values in zip(groups, advantages)
                 for sample, adv in zip(group, values)]
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample, adv in sequences:
        if name == "dapo" and args.overlong_filter and sample.truncated:
            continue
        logps = paper_logprobs(policy, sample, args.temperature)
        with torch.no_grad():
            olds, refs = (paper_logprobs(model, sample, args.temperature)
                          for model in (old, reference))
        loss, surrogates = 0.0, paper_surrogates(name, args, logps, olds, adv)
        for logp, before, ref, sampled, surrogate in zip(logps, olds, refs, sample.sampler_logp,
                                                         surrogates):
            weight = min((before - sampled).exp().item(), args.tis_cap) if args.tis_cap else 1.0
            k3 = (ref - logp).exp() - (ref - logp) - 1
            loss += -weight * surrogate + args.kl_coef * k3
        length = len(sample.completion_ids)
        tokens += length
        if name in TOKEN_MEAN:
            total = total + loss
        elif name == "dr_grpo":
            total = total + loss / args.max_completion_tokens / len(sequences)
        else:
            total = total + loss / length / len(sequences)
    return total / tokens if name in TOKEN_MEAN else total


def paper_gradients(name, args, update, models, groups, advantages):
    policy, old, reference = float64(models[0]), float64(models[0]), float64(models[1])
    with torch.no_grad():
        for key, value in policy.named_parameters():
            value.copy_(update.weights[key])
    loss = paper_loss(name, args, policy, old, reference, groups, advantages)
    loss.backward()
    return loss.item(), {key: value.grad for key, value in policy.named_parameters()}


def trained_on(name, args):
    """The groups that main() is given, and those that the papers train on."""
    own = 1 if name == "dapo" else 0  # a part that the script adds itself
    groups = make_groups(args, len(args.reward_weights) - own, prompts=4 + own)
    return groups, [group for group in groups
                    if name != "dapo" or 0 < sum(s.correct for s in group) < len(group)]


@every_script
def test_gradient_of_the_first_update(name, models, monkeypatch):
    """ρ = 1, with importance weights, KL to another model and temperature: C2, C4, C9, C22."""
    args = options(name, models)
    given, groups = trained_on(name, args)
    advantages = paper_advantages(name, groups, args)
    updates = drive(monkeypatch, name, args, given, reference=models[1])
    assert len(updates) == 1
    loss, expected = paper_gradients(name, args, updates[0], models, groups, advantages)
    close(updates[0].gradients, expected)
    assert updates.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert updates.metrics["ratio/min"] == updates.metrics["ratio/max"] == 1
    before = updates[0].weights
    assert all((before[key] != value).any() for key, value in updates.policy.named_parameters())


@every_script
def test_gradients_of_several_updates(name, models, monkeypatch):
    """C3, C7, C8: two minibatches, each averaged over its own sequences and tokens, twice; from the
    second update on the ratio isn't 1, and it does get clipped. CISPO never clips, and SAPO's
    gradient fades to nothing in fp32 where a ratio is above 18, as some are here."""
    args = options(name, models, num_minibatches=2, num_iterations=2, learning_rate=0.02)
    given, groups = trained_on(name, args)
    advantages = paper_advantages(name, groups, args)
    updates = drive(monkeypatch, name, args, given, reference=models[1])
    assert len(updates) == 4
    for i, update in enumerate(updates):
        half = slice(0, 2) if i % 2 == 0 else slice(2, 4)
        _, expected = paper_gradients(name, args, update, models, groups[half], advantages[half])
        close(update.gradients, expected)
    for key in ("clip_ratio/high_mean", "clip_ratio/low_mean"):
        assert name == "sapo" or (updates.metrics[key] > 0) == (name != "cispo")
    assert updates.metrics["ratio/min"] < 0.8 and updates.metrics["ratio/max"] > 1.2


def test_dapo_leaves_out_cut_off_completions(models, monkeypatch):
    """overlong_filter: they have a reward, but neither loss nor tokens."""
    args = options("dapo", models, overlong_filter=True, kl_coef=0.0)
    given, groups = trained_on("dapo", args)
    assert any(sample.truncated for group in groups for sample in group)
    advantages = paper_advantages("dapo", groups, args)
    updates = drive(monkeypatch, "dapo", args, given)
    _, expected = paper_gradients("dapo", args, updates[0], models, groups, advantages)
    close(updates[0].gradients, expected)


# -------------------------------------------------------------------- what must not matter
@every_script
def test_split_padding_and_order_do_not_matter(name, models, monkeypatch):
    """C4, C5, C6: one micro-batch, many, and others in another order with other padding."""
    args = options(name, models)
    given, _ = trained_on(name, args)
    expected = drive(monkeypatch, name, replace(args, micro_batch_tokens=4096), given, models[1])
    shuffled = [random.Random(1).sample(group, len(group)) for group in reversed(given)]
    for place, group in enumerate(shuffled):  # dapo goes by position
        for sample in group:
            sample.row = {**sample.row, "position": place}
    for groups, budget in ((given, 20), (given, 45), (shuffled, 33)):
        updates = drive(monkeypatch, name, replace(args, micro_batch_tokens=budget), groups,
                        models[1])
        assert updates.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-4)
        close(updates[0].gradients, expected[0].gradients)
        for key in ("entropy", "kl", "sampling/sampling_logp_difference/mean"):
            assert updates.metrics[key] == pytest.approx(expected.metrics[key], rel=1e-4), key


@every_script
def test_skipping_sequences_without_advantage_changes_nothing(name, models, monkeypatch):
    """Without KL they have no gradient: they only get a forward pass, for the metrics."""
    args = options(name, models, kl_coef=0.0, prompts_per_step=3)
    given = trained_on(name, args)[0][:3]
    if name == "dapo":  # the useless second group is dropped: make one sequence useless instead
        args = replace(args, prompts_per_step=2, overlong_filter=True)
        given[0][0].truncated = True
    learned, real_logprobs = [], common.token_logprobs

    def token_logprobs(model, micro, temperature):
        learned[-1] += micro.num_sequences * torch.is_grad_enabled()
        return real_logprobs(model, micro, temperature)

    results = []
    monkeypatch.setattr(common, "token_logprobs", token_logprobs)
    for patched in ({}, {"learns": lambda sample, args: True}):
        with monkeypatch.context() as patch:
            for function, stub in patched.items():
                patch.setattr(common, function, stub)
            learned.append(0)
            results.append(drive(monkeypatch, name, args, given))
    skipped, kept = results
    assert learned[1] - learned[0] >= (1 if name == "dapo" else args.group_size)
    close(skipped[0].gradients, kept[0].gradients)
    assert skipped.metrics["entropy"] == pytest.approx(kept.metrics["entropy"], rel=1e-5)
    assert "kl" not in skipped.metrics  # C13


def test_what_does_not_learn_is_packed_apart(models):
    args = options("grpo", models, kl_coef=0.0)
    groups = make_groups(args, 2)
    for group in groups:
        for sample in group:
            sample.advantage = 0.0 if group is groups[1] else 1.0
    micros, = common.minibatches(groups, args, common.Run(args, [], "x.py"))
    assert [m.learns for m in micros] == sorted((m.learns for m in micros), reverse=True)
    assert sum(m.num_sequences for m in micros if not m.learns) == len(groups[1])
    with_kl, = common.minibatches(groups, replace(args, kl_coef=0.1), common.Run(args, [], "x.py"))
    assert all(m.learns for m in with_kl)


def test_micro_batches_keep_to_the_budget(models):
    """Padded tokens; every sample once; the longest together."""
    args = options("grpo", models)
    samples = [sample for group in make_groups(args, 2, prompts=12) for sample in group]
    run = common.Run(args, [], "x.py")
    for budget in (max(map(len, samples)), 40, 100, 10**6):
        micros = common.micro_batches(samples, replace(args, micro_batch_tokens=budget), run)
        assert sum(micro.num_sequences for micro in micros) == len(samples)
        assert all(micro.input_ids.numel() <= budget for micro in micros)
        widths = [micro.input_ids.shape[1] for micro in micros]
        assert widths == sorted(widths, reverse=True)
    assert len(micros) == 1


@every_script
def test_at_ratio_one_the_gradient_is_reinforces(name, models, monkeypatch):
    """C2: that of −Σ weight · A · log π, though the loss is near 0 where lengths are equal, but
    for CISPO, whose loss is that sum, and SAPO, whose terms are 2A/τ."""
    args = options(name, models, kl_coef=0.0, tis_cap=0.0, temperature=1.0)
    given, groups = trained_on(name, args)
    for group in given:
        for sample in group:
            ids = (sample.completion_ids * LIMIT)[:4]
            sample.completion_ids, sample.sampler_logp = ids, [-3.0] * 4
    advantages = paper_advantages(name, groups, args)
    updates = drive(monkeypatch, name, args, given)
    policy, loss = float64(models[0]), 0.0
    sequences = [pair for group, values in zip(groups, advantages) for pair in zip(group, values)]
    for sample, adv in sequences:
        total = sum(paper_logprobs(policy, sample, 1.0))
        divisor = args.max_completion_tokens if name == "dr_grpo" else 4
        loss = loss - adv * total / divisor / len(sequences)
    loss.backward()
    close(updates[0].gradients, {key: value.grad for key, value in policy.named_parameters()})
    assert (abs(updates.metrics["loss"]) < 1e-6) == (name not in ("cispo", "sapo"))
    assert updates.metrics["grad_norm"] > 0


@every_script
def test_gradient_checkpointing_changes_nothing(name, models, monkeypatch):
    """I8."""
    args = options(name, models)
    given, _ = trained_on(name, args)
    off, on = (drive(monkeypatch, name, replace(args, gradient_checkpointing=value), given,
                     models[1]) for value in (False, True))
    assert on.policy.is_gradient_checkpointing and not off.policy.is_gradient_checkpointing
    assert on.metrics["grad_norm"] > 0
    close(on[0].gradients, off[0].gradients)


# -------------------------------------------------------------------- KL, clip share, masks
class Constant(torch.nn.Module):
    """Stands for a model whose every token has log-prob `value`."""

    def __init__(self, value):
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def token_logprobs(self, micro, temperature):
        return self.value * micro.sampled, torch.ones(micro.sampled.shape) * micro.sampled


@every_script
@pytest.mark.parametrize("gap", [12.0, -12.0, 0.5, 0.0, 100.0, -100.0])
def test_kl_term(name, gap, models, monkeypatch):
    """C11, C12: k3 = exp(x) − x − 1 of x = log π_ref − log π_θ: never negative, 0 for equal models,
    162 742 at 12, bounded at 20."""
    args = options(name, models, tis_cap=0.0)
    updates = drive(monkeypatch, name, args, trained_on(name, args)[0], Constant(-1.0 + gap),
                    Constant(-1.0))
    x = max(-20.0, min(20.0, gap))
    assert updates.metrics["kl"] == pytest.approx(math.exp(x) - x - 1, rel=1e-5, abs=1e-7)
    assert updates.metrics["kl"] >= 0 and math.isfinite(updates.metrics["grad_norm"])
    assert gap != 12 or round(updates.metrics["kl"]) == 162742
    assert gap != 0 or updates.metrics["kl"] == 0


@pytest.mark.parametrize("group,share", [(2, 0.295), (8, 0.796)])
def test_expected_share_of_useful_groups(group, share, models, monkeypatch):
    """C19: 1 − p^G − (1 − p)^G at a pass rate of 0.18, beside this rollout's own 1 of 25."""
    args = options("grpo", models, group_size=group, prompts_per_step=25, kl_coef=0.0)
    right = round(.18 * 25 * group)
    values = [1.0] * right + [0.0] * (25 * group - right)
    samples = [Sample([1], [2], [-1.0], rewards=[v, 0.0], correct=bool(v)) for v in values]
    groups = [samples[i:i + group] for i in range(0, len(samples), group)]
    metrics = drive(monkeypatch, "grpo", args, groups, policy=Constant(-1.0)).metrics
    assert metrics["useful_groups"] == pytest.approx(1 / 25)
    assert metrics["useful_groups_expected"] == pytest.approx(share, abs=1e-3)


@every_script
def test_masked_and_empty_completions(name, models, monkeypatch):
    """B2, B12: no completion at all is finite; one out of the loss gives no gradient, but counts in
    N; whatever its tokens are, a mask comes from lengths."""
    args = options(name, models, kl_coef=0.0)
    given, groups = trained_on(name, args)
    given[0][0].completion_ids, given[0][0].sampler_logp = [], []
    given[2][0].completion_ids, given[2][0].sampler_logp = [1, 1], [-3.0, -3.0]  # EOS, and pad
    updates = drive(monkeypatch, name, args, given)
    assert all(value.isfinite().all() for value in updates[0].gradients.values())
    assert all(math.isfinite(value) for value in updates.metrics.values())
    run = common.Run(args, [], "x.py")
    micro = common.pack([given[2][0], given[0][0], given[0][1]], args, run)
    lengths = [2, 0, len(given[0][1].completion_ids)]
    assert micro.mask.sum(1).tolist() == lengths and micro.sampled.sum(1).tolist() == lengths
    given[0][1].in_loss = False
    micro = common.pack([given[0][1], given[2][0]], args, run)
    assert micro.mask.sum(1).tolist() == [0, 2]
    assert micro.sampled.sum(1).tolist() == [lengths[2], 2]
    assert common.totals([micro], run) == (2, 2)


# -------------------------------------------------------------------- log-probs of real models
def logprobs(model, samples, args, **changes):
    args = replace(args, **changes)
    micro = common.pack(samples, args, common.Run(args, [], "x.py"))
    return *common.token_logprobs(model, micro, args.temperature), micro


def samples_of(seed=0, count=6):
    rng = random.Random(seed)
    return [Sample([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))],
                   [rng.randrange(VOCABULARY) for _ in range(n)], [0.0] * n)
            for n in rng.choices(range(1, LIMIT), k=count)]


FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5,
        embd_pdrop=0.5, attn_pdrop=0.5, initializer_range=0.3, bos_token_id=0, eos_token_id=1),
    "dropout": transformers.LlamaConfig(**SMALL, attention_dropout=0.5),
    "qwen2": transformers.Qwen2Config(**SMALL, attention_dropout=0.5),
    "gemma2": transformers.Gemma2Config(
        **SMALL, final_logit_softcapping=2.0, attn_logit_softcapping=5.0, sliding_window=4,
        query_pre_attn_scalar=8, attention_dropout=0.5),
    "gemma3": transformers.Gemma3TextConfig(
        **SMALL, final_logit_softcapping=2.0, sliding_window=4, query_pre_attn_scalar=8),
    "cohere": transformers.CohereConfig(**SMALL, logit_scale=0.3),
    "granite": transformers.GraniteConfig(**SMALL, logits_scaling=3.0),
}


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """Folder of a small random model of a family."""
    folder = tmp_path_factory.mktemp("families")

    def get(name):
        path = folder / name
        return str(path) if path.exists() else save_model(path, FAMILIES[name])

    return get


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_of_every_family(name, temperature, family, models):
    """B10, C22: those of the model's own logits ÷ temperature, of each sequence alone without
    padding; also with learned positions, capped or scaled logits. Entropy likewise."""
    args = options("grpo", models, model=family(name), temperature=temperature)
    samples = samples_of()
    run = common.Run(args, [], "x.py")
    double = float64(args.model)
    for frozen in (False, True):
        model = common.load_model(args, run, frozen=frozen)
        logp, entropy, _ = logprobs(model, samples, args)
        for row, sample in enumerate(samples):
            length, start = len(sample.completion_ids), len(sample.prompt_ids) - 1
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            with torch.no_grad():
                rows = (double(input_ids=ids).logits[0, start:-1] / temperature).log_softmax(-1)
            expected = rows[range(length), sample.completion_ids]
            torch.testing.assert_close(logp[row, :length].double(), expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(entropy[row, :length].double(), -(rows.exp() * rows).sum(-1),
                                       rtol=0, atol=1e-4)
            assert (logp[row, length:] == 0).all() and (entropy[row, length:] == 0).all()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_does_not_matter(name, family, models):
    """B10, B14: a sequence alone and beside one that makes it 7 tokens wider, in fp32."""
    args = options("grpo", models, model=family(name))
    model = common.load_model(args, common.Run(args, [], "x.py"))
    short = Sample([3, 4], [5, 6, 7], [0.0] * 3)
    alone, _, _ = logprobs(model, [short], args)
    padded, _, micro = logprobs(model, [short, Sample([3, 4], [8] * 10, [0.0] * 10)], args)
    assert micro.input_ids.shape[1] == len(short) + 7
    torch.testing.assert_close(padded[0, :3], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "dropout", "gemma2"])
def test_dropout_is_off(name, family, models, monkeypatch):
    """C23: a model that has dropout is trained without it: KL 0, and no ratio but 1."""
    args = options("grpo", models, model=family(name), kl_coef=0.1)
    run = common.Run(args, [], "x.py")
    policy, reference = common.load_model(args, run), common.load_model(args, run, frozen=True)
    assert policy.training  # gradient checkpointing wants it
    samples = samples_of()
    first, again, frozen = (logprobs(m, samples, args)[0] for m in (policy, policy, reference))
    assert torch.equal(first, again)
    torch.testing.assert_close(first, frozen, rtol=0, atol=1e-6)
    given, _ = trained_on("grpo", args)
    assert drive(monkeypatch, "grpo", args, given).metrics["kl"] < 1e-9


def test_unknown_scaling_of_logits_is_refused(models, monkeypatch):
    """A model that treats its logits in a way not known here is named, not trained wrongly."""
    real = transformers.LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        output = real(self, *args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    args = options("grpo", models)
    common.load_model(args, common.Run(args, [], "x.py"))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(common.RunError, match="LlamaForCausalLM"):
        common.load_model(args, common.Run(args, [], "x.py"))


def test_entropy_of_uniform_logits(models):
    """H4: ln 8 on each completion token, whatever the padding; an empty completion adds nothing."""
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": 8})
    model = transformers.LlamaForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    samples = [Sample([1], [2] * n, [0.0] * n) for n in (1, 9, 0, 4)]
    _, entropy, micro = logprobs(model, samples, options("grpo", models))
    assert (entropy[~micro.sampled] == 0).all()
    torch.testing.assert_close(entropy[micro.sampled], torch.full((14,), math.log(8)))
    _, entropy, _ = logprobs(model, samples[2:3], options("grpo", models))
    assert entropy.sum() == 0


def test_bf16_logits_of_a_large_vocabulary(models):
    """J5: log-softmax is in fp32, over 150k entries whose bf16 sum would be far off."""
    vocabulary = 150_000
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": vocabulary, "hidden_size": 8,
                                         "intermediate_size": 8, "num_hidden_layers": 1})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    samples = [Sample([1, 2], [3, 149_999, 70_000, 4], [0.0] * 4)]
    with torch.no_grad():
        logp, entropy, micro = logprobs(model, samples, options("grpo", models), temperature=1.0)
        logits = model(input_ids=micro.input_ids).logits[0, 1:-1]
    assert logits.dtype == torch.bfloat16 and logp.dtype == torch.float32
    rows = logits.double().log_softmax(-1)
    expected = rows[range(4), samples[0].completion_ids]
    torch.testing.assert_close(logp[0].double(), expected, rtol=0, atol=1e-3)
    torch.testing.assert_close(entropy[0].double(), -(rows.exp() * rows).sum(-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("learns", [True, False])
def test_logits_exist_in_chunks_only(learns, models, monkeypatch):
    """E1, E2, E10: the head sees completion positions alone, LOGITS_AT_ONCE elements at most at a
    time, with and without gradient, and none outlives the step."""
    args = options("grpo", models)
    model = common.load_model(args, common.Run(args, [], "x.py"))
    monkeypatch.setattr(common, "LOGITS_AT_ONCE", 4 * VOCABULARY)
    sizes, alive = [], []

    def watch(module, inputs, output):
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(output))
        sizes.append((output.numel(), len(alive)))

    handle = model.get_output_embeddings().register_forward_hook(watch)
    samples = samples_of(count=12)
    with torch.set_grad_enabled(learns):
        logp, entropy, _ = logprobs(model, samples, args)
        forward = len(sizes)
        assert all(ref() is None for ref in alive)  # before the backward pass recomputes them
        if learns:
            logp.sum().backward()
    handle.remove()
    tokens = sum(len(sample.completion_ids) for sample in samples)
    assert forward == math.ceil(tokens / 4) and len(sizes) == forward * (1 + learns)
    assert max(size for size, _ in sizes) == 4 * VOCABULARY
    assert sum(size for size, _ in sizes[:forward]) == tokens * VOCABULARY
    assert max(count for _, count in sizes) <= 2
    del logp, entropy
    gc.collect()
    assert all(ref() is None for ref in alive)
    whole, _, _ = logprobs(model, samples, args)
    monkeypatch.setattr(common, "LOGITS_AT_ONCE", 2**25)
    torch.testing.assert_close(logprobs(model, samples, args)[0], whole)
