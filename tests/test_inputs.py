"""Bad input ends in one line that names option, value and remedy, before anything slow starts."""
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import common
import dapo
import gopo
import grpo
import sapo

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_slow(monkeypatch):
    """The samplers must not be reached, nor a hub asked that isn't there."""
    def reached(*args):
        raise AssertionError("the sampler was started")

    monkeypatch.setattr(common.VllmSampler, "__init__", reached)
    monkeypatch.setattr(common.HfSampler, "__init__", reached)


def refusal(tmp_path, script=grpo, **options):
    options = {"output_dir": str(tmp_path / "out")} | options
    with pytest.raises(common.RunError) as caught:
        script.main(replace(script.Args(), **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("option, value, remedy", [
    ("group_size", 1, "2 or more"),  # C20
    ("group_size", 0, "at least 1"),
    ("prompts_per_step", 0, "at least 1"),
    ("num_minibatches", 3, "multiple"),  # F1
    ("num_steps", 0, "at least 1"),
    ("temperature", 0.0, "greedily"),  # J6
    ("micro_batch_tokens", 100, "must hold"),
    ("learning_rate", -1.0, "above 0"),
    ("clip_low", 1.5, "at most 1"),
    ("kl_coef", -0.1, "negative"),
    ("reward_weights", (1.0,), "one weight for each"),
    ("sampler", "sglang", "vllm or hf"),
    ("vllm_memory_share", 1.5, "between 0 and 1"),
    ("vllm_sleep", True, "on a GPU only"),
    ("model", "no/such/folder", "model directory"),
    ("model", "tests", "config.json"),
    ("dataset", "no-such-file.jsonl", "no such file"),
])
def test_option(tmp_path, option, value, remedy):
    message = refusal(tmp_path, **{option: value})
    shown = "3" if option == "num_minibatches" else " ".join(map(str, value)) if isinstance(
        value, tuple) else str(value)
    assert f"--{option.replace('_', '-')}" in message and shown in message and remedy in message


def test_dapo_cache_wider_than_the_limit(tmp_path):  # C21
    assert "--overlong-cache 97" in refusal(tmp_path, dapo, overlong_cache=97)


@pytest.mark.parametrize("script, option, value", [
    (dapo, "max_gen_batches", 0), (dapo, "max_empty_steps", 0), (gopo, "rank_scale", 0.0),
    (sapo, "tau_pos", 0.0), (sapo, "tau_neg", -1.0),
])
def test_options_of_one_script(tmp_path, script, option, value):
    assert f"--{option.replace('_', '-')} {value}: must be" in refusal(
        tmp_path, script, **{option: value})


def test_compiling_needs_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "--vllm-compile True" in (message := refusal(tmp_path, vllm_compile=True))
    assert "install g++" in message
    assert "vLLM on a CPU" in refusal(tmp_path, vllm_compile=True, sampler="hf")


def test_vllm_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    message = refusal(tmp_path)
    assert "--sampler hf" in message and "requirements" in message


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_empty_file(tmp_path):
    assert "is empty" in refusal(tmp_path, dataset=write(tmp_path / "a.jsonl"))


def test_missing_column_lists_those_there_are(tmp_path):  # F5, F10
    data = write(tmp_path / "a.jsonl", {"problem": "1+1", "solution": "2"})
    message = refusal(tmp_path, dataset=data)
    assert "--prompt-column question" in message and "problem, solution" in message


def test_no_readable_gold(tmp_path):  # A1
    data = write(tmp_path / "a.jsonl", {"question": "1+1", "answer": ""})
    assert "gold_unparsed" in refusal(tmp_path, dataset=data)


def test_all_prompts_too_long(tmp_path):  # B4
    message = refusal(tmp_path, max_prompt_tokens=3)
    assert "prompt_too_long" in message and "--max-prompt-tokens 3" in message


def test_unreadable_line(tmp_path):
    (tmp_path / "a.jsonl").write_text("{not json\n")
    assert "can't read" in refusal(tmp_path, dataset=str(tmp_path / "a.jsonl"))


def test_unwritable_output(tmp_path):
    (tmp_path / "file").write_text("")
    assert "can't write" in refusal(tmp_path, output_dir=str(tmp_path / "file" / "out"))


def test_output_folder_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("kept\n")
    assert "--resume" in refusal(tmp_path)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "kept\n"


def test_resume_without_a_run(tmp_path):
    assert "no args.json" in refusal(tmp_path, resume=str(tmp_path / "nothing"))


def test_a_run_older_or_newer_than_an_option(tmp_path, monkeypatch):
    args = grpo.Args(resume=str(tmp_path))
    saved = {name: value for name, value in vars(grpo.Args()).items() if name != "vllm_compile"}
    (tmp_path / "args.json").write_text(json.dumps({"script": "grpo", "args": saved}))
    checkpoint = tmp_path / "checkpoints" / "step-1" / "trainer.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    run = common.Run(args, ["correct", "format"], "grpo.py")
    common.check_resume(args, run)
    with pytest.raises(common.RunError, match="--vllm-compile False -> True"):
        common.check_resume(replace(args, vllm_compile=True), run)
    (tmp_path / "args.json").write_text(json.dumps({"script": "grpo", "args": saved | {"old": 3}}))
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--resume", str(tmp_path)])
    with pytest.raises(SystemExit, match="options differ from the run's: --old 3 -> gone; leave"):
        common.launch(grpo.main, grpo.PRESETS)


def test_resume_with_another_script(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"script": "dapo", "args": {}}))
    assert "a run of dapo.py" in refusal(tmp_path, resume=str(tmp_path))


def test_large_model_at_the_tiny_learning_rate(tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=60000, hidden_size=512, intermediate_size=2048, num_hidden_layers=12,
                tie_word_embeddings=True).save_pretrained(tmp_path / "big")
    message = refusal(tmp_path, model=str(tmp_path / "big"))
    assert "--learning-rate 0.0001" in message and "1e-6" in message


@pytest.mark.parametrize("option", ["--model", "--dataset"])
def test_hub_name_without_network(tmp_path, option):  # F4, H2: at once, in one line
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "grpo.py", option, "nobody/nothing"], cwd=ROOT,
                          env=environment, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(lines) == 1 and "Traceback" not in done.stderr
    assert f"{option} nobody/nothing" in lines[0] and "hub can't be reached" in lines[0]


def test_command_line_error_is_one_line_without_traceback(tmp_path):
    done = subprocess.run([sys.executable, "grpo.py", "--group-size", "1"], cwd=ROOT, text=True,
                          capture_output=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: --group-size 1: ") and done.stderr.count("\n") == 1


def test_flags_of_the_command_line(tmp_path):  # F6, F8
    import tyro

    parse = lambda *argv: tyro.cli(grpo.Args, args=list(argv))  # noqa: E731
    assert parse("--no-chat-template").chat_template is False
    assert parse("--reward-weights", "1", "0").reward_weights == (1.0, 0.0)
    for wrong in (["--chat-template", "False"], ["--num-steps", "1e3"], ["--no-such-option", "1"]):
        with pytest.raises(SystemExit):
            parse(*wrong)


def test_help_does_not_import_vllm():  # I5
    program = ("import sys, runpy; sys.argv = ['grpo.py', '--help']\n"
               "try: runpy.run_path('grpo.py', run_name='__main__')\n"
               "except SystemExit: pass\n"
               "assert 'vllm' not in sys.modules and 'transformers' not in sys.modules\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--group-size INT" in done.stdout and "completions per prompt" in done.stdout
    assert "gsm8k" in done.stdout
