"""The student: Hugging Face weights, whole or under an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class HFStudent:
    """A causal language model by local folder or hub name.

    Args:
        model: folder or hub name.
        dtype: of weights and activations; statistics and log-sum-exp are fp32 either way.
        lora: a `peft.LoraConfig`, or null to train all weights; its dropout is not applied.
        chat_template: path of a Jinja file that replaces the tokenizer's own chat template.
    """

    model: str
    dtype: Dtype = "float32"
    lora: PeftConfig | None = None
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    chat_template: str | None = None
    trust_remote_code: bool = False

    def load(self) -> nn.Module:
        """The model in training mode, its adapter attached, no dropout: the policy that sampled is trained.

        Raises:
            ValueError: the adapter fits no layer of the model.
        """
        config = AutoConfig.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)
        text = config.get_text_config()
        for key, value in text.to_dict().items():
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(text, key, 0.0)
        model = AutoModelForCausalLM.from_pretrained(
            self.model,
            config=config,
            dtype=torch.float32 if self.dtype == "float32" else torch.bfloat16,
            attn_implementation=self.attention,
            trust_remote_code=self.trust_remote_code,
        )
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        if self.lora is not None:
            try:
                model = get_peft_model(model, self.lora, autocast_adapter_dtype=False)
            except ValueError as error:
                raise ValueError(f"student.lora: {error}") from error
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.train()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with a padding token.

        Raises:
            ValueError: no file at `chat_template`, or neither a padding nor an end token.
        """
        tokenizer = AutoTokenizer.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)
        if self.chat_template is not None:
            template = Path(self.chat_template)
            if not template.is_file():
                raise ValueError(f"student.chat_template: no file {self.chat_template!r}")
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            raise ValueError(f"student.model: the tokenizer of {self.model!r} has neither a padding nor an end token")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Every id that ends an answer: the generation config's and the tokenizer's, in ascending order."""
        config = AutoConfig.from_pretrained(self.model, trust_remote_code=self.trust_remote_code)
        try:
            generation = GenerationConfig.from_pretrained(self.model)
        except OSError:  # a folder without generation_config.json
            generation = GenerationConfig.from_model_config(config)
        ids = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
        return sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})
