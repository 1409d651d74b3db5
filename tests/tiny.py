"""A tiny random model in the layout of a real checkpoint, and chat data for it: enough to test on a CPU.

    python tests/tiny.py DIR [--samples 300] [--seed 0] [--kind qwen3_5|qwen3_next|llama]

writes DIR/model (config, sharded bf16 safetensors, tokenizer, chat template; about 1 MB) and DIR/chat.jsonl.
What is already there stays as it is. A killed run is redone: nothing gets its final name before it is whole.
"""
import argparse
import json
import math
import os
import random
import shutil
import sys
from pathlib import Path

LAYERS, HIDDEN, VOCAB = 8, 64, 640  # the tokenizer has 613 ids: real checkpoints pad their vocabulary too
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>",
           "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEXT_IDS = 600  # ids below this are plain text, the specials follow

# Behaves like the Qwen3.5 templates where a loss mask can go wrong: earlier turns lose their thinking, turns
# after the last user query always get a <think> block, and the generation prompt ends in "<think>\n".
CHAT_TEMPLATE = r"""
{%- macro flat(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
        {{ '<|vision_start|><|image_pad|><|vision_end|>' }}
      {%- elif 'text' in part -%}{{ part.text }}
      {%- else -%}{{ raise_exception('A content part is neither text nor an image.') }}
      {%- endif -%}
    {%- endfor -%}
  {%- elif content is defined and content is not none -%}
    {{ raise_exception('Content must be text or a list of parts.') }}
  {%- endif -%}
{%- endmacro -%}
{%- macro render_call(function) -%}
  {{ '<tool_call>\n<function=' ~ function.name ~ '>\n' }}
  {%- for name, value in (function.arguments or {})|items -%}
    {{ '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value|tojson) ~ '\n</parameter>\n' }}
  {%- endfor -%}
  {{ '</function>\n</tool_call>' }}
{%- endmacro -%}
{%- if not messages -%}{{ raise_exception('There are no messages.') }}{%- endif -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- set text = flat(message.content)|trim -%}
    {%- if not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) -%}
      {%- set last.query = loop.index0 -%}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if last.query < 0 -%}{{ raise_exception('No user message asks anything.') }}{%- endif -%}
{%- set system = flat(messages[0].content)|trim if messages[0].role == 'system' else '' -%}
{%- if tools -%}
  {{ '<|im_start|>system\nFunctions, one a line:\n<tools>\n' }}
  {%- for tool in tools -%}{{ tool|tojson ~ '\n' }}{%- endfor -%}
  {{ '</tools>' ~ ('\n\n' ~ system if system else '') ~ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' -%}
  {{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
  {%- set text = flat(message.content)|trim -%}
  {%- if message.role == 'system' -%}
    {%- if not loop.first -%}{{ raise_exception('A system message must come first.') }}{%- endif -%}
  {%- elif message.role == 'user' -%}
    {{ '<|im_start|>user\n' ~ text ~ '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' -%}
    {%- set thought = '' -%}
    {%- if message.reasoning_content is string -%}
      {%- set thought = message.reasoning_content -%}
    {%- elif '</think>' in text -%}
      {%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}
      {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{ '<|im_start|>assistant\n' }}
    {%- if loop.index0 > last.query or preserve_thinking is true -%}
      {{ '<think>\n' ~ thought|trim ~ '\n</think>\n\n' }}
    {%- endif -%}
    {{ text }}
    {%- for tool_call in message.tool_calls or [] -%}
      {{ ('\n\n' if text|trim else '') if loop.first else '\n' }}
      {{- render_call(tool_call.function or tool_call) }}
    {%- endfor -%}
    {{ '<|im_end|>\n' }}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
    {{ '\n<tool_response>\n' ~ text ~ '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
  {%- else -%}
    {{ raise_exception('Unknown role: ' ~ message.role) }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\n<think>\n' ~ ('\n</think>\n\n' if enable_thinking is false else '') }}
{%- endif -%}
"""

