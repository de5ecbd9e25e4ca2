"""A user's mistake on the command line ends a run with one sentence, exit status 2, and nothing
written: one row per mistake.

FILES is a folder with data and rewards (conftest.files), and LONG is a text of 300 letters.
Mistakes in a model's folder are in test_bad_input.py, in the output folder in run/test_output.py;
values of the wrong type or outside their range in test_config.py. Read next:
tests/configurations.py.
"""

import pytest

import train
from tests.conftest import arguments, one_sentence, pairs

# The arguments, and words that the sentence must contain, in this order where … separates them.
MISTAKES = pairs("""
# --- spelling ---
--num-generation 4
    --num-generation is not an option: use --num-generations, or see
--learning_rates=1e-4
    --learning_rates is not an option: use --learning-rate, or see
--profil debug
    --profil is not an option: use --profile, or see
--lr 1e-4
    --lr is not an option: use --learning-rate
runs/base
    runs/base is not an option: see
--model warmup:60
    --model warmup:STEPS was removed: run `nanogrpo warmup FOLDER`
--num-generations four
    --num-generations is 'four' but must be a whole number
--num-generations 2.5
    --num-generations is '2.5' but must be a whole number
--max-steps 1.5
    --max-steps is '1.5' but must be a whole number
--temperature warm
    --temperature is 'warm' but must be a number
--reward-weights 1 two
    --reward-weights is [1.0, 'two'] but must be a list of numbers
--seed
    --seed is True but must be a whole number
--resume=maybe
    --resume is 'maybe' but must be true or false
--chat-template-kwargs {
    --chat-template-kwargs is '{' but must be an object
--chat-template-kwargs 3
    --chat-template-kwargs is 3 but must be an object
# --- values ---
--num-generations 1
    --num-generations is 1: it must be >= 2
--num-generations 6
    --generation-batch-size 16 is not a multiple of --num-generations 6
--temperature inf
    --temperature is inf: give a number below 1e38
--epsilon-high 1e39
    --epsilon-high is 1e+39: give a number below 1e38
--max-concurrent 99999999999
    --max-concurrent is 99999999999: it must be <= 65536
--loss-type ppo
    --loss-type is 'ppo': choose one of grpo, bnpo, dr_grpo, dapo
--max-completion-length 256
    --max-completion-length 256 leaves no room for a prompt in a
--warmup-steps nan
    --warmup-steps is nan
# --- files of options ---
--config FILES/none.json
    none.json is missing
--config FILES/none.yml
    none.yml cannot be read (No such file or directory): correct it
--config .
    --config . is not valid JSON (Is a directory)
--profile fast
    --profile is 'fast': choose one of debug, full
--beta -1 --print-config
    --beta is -1
# --- schedules ---
--lr-scheduler-type linear --lr-scheduler-kwargs {"a":1}
    linear has no setting a: give none
--lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs {"cycles":1}
    no setting cycles: give min_lr or min_lr_rate
--lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs {"min_lr":"2"}
    min_lr is '2': give a number, 0 or more
--lr-scheduler-type cosine_with_min_lr --lr-scheduler-kwargs {"min_lr":-1}
    min_lr is -1: give
--lr-scheduler-type cosine_with_min_lr
    needs min_lr or min_lr_rate: give exactly one
--lr-scheduler-type warmup_stable_decay
    needs num_decay_steps: give exactly one
# --- models ---
--model FILES/reward.py
    reward.py: there is no such folder
--model LONG
    xxx: there is no such folder
# --- data ---
--data LONG
    xxx cannot be read (File name too long)
--eval-steps 1 --eval-data LONG
    xxx cannot be read (File name too long)
--data FILES/empty.jsonl
    empty.jsonl holds no prompts
--data FILES/nowhere.jsonl
    nowhere.jsonl is not a .jsonl file
--data FILES/broken.jsonl
    broken.jsonl:3: not JSON
--data FILES/long.jsonl
    long.jsonl:9: the prompt has 300 tokens
--max-prompt-length 3
    data.jsonl:1: the prompt has 4 tokens
--generation-batch-size 64
    holds 12 prompts but a step draws 16
--eval-steps 1
    there are no held-out prompts: name some with --eval-data
--load-best-model-at-end --eval-steps 20
    compares checkpoints that were evaluated, but
--load-best-model-at-end --eval-steps 1 --save-steps 0
    compares checkpoints that were eval
--load-best-model-at-end --metric-for-best-model accuracy --eval-steps 1 --save-steps 1 \
--eval-data FILES/data.jsonl
    accuracy is not a metric of the evaluation: choose one of even, mean_length, reward
--prompt-column query
    data.jsonl:1: it has no column 'query' but 'prompt'
--chat-template-kwargs {"thinking":true}
    sets thinking, but the model's chat template
--system-prompt none.txt
    --system-prompt none.txt is not a file
# --- rewards ---
--reward-funcs reasoning_gym
    reasoning_gym scores the problems of --data reasoning_gym:
--reward-funcs FILES/reward.py:odd
    odd
--environment-factory examples.tools:Calculator --reward-funcs accuracy
    --reward-funcs environment calls get_reward of
--tools examples.tools:multiply --reward-funcs environment
    environment calls get_reward of
# --- tools ---
--tools nowhere
    --tools: 'nowhere' is neither package.module:name nor path/file.py:name
--tools FILES/reward.py:no
    has no function 'no'
--rollout no.such.module:f
    importing 'no.such.module' raised ModuleNotFoundError
--tools a:b --rollout a:b
    --rollout cannot be used with --tools, because
--rollout a:b --engine vllm --max-staleness 1
    --rollout cannot be used with --max-staleness, because its turns are sampled with the
# --- adapters ---
--lora-r 2 --lora-target-modules lm_head
    --lora-target-modules is 'lm_head': choose one
--lora-r 2 --lora-adapter LONG
    adapter_config.json … (File name too long)
--lora-alpha 8
    --lora-alpha is 8.0, which has no effect without --lora-r
# --- vision encoders ---
--freeze-vision-tower
    --freeze-vision-tower is for a vision encoder, which --model
--lora-r 2 --lora-target-modules linear_fc1
    --lora-target-modules linear_fc1 is for a vision encoder
# --- objectives, advantages, entropy, importance weights ---
--delta 2 --loss-type sapo
    --delta 2.0 cannot be used with --loss-type sapo
--loss-type dppo_kl --importance-sampling-level sequence
    --importance-sampling-level sequence cannot be used with --loss-type dppo_kl
--loss-kwargs {"a":1}
    --loss-kwargs is … which has no effect with --loss-type dapo
--loss-type sapo --loss-kwargs {"vespo_k_pos":1}
    --loss-kwargs: --loss-type sapo has no constant vespo_k_pos: give one of sapo_
--loss-type vespo --loss-kwargs {"vespo_k_pos":0}
    vespo_k_pos is 0: give a number above
--sapo-temperature-pos 2
    --sapo-temperature-pos is an option of TRL: use --loss-kwargs
--use-adaptive-entropy
    --use-adaptive-entropy is an option of TRL: use a constant
--trace-step 3
    --trace-step was removed: use torch.profiler
--top-entropy-quantile 0.5 --loss-type vespo
    --top-entropy-quantile cannot be used with
--advantage-estimator rloo --scale-rewards batch
    --scale-rewards batch cannot be combined, because rloo,
--advantage-estimator maxrl --multi-objective-aggregation normalize_then_sum
    --advantage-estimator maxrl, --multi-objective-aggregation normalize_then_sum and --scale
--scale-rewards none --multi-objective-aggregation normalize_then_sum
    --scale-rewards none cannot be combined
--loss-type vespo --vllm-importance-sampling-mode sequence_mask
    --vllm-importance-sampling-mode sequence_mask cannot be used with --loss-type vespo
# --- the reference model ---
--ref-model-sync-steps 9
    --ref-model-sync-steps is 9, which has no effect without --beta: set that
--ref-model-sync-steps 9 --beta 0.1 --lora-r 4
    --ref-model-sync-steps cannot be used with --lora-r, because the reference is then
# --- vLLM ---
--engine vllm --server http://127.0.0.1:1 --top-p 0.9 --eval-steps 1 --eval-temperature 1 \
--eval-data FILES/data.jsonl
    --eval-temperature 1.0 cannot be used with --top-p and --engine vllm, because
--engine vllm --server http://127.0.0.1:1 --vllm-options x
    --vllm-options is for a server that the trainer starts, but
--engine vllm --server http://127.0.0.1:1 --vllm-gpus 1
    --vllm-gpus is for a server that the trainer starts, but
--engine vllm --vllm-importance-sampling-mode token_mask --vllm-importance-sampling-clip-min 2
    do not enclose 1
--old-logp-from engine
    --old-logp-from was removed: use --vllm-importance-sampling-mode
--dppo-penalty 1
    --dppo-penalty was removed: give it in --loss-kwargs
--server http://127.0.0.1:1
    which has no effect with --engine local: choose vllm
--engine vllm --vllm-enable-sleep-mode --max-staleness 1
    --vllm-enable-sleep-mode cannot be used with --max-staleness
--engine vllm --temperature 3
    --temperature 3.0 is outside the range of vLLM: give a value between 0.01
--engine vllm --vllm-options='
    close the quotes
--engine vllm --vllm-gpus one
    --vllm-gpus is 'one': write different numbers
--engine vllm --vllm-gpus 1,1
    --vllm-gpus is '1,1': write different numbers
--engine vllm --vllm-gpus 0
    need a GPU, but the trainer uses a CPU: leave them out
""")


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_is_one_sentence(tiny_base, files, tmp_path, capsys, options, words):
    argv = arguments(tiny_base, files, tmp_path / "run")
    options = options.replace("FILES", str(files)).replace("LONG", "x" * 300)
    assert train.main(argv + options.split()) == 2
    found, place = one_sentence(capsys), 0
    for part in words.split(" … "):
        place = found.find(part, place)
        assert place >= 0, found
    # so the corrected command needs no further option
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
