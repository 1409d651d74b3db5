"""Compiles and proves the kernels once, before the shards start.

    python warmup.py --model Qwen/Qwen3.6-27B --work work          (`make warmup`)

Four processes that compile the same Triton kernels at once keep every core busy and the GPUs idle; after this
they find them compiled. It reports the environment, runs the run's one shape filled in different ways, cold
and warm, proves the packed forward against plain transformers, and leaves WORK/warmup.json, also as its last
line.

The first half are the kernels themselves, which extract.py puts into a model: attention, delta rule and short
convolution that keep the samples of a packed row apart, and the checks that every start makes.
"""
import argparse
import fcntl
import gc
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from monitor import read_json, say, write_atomic

os.environ.setdefault("FLA_FLASH_QLA", "0")  # transformers' own path, the measure of ours, stays FLA's Triton

varlen_attn, varlen_flags = None, {}  # flash attention, once swap_kernels has found a GPU


class Refused(Exception):
    """The run cannot begin: bad flag, input or environment; before the model was loaded."""
    code = 2


class Failed(Exception):
    """The run cannot go on."""
    code = 1


# ----------------------------------------------------------------------------------------- the command line
def opt(default, help, low=None, high=None, choices=None):
    """A dataclass field that becomes a flag; low and high are for check_ranges."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


def flag(name):
    return "--" + name.replace("_", "-")


def parse_options(argv, cls, doc):
    """Command line (None: the process's own) -> cls, its fields made by opt(); a bad flag ends it with 2."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"refused: {message}; --help describes every flag\n")
    for f in fields(cls):
        more = {"type": f.type, "choices": f.metadata["choices"]}
        more = {"action": "store_true"} if f.type is bool else more
        shown = "" if f.default == "" or f.default is False else f" (default: {f.default})"
        parser.add_argument(flag(f.name), default=f.default, help=f.metadata["help"] + shown, **more)
    return cls(**vars(parser.parse_args(argv)))


def check_ranges(o):
    """Raises Refused for a number out of its flag's range, and for GPUs that torch does not see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and not torch.cuda.is_available():
        raise Refused(f"torch {torch.__version__} sees no GPU under CUDA_VISIBLE_DEVICES={visible}. Look at "
                      "nvidia-smi; empty, it means the CPU")
    for f in fields(o):
        value, low, high = getattr(o, f.name), f.metadata["low"], f.metadata["high"]
        if low is not None and not low <= value <= high:
            raise Refused(f"{flag(f.name)} {value} is not from {low} to {high:,.0f}")


def own_shard(o):
    """Makes o.shard a number. Raises Refused."""
    env = os.environ.get
    for index, count in (("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"), ("SLURM_PROCID", "SLURM_NTASKS"),
                         ("JOB_COMPLETION_INDEX", ""), ("RANK", "WORLD_SIZE")):
        if o.shard == "auto" and env(index):
            o.shard, o.num_shards = env(index), env(count) or o.num_shards
            if index == "SLURM_ARRAY_TASK_ID" and o.shard.isdecimal():  # an array may be 1-8, or 0-14:2
                first = int(env("SLURM_ARRAY_TASK_MIN", 0))
                o.shard = str((int(o.shard) - first) // int(env("SLURM_ARRAY_TASK_STEP", 1)))
    if not (o.shard.isdecimal() and str(o.num_shards).isdecimal() and int(o.shard) < int(o.num_shards)):
        raise Refused(f"--shard {o.shard} of {o.num_shards}: give one below it, or auto under a scheduler: "
                      "a Slurm array without gaps, torchrun, a Kubernetes Indexed Job with --num-shards")
    o.shard, o.num_shards = int(o.shard), int(o.num_shards)


# -------------------------------------------------------------------------------------------------- the model
def compact(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sha(*parts):
    parts = (part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def file_hash(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").digest()


def stamp(path):
    """What tells that a file was touched: inode, bytes, nanoseconds."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def size_of(path):
    """Bytes of a file, 0 if it has just gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def model_directory(name):
    """Directory of a model; a hub id is downloaded. Raises Refused."""
    try:
        path = Path(name).expanduser()
        if not path.exists():
            from huggingface_hub import snapshot_download
            kinds = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
            path = Path(snapshot_download(name, allow_patterns=kinds))
        assert (path / "config.json").is_file(), f"no config.json in {path}"
        assert list(path.glob("*.safetensors")), f"no *.safetensors in {path}"
        return path.resolve()
    except Exception as e:
        raise Refused(f"--model {name}: no model directory, and not to be had from the hub "
                      f"({first_line(e)})") from None


def text_config(path, compute=None):
    """The text part of a model's config; with `compute`, --compute-dtype is checked, too. Raises Refused."""
    from transformers import AutoConfig
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as e:
        raise Refused(f"{path}/config.json cannot be used: {first_line(e)}") from None
    if getattr(config, "quantization_config", None) and compute == "fp32":
        raise Refused(f"the weights in {path} are quantized and run in bf16 only: use --compute-dtype bf16")
    text = config.get_text_config()
    if torch.float16 in (config.dtype, text.dtype) and compute == "bf16":
        say(f"{path} has float16 weights: bf16 keeps 8 of their 11 bits, --compute-dtype fp32 keeps them all")
    return text


def auto_class(config):
    """The class that loads a model of this configuration for text."""
    import transformers
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    return next((auto for auto in autos if type(config) in auto._model_mapping), autos[0])


def skeleton(path):
    """The model of `path`, of which only config.json is read, with weights on the meta device."""
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return auto_class(config).from_config(config)


def save_head(path, work, output, fingerprint):
    """OUT/head.safetensors: the checkpoint's embedding, final norm and lm_head, as they are, and its config.

    The first shard to come writes it. Raises Failed where the checkpoint lacks one of them, OutputError.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file
    done, tmp = work / "head.json", work / "head.safetensors.tmp"
    with open(work / ".head.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another shard is at it
            return
        there = output.sizes("head.").get("head.safetensors")
        if read_json(done) == {"out": str(output), "bytes": there, "fingerprint": fingerprint}:
            return
        model, where = skeleton(path), {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as f:
                where |= dict.fromkeys(f.keys(), file)
        decoder, embedding = model.get_decoder(), model.get_input_embeddings().weight
        embed = next(name for name, p in decoder.named_parameters() if p is embedding)
        # the decoder's prefix in the checkpoint is where its embedding has layers beside it
        prefix = next((name.removesuffix(embed) for name in where if name.endswith(embed) and any(
            other.startswith(name.removesuffix(embed) + "layers.") for other in where)), "")
        head = next((name for name in where if f".{name}".endswith(".lm_head.weight")), None)
        if not head and model.get_output_embeddings().weight is embedding:
            head = prefix + embed
        names = {"model.embed_tokens.weight": prefix + embed, "lm_head.weight": head} | {
            f"model.norm.{name}": f"{prefix}norm.{name}" for name, _ in decoder.norm.named_parameters()}
        if lost := [name for name, there in names.items() if there not in where]:
            raise Failed(f"--save-head: {path} has nothing that would be {lost}: leave the flag out")
        tensors = {}
        for name, there in names.items():
            with safe_open(where[there], "pt") as f:
                tensors[name] = f.get_tensor(there)
        config = json.loads((path / "config.json").read_bytes())
        try:
            save_file(tensors, tmp, {"meta": compact({"fingerprint": fingerprint, "config": config})})
            size = tmp.stat().st_size
            output.put(tmp, "head.safetensors", size, 60 + size / 5e6)
        finally:
            tmp.unlink(missing_ok=True)
        write_atomic(done, compact({"out": str(output), "bytes": size, "fingerprint": fingerprint}))
        say(f"head.safetensors is in {output}: embedding, final norm and lm_head, {size / 1e9:.2f} GB")


def layer_ids(rule, depth):
    """`--layers` and the number of decoder layers -> ids in the order asked for. Raises Refused.

    dflash:N is round(1 + i*(depth-4)/(N-1)), as z-lab counts; eagle3 is 1, depth//2-1, depth-4.
    """
    ids, n = [], int(rule[7:]) if re.fullmatch(r"dflash:\d{1,4}", rule) else 0
    if Path(rule).exists():
        config = read_json(Path(rule) / "config.json" if Path(rule).is_dir() else Path(rule)) or {}
        inner = config.get("dflash_config", config)
        ids = inner.get("target_layer_ids") if isinstance(inner, dict) else None
        ids = ids if isinstance(ids, list) else []
    elif re.fullmatch(r"\d+(,\d+)*", rule):
        ids = [int(i) for i in rule.split(",")]
    elif rule == "eagle3":
        ids = [1, depth // 2 - 1, depth - 4]
    elif n == 1:
        ids = [depth // 2]
    elif n:
        ids = [round(1 + i * (depth - 4) / (n - 1)) for i in range(n)]
    if not ids or n > depth or not all(type(i) is int and 0 <= i < depth for i in ids):
        raise Refused(f"--layers {rule or repr(rule)} gives {ids[:9] or 'no ids'}: the model has layers 0 to "
                      f"{depth - 1}. Give ids as 1,16,31, a rule (dflash:5, eagle3), or a drafter's config")
    return ids


def model_parts(path):
    """Content of a model, partly read: config, each safetensors header, first and last MB of weights.

    Raises Refused for a file that is torn, or that the checkpoint's index names and that is not there.
    """
    config = json.loads((path / "config.json").read_bytes())
    yield compact({k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")})
    index = path / "model.safetensors.index.json"
    names = (read_json(index) or {}).get("weight_map")
    if isinstance(names, dict) and not (path / "model.safetensors").is_file():  # which transformers prefers
        if lost := sorted(name for name in {*map(str, names.values())} if not (path / name).is_file()):
            raise Refused(f"{index} names files that are not there: {', '.join(lost[:5])}. Download them")
    for file in sorted(path.glob("*.safetensors")):
        with open(file, "rb") as f:
            begin, size = 8 + int.from_bytes(f.read(8), "little") % (1 << 28), size_of(file)
            yield (header := f.read(begin - 8))
            try:
                end = begin + max((tensor["data_offsets"][1] for tensor in json.loads(header).values()
                                   if "data_offsets" in tensor), default=0)
            except ValueError:  # torn within its header
                end = max(begin, size) + 1
            if end > size:
                raise Refused(f"{file} is torn: it has {size:,} of {end:,} bytes or more. Download it again")
            yield f.read(1 << 20)
            f.seek(max(0, size - (1 << 20)))
            yield f.read()


def determined_by(o, path, data, layers, final):
    """Everything that the content of the output depends on, by name; its hash is the fingerprint."""
    def content(*patterns):
        return [f.read_bytes() for f in sorted(f for pattern in patterns for f in path.glob(pattern))]

    settings = read_json(path / "tokenizer_config.json") or {}
    template = content("chat_template.*") or [settings.pop("chat_template", None)]
    for file in sorted(path.glob("additional_chat_templates/*")):  # their names say which is used when
        template += [file.name, file.read_bytes()]
    if "strftime_now" in str(template) and "date_string" not in o.template_args:
        today = json.dumps({"date_string": time.strftime("%d %b %Y")})
        say("the chat template writes today's date: planned anew on another day, samples differ. Where it "
            f"knows that name, fix it with --template-args '{today}'")
    tokenizer = content("tokenizer.*", "vocab.*", "special_tokens_map.json", "added_tokens.json")
    if not (path / "tokenizer.json").is_file():  # which has them
        tokenizer += content("merges.txt")
    same = "dtype compute_dtype tokens max_len overlong min_len min_supervised template_args".split()
    return {"weights": sha(*model_parts(path)), "tokenizer": sha(compact(settings), *tokenizer),
            "chat_template": sha(*template), "data": data, "layers": layers, "final": final} | {
            name: getattr(o, name) for name in same}


# --------------------------------------------------------------------------------------------------- the data
def data_files(data, but=()):
    """--data -> its files in order, all of one kind; none below the directories `but`. Raises Refused."""
    but = [place for place in (Path(name).resolve() for name in but) if data.resolve() in place.parents]
    splits, state = (read_json(data / name) or {} for name in ("dataset_dict.json", "state.json"))
    if splits.get("splits"):
        which = " or ".join(f"{data}/{name}" for name in splits["splits"])
        raise Refused(f"--data {data} holds splits: give {which}")
    others = []
    if state.get("_data_files"):  # saved by `datasets`
        files = [data / part["filename"] for part in state["_data_files"]]
    elif data.is_file():
        files = [data]
    else:
        below = [f for f in sorted(data.rglob("*")) if f.is_file() and not {*but} & {*f.resolve().parents}]
        files = [f for f in below if f.suffix in (".jsonl", ".parquet")]
        others = [f for f in below if f.suffix not in (".jsonl", ".parquet")]
    kinds = sorted({f.suffix for f in files})
    if (not all(f.is_file() for f in files) or not sum(map(size_of, files)) or len(kinds) > 1
            or state.get("_indices_data_files")):  # in which old versions kept another order of the rows
        holds = "only empty files" if files and not any(map(size_of, files)) else kinds or "nothing"
        raise Refused(f"--data {data} holds {holds}: give JSONL, Parquet, a directory of one of "
                      "them, or what `datasets` saved, all of it and without indices")
    if others:
        names = ", ".join(f.name for f in others[:5])
        say(f"--data {data}: {len(files)} files are read, {len(others)} are not: {names}")
    return files


def table_rows(f, parquet):
    """An open Parquet file, or Arrow stream as `datasets` saves it -> lists of rows, integers as arrays."""
    if not parquet and os.pread(f.fileno(), 8, max(0, f.seek(0, 2) - 8)) != b"\xff" * 4 + b"\0" * 4:
        raise pa.ArrowInvalid("its end is missing")  # a torn stream can pass for a shorter one
    f.seek(0)
    table = pq.ParquetFile(f) if parquet else pa.ipc.open_stream(f)
    names = (table.schema_arrow if parquet else table.schema).names
    names = [name for name in names if name in "messages conversations system tools id conversation_id uuid "
             "input_ids loss_mask assistant_masks completion_mask labels attention_mask".split()] or names
    for batch in table.iter_batches(256, columns=names) if parquet else table:
        values = [c.to_numpy(zero_copy_only=False) if re.match(r"(large_)?list<\w+: u?int", str(c.type))
                  and not c.flatten().null_count else c.to_pylist(maps_as_pydicts="lossy")
                  for c in batch.select(names).columns]
        rows = [dict(zip(names, row)) for row in zip(*values)]
        yield from (rows[i:i + 256] for i in range(0, len(rows), 256))


def read_parts(files, base):
    """({"file": …} in a directory, its first row, the part's first row, [line as bytes, or row as dict]).

    A part has about 1 MB or 256 rows. Rows count all lines of all files from 0. Raises Refused."""
    row = 0
    for file in files:
        first, where = row, {"file": str(file.relative_to(base))} if file != base else {}
        try:
            with open(file, "rb") as f:
                lines = file.suffix not in (".parquet", ".arrow") and iter(partial(f.readlines, 1 << 20), [])
                for part in lines or table_rows(f, file.suffix == ".parquet"):
                    yield where, first, row, part
                    row += len(part)
        except (pa.ArrowException, OSError) as e:
            raise Refused(f"{file} cannot be read after {row - first} rows: {first_line(e)}") from None


# ------------------------------------------------------------------------------------------------ the kernels
PACKED = SimpleNamespace(cu=None, cpu=None,  # bounds of the sequences in the row under way
                         flash_qla=False, long=False)  # whether FlashQLA is there, and used for this row
LONG = 256  # tokens of a sequence, on average, from which on FlashQLA is the faster one
RULES = {True: "FlashQLA (TileLang), FLA (Triton) for rows of short samples", False: "FLA (Triton)"}
HARMLESS = {"position_ids", "cache_position", "use_cache", "cu_seq_lens_k", "max_length_k", "is_causal",
            "packed_at"}  # keywords of an attention function that change nothing here


@contextmanager
def packing(cu, cpu, longest, positions):
    """Inside, the decoder takes a row with these bounds (int32 [n+1], on the device and on the host), whose
    longest sequence and positions [1, T] these are; gives the keywords for its call. FLA caches by the
    identity of `cu`: it must be a fresh tensor for every row."""
    PACKED.cu, PACKED.cpu = cu, cpu
    PACKED.long = PACKED.flash_qla and LONG * (len(cpu) - 1) <= int(cpu[-1])
    if PACKED.long:
        from flash_qla.utils.index import prepare_varlen_metadata
        prepare_varlen_metadata(cu, cpu)  # else it waits for the GPU to read the bounds
    if cu.is_cuda:
        torch._dynamo.maybe_mark_dynamic(cu, 0)
    try:
        yield {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest,
               "packed_at": positions}
    finally:
        PACKED.cu = PACKED.cpu = None


def bounds(cu):
    cu = cu.tolist()
    return list(zip(cu[:-1], cu[1:]))


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     sliding_window=None, cu_seq_lens_q=None, max_length_q=None, **other):
    """Causal attention within each sequence of a packed row, for transformers' registry of attentions.

    query [1, Hq, T, D], key and value [1, Hkv, T, D], cu_seq_lens_q int32 [n+1] -> ([1, T, Hq, D], None).
    Raises Failed for what it does not implement: to pass over a soft cap or a sink gives wrong states.
    """
    wants = [k for k in other.keys() - HARMLESS
             if torch.is_tensor(other[k]) or other[k] not in (None, False, 0)]
    if wants or attention_mask is not None or cu_seq_lens_q is None or not getattr(module, "is_causal", True):
        what = ", ".join(wants) or "a mask of its own"
        raise Failed(f"{type(module).__name__} wants {what} of its attention, which packed attention lacks. "
                     "Use --samples-per-forward 1")
    if query.is_cuda and query.dtype == torch.bfloat16:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling,
                          window_size=((sliding_window or 0) - 1, 0), **varlen_flags)
        return out[None], None
    return attention_by_sequence(query, key, value, scaling, sliding_window), None


def attention_by_sequence(query, key, value, scaling, sliding_window):
    """The same by torch's scaled_dot_product_attention, where flash attention cannot: CPU and fp32."""
    out = []
    for a, b in bounds(PACKED.cpu):
        mask = None
        if sliding_window and b - a > sliding_window:
            mask = torch.ones(b - a, b - a, dtype=torch.bool, device=query.device)
            mask = mask.tril().triu(1 - sliding_window)
        out.append(F.scaled_dot_product_attention(
            query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], attn_mask=mask, is_causal=mask is None,
            scale=scaling, enable_gqa=True))
    return torch.cat(out, 2).transpose(1, 2)


def fast_kernels():
    """FLA's delta rule, or None where it cannot run."""
    if not torch.cuda.is_available():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        return chunk_gated_delta_rule
    except Exception:  # FLA or Triton is missing or does not work here
        return None


def slow_kernels(config):
    """Why a model of this text configuration would run slowly on the GPU here; None where it would not."""
    linear = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if torch.cuda.is_available() and linear and not fast_kernels():
        return ("flash-linear-attention or Triton cannot be used here: linear attention would take the slow "
                "torch path. Try `python -c 'import fla.ops.gated_delta_rule'`, or use --allow-slow")
    return None


def rule_by_fla(q, k, v, g, beta, l2norm):
    return fast_kernels()(q, k, v, g, beta, use_qk_l2norm_in_kernel=l2norm, cu_seqlens=PACKED.cu,
                          cu_seqlens_cpu=PACKED.cpu)[0]


def rule_by_flash_qla(q, k, v, g, beta, l2norm):
    from fla.modules.norm.l2norm import l2norm_fwd
    from flash_qla import chunk_gated_delta_rule
    q, k = (l2norm_fwd(q)[0], l2norm_fwd(k)[0]) if l2norm else (q, k)
    return chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=PACKED.cu, auto_cp=False)[0]