WORDS = """the a one every river garden engine teacher letter window market silver quiet broken early careful
walks carries finds answers measures opens follows remembers under across before without because although
water paper number question station winter morning island bridge kitchen lantern harbour mountain never again
seven eleven twenty 3.14 42 1,000 print(x) return value[i] happily slowly almost shadow company history
language doctor village picture machine colour journey flight thunder orchard blanket captain signal pocket
thread together café naïve 数学 言葉 🙂""".split()
PLACE = {"type": "object", "properties": {"place": {"type": "string"}, "times": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": PLACE}}


def sentence(rng, words):
    """`words` random words as plain text with some punctuation and line breaks."""
    stop = lambda: rng.choices(["", ",", ".", "!\n", "\n\n"], [80, 8, 8, 2, 2])[0]
    return " ".join(rng.choice(WORDS) + stop() for _ in range(words)).strip()


def conversation(rng, row):
    """One line of chat data as a dictionary: a chat in either key style, or (one in 20) ready token ids."""
    size = lambda middle: max(1, min(300, round(middle * math.exp(rng.gauss(0, 1.1)))))  # words, long tail
    line = {"id": f"tiny-{row}"} if rng.random() < 0.5 else {}
    if rng.random() < 0.05:
        n = 3 + size(40)
        prompt = rng.randrange(1, n // 2)
        return line | {"input_ids": [rng.randrange(TEXT_IDS) for _ in range(n)],
                       "loss_mask": [int(i >= prompt) for i in range(n)]}
    messages = [{"role": "system", "content": sentence(rng, size(6))}] if rng.random() < 0.3 else []
    for _ in range(rng.choices([1, 2, 3, 5], [60, 20, 15, 5])[0]):
        answer = {"role": "assistant", "content": sentence(rng, size(20))}
        thinking = rng.random()
        if thinking < 0.2:
            answer["reasoning_content"] = sentence(rng, size(12))
        elif thinking < 0.4:
            answer["content"] = f"<think>\n{sentence(rng, size(12))}\n</think>\n\n{answer['content']}"
        messages += [{"role": "user", "content": sentence(rng, size(10))}, answer]
    style = rng.random()
    if style < 0.3:  # ShareGPT has no key for reasoning: only the inline kind
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        return line | {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}
    if style < 0.4:
        call = {"name": "measure", "arguments": {"place": sentence(rng, 2), "times": rng.randrange(9)}}
        line["tools"] = [TOOL]
        calls = [{"type": "function", "function": call}]
        messages[-1:-1] = [{"role": "assistant", "content": "", "tool_calls": calls},
                           {"role": "tool", "content": sentence(rng, 4)}]
    return line | {"messages": messages}


def make_chat(path, samples, seed=0):
    """Write `samples` lines of chat data to `path`; the same arguments give the same bytes."""
    rng = random.Random(seed)
    lines = [json.dumps(conversation(rng, row), ensure_ascii=False) + "\n" for row in range(samples)]
    partial = Path(f"{path}.tmp")
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)


def make_tokenizer(path):
    """Save a byte-level BPE tokenizer of 613 ids, and CHAT_TEMPLATE with it, into directory `path`."""
    from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                            trainers)
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), to_bytes])
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    text = [sentence(rng, 40) for _ in range(400)] + ["system user assistant function parameter tool"] * 20
    bpe.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=TEXT_IDS, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    assert bpe.token_to_id(SPECIAL[0]) == TEXT_IDS, f"{bpe.token_to_id(SPECIAL[0])} text ids, not {TEXT_IDS}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = CHAT_TEMPLATE.strip()
    tokenizer.save_pretrained(path)


