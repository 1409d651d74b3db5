"""What warm-up decides on a GPU, without one: the kernels stand in, and test_gpu.py has the real ones."""
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import bench
import warmup

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tuned(monkeypatch):
    """tuned(error) -> {"fla": [sequences of each row that it had], "qla": [...]}: tune() with kernels that only note."""
    decoder = bench.decoder(4, vocab_size=100, hidden_size=64, intermediate_size=64, num_attention_heads=2,
                            num_key_value_heads=1)
    index = types.SimpleNamespace(prepare_varlen_metadata=lambda cu, cpu: None)
    for name, module in (("", None), (".utils", None), (".utils.index", index)):
        monkeypatch.setitem(sys.modules, f"flash_qla{name}", module or types.ModuleType("flash_qla"))
    monkeypatch.setattr(warmup, "fast_kernels", lambda: True)
    monkeypatch.setattr(warmup.PACKED, "flash_qla", False)

    def tune(error=0.0, longest=1024):
        seen = {"fla": [], "qla": []}

        def kernel(name, factor):
            def run(q, k, v, g, beta, l2norm):
                seen[name].append(len(warmup.PACKED.cu) - 1)
                return v * factor
            return run
        monkeypatch.setattr(warmup, "rule_by_fla", kernel("fla", 1))
        monkeypatch.setattr(warmup, "rule_by_flash_qla", kernel("qla", 1 + error))
        warmup.tune(decoder, 2048, longest)
        return seen
    return tune


def row(sequences):
    """Which kernel has a row of 2,048 tokens in so many sequences."""
    cpu = torch.linspace(0, 2048, sequences + 1).int()
    with warmup.packing(cpu, cpu, None, None):
        v = torch.zeros(1, 2048, 2, 4)
        return warmup.delta_rule(v, v, v, v[..., 0], v[..., 0], True)


def test_flash_qla_is_compiled_for_every_number_of_sequences_that_it_will_have(tuned):
    assert tuned()["qla"] == [2, 3, 4, 5, 6, 7, 8]  # 2,048 tokens, samples of 1,024 at most, 256 on average at least


@pytest.mark.parametrize("sequences, name", [(2, "qla"), (8, "qla"), (9, "fla"), (2048, "fla")])
def test_rows_of_short_samples_are_flas(tuned, sequences, name):
    seen = tuned()
    seen["fla"].clear(), seen["qla"].clear()
    row(sequences)
    assert seen[name] == [sequences] and not seen["qla" if name == "fla" else "fla"]


def test_flash_qla_is_not_used_where_it_differs_from_fla(tuned, capfd):
    tuned(error=0.05)
    assert not warmup.PACKED.flash_qla and "0.050 from FLA" in capfd.readouterr().out


def test_fla_does_it_all_without_flash_qla(tuned, monkeypatch, capfd):
    for name in ("flash_qla", "flash_qla.utils", "flash_qla.utils.index"):
        monkeypatch.setitem(sys.modules, name, None)
    tuned()
    assert not warmup.PACKED.flash_qla and "without FlashQLA" in capfd.readouterr().out


def test_flash_qla_is_left_alone_where_no_row_would_be_its(tuned):
    assert tuned(longest=128)["qla"] == [] and not warmup.PACKED.flash_qla


def test_the_second_process_starts_with_the_environment_that_a_shard_will_have(tmp_path, monkeypatch):
    def warm(o, work):
        os.environ["TRITON_PTXAS_PATH"] = "/as/inductor/does"  # with it, Triton finds nothing of what it compiled
        return {}
    started = []
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that it is put back at the end
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(warmup, "warm", warm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(subprocess, "run", lambda command, env=None: started.append(env) or types.SimpleNamespace(returncode=0))
    assert warmup.main(["--model", "m", "--work", str(tmp_path)]) == 0
    assert "TRITON_PTXAS_PATH" not in started[0] and started[0]["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("name, value, words", [
    ("TRITON_CACHE_DIR", "/proc/kernels", "cannot be kept in /proc/kernels"), ("TRITON_CACHE_DIR", "", "but empty"),
    ("TORCHINDUCTOR_CACHE_DIR", "/dev/null/kernels", "give TORCHINDUCTOR_CACHE_DIR another directory")])
def test_a_cache_that_cannot_be_is_refused_before_the_model_is_loaded(place, tmp_path, name, value, words):
    command = [sys.executable, ROOT / "warmup.py", "--model", place.model, "--work", tmp_path / "work"]
    refused = subprocess.run(command, env=os.environ | {name: value}, text=True, capture_output=True)
    assert refused.returncode == 2 and words in refused.stdout.splitlines()[-1] and "Traceback" not in refused.stderr


def test_on_a_cpu_the_measured_rows_are_short_whatever_a_batch_holds(place, tmp_path):
    flags = ["--model", place.model, "--work", tmp_path, "--layers", "0", "--max-len", "300"]
    process = subprocess.run([sys.executable, ROOT / "warmup.py", *flags], text=True, capture_output=True)
    report = json.loads(process.stdout.splitlines()[-1])
    assert report["tokens"] == 32768 and report["tokens_per_sec"] > 0
    assert max(fill["tokens"] for fill in report["fills"].values()) <= 2048
