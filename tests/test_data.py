"""Data sets, chat templates, stop tokens, rewards and metrics, on small files and tokenizers."""
import csv
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import answers
import common
import grpo

ROOT = Path(__file__).parent.parent


def fresh_run(args, parts=("correct", "format")):
    run = common.Run(args, list(parts), "test.py")
    run.start_step()
    return run


def load(path, **options):
    args = replace(grpo.Args(), dataset=str(path), max_prompt_tokens=200, **options)
    run = fresh_run(args)
    return common.load_data(args, run), run


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- the shapes of data that people have
def test_gsm8k_shape(tmp_path):
    path = write(tmp_path / "a.jsonl", [
        {"question": f"{i} apples?", "answer": f"{i} and 1000\n#### 1,{i:03d}"} for i in range(20)])
    (_, train, held_out), _ = load(path)
    assert [row["gold"] for row in train + held_out] == [f"1{i:03d}" for i in range(20)]
    assert len(held_out) == 2  # a tenth


def test_a_line_separator_within_a_text_ends_no_row(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [f'{{"question": "{i}?\u2028Yes", "answer": "{i}"}}\n' for i in range(9)]
    path.write_text("".join(lines), encoding="utf-8")
    (_, train, held_out), _ = load(str(path))
    assert len(train + held_out) == 9 and "\u2028" in train[0]["question"]


def test_math_shape_and_unusable_golds_are_counted(tmp_path):  # A1
    path = write(tmp_path / "a.jsonl", [
        {"problem": "x?", "solution": r"So $x=\boxed{\frac{1}{2}}$."},
        {"problem": "y?", "solution": "It can be seen from the figure that the claim holds."},
        {"problem": "z?", "solution": None}, {"problem": "", "solution": "3"}])
    (_, train, _), run = load(path, prompt_column="problem", gold_column="solution")
    assert [row["gold"] for row in train] == [answers.reduce_gold(r"\boxed{\frac{1}{2}}")]
    assert run.counts == Counter({"data/gold_unparsed": 2, "data/prompt_empty": 1})


def test_dapo_math_shape(tmp_path):
    """Chat messages as the prompt, the gold in a nested column."""
    path = write(tmp_path / "a.jsonl", [{
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule"}}])
    (tokenizer, train, _), _ = load(path, prompt_column="prompt", instruction=" Box it.",
                                    gold_column="reward_model.ground_truth")
    text = tokenizer.decode(train[0]["prompt_ids"])
    assert train[0]["gold"] == "2" and "Be brief." in text and text.count("1+1? Box it.") == 1


def test_csv_parquet_json_and_folders_with_splits(tmp_path):  # F4
    import datasets

    rows = [{"question": f"{i}+1?", "answer": i + 1} for i in range(12)]
    with open(tmp_path / "a.csv", "w") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.json", "a.parquet"):
        (_, train, held_out), _ = load(tmp_path / name)
        assert [row["gold"] for row in train + held_out] == [str(i + 1) for i in range(12)], name
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", rows)
    shutil.copy(tmp_path / "a.parquet", folder / "validation.parquet")
    (_, train, held_out), _ = load(folder, eval_split="validation")
    assert len(train) == len(held_out) == 12


def test_long_prompts_are_dropped_and_counted(tmp_path):  # B4
    path = write(tmp_path / "a.jsonl",
                 [{"question": "x" * n, "answer": "1"} for n in (10, 20, 2000)])
    (_, train, _), run = load(path)
    assert len(train) == 2 and run.counts["data/prompt_too_long"] == 1


def test_every_prompt_once_an_epoch_on_any_number_of_ranks(tmp_path):  # G2, F2
    args = replace(grpo.Args(), prompts_per_step=4)
    train = [{"question": str(i)} for i in range(10)]

    def drawn(world, steps):
        ranks = []
        for rank in range(world):
            run = fresh_run(args)
            run.rank, run.world = rank, world
            ranks.append([[(row["position"], row["question"])
                           for row in common.next_rows(train, args, run)] for _ in range(steps)])
        return [sorted(sum(step, [])) for step in zip(*ranks)]

    assert drawn(1, 5) == drawn(2, 5) == drawn(4, 5)
    questions = [question for step in drawn(1, 5) for _, question in step]
    assert sorted(questions[:10]) == sorted(questions[10:]) == sorted(map(str, range(10)))
    assert questions[:10] != questions[10:]


# ---- templates and stop tokens
@pytest.fixture
def model_dir(tmp_path):
    """A copy of the tiny model whose files a test may change."""
    shutil.copytree(ROOT / "tiny" / "model", tmp_path / "model")
    return tmp_path / "model"


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_stop_ids_are_the_union_of_all_sources(model_dir):  # B1, B8, B13
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    end = tokenizer.eos_token_id
    change(model_dir / "generation_config.json", eos_token_id=[9, 11])
    assert common.stop_ids(tokenizer, str(model_dir)) == sorted({9, 11, end})
    tokenizer.eos_token = "<|user|>"  # the template still ends a turn with <|end|>
    assert set(common.stop_ids(tokenizer, str(model_dir))) == {9, 11, end, tokenizer.eos_token_id}
    tokenizer.chat_template = None
    assert set(common.stop_ids(tokenizer, str(model_dir))) == {9, 11, tokenizer.eos_token_id}


def test_bos_is_written_once(model_dir, tmp_path):
    """By a template that writes BOS, with a tokenizer that adds its own; bare prompts get it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.bos_token = "<|system|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", bos)])
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.save_pretrained(model_dir)
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "2"}])
    for chat_template in (True, False):
        (_, train, _), _ = load(path, model=str(model_dir), chat_template=chat_template)
        assert train[0]["prompt_ids"].count(bos) == 1 and train[0]["prompt_ids"][0] == bos


def test_a_think_tag_that_the_prompt_opens_is_seen_by_the_rewards(model_dir, tmp_path):  # A22
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    tokenizer.save_pretrained(model_dir)
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "2"}])
    (tokenizer, [row], _), _ = load(path, model=str(model_dir))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (
        r"hm, \boxed{2}? </think> \boxed{2}", r"hm, \boxed{2} perhaps", "so. </think> 2")]
    texts = common.decode(tokenizer, row, ids)
    assert [common.format(text, "2") for text in texts] == [1, 0, 0]
    assert [common.correct(text, "2") for text in texts] == [True, False, False]


def test_no_chat_template(model_dir, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    (model_dir / "chat_template.jinja").unlink()
    path = write(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "2"}])
    with pytest.raises(common.RunError, match="--no-chat-template"):
        load(path, model=str(model_dir))
    (_, train, _), _ = load(path, model=str(model_dir), chat_template=False)
    assert train[0]["prompt_ids"] == tokenizer("1+1?")["input_ids"]


def test_generation_config_of_the_model_does_not_leak(model_dir):  # D2, D3, D4
    """top-k 1 in the model's files would make all samples the same; log-probs are of T = 0.6."""
    change(model_dir / "generation_config.json", top_k=1, top_p=0.1, temperature=0.01,
           repetition_penalty=5.0, do_sample=True)
    args = replace(grpo.Args(), model=str(model_dir), temperature=0.6)
    for sampler in ("vllm", "hf"):
        args = replace(args, sampler=sampler)
        run = fresh_run(args)
        tokenizer, train, _ = common.load_data(args, run)
        policy = common.load_model(args, run)
        with common.open_sampler(args, run, tokenizer) as engine:
            rows = [train[0] | {"position": 0}]
            [group] = common.sample_groups(engine, tokenizer, rows, args, run)
        assert len({s.text for s in group}) > 4
        micro = common.pack(group, args, run)
        ours, _ = policy.token_logprobs(micro, 0.6)  # D1, C22
        assert (ours - micro.sampler_logp).abs().max() < 1e-4


def test_pad_that_equals_eos_does_not_hide_the_end():  # B2, B12, B6
    """Masks come from lengths: the stop token counts, padding doesn't, and nothing may be empty."""
    args = grpo.Args()
    samples = [common.Sample([5, 6], ids, [0.0] * len(ids), advantage=1.0)
               for ids in ([5, 6, 2], [2], [], [7, 8, 9, 10, 2])]
    micro = common.pack(samples, args, fresh_run(args))
    assert micro.mask.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5, [1] * 5]
    loss = grpo.token_loss(torch.zeros(4, 5), torch.zeros(4, 5), micro.adv, micro.mask, args)
    assert torch.isfinite((grpo.token_weights(micro.mask, 4, 9, args) * loss).sum())


# ---- rewards
def groups_of(*texts, gold="4"):
    return [[common.Sample([1], [2], [0.0], row={"gold": gold, "question": "q"}, text=text)
             for text in texts]]


def broken(kind):
    def reward(text, gold):
        if kind == "raises":
            raise TypeError("no")
        return {"none": None, "nan": math.nan, "inf": math.inf, "list": [1.0, 2.0]}[kind]

    reward.__name__ = kind
    return reward


@pytest.mark.parametrize("kind", ["raises", "none", "nan", "inf", "list"])
def test_broken_rewards_pay_zero_and_are_counted(kind):  # A14, A28, A29
    args, groups = grpo.Args(), groups_of(r"\boxed{4}", "x", "", r"\boxed{5}")
    run = fresh_run(args)
    common.score(groups, [common.correct, broken(kind)], None, run)
    assert [s.rewards for s in groups[0]] == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert run.counts == Counter({f"reward/{kind}_error": 4})
    assert [s.correct for s in groups[0]] == [True, False, False, False]


def test_correctness_is_known_whatever_the_rewards_are():  # H5
    groups = groups_of(r"\boxed{4}", "4")
    common.score(groups, [common.format], None, fresh_run(grpo.Args()))
    assert [s.correct for s in groups[0]] == [True, False]
    assert [s.rewards for s in groups[0]] == [[1.0], [0.0]]


def test_reward_model_is_one_more_part(tmp_path, model_dir):
    """A small sequence-classification model, in batches and alone: the same scores."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(model_dir, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "judge")
    args = replace(grpo.Args(), reward_model=str(tmp_path / "judge"))
    run = fresh_run(args)
    judge = common.load_reward_model(args, run)
    groups = groups_of("four", "a much longer answer that says four", r"\boxed{4}")
    common.score(groups, [common.correct], judge, run)
    alone = [judge([sample])[0] for sample in groups[0]]
    assert [s.rewards[1] for s in groups[0]] == pytest.approx(alone, abs=1e-5)
    assert len(set(alone)) == 3
    rewards, mine = common.gather_rewards(groups, replace(args, group_size=3), run)
    assert rewards.shape == (1, 3, 2) and mine == slice(0, 1)


# ---- metrics and warnings
class Said:
    def __init__(self):
        self.text = ""

    def warn(self, bad, text):
        self.text += text + "\n" if bad else ""

    def note(self, text):
        self.text += text + "\n"


@pytest.mark.parametrize("changed, said", [
    ({"completions/clipped_ratio": 0.95}, "--max-completion-tokens 96"),  # B5
    ({"rewards/format/mean": 0.0}, "format hit rate 0%"),  # A17
    ({"useful_groups": 0.0}, "--group-size"),  # H9
    ({"sampling/sampling_logp_difference/mean": 0.2}, "--tis-cap"),  # D6
    ({"reward/correct_error": 3}, "some rewards failed"),
    ({}, "the loss is near 0"),  # C2, C7
])
def test_what_users_ask_most_is_said_where_it_arises(changed, said):
    args, log = grpo.Args(), Said()
    run = fresh_run(args)
    run.step, run.flat, run.dtype = 1, 2, torch.bfloat16
    healthy = {"completions/clipped_ratio": 0.1, "rewards/format/mean": 0.5, "useful_groups": 0.5,
               "sampling/sampling_logp_difference/mean": 1e-7}
    common.check_health(healthy | changed, args, run, log)
    assert said in log.text and log.text.count("\n") == 1 + bool(changed)


def test_pass_at_k_is_unbiased():
    assert common.pass_at_k(16, 0, 8) == 0 and common.pass_at_k(16, 9, 8) == 1
    assert common.pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    assert common.pass_at_k(5, 1, 1) == pytest.approx(0.2)


def test_entropy_is_over_completion_tokens_alone():  # H4
    """Uniform over 8 tokens: ln 8, however much padding there is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32,
                                         num_hidden_layers=1, num_attention_heads=1))
    model.lm_head.weight.data.zero_()
    args = grpo.Args()
    samples = [common.Sample([1, 2], [3] * n, [0.0] * n) for n in (1, 5, 30)]
    micro = common.pack(samples, args, fresh_run(args))
    logp, entropy = common.token_logprobs(model, micro, 1.0)
    assert torch.allclose(entropy[micro.sampled], torch.tensor(math.log(8)))
    assert torch.allclose(logp[micro.sampled], torch.tensor(-math.log(8)))
    assert (entropy[~micro.sampled] == 0).all() and (logp[~micro.sampled] == 0).all()


def test_metrics_of_a_hand_made_rollout(tmp_path):  # B6, C1, C19, D5, H1
    args = replace(grpo.Args(), group_size=2, kl_coef=0.0)
    run = fresh_run(args)
    run.learning_rate, run.sums["updates"] = 1e-4, 1
    groups = [[common.Sample([1], [2] * n, [-1.0] * n, truncated=n == 4, row={"gold": "4"},
                             text=text, in_loss=n < 4) for n, text in pair]
              for pair in ([(1, r"\boxed{4}"), (4, "x")], [(2, "x"), (3, "x")])]
    common.score(groups, grpo.REWARDS, None, run)
    rewards, _ = common.gather_rewards(groups, args, run)
    adv = grpo.advantages(rewards, args)
    common.set_advantages(groups, adv)
    micro = common.pack(groups[0] + groups[1], args, run)
    micro.old_logp = torch.where(micro.sampled, micro.sampler_logp + math.log(4), 0.0)
    micro.entropy = micro.sampled * 0.5
    row = common.rollout_metrics(groups, [[micro]], rewards, adv, args, run)
    assert row["completions/mean_length"] == 2.5 and row["completions/clipped_ratio"] == 0.25
    assert row["completions/mean_length_wrong"] == 3
    assert row["entropy"] == 0.5 and row["accuracy"] == 0.25 and "kl" not in row
    assert row["useful_groups"] == 0.5 and row["frac_reward_zero_std"] == 0.5
    assert row["useful_groups_expected"] == pytest.approx(1 - 0.25**2 - 0.75**2)
    assert row["reward"] == pytest.approx(1.5 / 4) and row["rewards/format/mean"] == 0.25
    assert row["reward_std"] == pytest.approx(1.5 / math.sqrt(2) / 2)
    assert row["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(4))
    assert row["sampling/capped_ratio"] == 1.0
    assert all(math.isfinite(value) for value in row.values())


def test_nan_never_reaches_the_log(tmp_path):  # C13
    args = replace(grpo.Args(), output_dir=str(tmp_path))
    with common.Log(args, fresh_run(args)) as log, pytest.raises(ValueError):
        log.append("metrics", {"loss": math.nan})


def test_a_generation_config_that_cannot_be_saved_still_is(model_dir, tmp_path):  # G5
    """A temperature without sampling is refused by transformers when it is written."""
    change(model_dir / "generation_config.json", temperature=0.5, do_sample=False)
    args = replace(grpo.Args(), model=str(model_dir), output_dir=str(tmp_path / "run"))
    run = fresh_run(args)
    policy = common.load_model(args, run)
    common.save(args, run, policy, AutoTokenizer.from_pretrained(model_dir),
                torch.optim.AdamW(policy.parameters()))
    assert common.last_checkpoint(run.output_dir).name == "step-0"
    assert common.load_model(replace(args, resume=str(tmp_path / "run")), run) is not None


def test_a_full_disk_leaves_the_last_checkpoint_whole(model_dir, tmp_path, monkeypatch):
    args = replace(grpo.Args(), model=str(model_dir), output_dir=str(tmp_path / "run"))
    run, tokenizer = fresh_run(args), AutoTokenizer.from_pretrained(model_dir)
    policy = common.load_model(args, run)
    optimizer = torch.optim.AdamW(policy.parameters())
    common.save(args, run, policy, tokenizer, optimizer)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    run.step = 1
    with pytest.raises(common.RunError, match="No space left on device.*Earlier checkpoints"):
        common.save(args, run, policy, tokenizer, optimizer)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0"]


def test_weights_are_fp32_whatever_the_files_hold(model_dir):  # J1
    """100 steps of 1e-6 on 0.02: lost in bf16, not in fp32."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).save_pretrained(model_dir)
    args = replace(grpo.Args(), model=str(model_dir))
    policy = common.load_model(args, fresh_run(args))
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    weight = next(policy.parameters())
    with torch.no_grad():
        weight[0, 0] = 0.02
        for _ in range(100):
            weight[0, 0] -= 1e-6
    assert weight[0, 0].item() == pytest.approx(0.0199, abs=1e-6)
