"""Install nanogrpo: `pip install -e .` (add `[plot]`, `[tensorboard]`, `[wandb]`, `[vllm]`,
`[flash]`, `[test]` or `[bench]`).

The packages are named one by one. `kernels/` holds the Triton kernels at the top level, where a
reader finds them, but is installed as `nanogrpo.kernels`: a top-level package `kernels` would
shadow the Hugging Face package of that name (nanogrpo/kernels.py tells the whole story).
"""

from setuptools import setup

TRAIN = [
    "torch>=2.11,<2.14",
    "triton>=3.6,<3.8; platform_system == 'Linux'",
    "numpy>=1.26",
    "safetensors>=0.5",
]
TEXT = ["tokenizers>=0.21", "huggingface_hub>=0.30", "jinja2>=3.1.6", "rich>=13"]
PLOT = ["matplotlib>=3.8"]
TENSORBOARD = ["tensorboard>=2.18"]
# TRL needs Python 3.11; on 3.10 the parity tests against it are not collected (tests/conftest.py).
PEERS = ["peft>=0.19,<1", "transformers>=5,<6", "trl==1.16.0; python_version >= '3.11'"]
# setuptools: a test builds the wheel. Without a GPU the kernels' tests run in Triton's interpreter,
# and that of Triton 3.6 (with torch 2.11) fails on numpy >= 2.4: install "numpy<2.4" beside it, a
# condition that no requirement can express. Training is fine.
TEST = [
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff",
    "mypy>=1.14",
    "pyarrow>=16",
    "setuptools>=77",
]

FOLDERS = ["data", "distributed", "engine", "grpo", "logs", "model", "rewards", "run", "vllm"]

setup(
    name="nanogrpo",
    version="0.1.0",
    description="GRPO for language models, whole, in plain PyTorch and Triton",
    license="MIT",
    python_requires=">=3.10",
    packages=["nanogrpo", *(f"nanogrpo.{folder}" for folder in FOLDERS), "nanogrpo.kernels"],
    package_dir={"nanogrpo.kernels": "kernels"},
    py_modules=["train", "serve"],
    install_requires=TRAIN + TEXT,
    extras_require={
        "plot": PLOT,
        "tensorboard": TENSORBOARD,
        "wandb": ["wandb>=0.18"],
        "test": PLOT + TENSORBOARD + PEERS + TEST,
        "bench": PLOT + PEERS,
        "vllm": ["vllm==0.32.0"],
        "flash": ["flash-attn>=2.8"],
    },
)
