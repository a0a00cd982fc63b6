"""Trainer settings, table [trainer]."""

from trainer.config.operation import (
    BatchConfig,
    CheckpointConfig,
    GangConfig,
    PipelineConfig,
    PublishConfig,
    TrackingConfig,
)
from trainer.config.optimization import (
    AlgorithmConfig,
    ImportanceMode,
    KLConfig,
    KLEstimator,
    LoRAConfig,
    LossAggregation,
    OptimizerConfig,
)
from trainer.config.trainer_config import Setting, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "GangConfig",
    "ImportanceMode",
    "KLConfig",
    "KLEstimator",
    "LoRAConfig",
    "LossAggregation",
    "OptimizerConfig",
    "PipelineConfig",
    "PublishConfig",
    "Setting",
    "TrackingConfig",
    "TrainerConfig",
]
