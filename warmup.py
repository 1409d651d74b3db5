"""Compiles and proves the kernels once, before the shards start.

    python warmup.py --model Qwen/Qwen3.6-27B --work work          (`make warmup`)

Four processes that compile the same Triton kernels at once keep every core busy and the GPUs idle; after this they
find them compiled. It reports the environment, runs the run's one shape filled in different ways, cold and warm,
proves the packed forward against plain transformers, and leaves WORK/warmup.json. Its last line is that JSON.

The first half are the kernels themselves, which extract.py puts into a model: attention, delta rule and short
convolution that keep the samples of a packed row apart, and the checks that every start makes.
"""
import inspect
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

try:
    from torch.nn.attention.varlen import varlen_attn
    VARLEN_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.13 has it, 2.11 has not
except ImportError:
    varlen_attn, VARLEN_GQA = None, False

PACKED = SimpleNamespace(cu=None, cpu=None)  # bounds of the sequences in the row under way; None: nothing is packed
HARMLESS = {"position_ids", "cache_position", "use_cache", "cu_seq_lens_k", "max_length_k", "is_causal"}


class Unpackable(Exception):
    """Packing this model would give wrong states."""
    code = 1


@contextmanager
def packing(cu, cpu, longest):
    """Inside, the decoder takes rows with these bounds (int32 [n+1], on the device and on the host); gives the keywords
    for its call. FLA caches by the identity of `cu`: it must be a fresh tensor for every row."""
    PACKED.cu, PACKED.cpu = cu, cpu
    if cu.is_cuda:
        torch._dynamo.maybe_mark_dynamic(cu, 0)
    try:
        yield {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    finally:
        PACKED.cu = PACKED.cpu = None


def bounds(cu):
    cu = cu.tolist()
    return list(zip(cu[:-1], cu[1:]))


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None,
                     cu_seq_lens_q=None, max_length_q=None, **other):
    """Causal attention within each sequence of a packed row, for transformers' registry of attention functions.

    query [1, Hq, T, D], key and value [1, Hkv, T, D], cu_seq_lens_q int32 [n+1] -> ([1, T, Hq, D], None). Raises
    Unpackable for what it does not implement: to pass over a soft cap or a sink gives wrong states and no message.
    """
    wants = [k for k, v in other.items() if k not in HARMLESS and v is not None and v is not False and v != 0]
    if wants or attention_mask is not None or cu_seq_lens_q is None or not getattr(module, "is_causal", True):
        raise Unpackable(f"{type(module).__name__} wants {', '.join(wants) or 'a mask of its own'} of its attention")
    if query.is_cuda and query.dtype == torch.bfloat16:
        if not VARLEN_GQA:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        more = {"enable_gqa": True} if VARLEN_GQA else {}
        out = varlen_attn(*(x[0].transpose(0, 1) for x in (query, key, value)), cu_seq_lens_q, cu_seq_lens_q,
                          max_length_q, max_length_q, scale=scaling, window_size=((sliding_window or 0) - 1, 0), **more)
        return out[None], None
    out = []
    for a, b in bounds(cu_seq_lens_q):
        mask = None
        if sliding_window and b - a > sliding_window:
            mask = torch.ones(b - a, b - a, dtype=torch.bool, device=query.device).tril().triu(1 - sliding_window)
        out.append(F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], attn_mask=mask, is_causal=mask is None,
            scale=scaling, enable_gqa=True))
    return torch.cat(out, 2).transpose(1, 2), None


def fast_kernels():
    """FLA's (delta rule, short convolution), or None where they cannot run."""
    if not torch.cuda.is_available():
        return None
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        return chunk_gated_delta_rule, causal_conv1d
    except Exception:  # FLA or Triton is missing or does not work here
        return None


def slow_kernels(config):
    """Why a model of this text configuration would run slowly on the GPU here; None where it would not."""
    linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if torch.cuda.is_available() and linear and not fast_kernels():
        return ("flash-linear-attention or Triton cannot be used here, so that linear-attention layers would take "
                "transformers' slow torch path. Try `python -c 'import fla.ops.gated_delta_rule'`, or use --allow-slow")
    return None


def packed_rule(plain, fast):
    """Gated delta rule, q, k [1, T, Hk, Dk], v [1, T, Hv, Dv], g, beta [1, T, Hv] -> ([1, T, Hv, Dv], None)."""
    def rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, **_):
        more = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if PACKED.cu is None:
            return plain(q, k, v, g=g, beta=beta, **more)
        if fast:  # it takes fewer key than value heads as they are
            return fast[0](q, k, v, g, beta, cu_seqlens=PACKED.cu, cu_seqlens_cpu=PACKED.cpu, **more)
        return torch.cat([plain(q[:, a:b], k[:, a:b], v[:, a:b], g=g[:, a:b], beta=beta[:, a:b], **more)[0]
                          for a, b in bounds(PACKED.cpu)], 1), None
    return rule


