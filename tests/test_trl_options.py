"""Tests of TRL's words: every option of TRL has an answer, and those accepted mean the same here.

Read next: nanogrpo/extras/trl_names.py, docs/trl.md.
"""

import collections
import dataclasses
import logging
import re
import runpy
from pathlib import Path

import peft
import pytest
import torch
import transformers
import trl
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetMixtureConfig

import nanogrpo
from nanogrpo import Config
from nanogrpo.config import dashed
from nanogrpo.errors import UserError
from nanogrpo.extras import commandline, trl_names
from nanogrpo.extras.commandline import parse
from tests import ranks
from tests.conftest import pairs, refused

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/trl.md").read_text()
OURS = {f.name: f.default for f in dataclasses.fields(Config)}
REMOVED = trl_names.REMOVED
NAMES = [name for table in trl_names.TABLES for name in trl_names.rows(table)]


def names(*classes: type) -> set[str]:
    return {f.name for each in classes for f in dataclasses.fields(each)}


ALL = names(trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments, DatasetMixtureConfig)
ADDED = names(trl.GRPOConfig) - names(transformers.TrainingArguments)


def run(caplog, *argv: str) -> tuple[Config, list[str]]:
    """Return the options of a command line, and what was logged about it."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "nanogrpo"):
        cfg = parse(list(argv))
    return cfg, [record.getMessage() for record in caplog.records]


# --- the tables -----------------------------------------------------------------------------------


def test_every_option_of_trl_has_exactly_one_answer():
    answers = collections.Counter([*NAMES, *((OURS.keys() | REMOVED.keys()) & ALL)])
    assert answers.keys() >= ALL
    assert {name: n for name, n in answers.items() if n > 1} == {}, "drop it from trl_names.py"
    outdated = {"env", "torch_dtype", "warmup_ratio"}  # a key of TRL's YAML, and former names
    assert set(NAMES) - ALL == outdated


def test_answers_name_options_that_exist():
    answers = [f"--{dashed(ours)}" for ours in trl_names.RENAMED.values()]
    answers += [text for table in trl_names.TABLES[1:] for text in table.values()]
    engine = {"model-impl"}
    named = {name for text in answers for name in re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", text)}
    assert named - {dashed(name) for name in OURS} == engine


def test_the_documentation_has_the_tables():
    """If this fails, put the output of `python docs/trl_tables.py` into docs/trl.md."""
    assert runpy.run_path(str(ROOT / "docs/trl_tables.py"))["tables"]() in TEXT


THEIRS = trl.GRPOConfig(output_dir="-", use_cpu=True, bf16=False, report_to="none")


def listed() -> set[str]:
    table = TEXT.split("## Same option, different default or meaning\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_defaults_are_those_of_trl_unless_the_table_says_otherwise():
    assert listed() <= OURS.keys() & ALL
    shared = names(trl.GRPOConfig) & OURS.keys() - listed()
    assert len(shared & ADDED) > 25
    for name in sorted(shared):
        ours, default = OURS[name], getattr(THEIRS, name)
        if isinstance(ours, tuple):
            ours = list(ours) or None
        # an empty text and false are how an option is left out here
        assert ours == default or (default is None and ours in ("", False)), name


# --- what is accepted -----------------------------------------------------------------------------


UNDERSTOOD = pairs("""
--learning_rate 1e-4 --max-completion_length=64
    learning_rate=1e-4 max_completion_length=64
--model_name_or_path m --dataset_name d
    model=m data=d
--scale_rewards False
    scale_rewards=none
--scale_rewards True
    scale_rewards=group
--gradient_checkpointing
    gradient_checkpointing=full
--gradient_checkpointing --beta 1
    gradient_checkpointing=full beta=1.0
--gradient_checkpointing false
    gradient_checkpointing=none
--activation_checkpointing True
    gradient_checkpointing=full
--log_completions true --resume False
    log_completions=True
--log_completions=True --no_enable_thinking
    log_completions=True enable_thinking=False
--sync_ref_model --beta 1
    ref_model_sync_steps=512 beta=1.0
--sync_ref_model --beta 1 --ref_model_sync_steps 9
    ref_model_sync_steps=9 beta=1.0
--use_vllm
    engine=vllm
--use_vllm --weight_transport broadcast
    engine=vllm weight_transport=broadcast
