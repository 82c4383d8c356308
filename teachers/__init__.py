"""Teachers: what scores the student's own samples."""

from opd.teachers.local import LocalTeacher
from opd.teachers.protocol import Teacher

__all__ = ["LocalTeacher", "Teacher"]
