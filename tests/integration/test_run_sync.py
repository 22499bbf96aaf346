"""Weights from a real trainer to a real vLLM engine, whole and broken on purpose."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.engine import OptimizerConfig, TrainedRole
from plimsoll.config.model import ModelConfig
from plimsoll.config.rollout import RolloutConfig, SamplingConfig, SyncConfig
from plimsoll.data.packing import pack
from plimsoll.engine.process_group import Place, free_port
from plimsoll.engine.weights import WeightBucket, make_bucket, read_bucket
from plimsoll.engine.worker import Worker
from plimsoll.errors import WeightSyncError
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.recipes.arithmetic import make_tokenizer
from plimsoll.records import BatchCounts, Floats, Ints, Prompt, Sample, Trajectory, from_packed
from plimsoll.rollout.protocol import EngineSpec, Request
from plimsoll.rollout.sync import SyncReport, prove, sync_weights
from plimsoll.rollout.vllm import VllmEngine, environment

pytestmark = pytest.mark.slow
