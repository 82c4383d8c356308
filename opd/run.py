"""A run: its parts, assembled cheaply, started once, and kept through checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from opd import ranks
from opd.answers import Answers, inside_vocabulary
from opd.api_plan import spending, try_templates
from opd.batching import make_batch
from opd.checkpoint import Checkpoints, lock_run_dir, move_aside, read_state
from opd.checks import check
from opd.config import TrainConfig
from opd.credit import informative_share
from opd.diagnostics import diagnose
from opd.engine import Engine, init_distributed
from opd.evaluate import Evaluator, check_prompts
from opd.metrics import logp_gaps, rollout_metrics, values
from opd.objective import Objective
from opd.observe import Observer
from opd.parity import check_parity
from opd.prompts import Prompts
from opd.records import Batch, Credit, Mean, Reward, Rollout, TeacherScores
from opd.rewards import RewardStage
from opd.rows import Row, joined
from opd.schedules import Schedule, Watching
from opd.scoring import TeacherStage
from opd.terms import Term, check_sources, terms_on
from opd.weighting import Facts, split_by_rows


class Run:
    """Everything that a loop needs. `prepare` reads tokenizers and data, `load` loads weights and starts engines."""

    def __init__(self, config: TrainConfig, resolved: str) -> None:
        self.config, self.resolved = config, resolved
        self.sampler, self.credit = config.sampler, config.credit
        self.terms = list(config.loss.values())
        self.run_dir = Path(config.run_dir)
        self.checkpoints = Checkpoints(self.run_dir, config.checkpoint)
        self.micro_batch_tokens = config.engine.micro_batch_tokens
        self.rewards = RewardStage(
            list(config.reward.values()), config.reward_policy.time_limit, config.reward_policy.on_error
        )
        self.teachers = TeacherStage(config.teacher, self.terms, config.data.streams, self.rewards.pair_teachers)
        self.terminated, self.step = False, 0
        self._started = ExitStack()  # closes what has been started, the newest first

    def prepare(self) -> None:
        """Tokenizes the data and refuses what cannot work, a damaged checkpoint too; no weights are read."""
        self.tokenizer = self.config.student.tokenizer()
        pad_id = self.tokenizer.pad_token_id
        assert isinstance(pad_id, int), "a student's tokenizer always has a padding token"
        self.pad_id = pad_id
        self.stop_ids = self.config.student.stop_ids(self.tokenizer)
        check(self.config, self.tokenizer)
        self.teachers.meet(self.tokenizer, self.stop_ids)
        ends = [teacher.tokenizer().eos_token_id for teacher in self.teachers.same_tokens.values()]
        self.all_stop_ids = tuple(sorted({*self.stop_ids, *(end for end in ends if isinstance(end, int))}))
        self.prompts = Prompts(self.config.data, self.tokenizer, self.config.seed)
        check_sources(self.terms, self.prompts)
        self.teachers.check_examples(self.prompts.told)
        try_templates(self.config, self.prompts)
        self.answers = Answers(self.prompts, self.sampler, self.rewards, self.tokenizer, self.teachers.answering)
        self.latest = None if self.config.resume == "never" else self.checkpoints.latest()

    def already_finished(self) -> bool:
        """Whether the run folder holds a finished run of at least as many steps."""
        if self.latest is None or not (self.run_dir / "summary.json").exists():
            return False
        return read_state(self.latest)["step"] >= self.config.steps

    def load(self) -> None:
        """Loads weights and engines, and continues from the newest checkpoint, if there is one."""
        init_distributed()
        config = self.config
        if config.resume == "never":
            if self.run_dir.exists() and (probe := lock_run_dir(self.run_dir)) is not None:
                probe.close()  # a run that still goes on there would have refused it
            move_aside(self.run_dir)
        self.observer = Observer(self.run_dir, config.steps, list(config.logger.values()), config.alarms, self.resolved)
        self._started.callback(self.observer.close)
        self._seed(config.seed)
        self.engine = Engine(config.student.load(), config.engine, config.student.dtype)
        self._started.callback(self.answers.close)
        self.answers.start(config.student)
        max_len = config.data.max_prompt_tokens + max(config.sampler.params.max_tokens, config.eval.max_tokens or 0)
        self.teachers.start(max_len, self.engine.module.model)
        self._started.callback(self.teachers.close)
        self.vocab_size = self._shared_vocabulary()
        self.answers.vocab_size = self.vocab_size
        self.teacher_heads = self.teachers.heads(self.vocab_size, config.engine.resident_heads)
        self.sampler.start(config.student, self.tokenizer, self.stop_ids, max_len)
        self._started.callback(self.sampler.close)
        self.evaluator = Evaluator(
            config.eval, self.prompts, self.rewards, self.teachers, self.teacher_heads, self.engine,
            self.vocab_size, self.micro_batch_tokens, self.pad_id,
        )  # fmt: skip
        if self.latest is not None:
            state = read_state(self.latest)
            self.step = state["step"]
            self.engine.load(self.latest)
            self.teachers.load(self.latest)
            self.answers.learning.load(self.latest)
            self.observer.restore(state)
        self.sampler.sync(self.engine.weights(), version=self.step)

    def begin(self) -> None:
        """Opens the run folder, checks the sampler, and evaluates the start weights of a new run."""
        if (lock := lock_run_dir(self.run_dir)) is not None:
            self._started.enter_context(lock)
        self.observer.start(self.step)
        self.check_parity()
        if (owed := self.observer.owes_eval) or not self.observer.history:
            self.evaluate()  # owed: a server was gone when it was due
        if owed:
            self.save()

    def _shared_vocabulary(self) -> int:
        """The ids that student and teachers share: heads may be padded to different widths.

        Raises:
            ValueError: a teacher's head does not reach all tokens of the student.
        """
        widths = {"student": self.engine.module.vocab_size}
        sharing = {n: teacher for n, teacher in self.teachers.whole.items() if n in self.teachers.same_tokens}
        widths |= {f"teacher.{name}": len(teacher.head().weight) for name, teacher in sharing.items()}
        narrowest, last = min(widths, key=lambda name: widths[name]), max(self.tokenizer.get_vocab().values())
        if widths[narrowest] <= last:
            rows = widths[narrowest]
            raise ValueError(f"{narrowest}.model: its head has {rows} rows, the tokenizer ids up to {last}")
        return widths[narrowest]

    def remaining_steps(self) -> Iterator[int]:
        """Numbers of the steps still to do; ends early after `stop_after` of them, or on SIGTERM."""
        stop_after = self.config.steps if self.config.stop_after is None else self.config.stop_after
        last = min(self.config.steps, self.step + stop_after)
        while self.step < last:
            self.terminated = self.observer.asked_to_stop()
            if self.terminated:
                return
            self._seed(self.step_seed(self.step))
            yield self.step

    def finish(self) -> None:
        """Saves where the run stands; a run that did all its steps leaves `summary.json`."""
        self.keep()
        if self.step >= self.config.steps:
            self.observer.write_summary(self.step)

    def keep(self) -> None:
        """Saves the current step, if that has not been done."""
        latest = self.checkpoints.latest()
        if latest is None or read_state(latest)["step"] != self.step:
            self.save()

    def step_seed(self, step: int) -> int:
        """All random numbers of a step follow from it, so a resumed run draws what an unbroken one would."""
        return (self.config.seed * 1_000_003 + step * 101) % 2**31

    def _seed(self, seed: int) -> None:
        random.seed(seed + ranks.rank())
        numpy.random.seed(seed + ranks.rank())
        torch.manual_seed(seed + ranks.rank())

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Context that adds its wall time to `time/<name>`."""
        return self.observer.stage(name)

    def rows(
        self,
        rollouts: Sequence[Rollout],
        rewards: Sequence[Reward],
        scores: Mapping[str, Sequence[TeacherScores | None]],
        credits: Sequence[Credit],
    ) -> list[Row]:
        """Rollouts joined with what is known of them.

        Raises:
            RuntimeError: a rollout was sampled by other weights than the current ones.
        """
        stale = sorted({rollout.version for rollout in rollouts if rollout.version != self.step})
        if stale:
            raise RuntimeError(f"rollouts of weight versions {stale} reached the update of version {self.step}")
        terms = [frozenset(term.name for term in self._terms_on(rollout)) for rollout in rollouts]
        return joined(rollouts, rewards, credits, scores, terms)

    def _terms_on(self, rollout: Rollout) -> list[Term]:
        return terms_on(rollout.prompt, self.terms, self.config.data.streams)

    def credits(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Credit]:
        """Credit of the rows that a term with advantages trains on; the others do not move any mean."""
        return self.credit.assign(rollouts, self._that_count(rollouts, rewards))

    def _that_count(self, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> list[Reward]:
        return [
            reward if any(term.needs_advantage for term in self._terms_on(rollout)) else Reward(None)
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]

    def batch(self, rows: Sequence[Row]) -> Batch:
        """The rows as an update; preceded by a pass without gradients where a term needs what only that can tell."""
        facts: Facts = ()
        if any(term.needs_facts for term in self.terms):
            bare = make_batch(rows, [], self.micro_batch_tokens, self.pad_id)
            objective = replace(self.objective(self.step), terms=[], weights={})
            found = [outcome.statistics for _, outcome in self.engine.measure(bare, objective, self.teacher_heads)]
            facts = split_by_rows(rows, bare.order, found)
        progress = self.step / self.config.steps
        return make_batch(rows, self.terms, self.micro_batch_tokens, self.pad_id, facts, progress)

    def objective(self, step: int) -> Objective:
        """The terms with their weights at this step."""
        progress = step / self.config.steps
        return Objective(
            terms=self.terms,
            weights={term.name: self._weight(term)(progress) for term in self.terms},
            vocab_size=self.vocab_size,
            temperature=self.sampler.params.temperature,
            chunk_tokens=self.config.engine.chunk_tokens,
            progress=progress,
            stop_ids=self.all_stop_ids,
        )

    def diagnose(self, step: int, batch: Batch) -> dict[str, Mean]:
        """What the gradients of the terms say of each other before the update, every `diagnostics.every` steps."""
        asked = self.config.diagnostics
        if not asked.every or (step + 1) % asked.every:
            return {}
        with self.stage("diagnose"):
            return diagnose(self.engine, batch, self.objective(step), self.teacher_heads, asked.tokens)

    def _weight(self, term: Term) -> Schedule:
        weight = term.weight
        return weight.informed_by(self.observer.history) if isinstance(weight, Watching) else weight

    def finish_step(
        self, step: int, rollouts: Sequence[Rollout], rewards: Sequence[Reward], update: Mapping[str, Mean]
    ) -> None:
        """Logs the step; evaluates, checks parity and saves when due."""
        self.step = step
        weights = {f"weight/{name}": Mean(w, 1.0) for name, w in self.objective(step - 1).weights.items()}
        judged = self._that_count(rollouts, rewards)
        learns = any(term.needs_advantage for term in self.terms)
        groups = {"reward/informative_groups": informative_share(rollouts, judged)} if learns else {}
        groups |= spending(self.config)
        parts = rollout_metrics(rollouts), self.answers.metrics, self.teachers.metrics, groups, weights, update
        merged = ranks.merged({name: mean for part in parts for name, mean in part.items()})
        tokens = ranks.sums({"tokens": float(self.answers.sampled_tokens)})["tokens"]
        self.observer.log_step(step, values(merged), int(tokens))
        done = step >= self.config.steps
        saves = done or step % self.config.checkpoint.every == 0
        compares = saves and (self.config.checkpoint.best_metric or "").startswith("eval/")
        if done or compares or step % self.config.eval.every == 0:
            self.evaluate()
        if step % self.config.parity.every == 0:
            self.check_parity()
        if saves:
            self.save()

    def evaluate(self) -> None:
        """Held-out metrics of the current weights, logged under the current step; once, the teacher's accuracy too."""
        if not self.evaluator.has_problems:
            return
        self.observer.owes_eval = True
        with self.stage("eval"):
            metrics, judged = self.evaluator.student(self.sampler)
            if self.config.eval.teacher and self.rewards.terms and "teacher" not in self.observer.evals:
                self.observer.evals["teacher"] = self.evaluator.teacher_accuracy(self.sampler.params)
        self.observer.log_eval(self.step, values(metrics), judged)

    def check_parity(self) -> None:
        """Stops the run when the sampler does not hold the trainer's weights."""
        prompts = ranks.share(check_prompts(self.prompts, self.config.parity.prompts))
        params = replace(self.sampler.params, top_p=1.0, top_k=0, min_p=0.0)  # the trainer knows the full softmax
        rollouts = inside_vocabulary(self.sampler.sample(prompts, params, seed=0), self.vocab_size)
        temperature = params.temperature
        outcomes = self.evaluator.measure(rollouts, {}, temperature)
        check_parity(logp_gaps(outcomes), self.config.parity.limit)

    def save(self) -> None:
        """Writes a checkpoint of the current step."""
        with self.stage("checkpoint"):
            self.checkpoints.save(self.step, self.observer.state(self.step), self._write)

    def _write(self, folder: Path) -> None:
        self.engine.save(folder, self.config.student, self.tokenizer)
        self.teachers.save(folder)
        self.answers.learning.save(folder)

    def close(self) -> None:
        """Releases engines, workers and displays."""
        self._started.close()