@torch.library.custom_op("hidden_states::delta_rule", mutates_args=())
def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
               l2norm: bool) -> torch.Tensor:
    """The delta rule as one operation of the compiled layer: a graph break would cost copies around it.

    FlashQLA takes half of FLA's time where it runs, but twice as long for rows of very short samples.
    """
    return (rule_by_flash_qla if PACKED.long else rule_by_fla)(q, k, v, g, beta, l2norm)


delta_rule.register_fake(lambda q, k, v, *_: torch.empty_like(v))


def packed_rule(plain, fast):
    """Gated delta rule: q, k [1, T, Hk, Dk], v [1, T, Hv, Dv], g, beta [1, T, Hv] -> [1, T, Hv, Dv], None."""
    @torch.compiler.disable
    def by_sequence(q, k, v, g, beta, **more):
        return torch.cat([plain(q[:, a:b], k[:, a:b], v[:, a:b], g=g[:, a:b], beta=beta[:, a:b], **more)[0]
                          for a, b in bounds(PACKED.cpu)], 1), None

    def rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, packed_at=None, **_):
        more = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if packed_at is None:
            return plain(q, k, v, g=g, beta=beta, **more)
        if fast:  # contiguous here, where the compiler makes it part of the convolution, and not in FLA,
            # which takes fewer key than value heads as they are
            return delta_rule(q.contiguous(), k.contiguous(), v.contiguous(), g, beta,
                              use_qk_l2norm_in_kernel), None
        return by_sequence(q, k, v, g, beta, **more)
    return rule


