"""Where a self teacher's weights come from: a copy of the student's that follows it, or the student's own module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from peft import PeftModel
from peft.tuners import lora
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from opd.heads import Head, logit_maps, split_model

Weights = Callable[[], Iterable[tuple[str, Tensor]]]  # gathers (Hugging Face name, whole tensor), all ranks together


class Copy:
    """A copy of the start weights, which moves toward the student by `share` every `every` steps; never where None.

    theta <- theta + share * (student - theta). The sum is kept in fp32, whatever the network's dtype: in bf16 small
    steps would be lost to rounding.
    """

    def __init__(self, network: PreTrainedModel, every: int | None, share: float) -> None:
        self.network, self.every, self.share = network, every, share
        self._parameters = dict(network.named_parameters())  # a tied head is there once
        self._exact = {name: parameter.detach().float() for name, parameter in self._parameters.items() if share < 1.0}

    @contextmanager
    def lent(self) -> Iterator[PreTrainedModel]:
        """The network, to be run without gradients."""
        yield self.network

    def head(self) -> Head:
        """The network's own."""
        return split_model(self.network)[1]

    @torch.no_grad()
    def follow(self, weights: Weights, step: int) -> None:
        """After the update to `step`; the weights are asked for only where the copy moves.

        Raises:
            RuntimeError: the student lacks a weight.
        """
        if self.every is None or step % self.every:
            return
        missing = set(self._parameters)
        for name, tensor in weights():
            if name not in self._parameters:
                continue  # a tied head under its second name
            parameter = self._parameters[name]
            if name in self._exact:
                exact = self._exact[name]
                exact.lerp_(tensor.to(exact), self.share)
                parameter.copy_(exact)
            else:
                parameter.copy_(tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"the self teacher could not follow: the student has no weights {sorted(missing)[:5]}")

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: nothing of a copy that never moves."""
        return {} if self.every is None else {**self._parameters, **self._exact}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave."""
        for name, parameter in self._parameters.items():
            parameter.copy_(state[name])
            if name in self._exact:
                self._exact[name].copy_(state[name])


class Borrowed:
    """The student's own module, its adapter off or on; given back as it was: modes, gradient flags, settings."""

    def __init__(self, student: nn.Module, adapter_off: bool) -> None:
        self.student, self.adapter_off = student, adapter_off

    @contextmanager
    def lent(self) -> Iterator[PreTrainedModel]:
        """The network in evaluation mode, to be run without gradients."""
        base = self.student.get_base_model() if isinstance(self.student, PeftModel) else self.student
        assert isinstance(base, PreTrainedModel), "the student is a transformers model, perhaps under an adapter"
        training, settings = self.student.training, base.generation_config
        flags = [(parameter, parameter.requires_grad) for parameter in self.student.parameters()]
        adapter = self.student if self.adapter_off and isinstance(self.student, PeftModel) else None
        try:
            with nullcontext() if adapter is None else adapter.disable_adapter():
                self.student.eval()
                yield base
        finally:
            self.student.train(training)
            base.generation_config = settings
            for parameter, flag in flags:  # switching an adapter on again has set them anew
                parameter.requires_grad_(flag)

    def head(self) -> Head:
        """The student's; with the adapter off that of the base model, not one that `modules_to_save` trains."""
        if not self.adapter_off or not isinstance(self.student, PeftModel):
            return split_model(self.student)[1]
        base = self.student.get_base_model()
        assert isinstance(base, PreTrainedModel), "the student is a transformers model under an adapter"
        layer = base.get_output_embeddings()
        layer = layer.original_module if isinstance(layer, ModulesToSaveWrapper) else layer
        layer = layer.base_layer if isinstance(layer, lora.Linear) else layer
        assert isinstance(layer, nn.Linear), "the engine takes linear heads only"
        return replace(Head(layer.weight, layer.bias), **logit_maps(base.config))

    def follow(self, weights: Weights, step: int) -> None:
        """Nothing: it is the student."""

    def state(self) -> dict[str, Tensor]:
        """Nothing: the student's own checkpoint holds it."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Nothing."""
