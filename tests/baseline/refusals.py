"""What is refused or warned of: the calls of the catalogue, over the files that they need, and on
machines that are only said to be here. Codes are those of docs/rules.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
from calls import Call, Said
from catalogue import BAD_ROWS, NF4, PLANNED, RANK, SHARED, STARTED, USED, WRITTEN
from configs import JOBS, QWEN, changed, smallest, text
from plain import ROOT, write
from rows import row, write_rows

_SMALL = {"data.max_tokens": 64, "batch.micro_batch_tokens": 128, "cluster.device": "cpu"}
_ONE_PROCESS = {**_SMALL, "cluster.where": "local", "cluster.threads": 1}
_CARD = {
    "name": "NVIDIA A100-SXM4-80GB", "memory.total": "81920", "memory.reserved": "600",
    "memory.used": "500", "compute_cap": "8.0", "driver_version": "580.65.06",
    "mig.mode.current": "Disabled", "index": "0", "uuid": "GPU-0",
}  # fmt: skip
_PART = _CARD | {"uuid": "MIG-0", "memory.total": "[N/A]"}
# What said so before NVML did, for recordings of older sources.
_SMI = """\
#!/usr/bin/env python3
import json, os, sys
cards = json.loads(os.environ["SAID_CARDS"])
asked = sys.argv[1].partition("=")
if asked[0] == "--query-gpu":
    for card in cards:
        print(", ".join(card[name] for name in asked[2].split(",")))
for card in cards if asked[0] == "-L" else ():
    print("GPU (UUID: %s)" % card["uuid"])
    if card["mig.mode.current"] == "Enabled":
        print("  MIG 1g.10gb Device 0: (UUID: MIG-0)")
"""


def refusal_calls(home: Path) -> Iterator[Call]:
    """Writes what they need to `home`."""
    folder = home / "planned"
    folder.mkdir()
    for job in JOBS:
        (folder / f"{job}.yaml").write_text(text(job, smallest(job)))
    alone = changed(smallest("ppo"), {"critic": None})
    (folder / "grpo.yaml").write_text(text("grpo", alone))
    for name, job, flags in _numbered(PLANNED):
        yield Call(f"refusals/planned/{name}", ("plan", f"{job}.yaml", *flags), folder)
    for name, content in WRITTEN.items():
        file = folder / f"{name}.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield Call(f"refusals/written/{name}", ("plan", file.name), folder)
    small = home / "started"
    _write_small_files(small)
    for name, job, flags in _numbered(STARTED):
        yield Call(f"refusals/started/{name}", (job, f"{job}.yaml", *flags), small, heavy=True)
    for i, line in enumerate(USED, 1):
        yield Call(f"refusals/used/{i:02}", tuple(shlex.split(line)), small)
    yield from _of_machines(home, small)
    yield from _of_rows(home)


def _numbered(lines: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, list[str]]]:
    """(name, job, flags)"""
    for code, cases in lines.items():
        for i, line in enumerate(cases, 1):
            job, *flags = shlex.split(line) if '"' not in line else line.split()
            yield f"{code or 'without-code'}-{i:02}", job, flags


def _write_small_files(folder: Path) -> None:
    """Models of which only the files are looked at, and the rows and configs of every job."""
    folder.mkdir()
    shape = {
        "model_type": "qwen2", "max_position_embeddings": 128, "num_attention_heads": 2,
        "num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "vocab_size": 288, "architectures": ["Qwen2ForCausalLM"],
    }  # fmt: skip
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(8)
    whole: dict[str, str | bytes | None] = {
        "config.json": json.dumps(shape),
        "tokenizer.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "model.safetensors": weights,
    }
    models: dict[str, dict[str, str | bytes | None]] = {
        "model": {},
        "narrow": {"config.json": json.dumps(shape | {"hidden_size": 48})},
        "scoring": {
            "config.json": json.dumps(shape | {"architectures": ["Qwen2ForSequenceClassification"]})
        },
        "untemplated": {"chat_template.jinja": None},
        "unshaped": {"config.json": None},
        "broken": {"config.json": "{"},
        "listed": {"config.json": "[]"},
        "weightless": {"model.safetensors": None},
        "pickled": {"model.safetensors": None, "pytorch_model.bin": b""},
        "cut": {"model.safetensors": weights[:-1]},
        "sharded": {"model.safetensors.index.json": '{"weight_map": {"v": "model-2.safetensors"}}'},
        "wordless": {"tokenizer.json": None},
    }
    for name, other in models.items():
        _write_files(folder / name, whole | other)
    _write_files(
        folder / "ran",
        {
            "config.yaml": "# ppo\nrun: {}\n",
            "metrics.jsonl": "",
            "model/adapter_config.json": "{}",
            "checkpoints/step-000002/state.json": "{}",
            "checkpoints/step-000002/actor/weights.json": "{}",
        },
    )
    steps = {f"trajectories/step-{step:06}.parquet": _trajectories() for step in (1, 2, 3)}
    _write_files(folder / "played", steps)
    _write_files(folder / "cut-short", {"trajectories/step-000001.parquet": b"PAR1"})
    write_rows(folder / "rows.jsonl", [row(i) for i in range(4)])
    (folder / "empty.jsonl").touch()
    (folder / "link.jsonl").symlink_to("gone.jsonl")
    for job in JOBS:
        config = changed(smallest(job, "model"), _ONE_PROCESS)
        if job == "ppo":
            engine = {"transformers": {}, "sampling": {"max_new_tokens": 8}}
            config["rollout"] = engine
        (folder / f"{job}.yaml").write_text(text(job, config))
    (folder / "case.yaml").write_text((folder / "sft.yaml").read_text())


def _trajectories() -> bytes:
    """Two, with a token beyond the small models' vocabulary."""
    out = pa.BufferOutputStream()
    parquet.write_table(pa.table({"prompt_tokens": [[1], [2]], "tokens": [[3], [288]]}), out)
    return bytes(out.getvalue())


