"""GRPO, Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300 (2024), eq. 3 and 4.

PPO needs a critic to know whether an answer was better than expected. GRPO samples a group of G
answers to the same prompt instead: an answer is as good as it is better than its group's mean.

    A_i  = (r_i − mean(r)) / (std(r) + 1e-4)      one advantage for all tokens of answer i
    ρ_it = π_θ(o_it) / π_old(o_it)      o_it: token t of answer i. N: answers per optimizer step
    loss = −1/N Σ_i 1/|o_i| Σ_t [ w_it min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) − β k3_it ]
    w_it = min(π_old(o_it) / π_sampler(o_it), 2)      for trainer and sampler round differently

    python grpo.py                              a tiny model learns to add, on two CPU cores
    python grpo.py gsm8k                        Qwen2.5-0.5B-Instruct on GSM8K, on one GPU
"""
from dataclasses import dataclass

import torch

import common
from common import correct, format


@dataclass
class Args:
    model: str = "tiny/model"
    """Hugging Face directory or hub name of the policy, and of the reference that KL holds it to"""
    dataset: str = "tiny"
    """hub name, a JSONL, JSON, Parquet or CSV file, or a folder with one such file per split"""
    dataset_config: str = ""
    """configuration of a hub data set"""
    train_split: str = "train"
    """split to train on; a file is all `train`"""
    eval_split: str = "test"
    """held-out split; where there is none, a tenth of the training rows is held out, 500 at most"""
    prompt_column: str = "question"
    """column of the question: a text or a list of chat messages; dots reach into nested columns"""
    gold_column: str = "answer"
    """column of the right answer: bare, behind ####, or in the last box of a solution"""
    instruction: str = ""
    """text appended to every question, such as a request for \\boxed{}"""
    chat_template: bool = True
    """wrap questions in the tokenizer's chat template; without it the bare text is the prompt"""
    group_size: int = 16
    """G, completions per prompt"""
    prompts_per_step: int = 8
    """prompts per rollout, over all ranks"""
    num_steps: int = 80
    """rollouts to train on"""
    num_minibatches: int = 1
    """optimizer steps per pass over a rollout"""
    num_iterations: int = 1
    """μ, passes over each rollout"""
    micro_batch_tokens: int = 2048
    """padded tokens per forward and backward pass of a rank; bounds memory, not the result"""
    learning_rate: float = 1e-4
    """of AdamW on fp32 weights: 1e-4 suits the tiny model, 1e-6 one of half a billion or more"""
    warmup_steps: int = 0
    """steps over which the learning rate rises; it is constant afterwards"""
    weight_decay: float = 0.0
    """of AdamW"""
    adam_beta2: float = 0.999
    """β2 of AdamW"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    clip_low: float = 0.2
    """ε_low: no gradient where A < 0 and the ratio is below 1 − ε_low"""
    clip_high: float = 0.2
    """ε_high: no gradient where A > 0 and the ratio is above 1 + ε_high"""
    kl_coef: float = 0.04
    """β, weight of the KL to the initial model; at 0 no reference is loaded"""
    tis_cap: float = 2.0
    """cap on the importance weights that correct trainer/sampler mismatch; 0 turns them off"""
    temperature: float = 1.0
    """of sampling, and of all log-probs"""
    max_prompt_tokens: int = 64
    """rows with longer prompts are dropped"""
    max_completion_tokens: int = 96
    """sampling is cut off here"""
    reward_weights: tuple[float, ...] = (1.0, 0.5)
    """one per reward part: those of REWARDS, then the reward model's if there is one"""
    reward_model: str = ""
    """sequence-classification model whose score is one more reward part"""
    sampler: str = "vllm"
    """vllm, or hf (transformers' generate) where vLLM can't be installed"""
    vllm_memory_share: float = 0.4
    """share of the GPU's memory for vLLM"""
    vllm_sleep: bool = False
    """vLLM gives the GPU's memory back while the policy learns"""
    vllm_compile: bool = False
    """on a CPU: compile vLLM's model, which pays from about a hundred steps on"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    eval_every: int = 40
    """steps between evaluations, besides before the first and after the last; 0: none at all"""
    save_every: int = 40
    """steps between checkpoints, besides that after the last; 0: only that"""
    keep_checkpoints: int = 2
    """older ones are removed; 0 keeps all"""
    output_dir: str = ""
    """folder for metrics, samples, curves and checkpoints (runs/<script>-<time> if empty)"""
    resume: str = ""
    """folder of a run to continue from its last checkpoint; its options are the defaults then"""
    resume_with_changes: bool = False
    """let --resume change options that make it another run"""
    track: bool = False
    """log to Weights & Biases too, offline where there is no key"""
    seed: int = 0
    """of data order and sampling"""


PRESETS = {"tiny": Args(), "gsm8k": Args(
    model="Qwen/Qwen2.5-0.5B-Instruct", dataset="openai/gsm8k", dataset_config="main",
    instruction="\nThink step by step, and put the final answer in \\boxed{}.",
    group_size=8, prompts_per_step=16, num_steps=934,  # 2 passes over the 7473 problems
    learning_rate=1e-6, max_grad_norm=0.5, max_prompt_tokens=512, max_completion_tokens=2048,
    micro_batch_tokens=16384, eval_every=25, save_every=25)}
REWARDS = [correct, format]


# -------------------------------------------------------------------- the algorithm
def advantages(rewards, args):
    """How much better each answer is than its group. [prompts, group, parts] -> [prompts, group]"""
    parts = zip(args.reward_weights, rewards.unbind(-1), strict=True)
    total = sum(weight * part for weight, part in parts)  # [prompts, group]
    useful = total.amax(1, keepdim=True) > total.amin(1, keepdim=True)  # exact; std rounds
    adv = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-4)  # n − 1
    return torch.where(useful, adv, 0.0)


def token_weights(mask, num_sequences, num_tokens, args):
    """Mean over the tokens of each answer, then over answers. [sequences, tokens] -> same"""
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / num_sequences


def token_loss(logp, old_logp, adv, mask, args):
    """Clipped surrogate of each token, before averaging. [sequences, tokens], adv [sequences]"""
    ratio = torch.exp((logp - old_logp).clamp(-20, 20))
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return -torch.minimum(ratio * adv[:, None], clipped * adv[:, None])


# -------------------------------------------------------------------- the loop
def main(args: Args) -> None:
    # ---- set up: what can be wrong is found before anything slow
    run = common.start(args, REWARDS, __file__)
    tokenizer, train, test = common.load_data(args, run)
    with common.open_sampler(args, run, tokenizer) as sampler, common.Log(args, run) as log:
        policy = common.load_model(args, run)
        reference = common.load_model(args, run, frozen=True) if args.kl_coef else None
        reward_model = common.load_reward_model(args, run) if args.reward_model else None
        optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, args.adam_beta2),
                                      weight_decay=args.weight_decay)
        common.resume(args, run, policy, optimizer)
        sampler.sync(common.named_weights(policy))
        if run.step == 0:
            log.write(0, common.evaluate(sampler, tokenizer, test, args, run))

        while run.step < args.num_steps:
            run.start_step()

            # ---- sample: this rank's prompts, G completions each
            rows = common.next_rows(train, args, run)
            groups = common.sample_groups(sampler, tokenizer, rows, args, run)
            run.lap("sample")

            # ---- score
            common.score(groups, REWARDS, reward_model, run)
            run.lap("score")

            # ---- advantages: once per rollout, on the rewards of all ranks
            rewards, mine = common.gather_rewards(groups, args, run)  # [prompts, group, parts]
            adv = advantages(rewards, args)  # [prompts, group]
            common.set_advantages(groups, adv[mine])

            # ---- learn: an optimizer step per minibatch, gradients summed over its micro-batches
            run.set_learning_rate(optimizer, args)
            minibatches = common.minibatches(groups, args, run)
            one_update = len(minibatches) * args.num_iterations == 1
            for micro in sum(minibatches, []):
                with torch.no_grad():
                    if not (one_update and micro.learns):  # else π_old is π_θ, from the learn pass
                        logp, entropy = policy.token_logprobs(micro, args.temperature)
                        micro.old_logp, micro.entropy = logp, entropy
                    if reference:
                        micro.ref_logp, _ = reference.token_logprobs(micro, args.temperature)
            for minibatch in minibatches * args.num_iterations:
                num_sequences, num_tokens = common.totals(minibatch, run)  # of this optimizer step
                for micro in minibatch:
                    if not micro.learns:  # all advantages 0, and no KL: the gradient is 0
                        continue
                    logp, entropy = policy.token_logprobs(micro, args.temperature)
                    if one_update:
                        micro.old_logp, micro.entropy = logp.detach(), entropy
                    loss = token_loss(logp, micro.old_logp, micro.adv, micro.mask, args)
                    loss = loss * common.importance_weights(micro, args.tis_cap)  # of the sampler
                    if reference:  # k3: never negative, and KL(π_θ, π_ref) on average
                        x = (micro.ref_logp - logp).clamp(-20, 20)
                        k3 = torch.exp(x) - x - 1
                        loss = loss + args.kl_coef * k3
                        run.add("kl", k3.detach() * micro.sampled)  # in the loss or not
                    weights = token_weights(micro.mask, num_sequences, num_tokens, args)
                    loss = (weights * loss).sum()
                    (loss * run.world).backward()  # FSDP takes the mean over ranks
                    run.add("loss", loss.detach())
                    run.add_clipped(token_loss, logp, micro, args)  # counts tokens without gradient
                if run.finite(common.clip_gradients(policy, args.max_grad_norm)):
                    optimizer.step()
                optimizer.zero_grad()
            run.lap("learn")

            # ---- sync: the sampler gets the new weights, or the run stops
            sampler.sync(common.named_weights(policy))
            run.lap("sync")

            # ---- report
            run.step += 1
            metrics = common.rollout_metrics(groups, minibatches, rewards, adv, args, run)
            if common.due(run.step, args.eval_every, args):
                metrics |= common.evaluate(sampler, tokenizer, test, args, run)
            log.write(run.step, metrics, groups)
            common.check_health(metrics, args, run, log)
            stop = run.must_stop()
            if stop or common.due(run.step, args.save_every, args):
                common.save(args, run, policy, tokenizer, optimizer)
            if stop:
                run.stop()


if __name__ == "__main__":
    common.launch(main, PRESETS)
