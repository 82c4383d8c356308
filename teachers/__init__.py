"""Teachers: what scores the student's own samples."""

from opd.teachers.local import LocalTeacher
from opd.teachers.protocol import AnsweringTeacher, GivesFullVocab, LimitsLength, Teacher
from opd.teachers.scorer import ScorerTeacher
from opd.teachers.served import ServedTeacher

__all__ = [
    "AnsweringTeacher",
    "GivesFullVocab",
    "LimitsLength",
    "LocalTeacher",
    "ScorerTeacher",
    "ServedTeacher",
    "Teacher",
]