def new_model(kind):
    """An untrained model of `kind`, 8 layers of 64; linear and full attention 3:1 where the kind has both."""
    import transformers as tf

    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
                  linear_value_head_dim=32, linear_conv_kernel_dim=4, full_attention_interval=4)
    common = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS,
                  head_dim=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                  bos_token_id=TEXT_IDS, eos_token_id=TEXT_IDS + 2, tie_word_embeddings=False,
                  dtype="bfloat16")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**common, rope_parameters=rope))
    rope["partial_rotary_factor"] = 0.25
    if kind == "qwen3_next":
        return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(
            **common, **linear, rope_parameters=rope, partial_rotary_factor=0.25, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32))
    rope |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}  # 4 frequencies: 32 * 0.25 / 2
    text = dict(**common, **linear, rope_parameters=rope, partial_rotary_factor=0.25, attn_output_gate=True,
                mamba_ssm_dtype="float32", mtp_num_hidden_layers=1)
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4,
                  out_hidden_size=HIDDEN, num_position_embeddings=16)
    ids = dict(zip(["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"],
                   range(TEXT_IDS + 3, TEXT_IDS + 7)))
    return tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(
        text_config=text, vision_config=vision, **ids, dtype="bfloat16"))


def liven(model, seed):
    """Give `model` random weights under which states differ clearly by token and layer, without blowing up.

    Decay rates are spread so that some heads remember hundreds of tokens: a neighbour's leak would show."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    normal = lambda p, std: torch.empty(p.shape).normal_(0, std, generator=generator)
    uniform = lambda p, low, high: torch.empty(p.shape).uniform_(low, high, generator=generator)
    for name, p in sorted(model.named_parameters()):
        if name.endswith("A_log"):
            p.data = uniform(p, math.log(0.003), math.log(1.0)).to(p.dtype)
        elif name.endswith("dt_bias"):
            p.data = uniform(p, -3.0, 0.0).to(p.dtype)
        elif p.ndim == 1:  # norms: some hold w and some 1 + w, so spread them around what is there
            p.data = (p.data.float() + normal(p, 0.2)).to(p.dtype)
        elif "conv1d" in name:
            p.data = normal(p, 0.5).to(p.dtype)
        else:
            p.data = normal(p, 1.0 if "embed" in name else p.shape[-1] ** -0.5).to(p.dtype)


def make_model(path, kind="qwen3_5", seed=0):
    """Write a checkpoint directory `path`: config, bf16 safetensors in two or three shards, tokenizer.

    kind: qwen3_5 (multimodal wrapper around a hybrid), qwen3_next (hybrid with experts) or llama. The Qwen
    ones carry `mtp.*` tensors too, which transformers ignores. Raises ValueError for another kind."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if kind not in ("qwen3_5", "qwen3_next", "llama"):
        raise ValueError(f"kind {kind!r} is not one of qwen3_5, qwen3_next, llama")
    model = new_model(kind)
    liven(model, seed)
    weights = model.to(torch.bfloat16).state_dict()
    if kind != "llama":
        weights |= {"mtp.fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16),
                    "mtp.norm.weight": torch.zeros(HIDDEN, dtype=torch.bfloat16)}
    partial = Path(f"{path}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict=weights, max_shard_size="500KB")
    make_tokenizer(partial)
    os.replace(partial, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="directory to fill; made if it is not there")
    parser.add_argument("--samples", type=int, default=300, help="lines of chat data (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the data (default 0)")
    parser.add_argument("--kind", default="qwen3_5", choices=["qwen3_5", "qwen3_next", "llama"])
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    model, chat = args.dir / "model", args.dir / "chat.jsonl"
    if not model.exists():
        make_model(model, args.kind, args.seed)
    if not chat.exists():
        make_chat(chat, args.samples, args.seed)
    kind = json.loads((model / "config.json").read_text())["model_type"]
    lines = chat.read_bytes().count(b"\n")
    if kind != args.kind or lines != args.samples:
        print(f"{args.dir} holds a {kind} model and {lines} samples: remove it or choose another directory",
              file=sys.stderr)
        return 2
    print(f"{model} ({kind}), {chat} ({lines} samples)")


if __name__ == "__main__":
    sys.exit(main())
