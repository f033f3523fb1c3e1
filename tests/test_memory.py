"""Memory: logits exist in chunks and don't outlive the step, whatever holds them; and the numbers
of bench/gpu_memory.py are those of the real models."""
import gc
import importlib.util
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import common
import grpo

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, PROMPT, TOKENS = 1009, 3, 20
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2)


class Live(TorchDispatchMode):
    """Bytes of the tensors with rows as wide as the vocabulary: now, and at most. What autograd
    holds is counted too; a garbage collector wouldn't see it. The head's weights aren't counted."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.vocabulary, self.head = vocabulary, (hidden, vocabulary)
        self.seen, self.now, self.peak = WeakIdKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (isinstance(tensor, torch.Tensor) and tensor.shape[-2:] != self.head
                    and tensor.shape[-1:] == (self.vocabulary,)):
                storage = tensor.untyped_storage()
                if storage not in self.seen:
                    self.seen[storage] = True
                    self.add(storage.nbytes())
                    weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)


def wide(vocabulary):
    """Tensors with such rows that Python can see."""
    gc.collect()
    return [tuple(thing.shape) for thing in gc.get_objects()
            if type(thing) is torch.Tensor and thing.shape[-1:] == (vocabulary,)]


def small_model(tie=True):
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, tie_word_embeddings=tie))


def micro_batch(sequences):
    args = replace(grpo.Args(), micro_batch_tokens=10**6)
    ids = torch.randint(VOCABULARY, (sequences, PROMPT + TOKENS)).tolist()
    return common.pack([common.Sample(row[:PROMPT], row[PROMPT:], [0.0] * TOKENS) for row in ids],
                       args, common.Run(args, [], "grpo.py"))


def forward_and_backward(model, micro):
    """-> what was alive of the logits, and the gradients."""
    model.zero_grad()
    with Live(VOCABULARY, SMALL["hidden_size"]) as live:
        logp, entropy = common.token_logprobs(model, micro, 0.7)
        weights = torch.linspace(-1, 1, logp.numel()).view_as(logp)
        (weights * logp).sum().backward()
    return live, {name: weight.grad.clone() for name, weight in model.named_parameters()}


# -------------------------------------------------------------------- logits
@pytest.mark.parametrize("tie", [True, False])
def test_peak_grows_with_the_chunk_and_not_with_the_batch(tie, monkeypatch):  # E1, E2
    model, peaks = small_model(tie), {}
    for chunk in (10, 20):  # tokens
        monkeypatch.setattr(common, "LOGITS_AT_ONCE", chunk * VOCABULARY)
        for sequences in (4, 16):
            live, _ = forward_and_backward(model, micro_batch(sequences))
            peaks[chunk, sequences] = live.peak
            assert live.now == 0 and not wide(VOCABULARY)
    assert peaks[10, 4] == peaks[10, 16] and peaks[20, 4] == peaks[20, 16]
    assert peaks[20, 4] == 2 * peaks[10, 4]
    assert 2 <= peaks[10, 4] / (10 * VOCABULARY * 4) <= 6  # as bench/gpu_memory.py counts


def test_gradients_do_not_depend_on_the_chunk(monkeypatch):
    """Chunks of 1 and of 7 tokens, and all at once as the model's own logits."""
    model, micro = small_model(), micro_batch(4)
    found = []
    for chunk in (1, 7, 10**6):
        monkeypatch.setattr(common, "LOGITS_AT_ONCE", chunk * VOCABULARY)
        found.append(forward_and_backward(model, micro)[1])
    model.zero_grad()
    logp = (model(input_ids=micro.input_ids).logits[:, PROMPT - 1:-1] / 0.7).log_softmax(-1)
    logp = logp.gather(-1, micro.input_ids[:, PROMPT:, None])[..., 0]
    (torch.linspace(-1, 1, logp.numel()).view_as(logp) * logp).sum().backward()
    plain = {name: weight.grad for name, weight in model.named_parameters()}
    for gradients in found:
        for name, expected in plain.items():
            scale = expected.abs().max().item()
            torch.testing.assert_close(gradients[name], expected, rtol=0, atol=1e-5 * scale)


