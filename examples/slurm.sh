#!/bin/bash
# Training on several machines of a Slurm cluster: one torchrun per machine, one process per GPU.
#
#     sbatch examples/slurm.sh configs/nmt/demo.toml --run runs/first
#
# Adjust the five lines below to your cluster. The run folder and the prepared data are on storage that all
# machines share. The same command continues a run, also on another number of machines.
#SBATCH --job-name=gradvac
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
# Two minutes before the time is over, all processes save and leave.
#SBATCH --signal=TERM@120
# What was preempted comes again, and goes on.
#SBATCH --requeue
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$first:${PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 \
    -m gradvac -- nmt train "$@"
