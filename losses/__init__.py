"""Loss formulas: per-token values from a chunk, and nothing else."""

from opd.losses.corrections import MIS, TIS, Correction, SequenceMask, TokenMask
from opd.losses.divergences import (
    JSD,
    AdaptiveKL,
    ForwardKL,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    TotalVariation,
)
from opd.losses.estimators import CrossEntropy, SampledKL, SampledReverseKL
from opd.losses.policy_gradients import BPO, CISPO, GSPO, SAPO, PPOClip, ScoreCentering, TeacherModulated
from opd.losses.protocol import AnalyticLoss, ClippedLoss, Formula, Loss, Need, RowLoss, TokenLoss
from opd.losses.ranked import GOLD, ULD
from opd.losses.truncated import TruncatedReverseKL
from opd.losses.views import AtTemperature, GatedByEntropy, Geometric, OnTopK, StopClass, Toward, Veto

__all__ = [
    "BPO",
    "CISPO",
    "GOLD",
    "GSPO",
    "JSD",
    "MIS",
    "SAPO",
    "TIS",
    "ULD",
    "AdaptiveKL",
    "AnalyticLoss",
    "AtTemperature",
    "ClippedLoss",
    "Correction",
    "CrossEntropy",
    "Formula",
    "ForwardKL",
    "GatedByEntropy",
    "Geometric",
    "Loss",
    "Need",
    "OnTopK",
    "PPOClip",
    "ReverseKL",
    "RowLoss",
    "SampledKL",
    "SampledReverseKL",
    "ScoreCentering",
    "SequenceMask",
    "SkewForwardKL",
    "SkewReverseKL",
    "StopClass",
    "TeacherModulated",
    "TokenLoss",
    "TokenMask",
    "TotalVariation",
    "Toward",
    "TruncatedReverseKL",
    "Veto",
]
