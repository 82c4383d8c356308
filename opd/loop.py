"""The training loop: one call per stage."""

from __future__ import annotations

from opd.run import Run


def train(run: Run) -> None:
    """Runs the steps that remain; `run` is started, and closed by the caller."""
    for step in run.remaining_steps():
        with run.stage("sample"):
            rollouts = run.answers.sample(step, run.step_seed(step))
        with run.stage("reward"):
            rewards = run.answers.judge(rollouts)
            rollouts, rewards = run.answers.refill(step, run.step_seed(step), rollouts, rewards)
        with run.stage("score"):
            scores = run.teachers.score(rollouts, rewards)
        credits = run.credits(rollouts, rewards)
        batch = run.batch(run.rows(rollouts, rewards, scores, credits))
        findings = run.diagnose(step, batch)
        with run.stage("update"):
            update = run.engine.update(batch, run.objective(step), run.teacher_heads)
        with run.stage("sync"):
            run.sampler.sync(run.engine.weights(), version=step + 1)
            run.teachers.follow(run.engine.weights, step + 1)
        run.finish_step(step + 1, rollouts, rewards, {**findings, **update})
