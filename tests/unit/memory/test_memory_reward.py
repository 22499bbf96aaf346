"""The plan of reward models: no output head, a score head, what is learned, and what is saved."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from plan_cases import plan, read_config, read_spec, sizes

from plimsoll.commands.placement import placement
from plimsoll.jobs.rm import RmConfig
from plimsoll.memory.contents.contents import micro_batch
from plimsoll.shapes.known_models import read_shape

NAME = "Qwen/Qwen2.5-7B"
SHAPE = read_shape(NAME)
RM = f"""\
run: {{directory: out, steps: 10}}
data: {{train: {{path: x, chosen: a, rejected: b}}, max_tokens: 512}}
batch: {{pairs: 8, micro_batch_tokens: 2048}}
actor: {{model: {{path: {NAME}}}}}
cluster: {{where: local}}
"""
PRM = RM.replace("chosen: a, rejected: b", "prompt: q, steps: s, labels: l").replace(
    "pairs: 8", "sequences: 8"
)
WITHOUT_HEAD = SHAPE.parameters - SHAPE.vocabulary * SHAPE.hidden + SHAPE.hidden
TEXTS = {"rm": RM, "prm": PRM}


@pytest.mark.parametrize("job", TEXTS)
def test_the_output_head_is_replaced_by_one_row(job: str) -> None:
    found = plan(job, TEXTS[job], "H200")
    trained = sizes(found, "train_actor")
    assert trained["actor weights"] == 2 * WITHOUT_HEAD
    assert trained["actor moments"] == 8 * WITHOUT_HEAD
    assert not any("logits" in name for name in trained)
    assert found.disk_bytes == 3 * (4 + 8) * WITHOUT_HEAD + 2 * WITHOUT_HEAD  # and the model


def test_an_adapter_is_saved_with_the_head() -> None:
    adapted = plan("rm", RM.replace("}}", "}, adapter: {rank: 8}}"), "H200")
    trained = sizes(adapted, "train_actor")
    layer = sum(x.inputs + x.outputs for x in SHAPE.linears for _ in range(x.count))
    assert trained["actor moments"] == 8 * (8 * layer + SHAPE.hidden)


def test_a_reward_model_learns_at_the_ends_of_sequences_alone() -> None:
    rm, prm = read_spec("rm", RM), read_spec("prm", PRM)
    assert micro_batch(rm.workload, 1).loss_tokens == 4  # 2,048 tokens of sequences of 512
    assert micro_batch(prm.workload, 1).loss_tokens == 2048  # steps may be as short as a token
    a_pair = replace(rm.workload, units=1)
    assert micro_batch(a_pair, 4).tokens == 2 * 512  # a rank has both of a pair, or neither
    assert (rm.workload.together, prm.workload.together) == (2, 1)
    assert rm.roles["actor"].head == prm.roles["actor"].head == "value"


def test_fewer_pairs_than_ranks_leave_ranks_idle() -> None:
    text = RM.replace("where: local", "ranks: 16")
    [problem] = [p for p in plan("rm", text, "16xH200").problems if p.code == "idle-ranks"]
    assert "8 pairs, and there are 16 ranks" in problem.what


def test_a_dry_run_says_what_a_step_sees() -> None:
    assert isinstance(read_config("rm", RM), RmConfig)
    assert re.search(r"\n  pairs +8, .* 512 tokens", placement(read_spec("rm", RM)))
    assert re.search(r"\n  sequences +8, .* 512 tokens: 4,096 ", placement(read_spec("prm", PRM)))
