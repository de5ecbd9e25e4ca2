"""Tests of examples/smollm2.py: a GGUF file becomes an ordinary checkpoint with the same logits.

Read next: examples/smollm2.py.
"""

import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from examples import smollm2
from nanogrpo.model import checkpoint
from nanogrpo.model.tokenizer import Tokenizer
from tests.conftest import positions_of, said

gguf = pytest.importorskip("gguf")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def for_llama_cpp(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of q_proj or k_proj [H·E, D] for llama.cpp, which rotates adjacent pairs."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gguf_file(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    c = original.config
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(c.max_position_embeddings)
    out.add_block_count(c.num_hidden_layers)
    out.add_embedding_length(c.hidden_size)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(c.num_attention_heads)
    out.add_head_count_kv(c.num_key_value_heads)
    out.add_rope_dimension_count(c.head_dim)
    out.add_rope_freq_base(c.rope_parameters["rope_theta"])
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_vocab_size(c.vocab_size)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *bytes_to_unicode().values(), "1Ġ", "he", "ĠĠ"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(tokens)
    out.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    out.add_token_merges(["1 Ġ", "h e", "Ġ Ġ"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    for name, p in original.named_parameters():  # without the head, which is tied
        weight, layer = p.detach(), name.split(".")[-2]
        if layer in heads:
            weight = for_llama_cpp(weight, heads[layer])
        out.add_tensor(names.get_name(name, [".weight"]), weight.contiguous().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


@pytest.fixture(scope="module")
def converted(gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    smollm2.convert(gguf_file, folder)
    return folder


def test_the_converted_model_has_the_logits_of_the_original(original, converted):
    ids = torch.randint(3, 262, (20,))
    expected = original(ids[None]).logits[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(converted)
    torch.testing.assert_close(theirs(ids[None]).logits[0], expected)
    ours = checkpoint.load_model(converted)(ids, *positions_of([20]))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_converted_tokenizer_writes_each_digit_as_a_token(converted):
    tokenizer = Tokenizer(converted)
    assert tokenizer.stop_token_ids == [2]
    digits = tokenizer.encode("121 he")
    assert [tokenizer.decode([i]) for i in digits] == ["1", "2", "1", " ", "he"]
    text = tokenizer.render(said("hi"))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text)[0] == 1
    theirs = transformers.AutoTokenizer.from_pretrained(converted)
    assert theirs.encode("121 he", add_special_tokens=False) == digits
    assert theirs.eos_token_id == 2