def test_no_logits_outlive_a_training_step(tmp_path, monkeypatch):  # E10
    """In main() itself, while all that its step made is still in scope."""
    model = json.loads((ROOT / "tiny/model/config.json").read_text())
    vocabulary = model["vocab_size"]
    live, found = Live(vocabulary, model["hidden_size"]), []
    check = common.check_health

    def look(*args):
        found.append((live.now, wide(vocabulary)))
        check(*args)

    monkeypatch.setattr(common, "check_health", look)
    with live:
        grpo.main(replace(
            grpo.Args(), sampler="hf", num_steps=2, prompts_per_step=2, group_size=4,
            max_completion_tokens=8, eval_every=0, output_dir=str(tmp_path / "run")))
    assert found == [(0, [])] * 2 and live.peak > 0


def test_reference_is_in_inference_precision():
    """bf16 where the run's is: half the memory of the policy, whose weights are fp32."""
    args = grpo.Args()
    run = common.Run(args, [], "grpo.py")
    run.dtype = torch.bfloat16
    policy, reference = common.load_model(args, run), common.load_model(args, run, frozen=True)
    sizes = [sum(weight.nbytes for weight in model.parameters()) for model in (policy, reference)]
    assert sizes[0] == 2 * sizes[1]
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    assert {weight.dtype for weight in reference.parameters()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in reference.parameters())


# -------------------------------------------------------------------- bench/gpu_memory.py
spec = importlib.util.spec_from_file_location("gpu_memory", ROOT / "bench" / "gpu_memory.py")
gpu_memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_memory)


def config(shape):
    return transformers.Qwen2Config(
        hidden_size=shape.hidden, intermediate_size=shape.mlp, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied)


@pytest.mark.parametrize("name, parameters", [
    ("0.5 B", 494_032_768), ("1.5 B", 1_543_714_304), ("7 B", 7_615_616_512)])
def test_parameters_are_those_of_the_model(name, parameters):
    shape = gpu_memory.QWEN[name]
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config(shape))
    assert shape.parameters == model.num_parameters() == parameters
    assert shape.layer == sum(weight.numel() for weight in model.model.layers[0].parameters())


def test_activations_are_those_that_autograd_keeps():
    """Under bf16 autocast, weights and what doesn't grow with the tokens left out."""
    shape = gpu_memory.Shape(64, 160, 2, 4, 2, 100, True)

    def kept(layers, tokens):
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(config(replace(shape, layers=layers)))
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage  # held, so that no other gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16):
                model.model(input_ids=torch.randint(100, (1, tokens)), use_cache=False)
        return sum(storage.nbytes() for storage in found.values())

    a_layer = [kept(3, tokens) - kept(2, tokens) for tokens in (64, 128)]
    assert a_layer[1] - a_layer[0] == 64 * shape.activations


def test_sums_by_hand():
    """0.5 B on one GPU, and what the options and more GPUs are for."""
    shape, layer = gpu_memory.QWEN["0.5 B"], 16384 * (30 * 896 + 8 * 4864 + 4 * 128 + 4 * 14 + 8)
    plain = gpu_memory.gib(shape, 1)
    assert plain["training"] * 2**30 == 16 * 494_032_768
    assert plain["activations"] * 2**30 == 24 * layer
    assert plain["vLLM"] == pytest.approx(0.4 * 79)
    assert plain["total"] == pytest.approx(sum(v for k, v in plain.items() if k != "total"))
    recomputed = gpu_memory.gib(shape, 1, gradient_checkpointing=True)
    inputs = 24 * 16384 * 4 * 896
    assert inputs <= recomputed["activations"] * 2**30 <= inputs + layer
    for shape in gpu_memory.QWEN.values():
        for options in gpu_memory.OPTIONS:
            assert (gpu_memory.gib(shape, 8, **options)["total"]
                    > gpu_memory.gib(shape, 16, **options)["total"])
