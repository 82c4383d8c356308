"""Teachers: what scores the student's own samples."""

from opd.teachers.api import ApiTeacher
from opd.teachers.cross_tokenizer import CrossTokenizerTeacher
from opd.teachers.local import LocalTeacher
from opd.teachers.pooling import PoolingTeacher
from opd.teachers.protocol import (
    AnsweringTeacher,
    FollowsStudent,
    GivesFullVocab,
    LimitsLength,
    OwnTokens,
    ReadsVerdicts,
    Teacher,
    TriesExamples,
)
from opd.teachers.scorer import ScorerTeacher
from opd.teachers.self_teacher import SelfTeacher
from opd.teachers.served import ServedTeacher
from opd.teachers.spans import SpanTeacher

__all__ = [
    "AnsweringTeacher",
    "ApiTeacher",
    "CrossTokenizerTeacher",
    "FollowsStudent",
    "GivesFullVocab",
    "LimitsLength",
    "LocalTeacher",
    "OwnTokens",
    "PoolingTeacher",
    "ReadsVerdicts",
    "ScorerTeacher",
    "SelfTeacher",
    "ServedTeacher",
    "SpanTeacher",
    "Teacher",
    "TriesExamples",
]
