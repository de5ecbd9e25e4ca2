"""A small tokenizer folder for tests: byte-level BPE and two chat templates.

Out: `make_folder`, used by the tests of the tokenizer, of data and of reward models. Read next:
test_tokenizer.py.
"""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = """{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{
        raise_exception('unknown role ' ~ message.role) }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + eos_token + '\\n' }}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Has the features of Qwen3's template: a thinking switch, tools through tojson, removal of old
# thoughts, namespaces, slices, a break.
QWEN3_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last_user and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if message.reasoning_content is defined %}{%
        set content = message.reasoning_content + content %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ content }}{{
        '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def make_folder(folder, template=QWEN3_LIKE, *, in_config=False, config=(), generation=None):
    """Write the tokenizer files of a model: byte-level BPE with the end token <|im_end|>. As in
    Qwen3, <think> is an ordinary added token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(
        ["user assistant system how many apples are in the basket"] * 3, trainer
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "bos_token": None,
        **dict(config),
    }
    if template is not None and in_config:
        settings["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
