"""What is refused or warned of: a command line for every code, wrong usage, wrong configs and wrong
rows. A line is a job and its flags, over the job's smallest config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from configs import QWEN

LOCAL = "--cluster.where=local --rollout.transformers={}"
EVAL = "--data.eval.path=rows.jsonl --data.eval.prompt=prompt"
NF4, RANK = "--actor.model.quantization=nf4", "--actor.adapter.rank=8"
A100 = "--cluster 8xA100-80GB --host-memory 1TB"
SHARED = "--rollout.placement=shared"
PLAYED = "--environments.own.name=calculator"

PLANNED: Mapping[str, Sequence[str]] = {
    "adamw-8bit-offload": (
        "sft --actor.zero.optimizer_offload=cpu --actor.optimizer.kind=adamw_8bit",
    ),
    "adapter-dropout": (
        f"ppo {RANK} --actor.adapter.dropout=0.1",
        "ppo --critic.adapter.dropout=0.1",
    ),
    "adapter-separate": (
        "ppo --rollout.vllm.adapter=separate",
        f"ppo {RANK} {NF4} --rollout.vllm.adapter=separate",
        f"ppo {RANK} --actor.adapter.dora=true --rollout.vllm.adapter=separate",
        "ppo --actor.adapter.rank=1000 --rollout.vllm.adapter=separate",
        f"ppo {RANK} {LOCAL} --rollout.vllm.adapter=separate",
        f"ppo {RANK} {SHARED} --rollout.vllm.sleep_level=2 --rollout.vllm.adapter=separate",
    ),
    "adapter-targets": (
        "sft --actor.adapter.targets=[]",
        f"sft {A100} --actor.adapter.targets=[q_proj,w1]",
        f"sft {A100} --actor.model.path=mistralai/Mixtral-8x7B-v0.1 "
        "--actor.adapter.targets=[gate_up_proj]",
        f"sft {A100} --actor.model.path=zai-org/GLM-4.5-Air --actor.adapter.targets=[all-linear]",
        f"sft {A100} --actor.model.path=google/gemma-2-9b --actor.adapter.targets=[embed_tokens]",
    ),
    "advantage-needs": ("ppo --algorithm.advantage.name=textwrap:shorten",),
    "aggregation-unused": ("ppo --algorithm.aggregation_tokens=4",),
    "best-metric": (
        f"ppo {EVAL} --run.eval_every=1 --run.best.metric=eval/reward",
        f"ppo {EVAL} --run.eval_every=1 --run.best.patience=2",
        f"sft {EVAL} --data.eval.response=response --run.eval_every=1 --run.best.metric=eval/los",
    ),
    "best-without-checkpoints": (
        f"sft {EVAL} --data.eval.response=response --run.eval_every=1 --run.best.patience=2 "
        "--run.keep_checkpoints=0",
    ),
    "best-without-eval": ("sft --run.best.patience=2",),
    "bfloat16-card": (
        "sft --cluster V100-32GB",
        "ppo --cluster 2xV100-32GB --actor.model.dtype=float32 --critic.model.dtype=float32",
    ),
    "checkpointing-off": (
        "sft --actor.model.checkpoint_every=2",
        "ppo --critic.model.activation_offload=cpu",
    ),
    "corrected-twice": (
        "ppo --algorithm.policy_loss.name=dppo_tv --algorithm.correction.name=truncate",
    ),
    "critic-ema": ("ppo --critic.ema.decay=0.9",),
    "critic-needed": ("grpo --algorithm.advantage.name=gae",),
    "critic-ranks": ("sft --cluster.critic_ranks=2",),
    "critic-unused": (
        "ppo --algorithm.advantage.name=rloo --batch.responses=4",
        "grpo --algorithm.critic_warmup_steps=1",
    ),
    "data-columns": (
        "sft --data.train.response=null",
        "sft --data.train.messages=m",
        "sft --data.train.chosen=c",
        "sft --data.train.text=t",
        "sft --data.step_separator=,",
        "ppo --data.train.response=a",
        "ppo --data.train.prompt=null",
        "ppo --data.train.messages=m",
        "ppo --data.eval.path=x",
        "dpo --data.train.rejected=null",
        "dpo --data.train.rejected=chosen",
        "dpo --data.train.margin=margin",
        "rm --data.train.chosen=null",
        "kto --data.train.label=null",
        "kto --data.train.response=null",
        "kto --data.train.chosen=c",
        "prm --data.train.steps=null",
        "prm --data.train.labels=null --data.train.prompt=null",
    ),
    "decay-steps": (
        "sft --actor.optimizer.decay_steps=1",
        "sft --actor.optimizer.schedule=wsd --actor.optimizer.decay_steps=4",
    ),
    "device-memory": (
        "sft --cluster 1xRTX4090 --host-memory 64GB",
        "ppo --cluster 2xRTX4090 --host-memory 64GB",
        "dpo --cluster 8xA100-80GB --cluster.ranks=8 --actor.zero.stage=0 "
        f"--reference.model.path={QWEN}",
        "sft --cluster 8x46GB --cluster.ranks=8 --actor.zero.stage=2",
    ),
    "dynamic-awake": (
        f"grpo --batch.dynamic_sampling={{}} {SHARED} "
        "--rollout.vllm.sleep_level=1 --reward_model.role.model.path=r",
    ),
    "environment-column": (
        f"ppo {PLAYED} --environments.other.name=guess_number",
        "ppo --data.train.environment=played",
    ),
    "environment-length": (
        f"ppo {PLAYED} --environments.own.max_tokens=500",
        f"ppo {PLAYED} --environments.own.max_turns=2000",
    ),
    "environment-memory": (f"ppo {PLAYED} --environments.own.memory_gib=2",),
    "environment-template": (f"ppo {PLAYED} --data.train.chat_template=none",),
    "four-bit-dora": (f"sft {RANK} {NF4} --actor.adapter.dora=true --actor.zero.stage=3",),
    "four-bit-offload": (
        "dpo --reference.model.path=m --reference.zero.offload=cpu "
        "--reference.model.quantization=nf4",
        "ppo --reward_model.role.model.path=m --reward_model.role.model.quantization=nf4 "
        "--reward_model.role.zero.offload=cpu",
    ),
    "four-bit-training": (f"sft {NF4}", "ppo --critic.model.quantization=nf4"),
    "gradient-dtype": (
        "sft --actor.zero.gradient_dtype=float32 --actor.zero.stage=0",
        "sft --actor.zero.gradient_dtype=bfloat16 --actor.model.dtype=float32",
    ),
    "group-of-one": (
        "grpo --batch.responses=1",
        "ppo --batch.dynamic_sampling={}",
    ),
    "host-memory": (
        "sft --cluster cpu --host-memory 16GB",
        "sft --cluster 8xA100-80GB --cluster.ranks=8 --host-memory 40GB "
        "--actor.zero.optimizer_offload=cpu",
    ),
    "idle-cards": (f"sft {A100}", f"ppo {A100}"),
    "idle-ranks": (
        "sft --cluster 4xH200 --cluster.ranks=4 --batch.sequences=3",
        "dpo --cluster 4xH200 --cluster.ranks=4 --batch.pairs=3",
        "ppo --cluster 8xH200 --cluster.ranks=4 --batch.prompts=4 --algorithm.mini_batches=4",
    ),
    "kl-in-loss": ("ppo --algorithm.kl.place=loss",),
    "kl-reference": ("ppo --algorithm.kl=none --reference.model.path=r",),
    "kl-target": ("ppo --algorithm.kl.coefficient=0 --algorithm.kl.adaptive.target=6",),
    "kl-unused": ("ppo --algorithm.kl.ratio_corrected=true",),
    "local-one-process": (
        "ppo --cluster.where=local",
        f"ppo {LOCAL} --cluster.ranks=2 --cluster.nodes=2 --cluster.address=auto",
        f"ppo {LOCAL} --rollout.engines=2 --cluster.critic_ranks=2",
    ),
    "lost-updates": (f"sft {A100} --actor.zero.state_dtype=bfloat16 --actor.zero.stage=2",),
    "micro-batch-tokens": (
        "sft --batch.micro_batch_tokens=2047",
        "dpo --batch.micro_batch_tokens=4095",
        "ppo --batch.micro_batch_tokens=2559",
    ),
    "mini-batches": (
        "ppo --algorithm.mini_batches=5",
        "ppo --algorithm.mini_batches=7 --batch.responses=3",
    ),
    "more-ranks-than-gpus": (
        "sft --cluster 1xH200 --cluster.ranks=2",
        "ppo --cluster 4xH200 --cluster.ranks=4 --rollout.engines=2",
    ),
    "no-eval-data": ("sft --run.eval_every=2", "ppo --eval_sampling.temperature=0"),
    "no-gpu": ("sft --cluster cpu --cluster.device=cuda",),
    "no-reward": ("ppo --rewards.length.weight=0",),
    "nodes-without-cluster": (f"sft {A100} --nodes 2",),
    "offload-stage": (
        "sft --actor.zero.parameter_offload=cpu",
        "ppo --critic.zero.optimizer_offload=cpu --critic.zero.stage=0",
    ),
    "offload-without-gpu": (
        "sft --cluster cpu --actor.zero.optimizer_offload=cpu "
        "--actor.model.gradient_checkpointing=true --actor.model.activation_offload=cpu",
        f"dpo --cluster cpu --reference.model.path={QWEN} --reference.zero.offload=cpu",
    ),
    "optimizer-value": (
        "sft --actor.optimizer.beta1=1.0 --actor.optimizer.beta2=2 "
        "--actor.optimizer.final_ratio=1.5",
        "sft --actor.ema.decay=1",
    ),
    "reference-logprobs": (
        "dpo --reference_logprobs.path=kept.parquet",
        "kto --reference_logprobs.precompute=true --reference_logprobs.path=kept.json",
    ),
    "reinforce-several": ("ppo --algorithm.policy_loss.name=reinforce --algorithm.mini_batches=2",),
    "replay-without-engines": (
        f"ppo {EVAL} --run.eval_every=1 --rollout.replay=played",
        "grpo --algorithm.advantage.name=remax --rollout.replay=played",
    ),
    "reward-name": (
        "ppo --rewards.reward.name=length",
        "ppo --rewards.finished.name=length --rewards.seconds.name=length",
        "ppo --rewards.reward_model.name=length --reward_model.role.model.path=r",
    ),
    "reward-settings": (
        "ppo --rewards.length.judge.url=http://a/v1 --rewards.length.judge.model=m "
        "--rewards.length.judge.prompt=Q:{prompt}",
        'ppo --rewards.length.name=""',
        "ppo --rewards.length.clip=[1,0]",
        "ppo --rewards.served.http.urls=[] --rewards.served.http.chat_template=none",
    ),
    "reward-tokenizer": (
        "ppo --reward_model.role.model.path=r --reward_model.max_tokens=9",
        "ppo --reward_model.role.model.path=r --reward_model.steps.take=mean",
    ),
    "sampling-contradicts": (
        "ppo --rollout.sampling.min_new_tokens=600",
        f"ppo {EVAL} --eval_sampling.temperature=0 --eval_sampling.top_k=4",
        f"ppo {EVAL} --data.eval.responses=4 --eval_sampling.temperature=0",
    ),
    "sampling-for-training": (
        "ppo --rollout.sampling.temperature=0",
        "ppo --rollout.sampling.top_p=0.9",
    ),
    "sequence-over-positions": (
        f"sft {A100} --actor.model.path=google/gemma-2-9b --data.max_tokens=8193 "
        "--batch.micro_batch_tokens=8193",
        f"sft {A100} --actor.model.path=microsoft/Phi-3.5-mini-instruct --data.max_tokens=4097 "
        "--batch.micro_batch_tokens=4097",
        f"ppo {A100} --critic.model.path=google/gemma-2-9b --data.max_tokens=8000 "
        "--batch.micro_batch_tokens=9000",
    ),
    "sleep-not-shared": (
        "ppo --rollout.vllm.sleep_level=1",
        f"ppo --rollout.vllm.sleep_level=2 {SHARED} --rollout.transformers={{}}",
    ),
    "state-dtype": (
        "sft --actor.zero.state_dtype=bfloat16 --actor.zero.stage=1",
        "sft --actor.zero.state_dtype=bfloat16 --actor.zero.stage=0",
        "sft --actor.zero.state_dtype=bfloat16 --actor.model.dtype=float32",
        "sft --actor.ema.decay=0.9 --actor.zero.state_dtype=bfloat16",
    ),
    "pipeline-parallel": (f"ppo {A100} --rollout.vllm.pipeline_parallel=99",),
    "tensor-parallel": (f"ppo {A100} --rollout.vllm.tensor_parallel=3",),
    "tensor-parallel-node": ("ppo --cluster 2xH200 --rollout.vllm.tensor_parallel=4",),
    "text-decoder": (f"sft {A100} --actor.model.path=google/gemma-3-4b-it",),
    "transformers-engine": (
        "ppo --rollout.transformers={} --rollout.vllm.tensor_parallel=2",
        "ppo --rollout.transformers={} --rollout.vllm.pipeline_parallel=2",
        "ppo --rollout.transformers.max_sequences=4 --batch.responses=8",
    ),
    "varlen-attention": (
        f"sft {A100} --actor.model.attention=varlen --actor.model.dtype=float32",
        f"dpo {A100} --reference.model.path=google/gemma-2-9b --reference.model.attention=varlen",
        "sft --cluster cpu --actor.model.attention=varlen",
        "sft --cluster T4 --actor.model.attention=varlen",
    ),
    "vllm-argument": (
        "ppo --rollout.vllm.arguments.enforce_eagre=true",
        "ppo --rollout.vllm.arguments.max_num_seqs=8 "
        "--rollout.vllm.arguments.logprobs_mode=raw_logits",
        'ppo --cluster cpu --rollout.vllm.arguments.speculative_config={"method":"ngram"}',
        f"ppo {A100} {SHARED} --rollout.vllm.sleep_level=2 "
        "--rollout.vllm.arguments.spec_model=Qwen/Qwen2.5-0.5B",
    ),
    "vllm-cache": ("ppo --cluster cpu --host-memory 1TB --rollout.vllm.cpu_kv_cache_gib=0.001",),
    "vllm-not-in-plan": (
        f"ppo {A100} --rollout.vllm.arguments.block_size=32",
        f'ppo {A100} --rollout.vllm.arguments.speculative_config={{"method":"mtp"}}',
    ),
    "vllm-share": (
        "ppo --cluster 2xA100-80GB --rollout.vllm.memory_share=0.1",
        "ppo --cluster 2xRTX4090 --rollout.vllm.memory_share=0.9 "
        "--actor.model.path=Qwen/Qwen2.5-32B",
    ),
    "vllm-share-beside-training": (
        *(
            f"ppo --cluster 4xA100-80GB --host-memory 1TB --cluster.ranks=4 --rollout.engines=4 "
            f"{SHARED} --rollout.vllm.memory_share=0.9 --actor.model.path=Qwen/Qwen2.5-1.5B "
            f"--critic.model.path=Qwen/Qwen2.5-1.5B --rollout.vllm.sleep_level={level}"
            for level in (0, 1)
        ),
        f"ppo --cluster 4xRTX4090 --cluster.ranks=4 {SHARED} --actor.zero.stage=0",
    ),
    "vocabulary": (
        f"ppo {A100} --critic.model.path=Qwen/Qwen2.5-1.5B",
        f"distill {A100} --teacher.model.path=Qwen/Qwen2.5-1.5B",
    ),
    "warmup-too-long": (
        "sft --actor.optimizer.warmup_steps=4",
        "ppo --critic.optimizer.warmup_steps=7 --algorithm.epochs=2",
        "ppo --algorithm.critic_warmup_steps=3",
        "ppo --algorithm.critic_warmup_steps=2 --actor.optimizer.warmup_steps=2",
    ),
    "zero-plus-plus": (
        "sft --actor.zero.quantized_weights=true --actor.zero.quantized_gradients=true",
        "sft --cluster cpu --actor.zero.stage=3 --actor.zero.quantized_gradients=true",
        "sft --actor.zero.hpz_partition_size=3 --actor.zero.stage=3 --cluster.ranks=4",
        "sft --actor.zero.hpz_partition_size=2 --actor.zero.stage=3 --cluster.ranks=4 "
        "--actor.zero.parameter_offload=cpu",
        "ppo --actor.zero.hpz_partition_size=2 --actor.zero.stage=3 --cluster.ranks=4 "
        "--critic.zero.stage=3",
    ),
    "": (
        "sft --cluster 8xA100-90GB",
        "sft --cluster 65xH100",
        "sft --cluster 8xA100-80GB --nodes 0",
        "sft --cluster 8xA100-80GB --host-memory much",
        "sft --cluster 8xA100-80GB --cluster.hardware=H100",
        "sft --cluster.calibration=gone.json --cluster cpu",
        "sft --cluster cpu --actor.model.path=Qwen/Qwen2.5-7",
        "sft --actor.optimizer.learning_rate=-1 --actor.zero.stage=4 --batch.sequences=0",
        "sft --run.steps=many --actor.model.dtype=bf16 --actor.zero.bucket_elements=7",
        "sft --actor.optimizer.learnin_rate=1 --actr.model.path=x --actor.zero.xyzzy=1",
        "ppo --rollout.sampling.stop=5 --rollout.vllm.memory_share=1.5 --rewards.length.weihgt=2",
        'ppo --rollout.sampling.stop=["x",""]',
        "ppo --actor.zero.parameter_offload=cpu --algorithm.mini_batches=5 --rollout.engines=0",
        "ppo --actor.zero.parameter_offload=cpu --algorithm.mini_batches=5 "
        "--rollout.vllm.sleep_level=1 --actor.optimizer.beta1=1",
    ),
}
"""By the code that they are for: what `plimsoll plan` is asked."""

STARTED: Mapping[str, Sequence[str]] = {
    "reference-free-loss": (
        "dpo --algorithm.loss.name=simpo --algorithm.loss.options={} --reference.model.path=model",
        "dpo --algorithm.loss.name=orpo --algorithm.loss.options={} "
        "--reference_logprobs.precompute=true",
    ),
    "nodes-without-cluster": ("sft --cluster.where=ray --cluster.nodes=2",),
    "sequence-over-positions": (
        "sft --data.max_tokens=129 --batch.micro_batch_tokens=129",
        f"ppo {EVAL} --rollout.sampling.max_new_tokens=100 --eval_sampling.max_new_tokens=101 "
        "--batch.micro_batch_tokens=256",
    ),
    "tensor-parallel": (
        "ppo --cluster.where=ray --rollout.vllm.tensor_parallel=3",
    ),
    "vllm-head-size": (
        "ppo --cluster.where=ray --actor.model.path=narrow",
    ),
    "replay-batch": ("ppo --rollout.replay=played --batch.prompts=3",),
    "replay-steps": (
        "ppo --rollout.replay=gone",
        "ppo --rollout.replay=ran",
        "ppo --rollout.replay=out",
        "ppo --rollout.replay=played --run.steps=4",
        "ppo --rollout.replay=cut-short --run.steps=1",
    ),
    "replay-vocabulary": ("ppo --rollout.replay=played --batch.prompts=2 --batch.responses=1",),
    "less-than-planned": (
        "sft --cluster.hardware=8xA100-80GB --cluster.where=ray --cluster.device=auto",
        "sft --cluster.host_memory=500TB --cluster.hardware=cpu",
    ),
    "": (
        *(f"sft --data.train.path={path}" for path in (
            "rows.jsnl", "none/rows.jsonl", "/gone/rows", "model", "case.yaml", "empty.jsonl",
            "link.jsonl", "~no-such-user/rows.jsonl", "rwos",
        )),
        "sft --data.train.split=test --data.train.name=main",
        "sft --data.chat_template=chatml.jinja",
        "sft --data.chat_template=null --actor.model.path=untemplated",
        *(f"sft --actor.model.path={path}" for path in (
            "modle", "case.yaml", "unshaped", "broken", "listed", "weightless", "pickled", "cut",
            "sharded", "wordless", "ran", "ran/model", "ran/checkpoints/step-000002",
        )),
        "ppo --actor.model.path=scoring --reference.model.path=scoring",
        "ppo --reward_model.role.model.path=model",
        "sft --run.directory=case.yaml/deeper",
        "sft --run.directory=ran",
        "sft --run.directory=ran --run.resume=auto",
        "sft --run.resume=must",
        "ppo --algorithm.policy_loss.name=clpi --algorithm.advantage.name=gea "
        "--rewards.length.name=lenght",
        "ppo --algorithm.policy_loss.name=my.module:my_loss",
        "ppo --algorithm.policy_loss.options.dual_clip=1.0 "
        "--algorithm.advantage.options.gama=0.9",
        "ppo --rewards.form.name=pattern --rewards.form.options.pattern=a(b",
        "ppo --rewards.length.options.line=true",
        "dpo --algorithm.loss.name=dop",
        "kto --algorithm.loss.options.beta=x",
        "distill --algorithm.divergence.name=kl --teacher.model.path=modle",
        "ppo --data.train.path=x --actor.model.path=modle --run.resume=must "
        "--rewards.length.name=x",
    ),
}  # fmt: skip
"""What a job's own command is asked, over small files."""