def packed_conv(plain, fast):
    """Causal depthwise convolution, x [1, D, T], weight [D, W] -> [1, D, T]."""
    def conv(x, weight, bias=None, activation=None, **_):
        if PACKED.cu is None:
            return plain(x, weight, bias, activation=activation)
        if fast:
            return fast[1](x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=PACKED.cu,
                           cu_seqlens_cpu=PACKED.cpu)[0].transpose(1, 2)
        return torch.cat([plain(x[:, :, a:b], weight, bias, activation=activation) for a, b in bounds(PACKED.cpu)], 2)
    return conv


def swap_kernels(decoder):
    """Puts packed attention, delta rule and convolution into a decoder. Returns {kernel: implementation}.

    The last two are module-level names in the file that defines the decoder, so no model needs to be known by name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS.register("packed", packed_attention)
    decoder.config._attn_implementation = "packed"
    half = next(decoder.parameters()).dtype == torch.bfloat16
    flash = varlen_attn and half and torch.cuda.is_available()
    used = {"attention": "varlen_attn (flash)" if flash else "scaled_dot_product_attention, sequence by sequence"}
    module, fast = sys.modules[type(decoder.layers[0]).__module__], fast_kernels()
    for name, make in (("torch_chunk_gated_delta_rule", packed_rule), ("causal_conv1d_fn", packed_conv)):
        if plain := getattr(module, name, None):
            plain = getattr(plain, "plain", plain)  # a second model in one process
            ours = torch.compiler.disable(make(plain, fast)) if fast else make(plain, fast)
            ours.plain = plain
            setattr(module, name, ours)
            used[name] = "FLA (Triton)" if fast else "torch, sequence by sequence"
    for layer in decoder.layers if fast else ():  # skips transformers' own repeat of the key heads
        if hasattr(getattr(layer, "linear_attn", None), "num_v_heads"):
            layer.linear_attn.num_v_heads = layer.linear_attn.num_k_heads
    return used


def compile_layers(decoder):
    """Compiles each layer's forward, not the model's, so that hooks stay outside of the graphs."""
    import torch._dynamo.config as dynamo
    dynamo.recompile_limit = 8 * len(decoder.layers)
    dynamo.fail_on_recompile_limit_hit = True  # the default falls back to eager, with a line in the log
    for layer in decoder.layers:
        layer.forward = torch.compile(layer.forward)


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def captured(extractor, ids, fill=0):
    """States of one row of samples: [captures, T, H] fp32 on the host."""
    kept, n = {}, sum(map(len, ids))
    extractor.row(ids, lambda column, states: kept.update({column: states[:n].float().cpu()}), fill)
    return torch.stack([kept[column] for column in range(len(extractor.captures))])


def prepare(extractor):
    """Swaps the kernels of a loaded extract.Extractor, compiles, and proves the result. Returns a report.

    Isolation: with another first sequence the states of the others must not move. Truth: what a few sequences give
    alone, through untouched transformers, they must give packed; comparing only our own two ways would be blind to
    what both pass over. Sanity: finite, not constant. Raises Unpackable.
    """
    x, config, rng = extractor, extractor.decoder.config, np.random.default_rng(0)
    window, most = getattr(config, "sliding_window", None) or 0, min(x.o.max_len, x.o.tokens // 4)
    lengths = [min(n, most) for n in (37, 5, 150)] + [window + 33] * (0 < window and window + 33 <= most)
    probe = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    packs, x.packs = x.packs, False
    alone = [captured(x, [ids]) for ids in probe]
    x.packs, report = packs, {"kernels": {"all": "transformers' own"}, "isolation": 0.0, "truth": []}
    if packs:
        report["kernels"] = swap_kernels(x.decoder)
        if x.cuda and not x.o.eager:
            compile_layers(x.decoder)
    ours = captured(x, probe, x.fill) if packs else torch.cat(alone, 1)
    if not (torch.isfinite(ours).all() and (ours.amax(-1) > ours.amin(-1)).all()):
        raise Unpackable("states hold NaN, Inf or are constant before any data was seen. Look at the checkpoint")
    if packs:
        other = [(probe[0] + 1) % config.vocab_size, *probe[1:]]
        report["isolation"] = relative(captured(x, other, x.fill)[:, lengths[0]:], ours[:, lengths[0]:])
        eps, pieces = torch.finfo(next(x.decoder.parameters()).dtype).eps, ours.split(lengths, dim=1)
        for column, layer in enumerate(x.captures):
            report["truth"].append(max(relative(a[column], b[column]) for a, b in zip(pieces, alone)))
            limit = max(1e-4, 8 * eps * (layer + 1) ** 0.5)
            if not report["truth"][-1] <= limit or not report["isolation"] <= max(1e-4, 4 * eps):
                raise Unpackable(
                    f"packed states of {type(x.decoder).__name__} are wrong: isolation {report['isolation']:.1e}, and layer "
                    f"{layer} is {report['truth'][-1]:.1e} from transformers alone, {limit:.1e} allowed. Some layer mixes "
                    "the samples of a row: --samples-per-forward 1 is the slow way that needs no packing")
    return report
