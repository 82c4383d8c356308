"""What can be refused of teachers made of the student, and of those that read verdicts; see `opd.checks`."""

from __future__ import annotations

from collections.abc import Iterator

from opd.config import TrainConfig
from opd.teachers import ReadsVerdicts, SelfTeacher


def _used(config: TrainConfig, name: str) -> list[str]:
    """Streams with a term under the teacher."""
    terms = {term_name for term_name, term in config.loss.items() if name in term.teachers}
    return [
        stream_name
        for stream_name, stream in config.data.streams.items()
        if terms & (terms if stream.terms is None else set(stream.terms))
    ]


def _self_teachers_fit(config: TrainConfig) -> Iterator[str]:
    for name, teacher in config.teacher.items():
        if not isinstance(teacher, SelfTeacher) or not _used(config, name):
            continue
        key = f"teacher.{name}"
        if teacher.student != config.student:
            yield (
                f"{key}.student: {teacher.student.model} under other settings than the student's; leave it at "
                "'${student}', or use teacher=local for another model"
            )
        if teacher.is_live and teacher.template is None:
            yield (
                f"{key}: weights={teacher.weights} are the student's of now, and without a template the teacher sees "
                "the student's prompt, so that the divergence is always 0: set a template that shows more, or "
                "weights=frozen or ema"
            )
        if teacher.weights == "adapter_off" and config.student.lora is None:
            yield f"{key}.weights=adapter_off: the student has no adapter; use student=lora, or weights=frozen"
        if teacher.borrows_student and config.engine.zero_stage == 3:
            yield (
                f"{key}.weights={teacher.weights}: runs the student's module outside the engine, which ZeRO 3 takes "
                "apart; set engine.zero_stage=2, or use weights=frozen, ema or refresh"
            )


def _verdicts_are_there(config: TrainConfig) -> Iterator[str]:
    for name, teacher in config.teacher.items():
        used = _used(config, name)
        if isinstance(teacher, ReadsVerdicts) and teacher.reads_verdicts and used and not config.reward:
            yield (
                f"teacher.{name} ({type(teacher).__name__}) needs rewards, and there is none: add e.g. "
                "+reward@reward.correct=exact, or leave verdicts and siblings out of its template"
            )
        if isinstance(teacher, SelfTeacher) and teacher.reads_siblings:
            for stream in used:
                if config.data.streams[stream].samples < 2:
                    yield (
                        f"data.streams.{stream}.samples={config.data.streams[stream].samples}: teacher.{name} shows a "
                        "sibling's correct answer, and a group of one has no sibling; raise samples"
                    )


SELF_RULES = (_self_teachers_fit, _verdicts_are_there)
