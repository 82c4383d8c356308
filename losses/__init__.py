"""Loss formulas: per-token values from a chunk, and nothing else."""

from opd.losses.divergences import JSD, ForwardKL, ReverseKL
from opd.losses.policy_gradients import PPOClip
from opd.losses.protocol import AnalyticLoss, Formula, Loss, Need

__all__ = ["JSD", "AnalyticLoss", "ForwardKL", "Formula", "Loss", "Need", "PPOClip", "ReverseKL"]
