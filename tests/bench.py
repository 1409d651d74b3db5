"""What it costs and how fast it is, as ratios within one run. No checkpoint, no network.

    python tests/bench.py                   (make bench)      a tiny model on this CPU: stages, writing, planning
    python tests/bench.py --gpu             (make bench-gpu)  the Qwen3.6-27B shape with random weights on one GPU
    python tests/bench.py --gpu --end-to-end                  8 layers of it as a checkpoint, through make

--gpu measures, in one process, the same random model and the same lengths (16 to 4,096 tokens, log-uniform):
the matrix products of its layers alone, ours forward only, ours as the pipeline that a shard runs (forward,
concatenation, copy, file in /dev/shm), eager transformers with FLA on padded length-sorted batches, one sample at a
time with output_hidden_states, and by sample (545 samples of 60 tokens, a copy for each sample and layer, a file
each); then peak memory, compilations after the first batch, and the error against an fp32 reference; before that,
the first batch of a process with empty and of one with warm caches. Speeds count real tokens. The last line is one JSON object. tests/BENCH.md keeps what came out, with machine and date.
"""

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import extract
import warmup

LAYERS = [1, 16, 31, 46, 61]
SHAPE = dict(  # Qwen3.6-27B's text decoder
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
)


def decoder(layers, dtype=torch.bfloat16, **shape):
    """A random-weight Qwen3.5 text decoder, on the GPU where there is one."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as q

    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    config = q.Qwen3_5TextConfig(
        **(SHAPE | shape), num_hidden_layers=layers, layer_types=kinds, use_cache=False
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return q.Qwen3_5TextModel(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def mix(batches, tokens, longest, vocab, seed=0):
    """[[ids of a sample]]: batches of `tokens` tokens, lengths log-uniform from 16 to longest."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(batches):
        lengths = []
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(left, int(np.exp(rng.uniform(np.log(16), np.log(longest))))))
        out.append([rng.integers(0, vocab, n).astype(np.int32) for n in lengths])
    return out


def sync():
    torch.cuda.synchronize() if torch.cuda.is_available() else None


def timed(work, repeat=1):
    """Seconds that work() takes, the mean of `repeat`."""
    sync()
    began = time.perf_counter()
    for _ in range(repeat):
        work()
    sync()
    return (time.perf_counter() - began) / repeat


class Plan(SimpleNamespace):
    """As much of extract.Plan as a Slot, write_batch and its file need; batch b holds batches[b % len(batches)]."""

    states, layout = extract.Plan.states, extract.Plan.layout

    def __init__(self, batches, layers, hidden, dtype="bf16"):
        super().__init__(
            layers=layers,
            final=False,
            dtype=dtype,
            hidden_size=hidden,
            fingerprint="bench",
            known={"convention": extract.CONVENTION, "fingerprint": "bench", "layers": layers},
            batches=batches,
            input_ids=0,
            loss_mask=1,
        )

    def rows(self, b):
        lengths = np.array([len(ids) for ids in self.batches[b % len(self.batches)]])
        rows = np.zeros(len(lengths), extract.SAMPLE)
        rows["length"], rows["start"], rows["row"] = (
            lengths,
            np.cumsum(lengths) - lengths,
            np.arange(len(lengths)),
        )
        return rows

    @property
    def batch_tokens(self):
        return [sum(map(len, ids)) for ids in self.batches] * 1000

    def gather(self, which, b):
        ids = self.batches[b % len(self.batches)]
        return ids if which == self.input_ids else [np.ones(len(x), np.uint8) for x in ids]


def write_batch(o, plan, stage, b, slot, keep=lambda b, path: path.unlink()):
    """extract.write_batch, with keep(b, path) for the uploads and nobody who looks at the progress."""
    uploads = SimpleNamespace(fatal=None, failed=0, pending=0, add=keep)
    progress = SimpleNamespace(computed=lambda s: None, wrote=lambda: None, wait_for_room=lambda w: None)
    return extract.write_batch(o, plan, stage, uploads, progress, threading.Event(), b, slot, [])