def packed_conv(plain, fast):
    """Causal depthwise convolution, x [1, D, T], weight [D, W] -> [1, D, T], summed in fp32.

    packed_at [1, T] is each token's place in its own sequence: what lies before the sequence counts as zero.
    Plain torch code, so that on a GPU the compiler joins it with the activation and the split that follow.
    """
    def conv(x, weight, bias=None, activation=None, packed_at=None, **_):
        if packed_at is None:
            return plain(x, weight, bias, activation=activation)
        rows, at, taps = x.transpose(1, 2), packed_at[..., None], weight.float().unbind(1)  # [1, T, D]
        out = rows.float() * taps[-1]
        for back in range(1, len(taps)):
            before = F.pad(rows[:, :-back], (0, 0, back, 0))
            out = out + torch.where(at >= back, before, 0).float() * taps[-1 - back]
        out = out if bias is None else out + bias.float()
        if activation not in (None, "silu", "swish"):
            raise Failed(f"the convolution wants the activation {activation}: use --samples-per-forward 1")
        return (F.silu(out) if activation else out).to(x.dtype).transpose(1, 2)
    return conv


def swap_kernels(decoder):
    """Puts packed attention, delta rule and convolution into a decoder. Returns {kernel: implementation}.

    The last two are module-level names in the file that defines the decoder: no model is known by name.
    """
    global varlen_attn, varlen_flags
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS.register("packed", packed_attention)
    decoder.config._attn_implementation = "packed"
    half = next(decoder.parameters()).dtype == torch.bfloat16  # in fp32 the fast kernels would round to TF32
    if flash := half and torch.cuda.is_available():
        from torch.nn.attention.varlen import varlen_attn  # brings dynamo along: a second, and 100 MB
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # 2.11 takes fewer key heads without
            varlen_flags = {"enable_gqa": True}
    used = {"attention": "varlen_attn (flash)" if flash else "torch sdpa, sequence by sequence"}
    module, fast = sys.modules[type(decoder.layers[0]).__module__], fast_kernels() if half else None
    for name, make, how in (("torch_chunk_gated_delta_rule", packed_rule,
                             RULES[PACKED.flash_qla] if fast else "torch, sequence by sequence"),
                            ("causal_conv1d_fn", packed_conv, "torch, all sequences at once")):
        if plain := getattr(module, name, None):
            plain = getattr(plain, "plain", plain)  # a second model in one process
            ours = make(plain, fast)
            ours.plain = plain
            setattr(module, name, ours)
            used[name] = how
    if not fast:
        return used
    for module in decoder.modules():
        if hasattr(module, "num_v_heads"):  # skips transformers' own repeat of the key heads
            module.num_v_heads = module.num_k_heads
        if type(module) is torch.nn.Conv1d:  # channels side by side for each tap: 16 bytes a load, not 2
            module.weight.data = module.weight.data.float().transpose(0, 2).contiguous().transpose(0, 2)
    return used


