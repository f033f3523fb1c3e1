"""
Makes the embedded default: a tiny Llama that adds numbers, and the problems it is trained on.

    python tiny/make.py            # about eight minutes on two CPU cores, the same result for the same seed

writes, next to this file or into --out,

    model/        Hugging Face directory: 0.8 M parameters, character tokenizer, chat template, fp32 safetensors
    train.jsonl   4000 problems, test.jsonl 500 others; GSM8K's columns: `question`, and `answer` ending in `#### N`

What makes it a CartPole for RL on language models: *the skill is in the model, the habit is not.* As with a
real model, there are two stages of supervised learning before RL:

1. School. Every answer is worked column by column, from the units, with carries. Column addition is learnt here.
2. The crowd. Most people in it guess, some ramble on, few work; each puts the result in \\boxed{} half of the
   time, whatever the style. The model learns to imitate them all, so a sample from it is a random member of the
   crowd, right about one time in eight, while it could be right nearly always if it chose to work.

RL then has to find two things by reward alone: that the box is wanted, and that working it out pays. Problems
differ in difficulty (a guess at 17 + 25 is often right, one at 4180 + 977 never is), and answers in length for bad
reasons as well as good ones (ramblers are long *and* wrong): that is where the variants of GRPO differ.

Nothing in the training scripts knows about this file, and no problem of test.jsonl is seen here in training.
"""
import argparse
import json
import os
import random
import string

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# A turn is <|role|>text<|end|>; <|end|> is the EOS. Padding has a token of its own.
SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# ---------------------------------------------------------------------------------------------------------------
# Problems


def draw_problem(rng):
    """Two numbers of 2, 3 or 4 digits each. Of equal length, or finding the columns would be the harder part."""
    digits = rng.choices([2, 3, 4], [35, 40, 25])[0]
    return rng.randrange(10 ** (digits - 1), 10**digits), rng.randrange(10 ** (digits - 1), 10**digits)


def ask(a, b):
    return f"What is {a} + {b}?"


def columns(a, b):
    """347, 286 -> '7+6=13, 4+8+1=13, 3+2+1=6': from the units, the carry as a third term."""
    steps, carry = [], 0
    for i in range(len(str(max(a, b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        steps.append(f"{x}+{y}" + (f"+{carry}" if carry else "") + f"={total}")
        carry = total // 10
    return ", ".join(steps)


# ---------------------------------------------------------------------------------------------------------------
# The crowd: each is a completion for a + b. The unboxed endings carry no marker that a checker could read.


def estimate(a, b, rng):
    """The right size but not the right number: 4 % off, so that small sums are sometimes hit."""
    return max(1, round((a + b) * rng.gauss(1, 0.04)))


def worker(a, b, rng):
    end = "\\boxed{%d}" if rng.random() < 0.5 else "so %d."
    return f"{columns(a, b)}. " + end % (a + b)


def guesser(a, b, rng):
    # Nobody but a worker starts with a digit: else the first one of a guess could be taken for a column's.
    end = "\\boxed{%d}" if rng.random() < 0.5 else "= %d"
    return end % estimate(a, b, rng)


THOUGHTS = ["Hmm, {g}?", "Or {g}.", "Let me think.", "Maybe {g}.", "No, more.", "No, less.", "Wait, {a} and {b}."]


def rambler(a, b, rng):
    text = ["Well."]
    while rng.random() < 0.8:  # a geometric length: 5 thoughts on average, no end in sight for some
        text.append(rng.choice(THOUGHTS).format(a=a, b=b, g=estimate(a, b, rng)))
    end = "\\boxed{%d}" if rng.random() < 0.5 else "so %d."
    return " ".join(text + [end % estimate(a, b, rng)])


CROWD = {guesser: 0.64, worker: 0.19, rambler: 0.17}

# ---------------------------------------------------------------------------------------------------------------
# Tokenizer and model


def build_tokenizer():
    """One token per character: BPE without merges. The Fuse decoder joins tokens with nothing in between."""
    characters = [c for c in string.printable if c.isprintable()] + ["\n", "\t"]
    vocab = {token: i for i, token in enumerate(SPECIAL + characters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False, padding_side="left", model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,  # 32: the smallest that vLLM takes
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    ))


# ---------------------------------------------------------------------------------------------------------------
# Imitation


def draw_batch(tokenizer, rng, held_out, crowd, size):
    """Fresh problems, answered by the crowd -> ids [size, tokens], and labels: ids of the answer, else -100."""
    prompts, answers = [], []
    while len(prompts) < size:
        a, b = draw_problem(rng)
        if frozenset((a, b)) in held_out:
            continue
        person = rng.choices(list(crowd), list(crowd.values()))[0]
        prompts.append([{"role": "user", "content": ask(a, b)}])
        answers.append(person(a, b, rng) + tokenizer.eos_token)
    prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(prompts).input_ids
    answers = [ids[:80] for ids in tokenizer(answers).input_ids]  # who is still rambling then has no end to learn
    width = max(len(p) + len(c) for p, c in zip(prompts, answers))
    ids = torch.full((size, width), tokenizer.pad_token_id)
    labels = torch.full((size, width), -100)
    for i, (p, c) in enumerate(zip(prompts, answers)):
        ids[i, : len(p) + len(c)] = torch.tensor(p + c)
        labels[i, len(p) : len(p) + len(c)] = torch.tensor(c)
    return ids, labels


def imitate(model, tokenizer, rng, held_out, crowd, steps, size, learning_rate, name):
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    bar = tqdm(range(steps), desc=name, dynamic_ncols=True)
    for step in bar:
        ids, labels = draw_batch(tokenizer, rng, held_out, crowd, size)
        # Padding stands on the right, where causal attention from an answer can't see it: no mask is needed.
        logits = model(input_ids=ids[:, :-1]).logits  # [size, tokens - 1, vocab]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        for group in optimizer.param_groups:  # warm up for 50 steps; down to 0 over the second half
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50, (steps - step) / (0.5 * steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)), help="folder to write into")
    parser.add_argument("--train-problems", type=int, default=4000)
    parser.add_argument("--test-problems", type=int, default=500)
    parser.add_argument("--school-steps", type=int, default=600)
    parser.add_argument("--crowd-steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)

    # Problems, each at most once whichever way round it is written; so test and train share none either way.
    rng, problems = random.Random(f"problems {args.seed}"), {}
    while len(problems) < args.test_problems + args.train_problems:
        pair = draw_problem(rng)
        problems.setdefault(frozenset(pair), pair)
    rows = [
        {"question": ask(a, b), "answer": f"{columns(a, b)}\n#### {a + b}"} for a, b in problems.values()
    ]
    for name, part in (("test", rows[: args.test_problems]), ("train", rows[args.test_problems :])):
        with open(os.path.join(args.out, f"{name}.jsonl"), "w", newline="\n") as f:
            f.writelines(json.dumps(row) + "\n" for row in part)
    held_out = set(list(problems)[: args.test_problems])

    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    imitate(model, tokenizer, held_out, args)
    path = os.path.join(args.out, "model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    print(f"wrote {path}, train.jsonl, test.jsonl")


if __name__ == "__main__":
    main()