--use_vllm False
    engine=local
--use_vllm --vllm_mode colocate
    engine=vllm
--use_vllm --vllm_enable_sleep_mode
    engine=vllm vllm_enable_sleep_mode=True
--use_vllm --vllm_gpu_memory_utilization 0.3
    engine=vllm vllm_options=--gpu-memory-utilization=0.3
--vllm_gpu_memory_utilization 0.3
    engine=local
--use_vllm --vllm_mode server --vllm_tensor_parallel_size 2
    engine=vllm server=http://127.0.0.1:8000
--vllm_mode colocate
    engine=local
--use_vllm --vllm_mode server
    engine=vllm server=http://127.0.0.1:8000
--use_vllm --vllm_server_host h --vllm_server_port 9
    engine=vllm server=http://h:9
--use_vllm --vllm_server_base_url http://h:1
    engine=vllm server=http://h:1
--vllm_importance_sampling_correction
    vllm_importance_sampling_mode=sequence_mask
--vllm_importance_sampling_correction false
    vllm_importance_sampling_mode=off
--vllm_importance_sampling_correction --vllm_importance_sampling_mode token_mask
    vllm_importance_sampling_mode=token_mask
--vllm_importance_sampling_cap 2
    vllm_importance_sampling_clip_max=2.0
--bf16
    dtype=auto
--bf16 True --fp16 False --hub_token null --shuffle_dataset true
    dtype=auto
--fp16
    dtype=float16
--use_cpu
    device=cpu
--cast_lm_head_to_fp32
    head_dtype=float32
--use_peft
    lora_r=16
--use_peft --lora_r 8
    lora_r=8
--use_peft --load_in_4bit --bnb_4bit_quant_type nf4 --use_bnb_nested_quant
    lora_r=16 load_in_4bit=True
--use_peft --lora_target_modules all-linear
    lora_r=16
--resume_from_checkpoint
    resume=True
--eval_strategy no --save_strategy steps
    eval_steps=0
--eval_strategy steps --eval_steps 5
    eval_steps=5
--save_strategy no
    save_steps=0
--vllm_importance_sampling_mode false --eval_strategy false
    vllm_importance_sampling_mode=off eval_steps=0
--eval_on_start --eval_steps 5
    eval_steps=5
--eval_on_start --use_cpu False --use_peft False
    lora_r=0
--warmup_ratio 0.1
    warmup_steps=0.1
--max_steps -1 --num_train_epochs 2.5
    num_train_epochs=2.5
--logging_steps 1 --dataloader_num_workers 4 --report_to none
    engine=local
""")


@pytest.mark.parametrize(
    ("argv", "expected"),
    UNDERSTOOD,
)
def test_trls_words_are_understood(argv, expected):
    changed = {
        name: " ".join(value) if isinstance(value, tuple) else str(value)
        for name, value in dataclasses.asdict(parse(argv.split())).items()
        if value != OURS[name]
    }
    wanted = dict(pair.split("=", 1) for pair in expected.split())
    wanted = {n: v for n, v in wanted.items() if v not in (str(OURS[n]),)}
    assert {n: float(v) if n == "learning_rate" else v for n, v in changed.items()} == {
        n: float(v) if n == "learning_rate" else v for n, v in wanted.items()
    }


def test_the_steps_of_a_profile_are_enough_for_an_eval_strategy():
    assert parse(["--profile", "debug", "--eval_strategy", "steps"]).eval_steps == 2


def test_one_table_says_what_became_of_trls_options(caplog):
    argv = "--use_vllm --model_name_or_path m --scale_rewards False --logging_steps 1 --beta 1"
    _, (table,) = run(caplog, *argv.split())
    title, *rows = table.splitlines()
    assert title == "TRL's options became:"
    assert sorted(tuple(re.split("  +", row.strip())) for row in rows) == [
        ("--logging-steps", "ignored, because every step is logged, by the first process"),
        ("--model-name-or-path m", "--model m"),
        ("--scale-rewards False", "--scale-rewards none"),
        ("--use-vllm", "--engine vllm"),
    ]
    assert run(caplog, "--beta", "1")[1] == []


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize(
    "theirs",
    [
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6},
        {"gradient_accumulation_steps": 2},
        {
            "per_device_train_batch_size": 4,
            "steps_per_generation": 6,
            "gradient_accumulation_steps": 3,
        },
        {"per_device_train_batch_size": 8, "steps_per_generation": 4},
        {"per_device_train_batch_size": 8, "generation_batch_size": 64},
        {
            "per_device_train_batch_size": 2,
            "generation_batch_size": 32,
            "gradient_accumulation_steps": 2,
        },
    ],
)
def test_the_batch_is_that_of_trl(monkeypatch, theirs, processes):
    """TRL itself computes the completions of a generation and of an optimizer step."""
    monkeypatch.setattr(trl.GRPOConfig, "world_size", property(lambda self: processes))
    args = trl.GRPOConfig(output_dir="-", use_cpu=True, bf16=False, num_generations=2, **theirs)
    updates = args.steps_per_generation // args.gradient_accumulation_steps
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    argv = [word for name, value in theirs.items() for word in (f"--{name}", str(value))]
    cfg = parse(argv)
    expected = args.generation_batch_size, updates
    assert (cfg.generation_batch_size, cfg.steps_per_generation) == expected
    if processes == 1:  # a GRPOConfig of several processes needs torchrun
        cfg = Config.from_trl(args)
        assert (cfg.generation_batch_size, cfg.steps_per_generation) == expected


REFUSED = pairs("""
--fp16_full_eval
    --fp16-full-eval is an option of TRL: it is not supported here, because evaluations