def _write_files(folder: Path, files: Mapping[str, str | bytes | None]) -> None:
    for name, content in files.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _of_machines(home: Path, folder: Path) -> Iterator[Call]:
    """What only this machine's environment, packages or cards can show; all of it is made up."""
    fakes = home / "fakes"
    for package, version in (("peft", "0.10.0"), ("bitsandbytes", "0.42.0"), ("ray", "2.1.0")):
        _write_files(
            fakes / f"{package}-{version}",
            {f"{package}-{version}.dist-info/METADATA": f"Name: {package}\nVersion: {version}\n"},
        )
    _write_files(fakes / "bare-ray", {"ray/__init__.py": ""})
    hidden = "import sys\nsys.modules.update({'peft': None, 'bitsandbytes': None})\n"
    _write_files(fakes / "without", {"sitecustomize.py": hidden})
    _write_files(fakes / "cards", {"nvidia-smi": _SMI})
    (fakes / "cards" / "nvidia-smi").chmod(stat.S_IRWXU)
    on_ray = "--cluster.where=ray --dry-run"
    no_plan = "--cluster.device=auto --dry-run"
    vllm = "--cluster.where=ray --rollout.vllm={} --cluster.device=auto"
    lines: Mapping[str, tuple[str, str, dict[str, str]]] = {
        "disk-space": (
            "plan", f"case.yaml --actor.model.path={QWEN} --run.keep_checkpoints=100000", {}
        ),
        "no-jemalloc": ("sft", "case.yaml --dry-run", {"PYTHONPATH": "bare-ray"}),
        "package-version-peft": (
            "sft", f"case.yaml {RANK} --dry-run", {"PYTHONPATH": "peft-0.10.0"}
        ),
        "package-version-peft-run": ("sft", f"case.yaml {RANK}", {"PYTHONPATH": "peft-0.10.0"}),
        "package-version-ray": ("sft", f"case.yaml {on_ray}", {"PYTHONPATH": "ray-2.1.0"}),
        "four-bit-storage": (
            "sft",
            f"case.yaml {RANK} {NF4} --actor.zero.stage=3 --dry-run",
            {"PYTHONPATH": "bitsandbytes-0.42.0"},
        ),
        "package-missing": (
            "sft",
            f"case.yaml {RANK} {NF4} --actor.optimizer.kind=adamw_8bit",
            {"PYTHONPATH": "without"},
        ),
        "package-missing-compiler": (
            "sft", "case.yaml --actor.zero.optimizer_offload=cpu", {"CXX": "/nowhere/g++"}
        ),
        "package-missing-kit": (
            "sft",
            "case.yaml --actor.zero.stage=3 --actor.zero.quantized_weights=true "
            "--cluster.device=auto",
            {"CXX": "/nowhere/g++", "CUDA_HOME": "/nowhere"},
        ),
        "sleep-expandable-segments": (
            "ppo",
            f"ppo.yaml {vllm} {SHARED} --rollout.vllm.sleep_level=1 --dry-run",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "SAID_CARDS": "2"},
        ),
        "vllm-build": ("ppo", f"ppo.yaml {vllm}", {"SAID_CARDS": "2"}),
        "vllm-share-not-free": (
            "ppo", f"ppo.yaml {vllm} --dry-run", {"SAID_CARDS": "2", "USED": "70000"}
        ),
        "cards-idle": ("sft", f"case.yaml --cluster.where=ray {no_plan}", {"SAID_CARDS": "8"}),
        "cards-more-ranks": ("sft", f"case.yaml --cluster.where=ray --cluster.ranks=3 {no_plan}",
                             {"SAID_CARDS": "2"}),
        "cards-of-which-one-is-visible": (
            "plan", "case.yaml --cluster.device=auto --cluster.host_memory=64GB",
            {"SAID_CARDS": "2", "CUDA_VISIBLE_DEVICES": "1"},
        ),
        "cards-cut-by-mig": ("plan", "case.yaml --cluster.device=auto",
                             {"SAID_CARDS": "1", "MIG": "Enabled"}),
        "less-than-planned": (
            "sft", "case.yaml --cluster.hardware=2xH200 --cluster.where=ray --cluster.ranks=2 "
            "--cluster.device=auto", {"SAID_CARDS": "2"},
        ),
    }  # fmt: skip
    for name, (command, words, settings) in lines.items():
        environment = _machine(fakes, settings)
        call = (command, *words.split())
        yield Call(f"refusals/machines/{name}", call, folder, environment, masked=True)