def pipeline(x, plan, o, batches, stage):
    """(seconds, growth of host memory in bytes after the third) for `batches` batches as a shard makes them, each
    file removed when it is there."""
    slots, writing, memory = [extract.Slot(plan, o.tokens, x.device) for _ in range(2)], [], []

    def run():
        with extract.ThreadPoolExecutor(1) as writer:
            for b in range(batches):
                if not slots:
                    slots.append(writing.pop(0).result())
                slot = slots.pop(0)
                memory.append(psutil.Process().memory_info().rss)
                x.batch(plan.gather(plan.input_ids, b), slot)
                writing.append(writer.submit(write_batch, o, plan, stage, b, slot))
            while writing:
                slots.append(writing.pop(0).result())

    seconds = timed(run)
    return seconds, memory[-1] - memory[min(3, len(memory) - 1)]


def compilations():
    """A counter of what dynamo, Triton and TileLang compile from now on."""
    from torch._dynamo.utils import counters
    import triton

    seen = {"triton": 0, "dynamo": counters["stats"]["unique_graphs"]}
    kept = warmup.tilelang_kernels()

    def hook(*args, **kwargs):
        seen["triton"] += 1

    if hasattr(triton, "knobs"):
        triton.knobs.runtime.jit_post_compile_hook = hook
    return lambda: (seen["triton"] + counters["stats"]["unique_graphs"] - seen["dynamo"]
                    + warmup.tilelang_kernels() - kept)