--bnb_4bit_quant_type fp4
    --bnb-4bit-quant-type is an option of TRL: it is not supported here, because the
--optim paged_adamw_8bit --model m --data d
    --optim is 'paged_adamw_8bit': choose one
--deepspeed ds.json
    --deepspeed is an option of TRL: start one process per GPU with to
--greater_is_better false
    --greater-is-better False is not supported: the best checkpoint has the highest value
--use_vllm --engine local
    --use-vllm means --engine vllm, but --engine local is given
--use_vllm --vllm_mode both
    --vllm-mode both is not supported: colocate, the default
--use_peft false --lora_r 8
    --use-peft False means --lora-r 0, but --lora-r 8 is given too: leave one of them out
--resume_from_checkpoint 5
    --resume-from-checkpoint 5 is not supported: true is --resume, which continues from
--eval_strategy epoch
    --eval-strategy epoch is not supported: steps changes nothing, and no is --eval-steps 0; \
otherwise give a number to --eval-steps.
--save_strategy epoch
    --save-strategy epoch is not supported: steps changes nothing
--eval_strategy steps
    --eval-strategy steps needs --eval-steps: give a number of steps
--per_device_train_batch_size x
    --per-device-train-batch-size is 'x' but must be a wh
--per_device_train_batch_size 0
    --per-device-train-batch-size is 0 but must be a whol
--gradient_accumulation_steps 4 --steps_per_generation 6
    --gradient-accumulation-steps 4 does not divide the 6 micro-batches of a generation
--per_device_train_batch_size 8 --generation_batch_size 60
    --generation-batch-size 60 is not a multiple of --per-device-train-batch-size times
--per_device_train_batch_size 8 --generation_batch_size 64 --steps_per_generation 8
    --generation-batch-size and --steps-per-generation determine the batch: leave out
--resume_from_checkpoint=
    --resume-from-checkpoint  is not supported: true is --re
--num-train-epoch 2
    --num-train-epoch is not an option: use --num-train-epochs, or
--use-vlm
    --use-vlm is not an option: use --use-vllm, or see --help
--quantization_config x
    --quantization_config is not an option
--data a --dataset_name b
    --dataset-name and --data are the same option: remove one.
