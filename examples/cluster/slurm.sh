#!/bin/bash
# A run on several nodes under Slurm: a Ray cluster over the job's nodes, and the run on the first.
#
#   sbatch --nodes 2 examples/cluster/slurm.sh grpo mine.yaml
#
# The project with its .venv, models, data and run.directory lie on a file system that all nodes share.
#SBATCH --job-name plimsoll
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --mem 0
#SBATCH --exclusive
#SBATCH --time 24:00:00
#SBATCH --signal B:TERM@300
set -euo pipefail

PLIMSOLL=${PLIMSOLL:-$SLURM_SUBMIT_DIR/.venv/bin}
PORT=${PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(openssl rand -hex 32)

cluster() {  # NODE RAY-ARGUMENTS...: a node's share of the cluster, until the job ends
  srun --overlap --nodes 1 --ntasks 1 --nodelist "$1" \
    "$PLIMSOLL/ray" start --block "${@:2}" &
}

cluster "$head" --head --port "$PORT"
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n +2); do
  cluster "$node" --address "$head:$PORT"
done

# Five minutes before its time is over, Slurm sends TERM: the run saves and ends, and the next job
# goes on where it stopped.
srun --overlap --nodes 1 --ntasks 1 --nodelist "$head" \
  "$PLIMSOLL/plimsoll" "$@" --cluster.where ray --cluster.address "$head:$PORT" \
  --cluster.nodes "$SLURM_JOB_NUM_NODES" --run.resume auto &
run=$!
trap 'kill -TERM "$run"' TERM
while kill -0 "$run" 2>/dev/null; do wait "$run" && code=0 || code=$?; done
exit "$code"
