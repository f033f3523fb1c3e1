"""Tiny random models of the shapes people use, three steps each with both samplers.

After each weight sync, trainer and sampler must agree. A family that the CPU engine can't hold is
skipped by name, with the reason.
"""
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_training import rows
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import common
import grpo

ROOT = Path(__file__).parent.parent
SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2)
FAMILIES = {
    "llama, untied": lambda: LlamaForCausalLM(LlamaConfig(
        vocab_size=128, head_dim=32, tie_word_embeddings=False, **SHAPE)),
    "qwen2, tied, 152k tokens": lambda: Qwen2ForCausalLM(Qwen2Config(
        vocab_size=151936, tie_word_embeddings=True, **SHAPE | {"hidden_size": 128})),
    "qwen3, qk-norm": lambda: Qwen3ForCausalLM(Qwen3Config(
        vocab_size=128, head_dim=32, tie_word_embeddings=True, **SHAPE)),
    "gemma3, sliding window": lambda: Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=128, head_dim=32, sliding_window=16, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"], **SHAPE)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    made = FAMILIES[request.param]()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "model")
    made.config.eos_token_id, made.config.pad_token_id = tokenizer.eos_token_id, 0
    made.config.bos_token_id = None
    made.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield request.param, str(folder)
    shutil.rmtree(folder)


def digits(text, gold):
    """A reward that random tokens can earn, so that there is something to learn: the text is the
    list of their ids, for the tokenizer is smaller than the model."""
    return sum(character in "135" for character in text)


@pytest.mark.parametrize("sampler", ["vllm", "hf"])
def test_trainer_and_sampler_agree_after_each_sync(model, sampler, tmp_path, monkeypatch):
    name, folder = model
    monkeypatch.setattr(grpo, "REWARDS", [common.correct, digits])
    monkeypatch.setattr(common, "decode", lambda tokenizer, row, ids: [str(i) for i in ids])
    try:
        grpo.main(replace(
            grpo.Args(), model=folder, sampler=sampler, num_steps=3, prompts_per_step=2,
            group_size=4, max_completion_tokens=24, eval_every=0, learning_rate=1e-3,
            output_dir=str(tmp_path / "run")))
    except (NotImplementedError, ValueError) as error:
        if sampler == "vllm" and "support" in str(error):
            pytest.skip(f"{name}: vLLM's CPU engine: {error}")
        raise
    steps = rows(tmp_path / "run")[1:]
    assert all(row["grad_norm"] > 0 for row in steps)
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 1e-3