""")


@pytest.mark.parametrize(
    ("argv", "message"),
    REFUSED,
)
def test_a_word_without_a_meaning_here_gets_one_sentence(argv, message):
    with refused(re.escape(message)) as error:
        parse(argv.split()).validate()
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("name", [n for t in trl_names.TABLES[2::2] for n in trl_names.rows(t)])
def test_every_option_without_an_equal_is_refused_or_may_be_off(name):
    with refused(f"--{dashed(name)} is an option of TRL: "):
        parse([f"--{name}", "something"])
    assert parse([f"--{name}", "false"]) == Config()


def test_a_default_of_trl_asks_for_nothing():
    for name, value in trl_names.NEUTRAL.items():
        known = {getattr(THEIRS, name, None), getattr(trl.ModelConfig, name, None)}
        assert value in known, name
        assert parse([f"--{name}", str(value)]) == Config()


# --- objects --------------------------------------------------------------------------------------


def grpo_config(**options) -> trl.GRPOConfig:
    return trl.GRPOConfig(use_cpu=True, bf16=False, **options)


OPTIONS = """
output_dir: a
lr_scheduler_type: cosine
optim: adamw_torch
num_train_epochs: 2
beta: 0.1
scale_rewards: false
eval_strategy: steps
eval_steps: 5
report_to: tensorboard
gradient_checkpointing: false
reward_weights: [1.0, 2.0]
logging_steps: 1
generation_batch_size: 32
model_init_kwargs: {dtype: bfloat16}
"""


def test_objects_mean_what_their_options_mean_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text(OPTIONS)
    args = grpo_config(**commandline._read_yaml(tmp_path / "c.yaml"))
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    more = "--use_cpu --steps_per_generation 4 --beta 0.2 --lora_r 4 --lora_alpha 8"
    more += " --lora_target_modules q_proj v_proj"
    expected = parse(["--config", f"{tmp_path}/c.yaml", *more.split()])
    assert Config.from_trl(args, peft_config=lora, beta=0.2) == expected
    # the defaults are left out, apart from the batch
    expected = Config(model="m", device="cpu", generation_batch_size=8, data=("d",))
    assert Config.from_trl(grpo_config(), model="m", dataset_name="d") == expected


def test_a_model_object_stands_for_the_folder_it_was_loaded_from(tiny_base):
    base = str(tiny_base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    assert Config.from_trl(model=model, processing_class=tokenizer) == Config(model=base)
    tokenizer.chat_template += "!"
    other = message(Config.from_trl, model=base, processing_class=tokenizer)
    assert other.startswith(f"the run uses the chat template of {base}, but processing_class has")
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert f"whose weights are not in {base}: save it" in message(Config.from_trl, model=model)
    model.config._name_or_path = ""
    assert "not in any folder" in message(Config.from_trl, model=model)


def port(base: Path, folder: Path) -> list[int]:
    data = [{"prompt": f"{i}+1="} for i in range(8)]
    args = grpo_config(
        output_dir=str(folder), max_steps=9, num_generations=2, max_completion_length=8
    )
    rows = nanogrpo.train(
        str(base), args=args, reward_funcs="format", train_dataset=data, on_step=lambda row: True
    )
    return rows.steps


def test_a_port_runs_under_torchrun_and_all_ranks_stop_together(tiny_base, tmp_path):
    assert ranks.run(2, port, tiny_base, tmp_path / "run") == [[1], [1]]
    assert (tmp_path / "run/checkpoint-1/state.json").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"args": 3}, "3 is not a GRPOConfig: pass a GRPOConfig, or leave it out"),
        ({"model": 3}, "model is a int whose weights are not in any folder: save it and the tok"),
        ({"peft_config": object()}, " is not a LoraConfig: pass a LoraConfig"),
        ({"peft_config": {"lora_dropout": 0.1}}, "--lora-dropout is an option of TRL: it is not"),
        ({"peft_config": {"bias": "all"}}, "lora_bias is not an option: "),
        ({"callbacks": [print]}, "callbacks is not an option: pass a function as on_step"),
    ],
)
def test_an_object_without_a_meaning_here_gets_one_sentence(given, sentence):
    if isinstance(given.get("peft_config"), dict):
        given = {"peft_config": peft.LoraConfig(**given["peft_config"])}
    assert sentence in message(Config.from_trl, **given)


# --- names in other libraries, and several mistakes -----------------------------------------------


def message(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    return str(error.value)


def test_a_name_of_another_library_names_the_option_in_every_spelling(tmp_path):
    words = trl_names.rows(trl_names.SYNONYMS)
    assert not words.keys() & (OURS.keys() | ALL | set(NAMES) | REMOVED.keys())
    named = {n for text in words.values() for n in re.findall(r"--([a-z][a-z0-9-]*)", text)}
    assert named <= {dashed(name) for name in OURS}
    hint = "is an option of TRL, which Config.from_trl translates: generation_batch_size and"
    assert hint in message(Config, per_device_train_batch_size=8)
    assert message(Config, learning_rat=1).endswith("use learning_rate, or see --help.")
    for name, advice in words.items():
        in_python = f"{name} is not an option: {trl_names.in_python(advice)}."
        assert message(Config, **{name: 1}) == in_python
        (tmp_path / "c.yaml").write_text(f"{name}: 1")
        assert message(parse, ["--config", f"{tmp_path}/c.yaml"]).endswith(in_python)
        for option in (f"--{name}", f"--{dashed(name)}", f"--{name}=1"):
            plain = option.removesuffix("=1")
            assert message(parse, [option, "1"]) == f"{plain} is not an option: {advice}."
    words = ["--seed", "1", "actor_rollout_ref.rollout.n=8"]
    assert message(parse, words).endswith("use --num-generations.")


def test_all_mistakes_are_reported_together(tmp_path):
    def firsts(call, *args) -> list[str]:
        return [line.split()[0] for line in message(call, *args).splitlines()]

    argv = "--kl_coef 1 --modle m --num-generations four --fp16_full_eval --top-p 2 --seed 1 x"
    expected = ["--kl_coef", "--modle", "x", "--num-generations", "--fp16-full-eval"]
    assert firsts(parse, argv.split()) == expected
    (tmp_path / "c.yaml").write_text(
        "seed: many\nlr: 1\nresume_from: x\nfp16_full_eval: 1\nbeta: 1"
    )
    expected = ["--config", "lr", "resume_from", "--fp16-full-eval"]
    assert firsts(parse, ["--config", f"{tmp_path}/c.yaml"]) == expected
    assert firsts(Config(model="m", top_p=2.0).validate) == ["--data", "--top-p"]
    cfg = Config(model="m", data=("d",), lora_adapter="a", delta=2.0, loss_type="sapo")
    assert firsts(cfg.validate) == ["--delta", "--lora-adapter"]


# --- files ----------------------------------------------------------------------------------------

YAML = """
# TRL's documentation has files like this one
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: openai/gsm8k
learning_rate: 1e-6            # a text for PyYAML, a number in YAML 1.2, as below
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
max_steps: -1
num_train_epochs: 1
bf16: true
use_vllm: true
vllm_mode: colocate
scale_rewards: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 1e-1}
chat_template_kwargs: {enable_thinking: false}
warmup_steps: 0.1
eval_strategy: no              # false for PyYAML
vllm_importance_sampling_mode: off
reward_weights: [1e+0, .1e1]
report_to: wandb
use_peft: true
lora_target_modules: all-linear
logging_steps: 10
deepspeed: null
"""


def test_a_yaml_file_of_trl_is_understood(tmp_path):
    (tmp_path / "grpo.yaml").write_text(YAML)
    cfg = parse(["--config", str(tmp_path / "grpo.yaml"), "--learning_rate", "2e-6"])
    cfg.validate()
    expected = Config(
        model="Qwen/Qwen3-0.6B",
        data=("openai/gsm8k",),
        learning_rate=2e-6,
        generation_batch_size=16,
        num_train_epochs=1.0,
        engine="vllm",
        scale_rewards="none",
        gradient_checkpointing="full",
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        enable_thinking=False,
        warmup_steps=0.1,
        reward_weights=(1.0, 1.0),
        report_to=("wandb",),
        lora_r=16,
    )
    assert cfg == expected


def test_null_stands_for_the_default_and_is_not_mentioned(caplog, tmp_path):
    (tmp_path / "nulls.yaml").write_text("".join(f"{name}: null\n" for name in sorted(ALL)))
    assert run(caplog, "--config", str(tmp_path / "nulls.yaml")) == (Config(), [])


def test_the_last_layer_that_says_how_long_to_train_decides(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("num_train_epochs: 2")
    both = f"--profile full --config {file}".split()
    cfg = parse(both)
    assert (cfg.num_train_epochs, cfg.max_steps) == (2.0, Config.max_steps)
    cfg = parse([*both, "--max-steps", "7"])
    assert (cfg.num_train_epochs, cfg.max_steps) == (0.0, 7)
    file.write_text("num_train_epochs: 2\nmax_steps: 9")
    with refused("--num-train-epochs 2 and --max-steps 9 both say how long"):
        parse(f"--model m --data d --config {file}".split()).validate()
