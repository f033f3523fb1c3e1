"""Makes the embedded default: a tiny Llama that can add, and the problems it is trained on.

    python tiny/make.py        # 5 to 8 minutes on two CPU cores; the same seed, the same data

writes into the folder of this file, or into --out,

    model/        Hugging Face directory: 0.8 M parameters, a token per character, fp32
    train.jsonl   4000 problems, and test.jsonl, 500 others, with GSM8K's columns:
                  `question`, and `answer`, a worked solution that ends in `#### N`

What makes it a CartPole for RL on language models: *the skill is in the model, the habit isn't.*
As in a real model, two stages of supervised learning come before RL:

1. School. Every answer is worked column by column, from the units, with carries.
2. The crowd. Most people guess, some ramble, few work; each puts the result in \\boxed{} half of
   the time, whatever the style. The model learns to imitate them all, so a sample is like a random
   member of the crowd: boxed and right one time in ten, though it could nearly always be.

RL has two things to find by reward alone: that the box is wanted, and that working it out pays.
Problems differ in difficulty (a guess at 17 + 25 may hit, one at 4180 + 2977 never does), and
answers are long for bad reasons as well as good ones (ramblers are long *and* wrong, and often cut
off): that is where the variants of GRPO differ. No problem of test.jsonl is seen here in training.
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
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# --------------------------------------------------------------------------------------------------
# Problems


def draw_problem(rng):
    """Two numbers of 2, 3 or 4 digits; of equal length, or finding the columns is the hard part."""
    digits = rng.choices([2, 3, 4], [35, 40, 25])[0]
    low, high = 10 ** (digits - 1), 10**digits
    return rng.randrange(low, high), rng.randrange(low, high)


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


# --------------------------------------------------------------------------------------------------
# The crowd: each answers a + b. Endings without a box carry no marker that a checker could read.


def estimate(a, b, rng):
    """The right size, not the right number: 3 % off, so that small sums are sometimes hit."""
    return max(1, round((a + b) * rng.gauss(1, 0.03)))


def worker(a, b, rng):
    end = "\\boxed{%d}" if rng.random() < 0.5 else "so %d."
    return f"{columns(a, b)}. " + end % (a + b)


def guesser(a, b, rng):
    # Only workers start with a digit: else the first one of a guess is taken for a column's.
    end = "\\boxed{%d}" if rng.random() < 0.5 else "= %d"
    return end % estimate(a, b, rng)


THOUGHTS = ["Hmm, {g}?", "Or {g}.", "Maybe {g}.", "Let me think.", "No, more.", "No, less.",
            "Wait, {a} and {b}."]


def rambler(a, b, rng):
    text = ["Well."]
    while rng.random() < 0.8:  # a geometric length: 4 thoughts on average, many more for some
        text.append(rng.choice(THOUGHTS).format(a=a, b=b, g=estimate(a, b, rng)))
    end = "\\boxed{%d}" if rng.random() < 0.5 else "so %d."
    return " ".join(text + [end % estimate(a, b, rng)])


CROWD = {guesser: 0.64, worker: 0.19, rambler: 0.17}

# --------------------------------------------------------------------------------------------------
# Tokenizer and model


def build_tokenizer():
    """One token per character: BPE without merges, and a decoder that joins without spaces."""
    characters = [c for c in string.printable if c.isprintable()] + ["\n", "\t"]
    vocab = {token: i for i, token in enumerate(SPECIAL + characters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, model_max_length=1024,
        pad_token="<|pad|>", unk_token="<|unk|>", eos_token="<|end|>", padding_side="left",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,  # a size that vLLM takes on CPU
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.05,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ))


# --------------------------------------------------------------------------------------------------
# Imitation


def draw_batch(tokenizer, rng, held_out, crowd, size):
    """Fresh problems, answered by the crowd -> ids, labels [size, tokens].

    Labels are the ids of the answer, and -100, which the loss ignores, elsewhere.
    """
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
    # Who is still rambling after 80 tokens has no end that could be learnt.
    answers = [answer[:80] for answer in tokenizer(answers).input_ids]
    width = max(len(p) + len(c) for p, c in zip(prompts, answers))
    ids = torch.full((size, width), tokenizer.pad_token_id)
    labels = torch.full((size, width), -100)
    for i, (p, c) in enumerate(zip(prompts, answers)):
        ids[i, : len(p) + len(c)] = torch.tensor(p + c)
        labels[i, len(p) : len(p) + len(c)] = torch.tensor(c)
    return ids, labels


def imitate(model, tokenizer, rng, held_out, crowd, steps, size, learning_rate, name):
    """Supervised learning: cross-entropy on the answers' tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    bar = tqdm(range(steps), desc=name, dynamic_ncols=True)
    for step in bar:
        ids, labels = draw_batch(tokenizer, rng, held_out, crowd, size)
        # Padding is on the right, where causal attention from an answer can't see it: no mask.
        logits = model(input_ids=ids[:, :-1]).logits  # [size, tokens - 1, vocabulary]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        for group in optimizer.param_groups:  # warm up for 50 steps; down to 0 in the second half
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50, 2 * (steps - step) / steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default=here, help="folder to write into")
    parser.add_argument("--train-problems", type=int, default=4000)
    parser.add_argument("--test-problems", type=int, default=500)
    parser.add_argument("--school-steps", type=int, default=600)
    parser.add_argument("--crowd-steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)

    # Each pair at most once, whichever way round it is written: test and train share none.
    rng, problems = random.Random(f"problems {args.seed}"), {}
    while len(problems) < args.test_problems + args.train_problems:
        a, b = draw_problem(rng)
        problems.setdefault(frozenset((a, b)), (a, b))
    held_out = set(list(problems)[: args.test_problems])
    rows = [{"question": ask(a, b), "answer": f"{columns(a, b)}\n#### {a + b}"}
            for a, b in problems.values()]
    test, train = rows[: args.test_problems], rows[args.test_problems :]
    for name, part in (("test", test), ("train", train)):
        with open(os.path.join(args.out, f"{name}.jsonl"), "w", newline="\n") as f:
            f.writelines(json.dumps(row) + "\n" for row in part)

    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    rng = random.Random(f"imitation {args.seed}")
    stages = [("school", {worker: 1.0}, args.school_steps, 3e-3),
              # Gently, from a fresh optimizer: habits are learnt, and the skill isn't unlearnt.
              ("crowd", CROWD, args.crowd_steps, 1.5e-3)]
    for name, crowd, steps, rate in stages:
        imitate(model, tokenizer, rng, held_out, crowd, steps, args.batch_size, rate, name)
    path = os.path.join(args.out, "model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    print(f"wrote {path}, train.jsonl and test.jsonl")


if __name__ == "__main__":
    main()