USED = (
    "pop", "--hepl", "doctr", "", "ppo", "sft a.yaml b.yaml", "sft case.yaml --dryrun",
    "sft case.yaml --learning-rate 1", "sft case.yaml --rewards 1", "sft csae.yaml",
    "sft --help actr", "dpo case.yaml", "demo --sed 1", "demo --seed x", "doctor --adress a:1",
    "plan", "plan case.yaml --json=1", "plan gone.yaml", "plan .", "plan case.yaml --nodes x",
    "report", "report gone", "report model", "calibrate", "calibrate gone", "calibrate model",
    "eval", "eval gone", "eval model", "eval ran", "eval case.yaml --model modle",
    "eval case.yaml --model scoring", "export", "export gone --to new", "export model --to new",
    "export ran --to model", "export ran --to new --merge", "merge", "merge model --out new",
    "merge gone --out new", "merge ran/model --out model", "merge ran/model --out new --dtype x",
    "sft case.yaml --run.steps", "sft case.yaml --run.steps 1 --run.steps 2",
    "sft case.yaml --debug --run.stepz=1",
)  # fmt: skip

WRITTEN: Mapping[str, str | bytes] = {
    "twice": "a: 1\nb:\n  c: 1\n  c: 2\n",
    "a-list": "- 1\n- 2\n",
    "words": "just words",
    "open": "a: [1, 2",
    "tab": "a: 1\n\tb: 2\n",
    "two-documents": "a: 1\n--- \nb: 2\n",
    "itself": "a: &x [*x]\n",
    "python": "a: !!python/name:os.system x\n",
    "tagged": "a: !!set {x, y}\n",
    "list-key": "? [a]\n: 1\n",
    "merge-key": "x: &x {a: 1}\nb:\n  <<: *x\n",
    "latin": "a: ü".encode("latin-1"),
    "deep": "a: " + "[" * 5000 + "]" * 5000,
    "empty": "",
    "empty-ppo": "# ppo\n",
    "any-job": "run: {directory: out, steps: 3}\nactor: {model: {path: m}}\n",
    "many-problems": "# ppo\nrun:\n  directory: 2024\n  stepz: 3\n"
    "data: {train: {path: x, prompt: q}}\nactor:\n  model: {path: m, dtype: bf16}\n"
    "  zero: {stage: true}\ncritic: 3\nrewards: {a: {name: x, options: {k: [1]}, weihgt: 2}}\n"
    "rollout:\n  memory_share: 1.5\n  engines: 0\nzero: {stage: 2}\n",
    "mixture": "# sft\nrun: {directory: out, steps: 3}\nactor: {model: {path: m}}\n"
    "data:\n  train:\n    path: {path: x, text: t}\n    b: {path: y, text: t, weight: 0}\n",
}  # fmt: skip
"""Config files that cannot be read, or do not say enough."""