def gemm_floor(model, tokens):
    """(seconds, FLOP) of the layers' matrix products alone, one after the other as a forward has them, under load."""
    linears = [m for layer in model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {
        m.in_features: torch.randn(tokens, m.in_features, device="cuda", dtype=torch.bfloat16)
        for m in linears
    }
    flop = sum(2 * tokens * m.in_features * m.out_features for m in linears)

    def run():
        for m in linears:
            m(inputs[m.in_features])

    with torch.no_grad():
        timed(run)
        return timed(run, 2), flop


def padded(model, ids, sink):
    """Eager transformers on one right-padded batch; hidden states of LAYERS as hooks see them go to sink."""
    longest = max(map(len, ids))
    tokens, mask = (
        torch.zeros(len(ids), longest, dtype=torch.long),
        torch.zeros(len(ids), longest, dtype=torch.long),
    )
    for i, x in enumerate(ids):
        tokens[i, : len(x)], mask[i, : len(x)] = torch.from_numpy(x), 1
    hooks = [model.layers[l].register_forward_hook(lambda m, a, out: sink.append(out)) for l in LAYERS]
    with torch.no_grad():
        model(
            input_ids=tokens.cuda(),
            attention_mask=mask.cuda() if int(mask.min()) == 0 else None,
            use_cache=False,
        )
    for hook in hooks:
        hook.remove()


def eager_padded(model, samples, tokens):
    """Real tokens a second over length-sorted padded batches of at most `tokens` positions; every 4th batch is run."""
    ordered, groups = sorted(samples, key=len), [[]]
    for ids in ordered:
        if (len(groups[-1]) + 1) * len(ids) > tokens:
            groups.append([])
        groups[-1].append(ids)
    groups = groups[1::4]
    for ids in groups:  # FLA tunes itself for each shape
        padded(model, ids, [])
    return sum(len(x) for ids in groups for x in ids) / timed(
        lambda: [padded(model, ids, []) for ids in groups]
    )


def one_at_a_time(model, samples):
    def run():
        with torch.no_grad():
            for ids in samples:
                out = model(
                    input_ids=torch.from_numpy(ids).long()[None].cuda(),
                    output_hidden_states=True,
                    use_cache=False,
                )
                torch.cat([out.hidden_states[l + 1][0] for l in LAYERS], -1).cpu()

    run()
    return sum(map(len, samples)) / timed(run)


def per_sample_copies(model, ids, directory):
    """Samples a second with a copy for each sample and layer, concatenation on the CPU, and a file a sample."""
    from safetensors.torch import save_file

    def run():
        states = []
        padded(model, ids, states)
        for i, x in enumerate(ids):
            parts = [layer[i, : len(x)].cpu() for layer in states]
            save_file(
                {"hidden_states": torch.cat(parts, -1), "input_ids": torch.from_numpy(x)},
                directory / f"{i}.safetensors",
            )

    run()
    return len(ids) / timed(run, 2)


def fidelity(o, layers=16, tokens=2048):
    """Relative error by layer against fp32 through transformers' torch path: (ours, eager bf16 with FLA)."""
    which = [1, 3, 7, 11, layers - 1]
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, 1000, n).astype(np.int32) for n in (64, 200, 512, 1000)]
    torch.backends.cudnn.allow_tf32 = False
    exact = decoder(layers, torch.float32, vocab_size=1000)
    state = {k: v.bfloat16() for k, v in exact.state_dict().items()}
    exact.load_state_dict({k: v.float() for k, v in state.items()})
    ours = decoder(layers, vocab_size=1000)
    ours.load_state_dict(state)
    plan = Plan([ids], which, SHAPE["hidden_size"])
    reference, eager = (extract.Extractor(o, plan, m) for m in (exact, ours))
    module = sys.modules[type(exact.layers[0]).__module__]
    fast = {n: getattr(module, n) for n in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")}
    reference.packs = eager.packs = False
    for name, f in fast.items():  # the torch path, undecorated
        setattr(module, name, inspect.unwrap(getattr(f, "plain", f)))
    truth = torch.cat([warmup.captured(reference, [x]) for x in ids], 1)
    for name, f in fast.items():
        setattr(module, name, getattr(f, "plain", f))
    theirs = torch.cat([warmup.captured(eager, [x]) for x in ids], 1)
    eager.packs = True
    warmup.swap_kernels(ours)
    warmup.compile_layers(ours)
    mine = warmup.captured(eager, ids, eager.fill)
    return [
        {str(l): round(warmup.relative(a[i], truth[i]), 5) for i, l in enumerate(which)}
        for a in (mine, theirs)
    ]


def ours(a, o, plan, model, batches, short):
    """What a shard does, timed: forward only, the pipeline, the short samples; memory and compilations."""
    torch.cuda.reset_peak_memory_stats()
    x = extract.Extractor(o, plan, model)
    warmup.tune(model, o.tokens, o.max_len)
    warmup.swap_kernels(model)
    warmup.compile_layers(model)
    slot = extract.Slot(plan, o.tokens, x.device)
    x.batch(batches[0], slot)
    count = compilations()
    before, flop = gemm_floor(model, o.tokens)  # and after, since the clock of a hot GPU is another
    forward = timed(lambda: [x.batch(batches[b % 8], slot) for b in range(a.batches // 2)]) / (a.batches // 2)
    floor_s = (before + gemm_floor(model, o.tokens)[0]) / 2
    print(
        f"matrix products alone  {o.tokens / floor_s:9,.0f} tokens/s  {flop / floor_s / 1e12:.0f} TFLOP/s\n"
        f"ours, forward          {o.tokens / forward:9,.0f} tokens/s  {flop / forward / 1e12:.0f} TFLOP/s  "
        f"{floor_s / forward:.3f} of the matrix products alone",
        flush=True,
    )
    by_qla, warmup.PACKED.flash_qla = warmup.PACKED.flash_qla, False
    x.batch(batches[0], slot)
    by_fla = timed(lambda: [x.batch(ids, slot) for ids in batches[:4]]) / 4
    warmup.PACKED.flash_qla = by_qla
    print(f"with FLA's delta rule  {o.tokens / by_fla:9,.0f} tokens/s" if by_qla else "no FlashQLA here", flush=True)
    stage = extract.Stage(tempfile.mkdtemp(dir="/dev/shm"), "bench")
    piped, growth = pipeline(x, plan, o, a.batches, stage)
    piped /= a.batches
    print(
        f"ours, pipeline         {o.tokens / piped:9,.0f} tokens/s  {forward / piped:.3f} of forward only",
        flush=True,
    )
    short_plan = Plan([short], LAYERS, SHAPE["hidden_size"])
    ours_short = 545 * 12 / pipeline(x, short_plan, o, 12, stage)[0]
    print(f"ours, 545 x 60         {ours_short:9,.1f} samples/s of 60 tokens", flush=True)
    shutil.rmtree(stage.dir.parent)
    peak, compiled = torch.cuda.max_memory_allocated() / 1e9, count()
    print(f"peak GPU memory {peak:.1f} GB, {compiled} compilations after the first batch", flush=True)
    return {
        "forward_tokens_per_s": round(o.tokens / forward),
        "tflops": round(flop / forward / 1e12, 1),
        "gemm_floor_tokens_per_s": round(o.tokens / floor_s),
        "gemm_floor_ratio": round(floor_s / forward, 4),
        "flash_qla": by_qla,
        "fla_tokens_per_s": round(o.tokens / by_fla),
        "pipeline_tokens_per_s": round(o.tokens / piped),
        "pipeline_over_forward": round(forward / piped, 4),
        "samples_per_s_of_60": round(ours_short, 1),
        "compiles_after_first": compiled,
        "peak_gpu_gb": round(peak, 2),
        "host_rss_growth_gb": round(growth / 1e9, 3),
    }


def fresh(a):
    """Seconds from a loaded model to its first batch, in a process of its own."""
    command = [sys.executable, __file__, "--gpu", "--first-batch", "--tokens", str(a.tokens)]
    child = subprocess.run(command, text=True, capture_output=True)
    if child.returncode:
        print(child.stderr[-2000:], flush=True)
        return None
    return json.loads(child.stdout.splitlines()[-1])["first_batch_s"]


def gpu(a):
    """The table of this file's docstring, and the JSON object."""
    o = extract.Options(tokens=a.tokens, max_len=4096)
    began = time.time()
    if not a.first_batch:
        with tempfile.TemporaryDirectory() as caches:  # the first process compiles, the second finds it done
            caches = a.caches or caches
            os.environ |= {f"{name.upper()}_CACHE_DIR": f"{caches}/{name}"
                           for name in ("triton", "torchinductor", "tilelang")}
            return compared(a, o, {"first_batch_cold_s": fresh(a), "first_batch_warm_s": fresh(a)})
    model = decoder(max(LAYERS) + 1)
    batches = mix(8, o.tokens, o.max_len, SHAPE["vocab_size"])
    print(f"{len(model.layers)} layers with random weights in {time.time() - began:.0f} s", flush=True)
    return first_batch(o, Plan(batches, LAYERS, SHAPE["hidden_size"]), model)


def compared(a, o, fresh_process):
    """Ours against the other ways, in this process."""
    print("first batch, cold and warm:", *fresh_process.values(), flush=True)
    model = decoder(max(LAYERS) + 1)
    batches = mix(8, o.tokens, o.max_len, SHAPE["vocab_size"])
    samples = [ids for batch in batches for ids in batch]
    half = [np.resize(samples[0], 512) for _ in range(12)]
    others = {
        "eager, padded": eager_padded(model, samples, o.tokens),
        "one at a time, of 512": one_at_a_time(model, half),
        "one at a time, mixed": one_at_a_time(model, samples[:16]),
    }
    short = [np.resize(samples[0], 60) for _ in range(545)]
    began_way = {}
    for name, folder in (("memory", "/dev/shm"), ("disk", None)):
        with tempfile.TemporaryDirectory(dir=folder) as d:
            began_way[name] = per_sample_copies(model, short, Path(d))
    for name, rate in others.items():
        print(f"{name:22} {rate:9,.0f} tokens/s", flush=True)
    for name, rate in began_way.items():
        print(f"by sample, to {name:8} {rate:9,.1f} samples/s of 60 tokens", flush=True)

    result = ours(a, o, Plan(batches, LAYERS, SHAPE["hidden_size"]), model, batches, short)
    rate, short_rate = result["pipeline_tokens_per_s"], result["samples_per_s_of_60"]
    del model
    torch.cuda.empty_cache()
    mine, theirs = fidelity(o)
    print("error against fp32 by layer, ours:", mine, "eager:", theirs, flush=True)
    return (
        {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": warmup.environment()["transformers"],
            "tokens_per_batch": o.tokens,
            "batches": a.batches,
        }
        | result
        | fresh_process
        | {
            "vs_eager_padded": round(rate / others["eager, padded"], 3),
            "vs_one_at_a_time": round(rate / others["one at a time, of 512"], 3),
            "vs_one_at_a_time_mixed": round(rate / others["one at a time, mixed"], 3),
            "vs_per_sample_copies": round(short_rate / began_way["memory"], 3),
            "vs_per_sample_copies_to_disk": round(short_rate / began_way["disk"], 3),
            "fidelity_ours": mine,
            "fidelity_eager": theirs,
        }
    )


def end_to_end(a):
    """make warmup extract on an 8-layer checkpoint of that shape, into a local directory; every sample verified."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    root, place = Path(__file__).resolve().parent.parent, Path(tempfile.mkdtemp(dir=a.folder))
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(8)]
    shape = SHAPE | {"vocab_size": 32000, "bos_token_id": 0, "eos_token_id": 0}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            Qwen3_5TextConfig(**shape, num_hidden_layers=8, layer_types=kinds)
        )
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(place / "model")
    del model
    torch.cuda.empty_cache()
    with open(place / "data.jsonl", "w") as f:
        for batch in mix(a.batches, a.tokens, 4096, 32000):
            f.writelines(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in batch)
    print(f"checkpoint and data in {place}", flush=True)
    knobs = {
        "PY": sys.executable,
        "MODEL": place / "model",
        "DATA": place / "data.jsonl",
        "OUT": place / "out",
        "WORK": place / "work",
        "TOKENS": a.tokens,
        "LAYERS": 5,
        "GPUS": a.gpus,
    }
    make = ["make", "--no-print-directory", *(f"{k}={v}" for k, v in knobs.items())]
    for name in [name for name in os.environ if name.startswith(("MAKE", "MFLAGS", "ARGS"))]:
        del os.environ[name]  # the ARGS of a make above would be theirs, too
    began = time.time()
    subprocess.run([*make, "warmup"], cwd=root, check=True)
    warmed, busy, first = time.time(), [], None
    run = subprocess.Popen([*make, "extract"], cwd=root)
    while run.poll() is None:
        time.sleep(0.5)
        for shard in range(a.gpus):
            now = extract.read_json(place / "work" / f"progress_shard_{shard}.json") or {}
            if now.get("batch", 0) >= 1 and not first:
                first = time.time() - warmed
            if now.get("state") == "running" and now.get("batch", 0) > 3 and now["gpu_busy"]:
                busy.append((shard, now["gpu_busy"], now["tokens_per_sec"]))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "gpus": a.gpus,
        "layers": 8,
        "batches": a.batches,
        "exit_code": run.returncode,
        "warmup_s": round(warmed - began, 1),
        "second_process": extract.read_json(place / "work" / "warmup.json")["second_process"],
        "start_to_first_marked_batch_s": round(first, 1) if first else None,
        "gpu_busy": [max((b for s, b, _ in busy if s == shard), default=None) for shard in range(a.gpus)],
        "busy_and_tokens_per_s": [seen[1:] for seen in busy[:: max(1, len(busy) // 12)]],
    }
    print(json.dumps(result), flush=True)  # the check takes the longest
    verify = [sys.executable, root / "tests" / "oracle.py", "--out", place / "out", "--model", place / "model"]
    verdict = subprocess.run(
        [*verify, "--samples", "all", "--dtype", "bf16", "--device", "cuda"], text=True, capture_output=True
    )
    print(verdict.stdout[-600:], verdict.stderr[-600:])
    shutil.rmtree(place)
    return result | {
        "every_sample_equals_solo": verdict.returncode == 0,
        "verdict": (verdict.stdout.splitlines() or [""])[-1],
    }


def first_batch(o, plan, model):
    """Seconds from a loaded model to the first batch, in a process that finds its kernels compiled."""
    x = extract.Extractor(o, plan, model)
    slot = extract.Slot(plan, o.tokens, x.device)
    began = time.perf_counter()
    warmup.tune(model, o.tokens, o.max_len)
    warmup.swap_kernels(model)
    warmup.compile_layers(model)
    x.batch(plan.batches[0], slot)
    sync()
    return {"first_batch_s": round(time.perf_counter() - began, 2)}


def random_states(tokens, hidden):
    """States such as models have: a scale for each channel and token, and a few channels 100 times as large."""
    random = torch.Generator().manual_seed(0)
    scale = torch.exp(0.5 * torch.randn(hidden, generator=random))
    scale[torch.randperm(hidden, generator=random)[:8]] *= 100
    of_token = torch.exp(0.3 * torch.randn(tokens, 1, generator=random))
    return torch.randn(tokens, hidden, generator=random) * scale * of_token


def fp8():
    """What --dtype fp8 costs: bytes, error, speed of one layer on this CPU."""
    states, result = random_states(2048, 5120).bfloat16(), {}
    for dtype in ("bf16", "fp8"):
        plan = Plan([[np.zeros(2048, np.int32)]], [0], 5120, dtype)
        slot = extract.Slot(plan, 2048, torch.device("cpu"))
        seconds = timed(lambda: slot.store(0, 0, states), 3)
        result[f"{dtype}_bytes_per_token_and_layer"] = (
            sum(t.nbytes for name, t in slot.host.items() if name != "range") // 2048
        )
        result[f"{dtype}_store_gb_per_s"] = round(states.nbytes / seconds / 1e9, 2)
    back = slot.host["hidden_states"].float() * slot.host["hidden_states_scale"]
    exact, error = states.float(), (back - states.float()).norm(dim=1) / states.float().norm(dim=1)
    return result | {
        "fp8_relative_error": round(float((back - exact).norm() / exact.norm()), 5),
        "fp8_cosine": round(float(torch.cosine_similarity(back, exact).mean()), 6),
        "fp8_worst_token": round(float(error.max()), 5),
    }


def reader(plan, stage, slot, o, workers=2):
    """Random samples of 400 tokens by HiddenStates, in this process and through a DataLoader, from page cache."""
    from export import KEY, HiddenStates
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = stage.dir.parent / "out"
    (out / "batches").mkdir(parents=True)
    index = []
    for b in range(2):
        write_batch(o, plan, stage, b, slot, lambda b, path: os.replace(path, out / KEY.format(b)))
        index += [
            {
                "id": str(r["row"]),
                "row": int(r["row"]),
                "batch": b,
                "start": int(r["start"]),
                "length": int(r["length"]),
            }
            for r in plan.rows(b)
        ]
    pq.write_table(pa.Table.from_pylist(index), out / "index.parquet")
    (out / "manifest.json").write_text(json.dumps({"fingerprint": "bench", "complete": True, "excluded": {}}))
    data, rng = HiddenStates(out), np.random.default_rng(0)
    order = rng.integers(0, len(data), 60).tolist()
    size = sum(data[i]["hidden_states"].nbytes for i in order)
    alone = timed(lambda: [data[i] for i in order])
    loader = torch.utils.data.DataLoader(data, batch_size=None, sampler=order, num_workers=workers)
    ready = iter(loader)
    next(ready)  # the workers are there
    several = timed(lambda: list(ready)) * len(order) / (len(order) - 1)
    return {
        "reader_samples_per_s": round(len(order) / alone),
        "reader_mb_per_s": round(size / alone / 1e6),
        "reader_2_workers_samples_per_s": round(len(order) / several),
        "reader_2_workers_mb_per_s": round(size / several / 1e6),
    }


def cpu(a):
    """The tiny shape: stages of a batch, host copies and writes, planning."""
    import tiny

    tokens, small = (
        4096,
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            vocab_size=640,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        ),
    )
    o, batches = extract.Options(tokens=tokens, max_len=1024), mix(4, tokens, 1024, 640)
    model, layers = decoder(8, torch.float32, **small), [1, 2, 3, 4, 5]
    plan = Plan(batches, layers, 64, "fp32")
    alone_ids = [ids for ids in batches[0]]
    with torch.no_grad():

        def alone():
            for ids in alone_ids:
                model(
                    input_ids=torch.from_numpy(ids).long()[None], output_hidden_states=True, use_cache=False
                )

        alone_s = timed(alone)
    x = extract.Extractor(o, plan, model)
    warmup.swap_kernels(model)
    slot = extract.Slot(plan, tokens, x.device)
    forward = timed(lambda: x.batch(batches[0], slot), 3)
    stage = extract.Stage(tempfile.mkdtemp(dir="/dev/shm"), "bench")
    piped = pipeline(x, plan, o, 6, stage)[0] / 6
    wide = Plan([[np.zeros(4096, np.int32)]], [0], 50 << 10)
    big = extract.Slot(wide, 4096, x.device)
    big.seconds = 0
    for tensor in big.device.values():
        tensor.normal_()
    write = timed(lambda: write_batch(o, wide, stage, 0, big), 3)
    copy = timed(lambda: big.host["hidden_states"].clone(), 3)
    samples = Plan(
        [[np.zeros(400, np.int32)] * 10], [0], 25600
    )  # 51,200 bytes a token, as five layers of 5,120
    ten = extract.Slot(samples, 4000, x.device)
    ten.seconds = 0
    ten.device["hidden_states"].normal_(), ten.device["range"].copy_(torch.tensor([-1.0, 1.0]))
    read = reader(samples, stage, ten, o)
    shutil.rmtree(stage.dir.parent)
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        tiny.make_model(d / "model")
        tiny.make_chat(d / "chat.jsonl", 2000)
        encoder = extract.Encoder(o, d / "model", 640)
        lines = (d / "chat.jsonl").read_bytes().splitlines()
        encoder.encode(lines[0])
        planning = len(lines) / timed(lambda: [encoder.encode(line) for line in lines])
    size = big.host["hidden_states"].nbytes
    result = {
        "cpu": os.cpu_count(),
        "torch": torch.__version__,
        "forward_tokens_per_s": round(tokens / forward),
        "vs_one_at_a_time": round(alone_s / forward, 3),
        "pipeline_over_forward": round(forward / piped, 3),
        "write_gb_per_s": round(size / write / 1e9, 2),
        "write_over_copy": round(copy / write, 3),
        "plan_samples_per_s_per_process": round(planning),
    }
    result |= read | fp8()
    for name, value in result.items():
        print(f"{name:34} {value}")
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpu", action="store_true", help="the 27B shape on one GPU; else a tiny one on the CPU"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a batch (default: 32768)")
    parser.add_argument("--batches", type=int, default=40, help="batches that are timed (default: 40)")
    parser.add_argument("--end-to-end", action="store_true", help="make warmup extract on 8 layers of the shape")
    parser.add_argument("--gpus", type=int, default=1, help="shards of --end-to-end, one a GPU (default: 1)")
    parser.add_argument("--caches", help="where compiled kernels go, empty for a cold start (default: temporary)")
    parser.add_argument("--folder", help="where --end-to-end makes its checkpoint (default: a temporary one)")
    parser.add_argument("--first-batch", action="store_true", help="only the first batch of a fresh process")
    parser.add_argument("--out", help="write the JSON object there, too")
    a = parser.parse_args()
    if a.gpu and not torch.cuda.is_available():
        print("--gpu: no GPU here; make bench is the CPU version", file=sys.stderr)
        return 2
    result = cpu(a) if not a.gpu else end_to_end(a) if a.end_to_end else gpu(a)
    if a.out:
        Path(a.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
