"""A kill at any file operation of a run: what --resume finds is whole, and is the right step.

bench/kills.py does it with SIGKILL at random moments. Here the code is broken off, before and after
every call that touches a file, by an exception that nothing catches.
"""
import json
import os
import random
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

import common
import grpo

OPERATIONS = {"open", "write", "__exit__", "close", "rename", "replace", "unlink", "rmdir", "mkdir",
              "write_record", "write_end_of_file", "serialize_file"}


class Killed(BaseException):
    """Not an Exception: no handler may hold it up."""


def broken_off(action, at: int) -> bool:
    """Run action() up to its at-th file operation. -> whether it came so far"""
    count = 0

    def watch(frame, event, function):
        nonlocal count
        if event in ("c_call", "c_return") and function.__name__ in OPERATIONS:
            count += 1
            if count == at:
                raise Killed

    sys.setprofile(watch)
    try:
        action()
    except BaseException:  # Killed, or what a `finally` made of it
        if count < at:
            raise
        return True
    finally:
        sys.setprofile(None)
    return False


def every_moment(action):
    """Yields after each way of breaking it off, then after it went through."""
    at = 1
    while broken_off(action, at):
        yield at
        at += 1
    yield at


class Policy(torch.nn.Linear):
    """Writes two files, as a model and a tokenizer do."""
    generation_config = SimpleNamespace()

    def save_pretrained(self, folder, state_dict=None):
        folder.mkdir()
        save_file({"weight": self.weight.detach()}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")


def whole(folder) -> int:
    """The step of a checkpoint, all of whose files are there and can be read."""
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json",
                                                        "trainer.pt"}
    load_file(folder / "model.safetensors")
    return torch.load(folder / "trainer.pt", weights_only=False)["run"]["step"]


def test_every_checkpoint_that_a_kill_leaves_is_whole(tmp_path, monkeypatch):  # G1
    """The one that was being written, and the one that was being removed for it; the next save
    clears up."""
    monkeypatch.setattr(os, "sync", lambda: None)
    args = replace(grpo.Args(), output_dir=str(tmp_path / "run"), keep_checkpoints=2)
    run = common.Run(args, [], "grpo.py")
    folder, policy = run.output_dir / "checkpoints", Policy(2, 2)
    folder.mkdir(parents=True)
    optimizer, tokenizer = torch.optim.AdamW(policy.parameters()), SimpleNamespace()
    tokenizer.save_pretrained = lambda folder: None

    def save():
        common.save(args, run, policy, tokenizer, optimizer)

    for run.step in (2, 3):
        save()
    shutil.copytree(folder, tmp_path / "before")
    run.step, left = 4, set()
    for at in every_moment(save):
        found = sorted(folder.glob("step-*"))
        assert [whole(path) for path in found] == [int(path.name[5:]) for path in found]
        assert common.last_checkpoint(run.output_dir) == found[-1]
        left.add(tuple(whole(path) for path in found))
        for path in folder.glob("step-4"):  # else the run would go on with step 5
            shutil.rmtree(path)
        save()
        assert {path.name for path in folder.iterdir()} <= {"step-2", "step-3", "step-4"}
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
    assert at > 30 and left == {(2, 3), (2, 3, 4), (3, 4)}


def test_a_kill_while_the_logs_are_cut_back_loses_no_row(tmp_path, monkeypatch):  # G1
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(5))
    args = replace(grpo.Args(), resume=str(tmp_path))
    state = common.Run(args, [], "grpo.py")
    saved = {name: getattr(state, name) for name in state.STATE} | {"step": 3}
    rng = [(random.getstate(), torch.get_rng_state())]
    monkeypatch.setattr(common, "last_checkpoint", lambda folder: folder)
    monkeypatch.setattr(torch, "load", lambda path, weights_only: {
        "optimizer": None, "run": saved, "rng": rng})
    monkeypatch.setattr("torch.distributed.checkpoint.state_dict.set_optimizer_state_dict",
                        lambda *args, **options: None)
    for name in ("metrics", "samples"):
        (tmp_path / f"{name}.jsonl").write_text(rows + '{"step": 5, "rew')
    for at in every_moment(lambda: common.resume(args, state, None, None)):
        for name in ("metrics", "samples"):
            text = (tmp_path / f"{name}.jsonl").read_text()
            steps = [json.loads(line)["step"] for line in text.splitlines()[:4]]
            assert steps == [0, 1, 2, 3], f"{name}.jsonl after {at} operations"
    assert at > 8
    assert text == "".join(rows.splitlines(keepends=True)[:4])
