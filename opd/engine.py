"""The DeepSpeed engine: a student forward through the streaming objective, backward, step. Alone imports deepspeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from opd import ranks
from opd.export import ADAPTER, WEIGHTS, write_adapter, write_weights
from opd.heads import Head, check_split, split_model
from opd.metrics import outcome_metrics
from opd.objective import Objective, Outcome, streamed_loss
from opd.records import Batch, Mean, MicroBatch, moved
from opd.students import HFStudent
from opd.students.model import Dtype
from opd.weight_sync import check_adapter, named_weights

Found = TypeVar("Found")
# Hidden states [N, H] of the trainable tokens, the student's head, the micro-batch, the teachers' heads, the objective.
Look = Callable[[Tensor, Head, MicroBatch, Mapping[str, Head], Objective], Found]

# DeepSpeed settings that would contradict ours or divide the loss once more, and what to set instead.
OWNED = {
    "train_batch_size": "micro_batch_tokens",
    "train_micro_batch_size_per_gpu": "micro_batch_tokens",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "gradient_clipping": "max_grad_norm",
    "optimizer": "engine.optimizer",
    "scheduler": "engine.scheduler",
    "zero_optimization.stage": "zero_stage",
    "bf16.enabled": "student.dtype",
    "fp16.enabled": "student.dtype",
}


@dataclass(frozen=True)
class EngineConfig:
    """How the student is stepped.

    Args:
        optimizer: parameters -> torch or DeepSpeed optimizer (`_partial_: true`).
        scheduler: optimizer -> learning-rate scheduler, stepped once per update; null keeps the rate.
        zero_stage: 0 to 3.
        micro_batch_tokens: padded tokens that go through the student at once; sets gradient accumulation.
        max_grad_norm: clipping, 0 for none.
        chunk_tokens: tokens whose logits exist at one time (256 suits a CPU, 1024 and more a GPU).
        resident_heads: teachers' heads in memory at one time; null for all.
        deepspeed: any further DeepSpeed setting, merged over ours key by key.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[..., Any] | None = None
    zero_stage: Literal[0, 1, 2, 3] = 0
    micro_batch_tokens: int = 8192
    max_grad_norm: float = 1.0
    chunk_tokens: int = 256
    resident_heads: int | None = None
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, own in OWNED.items():
            group, _, name = key.rpartition(".")
            settings = self.deepspeed.get(group, {}) if group else self.deepspeed
            if name in settings:
                raise ValueError(f"deepspeed.{key}={settings[name]}: the trainer decides this; set {own} instead")

    def settings(self, dtype: Dtype) -> dict[str, Any]:
        """The DeepSpeed configuration. Accumulation is explicit: the loss arrives already divided by global counts."""
        ours = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.max_grad_norm,
            "zero_optimization": {"stage": self.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == "bfloat16"},
            "steps_per_print": 2**31 - 1,
        }
        return _overlaid(ours, self.deepspeed)


def _overlaid(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`theirs` over `ours`, nested mappings key by key."""
    nested = {
        key: _overlaid(ours[key], value)
        for key, value in theirs.items()
        if isinstance(value, Mapping) and isinstance(ours.get(key), Mapping)
    }
    return {**ours, **theirs, **nested}


def init_distributed() -> None:
    """Joins (or, without a launcher, makes) the process group. Must precede an in-process vLLM engine."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(ranks.free_port()))
    import deepspeed  # its import probes the accelerator, which DS_ACCELERATOR must precede
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    # On a CPU DeepSpeed would compile this C++ kernel for a minute at first use, and fail where there is no compiler.
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)


