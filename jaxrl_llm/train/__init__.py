"""Composes a run: stages, the loop, one step, evaluation and checkpoints.

`from jaxrl_llm import train` is all that a gin file of a run needs of the framework.
"""

from jaxrl_llm.distributed.mesh import MeshConfig
from jaxrl_llm.distributed.processes import Hosts
from jaxrl_llm.learner.optimizer import Optimizer
from jaxrl_llm.learner.packing import Packing
from jaxrl_llm.learner.router import Router
from jaxrl_llm.metrics.console import Console
from jaxrl_llm.metrics.prometheus import Prometheus
from jaxrl_llm.metrics.trackers import MLflow, Trackio
from jaxrl_llm.metrics.watchdog import Watchdog
from jaxrl_llm.metrics.writers import Jsonl, TensorBoard, WandB
from jaxrl_llm.rollouts.collect import DynamicSampling
from jaxrl_llm.rollouts.curriculum import Curriculum
from jaxrl_llm.rollouts.episodes import Episodes
from jaxrl_llm.rollouts.pairs import AboveTheMean, BestAgainstWorst, DemonstrationAgainstSample
from jaxrl_llm.train.checkpoint import Checkpointing
from jaxrl_llm.train.load import TrainedModel
from jaxrl_llm.train.old_logprobs import GapRule
from jaxrl_llm.train.phases import BuPO, TokenBuncher
from jaxrl_llm.train.run import Run
from jaxrl_llm.train.stage import Stage

__all__ = [
    "AboveTheMean",
    "BestAgainstWorst",
    "BuPO",
    "Checkpointing",
    "Console",
    "Curriculum",
    "DemonstrationAgainstSample",
    "DynamicSampling",
    "Episodes",
    "GapRule",
    "Hosts",
    "Jsonl",
    "MLflow",
    "MeshConfig",
    "Optimizer",
    "Packing",
    "Prometheus",
    "Router",
    "Run",
    "Stage",
    "TensorBoard",
    "TokenBuncher",
    "Trackio",
    "TrainedModel",
    "WandB",
    "Watchdog",
]
