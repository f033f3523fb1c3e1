"""Two processes under torchrun (gloo, FSDP2) do what one does.

This file is also the program of those processes: it runs main() of every script on the same
completions, made by hand, and keeps the gradients of the first optimizer step.
"""
import copy
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scripts import SCRIPTS, load
from test_gradients import LIMIT, VOCABULARY, close, drive, models, options  # noqa: F401

import common
from common import Sample

ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


# -------------------------------------------------------------------- the program of a process
def group_at(position, args, parts, case):
    """The completions of the prompt at this place of the data. Those of even places, which the
    first of two ranks gets, are longer: then the ranks' micro-batches are not equally many.
    With case `idle` no group of the second rank is of use to any algorithm.
    """
    rng, group = random.Random(position), []
    prompt = [rng.randrange(VOCABULARY) for _ in range(3)]
    useless = position % 2 == 1 if case == "idle" else position == 1
    for i in range(args.group_size):
        length = rng.randint(6, LIMIT) if position % 2 == 0 else rng.randint(1, 3)
        right = not useless and (i == 0 or i > 1 and rng.random() < .5)
        rewards = [float(right), *(0.0 if useless else rng.random() for _ in range(parts - 1))]
        group.append(Sample(
            prompt, [rng.randrange(VOCABULARY) for _ in range(length)],
            [rng.uniform(-4, -3) for _ in range(length)], False,
            {"position": position, "question": "", "gold": ""}, rewards=rewards, correct=right))
    return group


def first_step(patch, name, models, case):  # noqa: F811
    """-> gradients of the first optimizer step, whole, and the metrics of its rollout."""
    args = options(name, models, micro_batch_tokens=32,
                   **({"kl_coef": 0.0} if case == "idle" else {}))
    parts = len(load(name).REWARDS)
    rows = [{"position": 0, "question": "", "gold": "", "prompt_ids": [0]}] * 64
    updates = drive(
        patch, name, args, [], reference=models[1], load_data=lambda args, run: (None, rows, []),
        next_rows=common.next_rows, sample_groups=lambda sampler, tokenizer, rows, *_: [
            copy.deepcopy(group_at(row["position"], args, parts, case)) for row in rows])
    return updates[0].gradients, updates.metrics


def fail_on_second_rank(*options):
    """grpo.py, but rank 1 breaks in its first learn phase, while rank 0 waits for its gradients."""
    import grpo

    def clip_gradients(model, max_norm):
        if os.environ["RANK"] == "1":
            Path(os.environ["BROKEN"]).touch()
            raise ValueError("rank 1 broke here")
        return clip(model, max_norm)

    clip, common.clip_gradients = common.clip_gradients, clip_gradients
    sys.argv = ["grpo.py", *options]
    common.launch(grpo.main, grpo.PRESETS)


def program(folder, *models):  # noqa: F811
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        found = {(name, case): first_step(patch, name, models, case)
                 for name in SCRIPTS for case in ("mixed", "idle")}
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, Path(folder) / f"{os.environ.get('WORLD_SIZE', 1)}.pt")
    if "RANK" in os.environ:
        dist.destroy_process_group()


# -------------------------------------------------------------------- the tests
@pytest.fixture(scope="module")
def found(models, tmp_path_factory):  # noqa: F811
    """What one process and two came to."""
    folder = tmp_path_factory.mktemp("ranks")
    for launcher in ([sys.executable], TORCHRUN):
        done = subprocess.run([*launcher, __file__, str(folder), *models], capture_output=True,
                              text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{world}.pt") for world in (1, 2)]


@pytest.mark.xdist_group("ranks")  # `found` takes a minute: one worker makes it
@pytest.mark.parametrize("case", ["mixed", "idle"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_gradient_of_two_ranks_is_that_of_one(name, case, found):
    """`mixed`: unequal micro-batches, and in dapo unequal refills. `idle`: a rank without anything
    to train on, in dapo without any group."""
    (one, metrics), (two, metrics_of_two) = (results[name, case] for results in found)
    close(two, one)
    for key, value in metrics.items():
        if not key.startswith("time/"):
            assert metrics_of_two[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("options, error", [  # noqa: F811
    ([], "ValueError: rank 1 broke here"),
    (["--group-size", "1"], "error: --group-size 1: a group of one"),
    (["--dataset", "nowhere.jsonl"], "error: --dataset nowhere.jsonl: no such file"),
], ids=["one rank", "options", "data"])
def test_an_error_ends_all_ranks_and_comes_first(options, error, tmp_path):
    """D15, I6: within a minute; what all ranks would say is said once."""
    broken = tmp_path / "broken"
    process = subprocess.Popen(
        [*TORCHRUN, __file__, "fail", "--output-dir", str(tmp_path / "run"), "--eval-every", "0",
         *options], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "BROKEN": str(broken)})
    try:
        began = time.monotonic()
        while process.poll() is None and not broken.exists() and time.monotonic() < began + 300:
            time.sleep(0.2)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    errors = re.findall(r"^(?:\S+: )?((?:error|\w+Error): .*)", text, re.MULTILINE)
    assert errors[0].startswith(error), text
    assert not options or text.count(error) == 1


if __name__ == "__main__":
    if sys.argv[1] == "fail":
        fail_on_second_rank(*sys.argv[2:])
    else:
        program(*sys.argv[1:])