class Engine:
    """Owns the student's weights, optimizer and schedule."""

    def __init__(self, model: nn.Module, config: EngineConfig, dtype: Dtype) -> None:
        import deepspeed

        check_adapter(model)
        check_split(model, *split_model(model), "student.model")
        self.config = config
        self.module = _Trainee(model)
        if config.zero_stage == 3:
            for parameter in self.module.head.parameters:  # used by the objective, outside its layer
                deepspeed.zero.register_external_parameter(self.module, parameter)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.deepspeed, _, _, self.scheduler = deepspeed.initialize(
            model=self.module,
            model_parameters=trained,  # pyright: ignore[reportArgumentType]: a list is what DeepSpeed documents
            optimizer=config.optimizer(trained),
            lr_scheduler=config.scheduler,
            config=config.settings(dtype),
        )
        self._gathered = deepspeed.zero.GatheredParameters

    @property
    def device(self) -> torch.device:
        """Where the student runs."""
        return next(self.module.parameters()).device

    def update(self, batch: Batch, objective: Objective, heads: Mapping[str, Head]) -> dict[str, Mean]:
        """One optimizer step on the batch; its metrics over this rank's share.

        A batch without any trainable token on any rank changes nothing and is counted in `update/skipped`.

        Raises:
            FloatingPointError: a term's loss is not finite; the weights are those before the step.
        """
        if not any(batch.term_counts.values()):
            return {"update/skipped": Mean(1.0, 1.0)}
        outcomes: list[tuple[MicroBatch, Outcome]] = []
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            if number > 1:
                self.deepspeed.step()  # not at a boundary: moves DeepSpeed's counters on, no more
            self.deepspeed.set_gradient_accumulation_boundary(number == len(batch.micro_batches))
            loss, outcome = self._forward(micro_batch, objective, heads)
            outcomes.append((micro_batch, outcome))
            self.deepspeed.backward(loss * ranks.world_size())  # DeepSpeed averages over ranks; ours is a global sum
        metrics = outcome_metrics(outcomes, objective)
        self._refuse_non_finite(metrics)
        norm, rate = self._plain_grad_norm(), self.deepspeed.get_lr()[0]  # the step moves the schedule on
        self.deepspeed.step()
        return metrics | {
            "grad_norm": Mean(self._finite_norm(self.deepspeed.get_global_grad_norm() or norm), 1.0),
            "lr": Mean(rate, 1.0),
            "update/skipped": Mean(0.0, 1.0),
        }

    @torch.no_grad()
    def measure(
        self, batch: Batch, objective: Objective, heads: Mapping[str, Head]
    ) -> list[tuple[MicroBatch, Outcome]]:
        """The objective's per-token results without a step."""
        self.deepspeed.eval()
        outcomes = [(micro, self._forward(micro, objective, heads)[1]) for micro in batch.micro_batches]
        self.deepspeed.train()
        return outcomes

    @torch.no_grad()
    def look(
        self, micro_batch: MicroBatch, objective: Objective, heads: Mapping[str, Head], look: Look[Found]
    ) -> Found:
        """What `look` finds in a micro-batch's last hidden states; without a step, all ranks together."""
        self.deepspeed.eval()
        found = self.deepspeed(moved(micro_batch, self.device), heads, objective, look)
        self.deepspeed.train()
        return found

    def _forward(
        self, micro_batch: MicroBatch, objective: Objective, heads: Mapping[str, Head]
    ) -> tuple[Tensor, Outcome]:
        loss, values, statistics = self.deepspeed(moved(micro_batch, self.device), heads, objective)
        return loss, Outcome(values, statistics)

    def _refuse_non_finite(self, metrics: Mapping[str, Mean]) -> None:
        local = {name: mean.sum for name, mean in metrics.items() if name.startswith("loss/")}
        broken = sorted(name for name, total in ranks.sums(local).items() if not isfinite(total))
        if broken:
            raise FloatingPointError(f"{', '.join(broken)} is not finite: stopped before the step, weights unchanged")

    def _plain_grad_norm(self) -> float:
        """The norm at ZeRO 0, whose fp32 path does not report it; 0 elsewhere (DeepSpeed knows it after the step)."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None] if self.config.zero_stage == 0 else []
        return self._finite_norm(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    @staticmethod
    def _finite_norm(norm: float | Tensor) -> float:
        value = float(norm)
        if not isfinite(value):
            raise FloatingPointError("the gradient norm is not finite; the last checkpoint is intact")
        return value

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every weight; all ranks must run through it together."""
        return named_weights(self.module.model, self._gather)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        return self._gathered(list(parameters)) if self.config.zero_stage == 3 else nullcontext()

    def save(self, folder: Path, student: HFStudent, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes engine state, and the weights as a Hugging Face folder (or the adapter alone); all ranks together."""
        self.deepspeed.save_checkpoint(str(folder), tag="engine", save_latest=False)
        if isinstance(self.module.model, PeftModel):
            with self._gather([p for p in self.module.model.parameters() if p.requires_grad]):
                write_adapter(self.module.model, tokenizer, folder / ADAPTER)
        else:
            write_weights(student, tokenizer, self.weights(), folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; all ranks together."""
        there = (folder / "engine").is_dir()  # DeepSpeed fails without a word of its own on an absent folder
        path = self.deepspeed.load_checkpoint(str(folder), tag="engine")[0] if there else None
        if path is None:
            raise FileNotFoundError(f"{folder}/engine: DeepSpeed found no complete state there")


class _Trainee(nn.Module):
    """The student and the objective as one module, so that DeepSpeed's hooks see the whole computation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

        self.vocab_size = len(self.head.weight)  # noted while the weight is whole: ZeRO-3 takes it apart

    @property
    def head(self) -> Head:
        """The student's head."""
        return split_model(self.model)[1]

    def forward(
        self, batch: MicroBatch, heads: Mapping[str, Head], objective: Objective, look: Look[Any] | None = None
    ) -> Any:
        """Loss, values per term, statistics; or what `look` finds instead."""
        body, head = split_model(self.model)
        states = body(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).last_hidden_state
        hidden, head = states.flatten(0, 1)[batch.tokens.predictor], head.narrowed(objective.vocab_size)
        if look is not None:
            return look(hidden, head, batch, heads, objective)
        loss, outcome = streamed_loss(hidden, head, batch, heads, objective)
        return loss, outcome.values, outcome.statistics