_USER, _YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
BAD_ROWS: Mapping[str, tuple[str, dict[str, Any], Sequence[dict[str, Any] | str]]] = {
    "sft-columns": ("sft", {}, (
        {"response": None}, {"response": ""}, {"response": 3}, {"prompt": ["x"]},
        {"response": "is " * 90}, "{broken", "[1]", '{"prompt": "a", "prompt": "b"}',
    )),
    "sft-wrong-column": ("sft", {"data.train.response": "reponse"}, ()),
    "sft-messages": ("sft", {"data.train.messages": "messages", "data.train.prompt": None,
                             "data.train.response": None}, (
        {"messages": []}, {"messages": "hi"}, {"messages": [3]}, {"messages": [_USER]},
        {"messages": [_USER, {"role": "assistant"}]}, {"messages": [_USER, {"content": "x"}]},
        {"messages": [_USER, {"role": "assistant", "content": ""}]},
    )),
    "sft-text": ("sft", {"data.train.text": "text", "data.train.prompt": None,
                         "data.train.response": None}, ({"text": ""}, {"text": 3}, {"text": None})),
    "sft-truncated": ("sft", {"data.over_long": "truncate"}, ({"prompt": "1 " * 90},)),
    "dpo": ("dpo", {}, (
        {"rejected": " 7", "chosen": " 7"}, {"chosen": ""}, {"chosen": 2}, {"rejected": None},
        {"prompt": "1" * 64}, {"chosen": "is" * 50}, {"chosen": [_USER, _YO]},
    )),
    "dpo-dialogues": ("dpo", {"data.train.prompt": None, "data.train.chosen": "messages",
                              "data.train.rejected": "other"}, (
        {"messages": [_USER, _YO], "other": [_USER, _YO]},
        {"messages": [_USER, _YO], "other": [_USER]},
        {"messages": [_USER, _YO], "other": "go"},
        {"messages": "\n\nHuman: x\n\nAssistant: a", "other": "\n\nHuman: y\n\nAssistant: b"},
    )),
    "rm-margin": ("rm", {"data.train.margin": "margin"}, ({"margin": "x"}, {"margin": None})),
    "prm": ("prm", {}, (
        {"labels": [True] * 9}, {"labels": ["x"]}, {"steps": []}, {"steps": "one"},
        {"steps": [""], "labels": [1]}, {"steps": ["a"], "labels": [2]}, {"labels": None},
    )),
    "kto": ("kto", {}, (
        {"good": "true"}, {"good": 2}, {"good": None}, {"response": " "}, {"prompt": 3},
    )),
    "ppo": ("ppo", {}, (
        {"prompt": ""}, {"prompt": 3}, {"answer": None}, {"answer": [1]}, {"prompt": "1" * 99},
        '{"prompt": "1+1=", "answer": NaN}',
    )),
}  # fmt: skip
"""By name: the job, changes to its config, and rows as changes to a good one or as lines."""
