"""The whole loop with the real engines on the tiny model: a few steps each."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from scripts import SCRIPTS, load

import common
import grpo

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with 64 training and 16 held-out problems of the embedded task."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 64), ("test", 16)):
        lines = (ROOT / "tiny" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]))
    return str(folder)


def run(folder, script=grpo, **options):
    """main() with these options -> the rows of metrics.jsonl."""
    script.main(replace(script.Args(), output_dir=str(folder), **options))
    return rows(folder)


def rows(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def untimed(rows):
    return [{key: value for key, value in row.items() if not key.startswith("time/")}
            for row in rows]


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("four") / "run"
    return folder, run(folder, dataset=data, num_steps=4, learning_rate=1e-3, eval_every=2,
                       save_every=2)


@pytest.mark.xdist_group("four steps")
def test_rows_are_whole(four_steps):  # H1, C13, C2, C7
    _, steps = four_steps
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    assert all("eval/accuracy" in steps[i] for i in (0, 2, 4))
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps[1:])
    assert abs(steps[1]["loss"]) < 1e-5 and steps[1]["grad_norm"] > 0.01
    assert all(row["clip_ratio/high_mean"] == row["clip_ratio/low_mean"] == 0 for row in steps[1:])
    assert steps[1]["kl"] == 0 and all(row["kl"] > 0 for row in steps[2:])
    assert all(row["num_completions"] == 128 * row["step"] for row in steps[1:])


@pytest.mark.xdist_group("four steps")
def test_files_of_a_run(four_steps):
    folder, _ = four_steps
    assert {p.name for p in folder.iterdir()} == {"args.json", "metrics.jsonl", "samples.jsonl",
                                                  "curves.png", "checkpoints"}
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"step-2", "step-4"}
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert set(sample) >= {"step", "question", "completion", "answer", "gold", "correct",
                           "rewards", "advantage", "truncated"}
    assert json.loads((folder / "args.json").read_text())["args"]["learning_rate"] == 1e-3


@pytest.mark.xdist_group("four steps")
def test_same_seed_same_run_and_resumed_run_the_same(four_steps, data, tmp_path):  # G1, G2, G6
    """Two steps, a break, two more: equal to four without a break, to the last bit."""
    _, whole = four_steps
    options = dict(dataset=data, learning_rate=1e-3, eval_every=2, save_every=2)
    run(tmp_path / "run", num_steps=2, **options)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:  # rows after the checkpoint, and
        file.write('{"step": 3, "reward": 0.5}\n{"step": 4, "rew')  # one cut off by the kill
    (tmp_path / "run" / "checkpoints" / ".step-3").mkdir()  # half a checkpoint
    grpo.main(replace(grpo.Args(), resume=str(tmp_path / "run"), num_steps=4, **options))
    assert untimed(rows(tmp_path / "run")) == untimed(whole)


def test_a_killed_run_goes_on_as_if_never_stopped(data, tmp_path):  # G1, G8
    """SIGKILL at any moment, a checkpoint every step: the same rows as without it, none doubled."""
    options = ["--dataset", data, "--sampler", "hf", "--num-steps", "6", "--eval-every", "3",
               "--save-every", "1", "--prompts-per-step", "2", "--max-completion-tokens", "32"]
    command = [sys.executable, "grpo.py", *options, "--output-dir"]
    subprocess.run([*command, str(tmp_path / "whole")], cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen([*command, str(tmp_path / "killed")], cwd=ROOT,
                               stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("killed/checkpoints/step-2")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run([sys.executable, "grpo.py", "--resume", str(tmp_path / "killed")], cwd=ROOT,
                   check=True, capture_output=True)
    assert untimed(rows(tmp_path / "killed")) == untimed(rows(tmp_path / "whole"))
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("whole", "killed")]
    assert samples[0] == samples[1]


@pytest.mark.xdist_group("four steps")
def test_resume_with_other_options_is_refused(four_steps, data):
    folder, before = four_steps
    options = dict(dataset=data, eval_every=2, save_every=2, num_steps=6)
    refusal = "--learning-rate 0.001 -> 0.01.*--resume-with-changes"
    with pytest.raises(common.RunError, match=refusal):
        grpo.main(replace(grpo.Args(), resume=str(folder), learning_rate=1e-2, **options))
    assert rows(folder) == before


def engine(path, **options):
    """A sampler on a model directory, as open_sampler makes it."""
    args = replace(grpo.Args(), model=path, **options)
    state = common.Run(args, ["correct"], "test.py")
    tokenizer = common.load_data(args, state)[0]
    return common.open_sampler(args, state, tokenizer)


@pytest.mark.xdist_group("four steps")
def test_checkpoint_opens_everywhere_with_the_same_answers(four_steps, data):  # G4, D17
    """Greedy answers of the sampler as trained, of plain vLLM and of plain transformers."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, steps = four_steps
    path = folder / "checkpoints" / "step-4"
    tokenizer = AutoTokenizer.from_pretrained(path)
    questions = [json.loads(line) for line in (ROOT / "tiny/test.jsonl").read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": row["question"]}],
                                             add_generation_prompt=True, return_dict=False)
               for row in questions[:50]]
    with engine(str(path), dataset=data) as sampler:
        from_vllm = [group[0][0] for group in sampler.generate(prompts, 1, [0] * 50, 0.0, 96)]
    with engine(str(path), dataset=data, sampler="hf") as sampler:
        from_hf = [group[0][0] for group in sampler.generate(prompts, 1, [0] * 50, 0.0, 96)]
    assert from_hf == from_vllm
    model = AutoModelForCausalLM.from_pretrained(path)
    for prompt, answer in list(zip(prompts, from_vllm))[:8]:
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=96)
        assert out[0, len(prompt):].tolist() == answer
    right = [common.correct(tokenizer.decode(ids, skip_special_tokens=True),
                            row["answer"].split("#### ")[1])
             for ids, row in list(zip(from_vllm, questions))[:16]]
    assert sum(right) / 16 == steps[4]["eval/accuracy"]
    with safe_open(path / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # tied: saved once


def test_samples_do_not_depend_on_the_batch(data):  # D13, D14, J6
    tokenizer_args = dict(dataset=data)
    with engine("tiny/model", **tokenizer_args) as sampler:
        prompts = [[5, 20, 30 + i] for i in range(6)]
        together = sampler.generate(prompts, 4, [100 * i for i in range(6)], 1.0, 20)
        alone = sampler.generate(prompts[4:5], 4, [400], 1.0, 20)
        assert [ids for ids, _, _ in alone[0]] == [ids for ids, _, _ in together[4]]
        assert len({tuple(ids) for ids, _, _ in together[4]}) > 1
        stops = set(sampler.stops)
        for ids, logp, truncated in (c for group in together for c in group):
            assert len(ids) == len(logp) <= 20
            assert truncated == (ids[-1] not in stops) and not stops & set(ids[:-1])


@pytest.mark.parametrize("what", ["no sync", "stale head"])
def test_a_sync_that_failed_stops_the_run(what, data, tmp_path, monkeypatch):  # D7, D11, D12
    if what == "no sync":
        monkeypatch.setattr(common.VllmSampler, "sync", lambda self, weights: None)
    else:
        monkeypatch.setattr(common, "repack_head", lambda model: None)
    with pytest.raises(common.RunError, match="weight sync failed"):
        run(tmp_path / "run", dataset=data, num_steps=4, learning_rate=1e-6, eval_every=0)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_weights_that_vllm_does_not_hold_are_noticed(data, tmp_path):
    """The read-back, which also sees what bf16 would hide."""
    with engine("tiny/model", dataset=data) as sampler:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny/model")
        load = sampler.llm.collective_rpc
        sampler.llm.collective_rpc = lambda name, kwargs: load(name, kwargs={"weights_iterator": (
            (n, w * 1.001 if "norm" in n else w) for n, w in kwargs["weights_iterator"])})
        with pytest.raises(common.RunError, match="not the trainer's"):
            sampler.sync(common.named_weights(model))


class SleepyEngine:
    """Stands in for vLLM on a GPU, which alone can sleep: keeps the calls, and refuses those that
    find the memory they need away."""

    def __init__(self, wakes_up_well=True, **options):
        assert options["enable_sleep_mode"]
        self.calls, self.awake, self.good = [], {"weights", "kv_cache"}, wakes_up_well
        self.slept = False

    def wake_up(self, tags):
        if not self.awake.issuperset(tags):
            self.calls.append(f"wake {tags[0]}")
            self.awake |= set(tags)

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.awake, self.slept = set(), True

    def generate(self, prompts, params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append("generate")
        token = 7 if self.good or not self.slept else 8
        one = SimpleNamespace(index=0, token_ids=[token], finish_reason="stop",
                              logprobs=SimpleNamespace(logprobs=[0.0]))
        return [SimpleNamespace(outputs=[one]) for _ in prompts]

    def collective_rpc(self, method, kwargs):
        assert "weights" in self.awake
        self.calls.append(method)
        self.held = dict(kwargs["weights_iterator"])

    def apply_model(self, function):
        model = SimpleNamespace(named_parameters=lambda: self.held.items())
        return [function(model)]

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True


def test_the_engine_sleeps_while_the_policy_learns(monkeypatch):  # D8, D9
    """What can be shown without a GPU: the order of the calls, and that a bad awakening is seen."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", SleepyEngine)
    args = replace(grpo.Args(), vllm_sleep=True)
    sampler = common.VllmSampler(args, common.Run(args, ["correct"], "grpo.py"), "", [1])
    calls = sampler.llm.calls
    assert calls == ["generate", "sleep 1", "wake weights", "wake kv_cache", "generate", "sleep 1"]
    calls.clear()
    sampler.sync([("norm", torch.ones(3))])
    sampler.generate([[1]], 1, [0], 1.0, 8)
    sampler.generate([[1]], 1, [0], 1.0, 8)  # as DAPO does, without a sync between
    assert calls == ["wake weights", "reload_weights", "reset", "wake kv_cache", "generate",
                     "sleep 1", "wake weights", "wake kv_cache", "generate", "sleep 1"]
    monkeypatch.setattr(vllm, "LLM", lambda **options: SleepyEngine(False, **options))
    with pytest.raises(common.RunError, match="answers differently"):
        common.VllmSampler(args, common.Run(args, ["correct"], "grpo.py"), "", [1])


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_every_variant_runs_and_moves_the_weights(name, data, tmp_path):  # C9
    script = load(name)
    steps = run(tmp_path / "run", script, dataset=data, num_steps=2, num_minibatches=2,
                num_iterations=2, eval_every=0)
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(row["grad_norm"] > 0 and row["loss"] == row["loss"] for row in steps[1:])
    assert ("kl" in steps[1]) == (script.Args().kl_coef > 0)
    from safetensors.torch import load_file

    before = load_file(ROOT / "tiny/model/model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step-2/model.safetensors")
    assert all(not torch.equal(before[name], after[name]) for name in before)  # J8


def graded(text, gold):
    """A reward of up to 9 with many values."""
    return sum(character.isdigit() for character in text) % 10


def exponential(text, gold):
    return math.exp(graded(text, gold))


@pytest.mark.parametrize("name, same", [("gopo", True), ("grpo", False)])
def test_gopo_sees_the_order_of_rewards_alone(name, same, data, tmp_path, monkeypatch):
    """Three steps with rewards and with exp(rewards): the same weights, bit for bit."""
    script, weights = load(name), []
    for reward in (graded, exponential):
        monkeypatch.setattr(script, "REWARDS", [reward])
        folder = tmp_path / reward.__name__
        run(folder, script, dataset=data, sampler="hf", num_steps=3, eval_every=0,
            prompts_per_step=4, group_size=8, max_completion_tokens=32, reward_weights=(1.0,))
        weights.append((folder / "checkpoints/step-3/model.safetensors").read_bytes())
    assert (weights[0] == weights[1]) is same


def test_gdpo_learns_where_only_the_format_differs(tmp_path):
    """No answer is ever right, boxes differ inside groups: still useful, and the weights move."""
    path = tmp_path / "never.jsonl"
    path.write_text(json.dumps({"question": "What is 12 + 34?", "answer": "-7"}) + "\n")
    [_, step] = run(tmp_path / "run", load("gdpo"), dataset=str(path), sampler="hf", num_steps=1,
                    eval_every=0, prompts_per_step=4, kl_coef=0.0)
    assert step["rewards/correct/mean"] == 0 and 0 < step["rewards/format/mean"] < 1
    assert step["useful_groups"] > 0 and step["grad_norm"] > 0


@pytest.mark.parametrize("name", ["grpo", "dapo", "gdpo"])
def test_a_reward_model_trains(name, data, tmp_path):
    """Its score is one more part; in dapo.py the punishment of length comes behind it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig.from_pretrained(ROOT / "tiny/model", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(ROOT / "tiny/model").save_pretrained(tmp_path / "judge")
    script = load(name)
    weights = (*script.Args().reward_weights, 0.1)
    [_, step] = run(tmp_path / "run", script, dataset=data, sampler="hf", num_steps=1, eval_every=0,
                    reward_model=str(tmp_path / "judge"), reward_weights=weights)
    parts = [key for key in step if key.startswith("rewards/")]
    assert len(parts) == len(weights) and step["rewards/reward_model/mean"] != 0
    assert parts.index("rewards/reward_model/mean") == len(script.REWARDS)


def test_a_hostile_run_ends_with_every_case_counted(data, tmp_path, monkeypatch):
    """Rewards that raise, return None, NaN or a list, and answers that hang the checker."""
    def reward(name, value):
        def broken(text, gold):
            if value is TypeError:
                raise TypeError("no")
            return value
        broken.__name__ = name
        return broken

    broken = [reward("raises", TypeError), reward("none", None), reward("nan", math.nan),
              reward("few", [])]
    monkeypatch.setattr(grpo, "REWARDS", [common.correct, *broken])
    decode = common.decode

    def hostile(tokenizer, row, ids):
        texts = decode(tokenizer, row, ids)
        return [r"\boxed{9^{9^{9^{9}}}+1}", "\x00" * 99, "{" * 9999, *texts[3:]]

    monkeypatch.setattr(common, "decode", hostile)
    steps = run(tmp_path / "run", dataset=data, sampler="hf", num_steps=20, eval_every=0,
                prompts_per_step=1, group_size=6, max_completion_tokens=16,
                reward_weights=(1.0, *[0.1] * 4))
    assert [row["step"] for row in steps] == list(range(21))
    last = steps[-1]
    assert all(last[f"reward/{r.__name__}_error"] == 20 * 6 for r in broken)
    assert last["reward/checker_timeout"] == 20
    assert all(math.isfinite(value) for row in steps for value in row.values())


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_a_compiled_engine_gets_the_weights_too(data, tmp_path):  # D7
    steps = run(tmp_path / "run", dataset=data, num_steps=2, eval_every=0, learning_rate=1e-3,
                vllm_compile=True)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps[1:])


def test_hf_sampler_trains(data, tmp_path):
    """Also: several updates per rollout clip something at a large learning rate (C7, C8)."""
    steps = run(tmp_path / "run", dataset=data, num_steps=2, sampler="hf", eval_every=0,
                num_minibatches=2, num_iterations=2, learning_rate=5e-3)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in steps[1:])
    assert steps[1]["clip_ratio/high_mean"] + steps[1]["clip_ratio/low_mean"] > 0


def test_track_logs_offline_without_a_key(data, tmp_path, monkeypatch):  # H2, H1
    """The same keys as metrics.jsonl, in the file that wandb wrote."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc there
    steps = run(tmp_path / "run", dataset=data, num_steps=2, sampler="hf", track=True)
    [path] = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    written = path.read_bytes()
    assert [key for row in steps for key in row if key.encode() not in written] == []


def test_bad_gradients_are_skipped_and_the_third_in_a_row_stops(data, tmp_path, monkeypatch):  # I4
    """The gradient of one parameter turns NaN from the second step on."""
    clip, calls = common.clip_gradients, []

    def poisoned(model, norm):
        calls.append(1)
        if len(calls) > 1:
            next(model.parameters()).grad[0, 0] = float("nan")
        return clip(model, norm)

    monkeypatch.setattr(common, "clip_gradients", poisoned)
    with pytest.raises(common.RunError, match="3 gradients in a row were NaN"):
        run(tmp_path / "run", dataset=data, num_steps=9, sampler="hf", eval_every=0)
    steps = rows(tmp_path / "run")
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    assert steps[-1]["skipped_updates"] == 3
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-4"]


def test_dapo_stops_by_itself_where_nothing_is_right(tmp_path):  # C26
    (tmp_path / "never.jsonl").write_text(json.dumps({"question": "hm?", "answer": "-1"}) + "\n")
    with pytest.raises(common.RunError, match="nothing to learn from.*both right and wrong"):
        run(tmp_path / "run", load("dapo"), dataset=str(tmp_path / "never.jsonl"), num_steps=2,
            eval_every=0, max_gen_batches=2, max_empty_steps=2, prompts_per_step=2, sampler="hf")


def test_dapo_fills_the_batch_where_most_groups_are_useless(data, tmp_path):  # C27, C28, C29
    lines = (Path(data) / "train.jsonl").read_text().splitlines(keepends=True)[:6]
    never = json.dumps({"question": "What is 1 + 1?", "answer": "-7"}) + "\n"
    (tmp_path / "mixed.jsonl").write_text("".join(lines) + never * 10)
    steps = run(tmp_path / "run", load("dapo"), dataset=str(tmp_path / "mixed.jsonl"), num_steps=2,
                eval_every=0, prompts_per_step=4, no_repeat=True, overlong_filter=True)
    for row in steps[1:]:
        assert row["useful_groups"] == 1 and row["dapo/rounds"] > 1
        assert row["dapo/groups_kept"] >= 4 and row["dapo/share_kept"] < 1
    assert steps[2]["dapo/generations"] == steps[1]["dapo/rounds"] + steps[2]["dapo/rounds"]
    assert steps[2]["num_completions"] > 2 * 4 * 16


def test_ctrl_c_saves_and_leaves_no_process(data, tmp_path):  # I6
    process = subprocess.Popen(
        [sys.executable, "grpo.py", "--dataset", data, "--output-dir", str(tmp_path / "run")],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(rows(tmp_path / "run")) < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    last = rows(tmp_path / "run")[-1]["step"]
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{last}"]
    assert not [child for child in children if child.is_running()]


def test_two_processes_compute_the_gradient_of_one(data, tmp_path):
    """torchrun with two ranks, FSDP2 and two engines, against one process on the same batch; the
    ranks have unequal numbers of micro-batches."""
    options = ["--dataset", data, "--num-steps", "2", "--eval-every", "0",
               "--micro-batch-tokens", "400", "--num-minibatches", "2"]
    for name, launcher in (("one", [sys.executable]), ("two", [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"])):
        command = [*launcher, "grpo.py", *options, "--output-dir", str(tmp_path / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    for one, two in zip(rows(tmp_path / "one")[1:], rows(tmp_path / "two")[1:]):
        for key in ("reward", "accuracy", "num_tokens", "completions/mean_length"):
            assert one[key] == two[key], key
        for key in ("grad_norm", "entropy", "kl"):
            assert one[key] == pytest.approx(two[key], rel=1e-4, abs=1e-7), key