def _machine(fakes: Path, settings: Mapping[str, str]) -> dict[str, str]:
    more = {name: value for name, value in settings.items() if name not in ("USED", "MIG")}
    if "PYTHONPATH" in more:
        more["PYTHONPATH"] = str(fakes / more["PYTHONPATH"])
    if "SAID_CARDS" in more:
        other = {"memory.used": settings.get("USED", "500")}
        other["mig.mode.current"] = settings.get("MIG", "Disabled")
        numbers = range(int(more["SAID_CARDS"]))
        cards = [_CARD | other | {"index": str(i), "uuid": f"GPU-{i}"} for i in numbers]
        more |= {
            "SAID_CARDS": json.dumps([{**card, "parts": [_PART]} for card in cards]),
            "PATH": f"{fakes / 'cards'}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[1] / "fakes"),
        }
    return more or {"RECORDED": "1"}


def _of_rows(home: Path) -> Iterator[Call]:
    """Runs that end where they read their rows; of the first rows of the task, then bad ones."""
    folder = home / "rows"
    folder.mkdir()
    for name in ("model", "other"):
        (folder / name).symlink_to(home / name)
    for name, (job, changes, rows) in BAD_ROWS.items():
        config = changed(smallest(job, "model"), _ONE_PROCESS)
        if job == "ppo":
            engine = {"transformers": {}, "sampling": {"max_new_tokens": 8}}
            config["rollout"] = engine
            config["batch"] |= {"micro_batch_tokens": 128}
        source = {"run.directory": name, "data.train.path": f"{name}.jsonl"}
        (folder / f"{name}.yaml").write_text(text(job, changed(config, source | changes)))
        good = [json.dumps(row(i)) for i in range(2)]
        bad = [one if isinstance(one, str) else json.dumps(row(3) | one) for one in rows]
        (folder / f"{name}.jsonl").write_text("\n".join([*good, *bad]) + "\n")
        yield Call(f"refusals/rows/{name}", (job, f"{name}.yaml"), folder, heavy=True)
    skipped = ("sft", "sft-columns.yaml", "--data.on_bad_row=skip", "--data.train.limit=1")
    other = (*skipped, "--run.directory=other-words", "--actor.model.path=../judge")
    yield Call("refusals/rows/other-head", other, folder, heavy=True)


def write_coverage(out: Path, said: Mapping[str, Said]) -> list[str]:
    """Which calls met each code of docs/rules.md, and which codes none did; returns the latter."""
    page = (ROOT / "docs" / "rules.md").read_text()
    codes = re.findall(r"^\| `([a-z0-9-]+)`", page, re.MULTILINE)
    told = {name: one.out + one.err for name, one in said.items()}

    def met(code: str) -> Callable[[str], bool]:
        shown = re.compile(rf"\[{code}\]|\b(?:error|warning) {code}:|\"code\": \"{code}\"")
        return lambda text: shown.search(text) is not None

    found = {code: sorted(n for n, text in told.items() if met(code)(text)) for code in codes}
    lines = [f"{code}: {len(calls)} {calls[:3]}" for code, calls in found.items()]
    write(out / "refusals" / "codes.txt", "\n".join(lines))
    return [code for code, calls in found.items() if not calls]