def compile_layers(decoder):
    """Compiles each layer's forward, not the model's, so that hooks stay outside of the graphs."""
    global attention_by_sequence
    import torch._dynamo.config as dynamo
    attention_by_sequence = torch.compiler.disable(attention_by_sequence)
    dynamo.recompile_limit = 8 * len(decoder.layers)
    dynamo.fail_on_recompile_limit_hit = True  # the default falls back to eager, with a line in the log
    dynamo.automatic_dynamic_shapes = False  # a forward of another size is compiled for itself
    # the convolution's taps are read again for query, key and value rather than written between, unsplit
    options = {"realize_reads_threshold": 24, "realize_acc_reads_threshold": 24,
               "realize_opcount_threshold": 200}
    compiled = {kind: torch.compile(kind.forward, options=options) for kind in set(map(type, decoder.layers))}
    for layer in decoder.layers:  # one compiled function for all: of its own, each layer would be traced anew
        layer.forward = MethodType(compiled[type(layer)], layer)


def tune(decoder, tokens, longest):
    """Runs the delta rule's kernels on rows of `tokens` tokens in samples of at most `longest`.

    FLA tunes each kernel on the first size that it meets and keeps the result: that must be the run's.
    FlashQLA compiles for one, for a few and for many sequences; where it cannot run, FLA computes them all.
    """
    PACKED.flash_qla, weights = False, next(decoder.parameters())
    rules = [m for m in decoder.modules() if hasattr(m, "num_v_heads") and hasattr(m, "head_k_dim")]
    if not rules or weights.dtype != torch.bfloat16 or not fast_kernels():
        return
    rule, like = rules[0], {"dtype": weights.dtype, "device": weights.device}
    q, k = torch.randn(2, 1, tokens, rule.num_k_heads, rule.head_k_dim, **like)
    v = torch.randn(1, tokens, rule.num_v_heads, rule.head_v_dim, **like)
    g, beta = torch.rand(2, 1, tokens, rule.num_v_heads, **like)

    @torch.no_grad()
    def run(by, sequences):
        cpu = torch.linspace(0, tokens, sequences + 1).int()
        with packing(cpu.to(q.device), cpu, None, None):
            return by(q, k, v, -g.float(), beta, True)

    fla = run(rule_by_fla, few := -(-tokens // longest))
    try:
        PACKED.flash_qla = few <= tokens // LONG
        for sequences in range(few, tokens // LONG + 1):
            states = run(rule_by_flash_qla, sequences)
            if sequences == few and not (apart := relative(states.float(), fla.float())) < 0.02:
                raise ValueError(f"{apart:.3f} from FLA")
    except Exception as e:  # not installed, another GPU, no nvcc, other heads: it has many ways to say so
        PACKED.flash_qla = False
        say(f"without FlashQLA ({type(e).__name__}: {first_line(e)}), FLA alone computes the delta rule")


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def captured(extractor, ids, fill=0):
    """States of one row of samples: [captures, T, H] fp32 on the host."""
    kept, n = {}, sum(map(len, ids))
    extractor.row(ids, lambda column, states: kept.update({column: states[:n].float().cpu()}), fill)
    return torch.stack([kept[column] for column in range(len(extractor.captures))])


def prepare(extractor):
    """Swaps the kernels of a loaded extract.Extractor, compiles, and proves the result. Returns a report.

    Isolation: with another first sequence the states of the others must not move. Truth: what a few sequences
    give alone, through untouched transformers, they must give packed; to compare only our own two ways would
    be blind to what both pass over. Sanity: finite, not constant. Raises Failed.
    """
    x, config, rng = extractor, extractor.decoder.config, np.random.default_rng(0)
    window, most = getattr(config, "sliding_window", None) or 0, min(x.o.max_len, x.o.tokens // 4)
    lengths = [min(n, most) for n in (37, 5, 150)]
    if 0 < window <= most - 33:
        lengths.append(window + 33)
    probe = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    packs, x.packs = x.packs, False
    if packs and x.cuda:
        tune(x.decoder, x.fill, x.o.max_len)
    alone = [captured(x, [ids]) for ids in probe]
    x.packs, report = packs, {"kernels": {"all": "transformers' own"}, "isolation": 0.0, "truth": []}
    if packs:
        report["kernels"] = swap_kernels(x.decoder)
        if x.cuda and not x.o.eager:
            compile_layers(x.decoder)
    ours = captured(x, probe, x.fill) if packs else torch.cat(alone, 1)
    if not (torch.isfinite(ours).all() and (ours.amax(-1) > ours.amin(-1)).all()):
        raise Failed("states hold NaN, Inf or are constant before any data was seen. Look at the checkpoint")
    if packs:
        other = [(probe[0] + 1) % config.vocab_size, *probe[1:]]
        report["isolation"] = relative(captured(x, other, x.fill)[:, lengths[0]:], ours[:, lengths[0]:])
        eps, pieces = torch.finfo(next(x.decoder.parameters()).dtype).eps, ours.split(lengths, dim=1)
        eps = max(eps, 2 ** -11) if x.cuda else eps  # there transformers' own kernels round fp32 to TF32
        for column, layer in enumerate(x.captures):
            report["truth"].append(max(relative(a[column], b[column]) for a, b in zip(pieces, alone)))
            limit = max(1e-4, 8 * eps * (layer + 1) ** 0.5)
            if not report["truth"][-1] <= limit or not report["isolation"] <= max(1e-4, 4 * eps):
                raise Failed(
                    f"packed states of {type(x.decoder).__name__} are wrong: isolation "
                    f"{report['isolation']:.1e}, layer {layer} {report['truth'][-1]:.1e} from transformers "
                    f"alone, {limit:.1e} allowed. Some layer mixes the samples of a row. "
                    "--samples-per-forward 1 is the slow way without packing")
    return report


# ------------------------------------------------------------------------------------------------ the command
def environment():
    """Versions and the GPU, as the record of a run has them."""
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda,
             "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    for name in ("torch", "triton", "transformers", "flash-linear-attention", "flash-qla", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def kernel_caches():
    """{environment variable: directory} for the compilers that keep kernels: Triton, inductor, TileLang."""
    usual = {"TRITON_CACHE_DIR": Path.home() / ".triton" / "cache",
             "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()),
             "TILELANG_CACHE_DIR": Path.home() / ".tilelang" / "cache"}
    return {name: Path(os.environ.get(name) or path) for name, path in usual.items()}


def cache_problem():
    """Why compiled kernels could not be kept here; None where they can."""
    for name, path in kernel_caches().items():
        if name == "TILELANG_CACHE_DIR" and not torch.cuda.is_available():
            continue  # only FlashQLA, on a GPU, compiles with it
        if os.environ.get(name) == "":
            return f"{name} is set, but empty: unset it, or give it a directory"
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as e:
            return f"compiled kernels cannot be kept in {path} ({e.strerror}): give {name} another directory"
    return None


def fills(tokens, max_len):
    """{name: lengths}: the run's one shape, filled as data will fill it."""
    shapes = {f"full of {n}": [n] * (tokens // n) for n in (32, 128, 512) if n <= max_len and n <= tokens}
    return shapes | {f"{k} x 200": [min(200, max_len)] * min(k, tokens // min(200, max_len)) for k in (8, 32)}


def identity(o, path):
    """What a warm-up is good for: model, shape and box, and their fingerprint."""
    config = text_config(path, o.compute_dtype)
    layers, final = layer_ids(o.layers, config.num_hidden_layers), o.final or o.layers == "eagle3"
    shape = ("dtype", "compute_dtype", "tokens", "max_len", "forward_tokens", "samples_per_forward", "eager",
             "allow_slow")
    kept = {"model": o.model, "weights": sha(*model_parts(path)), "layers": layers, "final": final,
            "environment": environment()} | {name: getattr(o, name) for name in shape}
    kept["fingerprint"] = sha(compact({k: v for k, v in kept.items() if k != "model"}))
    return kept


def report_of(work, fingerprint):
    """What warm-up found in WORK for this model and shape on this kind of node; {} where it has not run."""
    reports = (read_json(work / name) or {} for name in (f"warmup_{fingerprint}.json", "warmup.json"))
    return next((report for report in reports if report.get("fingerprint") == fingerprint), {})


def keep(work, report):
    """Under its own name, too: nodes of two kinds, each with its report, may share a WORK."""
    for name in (f"warmup_{report['fingerprint']}.json", "warmup.json"):
        write_atomic(work / name, json.dumps(report, indent=1))


def found_forward_tokens(o, work, path):
    """--forward-tokens auto -> what warm-up found for this model, shape and box. Raises Refused."""
    report = report_of(work, identity(o, path)["fingerprint"])
    if not report:
        raise Refused(f"--forward-tokens auto: no warm-up in {work} fits this model, shape and box. Run "
                      "warmup.py (`make warmup`) with the same flags first")
    return report["found_forward_tokens"]


def loaded(o, path, layers, final):
    """(an extract.Extractor with the model, one extract.Slot)."""
    import extract
    hidden_size = text_config(path).hidden_size
    plan = SimpleNamespace(layers=layers, final=final, dtype=o.dtype, hidden_size=hidden_size)
    plan.states = lambda: extract.Plan.states(plan)
    extractor = extract.Extractor(o, plan, extract.load_decoder(o, path))
    return extractor, extract.Slot(plan, o.tokens, extractor.device)


def seconds(extractor, ids, slot):
    """Seconds that a batch of these samples takes, to its end."""
    began = time.time()
    extractor.batch(ids, slot)
    if extractor.cuda:
        torch.cuda.synchronize()
    return time.time() - began


def search(extractor, slot, sizes):
    """Tokens of a forward -> {size: tokens/s, None where memory was short}; and the smallest size within 1 %
    of the largest that leaves a tenth of the GPU's memory."""
    x, rng, rates, longest = extractor, np.random.default_rng(0), {}, extractor.o.max_len
    for size in sizes:
        lengths = [min(longest, size - i) for i in range(0, size, longest)]
        ids = [rng.integers(0, x.decoder.config.vocab_size, n).astype(np.int32) for n in lengths]
        x.o.forward_tokens, x.fill, splits = size, size * x.cuda, x.splits
        torch.cuda.reset_peak_memory_stats() if x.cuda else None
        rate = size / min(seconds(x, ids, slot) for _ in range(4))
        fits = not x.cuda or torch.cuda.max_memory_reserved() < 0.9 * torch.cuda.mem_get_info()[1]
        rates[size] = round(rate, 1) if fits and x.splits == splits else None
        say(f"forward of {size:,} tokens: {f'{rate:,.0f} tokens/s' if rates[size] else 'memory is short'}")
    good = {size: rate for size, rate in rates.items() if rate}
    if not good:
        raise Failed(f"no forward of {sizes[-1]:,} tokens fits into GPU memory: lower --max-len and --tokens")
    return rates, min(size for size, rate in good.items() if rate >= 0.99 * good[max(good)])


def tilelang_kernels():
    """How many kernels TileLang, FlashQLA's compiler, has on the disk."""
    return sum(1 for _ in kernel_caches()["TILELANG_CACHE_DIR"].rglob("executable.so"))


def second(o, work):
    """A fresh process that finds what the first one compiled, and counts what it does not find."""
    from torch._dynamo.utils import counters
    missed, report = [], read_json(work / "warmup.json")
    try:
        import triton
        triton.knobs.compilation.listener = (
            lambda **seen: seen.get("cache_hit") or missed.append(getattr(seen.get("src"), "name", "?")))
    except (ImportError, AttributeError):
        pass  # a Triton without the hook
    o.forward_tokens, began, before = report["found_forward_tokens"], time.time(), tilelang_kernels()
    extractor, slot = loaded(o, model_directory(o.model), report["layers"], report["final"])
    ready = time.time()
    prepare(extractor)
    ids = np.random.default_rng(1).integers(0, extractor.decoder.config.vocab_size, o.tokens).astype(np.int32)
    seconds(extractor, np.split(ids, range(o.max_len, o.tokens, o.max_len)), slot)
    compiled = {"triton_compiled": len(missed), "tilelang_compiled": tilelang_kernels() - before,
                "graphs_compiled": counters["inductor"]["fxgraph_cache_miss"]}
    report["second_process"] = {"load_s": round(ready - began, 2),
                                "first_batch_s": round(time.time() - ready, 2), **compiled}
    if any(compiled.values()):
        say(f"WARNING: a second process compiled again ({', '.join(sorted(set(missed))) or 'graphs'}), so "
            "every shard will. Are TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and TILELANG_CACHE_DIR kept?")
    keep(work, report)
    return report


def warm(o, work):
    """Loads, compiles, proves, times. Returns the report. Raises Refused or Failed."""
    path = model_directory(o.model)
    kept = identity(o, path)
    if o.if_needed and (before := report_of(work, kept["fingerprint"])):
        say(f"warm already, see {work / 'warmup.json'}")
        return before
    for name, value in kept["environment"].items():
        print(f"  {name:24} {value}")
    problem = cache_problem()
    if not problem and not o.allow_slow:
        problem = slow_kernels(text_config(path))
    if problem:
        raise Refused(problem)
    sizes = [o.tokens >> k for k in range(6) if o.tokens >> k >= o.max_len]
    automatic = o.forward_tokens == "auto"
    if automatic:  # proved at the smallest size, which fits if any does
        o.forward_tokens = sizes[-1]
    began = time.time()
    extractor, slot = loaded(o, path, kept["layers"], kept["final"])
    ready = time.time()
    checks = prepare(extractor)
    kept |= {"load_s": round(ready - began, 2), "first_forward_s": round(time.time() - ready, 2),
             "checks": checks, "fills": {}}
    for name, used in checks["kernels"].items():
        print(f"  {name:32} {used}")
    if automatic:
        kept["forward_tokens_per_sec"], o.forward_tokens = search(extractor, slot, sizes[::-1])
        extractor.fill = o.forward_tokens * extractor.cuda
    kept["found_forward_tokens"], rng = o.forward_tokens, np.random.default_rng(0)
    most = o.tokens if extractor.cuda else min(o.tokens, 2048)  # a CPU compiles nothing, and takes minutes
    for name, lengths in fills(most, o.max_len).items():
        ids = [rng.integers(0, extractor.decoder.config.vocab_size, n).astype(np.int32) for n in lengths]
        cold, hot = seconds(extractor, ids, slot), seconds(extractor, ids, slot)
        kept["fills"][name] = {"tokens": sum(lengths), "cold_s": round(cold, 3), "warm_s": round(hot, 3)}
        print(f"  {name:12} {sum(lengths):7,} tokens   cold {cold:8.2f} s   warm {hot:8.2f} s")
        if sum(lengths) > most // 2:
            kept["tokens_per_sec"] = round(sum(lengths) / hot, 1)
    kept["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2) if extractor.cuda else None
    keep(work, kept)
    return kept


def main(argv=None):
    shell = dict(os.environ)  # inductor, FLA and TileLang write into it, also where Triton keeps its kernels
    import extract

    @dataclass
    class Options(extract.Options):
        if_needed: bool = opt(False, "do nothing if WORK/warmup.json has this model, shape and box")
        second: bool = opt(False, "only see whether a new process finds everything compiled")

    o = parse_options(argv, Options, __doc__)
    work = Path(o.work)
    try:
        o.data, o.out = o.data or "unused", o.out or "unused"
        extract.check_options(o)
        (work / "pids").mkdir(parents=True, exist_ok=True)
        with open(work / "pids" / ".warmup", "a+") as lock:  # one compiles, the others find it done
            if o.second:
                print(compact(second(o, work)), flush=True)
                return 0
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            print(os.getpid(), file=lock, flush=True)  # for make stop and status
            report = warm(o, work)
            print(compact(report), flush=True)
            if torch.cuda.is_available() and "second_process" not in report:
                torch._dynamo.reset()  # what it compiled refers to the model, and two would not fit
                gc.collect()
                torch.cuda.empty_cache()
                again = sys.argv[1:] if argv is None else argv
                return subprocess.run([sys.executable, __file__, *again, "--second"], env=shell).returncode
        return 0
    except (Refused, Failed) as e:
        print(f"warm-up {'refused' if e.code == 2 else 'failed'}: {e}", flush=True)
        return e.code
    except OSError as e:
        print(f"warm-up refused: {e}", flush=True)
        return 2


if __name__ == "__main__":
    from warmup import main  # the module that extract.py uses, not a second copy of it
    sys.exit(main())
