"""Kinds of models, tiny and random: packed states against transformers alone, or a refusal that names the way out.

    python -m pytest tests/test_models.py

Each is a checkpoint that extract.py runs in a process of its own, all layers and the final state captured.
"""
import json
import shutil

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import oracle
import tiny
from shards import Run

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = dict(vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=tiny.TEXT_IDS,
              eos_token_id=tiny.TEXT_IDS + 2, tie_word_embeddings=False, dtype="bfloat16")
HEADS = COMMON | {"head_dim": 32}
WINDOW = {"sliding_window": 16}  # much less than a sample
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
VISION = dict(hidden_size=32, intermediate_size=64)


def qwen3_5_moe():
    """A multimodal wrapper around a hybrid with experts."""
    text = HEADS | EXPERTS | dict(
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=4, partial_rotary_factor=0.25,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [2, 1, 1]})
    vision = VISION | dict(depth=1, num_heads=2, patch_size=4, out_hidden_size=64, num_position_embeddings=16)
    return tf.Qwen3_5MoeForConditionalGeneration(tf.Qwen3_5MoeConfig(text_config=text, vision_config=vision,
                                                                     dtype="bfloat16"))


def gemma2(**more):
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**HEADS | WINDOW, query_pre_attn_scalar=32, **more))


def gemma3():
    """A multimodal wrapper around alternating layers with a sliding window and without."""
    text = HEADS | WINDOW | dict(layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=32)
    vision = VISION | dict(num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4)
    return tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=606, dtype="bfloat16"))


def qwen3():
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**HEADS | WINDOW, use_sliding_window=True, max_window_layers=2))


def jamba():
    return tf.JambaForCausalLM(tf.JambaConfig(
        **COMMON, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1, mamba_d_state=8,
        mamba_dt_rank=8))


MODELS = {
    "qwen3_5_moe": qwen3_5_moe, "qwen3_next": lambda: tiny.new_model("qwen3_next"), "qwen3": qwen3,
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**HEADS | EXPERTS)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**HEADS)),
    "gemma2": lambda: gemma2(attn_logit_softcapping=None), "gemma2_capped": gemma2, "gemma3": gemma3, "jamba": jamba}


def halve(folder):
    """Weights of a checkpoint as float16."""
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return {"dtype": "float16"}


def quantize(folder, block=32):
    """Projections of a checkpoint as float8_e4m3fn, with a scale for each block."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            rows, columns = tensors[name].shape
            blocks = tensors[name].float().reshape(rows // block, block, columns // block, block)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[name] = (blocks / scale).reshape(rows, columns).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
        save_file(tensors, file, {"format": "pt"})
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                    "weight_block_size": [block, block]}}


PACKED = ["qwen3_5_moe", "qwen3_next", "qwen3", "qwen3_moe", "llama", "gemma2", "gemma3"]
BF16, ALONE = ["--compute-dtype", "bf16"], ["--samples-per-forward", "1"]
RUNS = {name: (name, []) for name in [*PACKED, "gemma2_capped", "jamba"]} | {
    "gemma2_capped alone": ("gemma2_capped", ALONE), "jamba alone": ("jamba", ALONE),
    "float16": ("float16", []), "float16 in bf16": ("float16", BF16),
    "fp8": ("fp8", []), "fp8 in bf16": ("fp8", BF16)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: a checkpoint directory}"""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        model = make()
        tiny.liven(model, 0)
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tiny.make_tokenizer(folder / name)
    for name, change in {"float16": halve, "fp8": quantize}.items():
        shutil.copytree(folder / "qwen3", folder / name)
        config = json.loads((folder / name / "config.json").read_text()) | change(folder / name)
        (folder / name / "config.json").write_text(json.dumps(config))
    return {name: folder / name for name in [*MODELS, "float16", "fp8"]}


@pytest.fixture(scope="module")
def done(models, shards, staging, tmp_path_factory):
    """{run: (exit code, what it said, its output, its model)}"""
    folder, stage, made = tmp_path_factory.mktemp("runs"), staging(), {}
    tiny.make_chat(folder / "chat.jsonl", 6)
    for name, (model, args) in RUNS.items():
        (folder / name).mkdir()
        run = Run(shards, folder / name, models[model], folder / "chat.jsonl", stage)
        made[name] = run.run("--layers", "0,1,2,3", "--final", *args), run.log(), run.out, run.model
    return made


def largest(run, dtype="fp32"):
    """The oracle's largest relative error over all samples and layers of a run."""
    code, said, out, model = run
    assert code == 0, said
    found = oracle.check(out, model, dtype=dtype)
    assert found["samples"] == 6 and len(found["layers"]) == 5 and not found["problems"], found
    return found["largest"]


@pytest.mark.parametrize("name", PACKED)
def test_packed_states_are_those_of_transformers_alone(done, name):
    assert "sequence by sequence" in done[name][1] and largest(done[name]) < 1e-4


@pytest.mark.parametrize("name, why", [("jamba", "mixes the samples of a row"), ("gemma2_capped", "softcap")])
def test_what_cannot_be_packed_fails_before_the_first_batch_and_names_the_way_out(done, name, why):
    code, said, out, _ = done[name]
    assert code == 1 and not list(out.glob("batches/*"))
    assert why in said.splitlines()[-1] and "--samples-per-forward 1" in said.splitlines()[-1]


@pytest.mark.parametrize("name", ["jamba", "gemma2_capped"])
def test_what_cannot_be_packed_runs_sample_by_sample(done, name):
    assert largest(done[f"{name} alone"]) < 1e-4


def test_float16_weights_in_fp32_are_taken_whole(done):
    assert largest(done["float16"]) < 1e-4 and "float16 weights" not in done["float16"][1]


def test_float16_weights_in_bf16_are_warned_of(done):
    assert done["float16 in bf16"][0] == 0
    assert "float16 weights: bf16 keeps 8 of their 11 bits, --compute-dtype fp32" in done["float16 in bf16"][1]


def test_fp8_weights_run_in_bf16(done):
    assert largest(done["fp8 in bf16"], "bf16") < 0.02


def test_fp8_weights_in_fp32_are_refused(done):
    code, said, _, _ = done["fp8"]
    assert code == 2 and "--compute-dtype bf16" in said.splitlines()[-1] and "Traceback" not in said
