"""Prompts from files: what each kind of row becomes, what each bad row is told, and that `draw` is a fair, pure function.

Read next: test_answers.py and test_rewards.py, where the other columns end up.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import make_folder

from nanogrpo.batch import Prompt
from nanogrpo.data import _order, draw, from_rows, load
from nanogrpo.errors import UserError
from nanogrpo.rewards import same_answer
from nanogrpo.tokenizer import Tokenizer

GSM8K = Path(__file__).parent / "assets" / "gsm8k_tiny.jsonl"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Tokenizer.from_pretrained(make_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Tokenizer.from_pretrained(make_folder(tmp_path_factory.mktemp("plain"), None))


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return str(path)


# ---- rows ----------------------------------------------------------------------------------------------------------------------


def test_plain_and_conversational_rows_keep_every_other_column(tmp_path, chat):
    messages = [{"role": "user", "content": "3+4="}]
    rows = [{"prompt": "3+4=", "solution": 7, "level": None}, {"prompt": messages, "tags": ["a", {"b": 1}]}]
    path = write(tmp_path / "data.jsonl", "\ufeff" + json.dumps(rows[0]), "", "  ", json.dumps(rows[1]) + "\r", "")
    first, second = load(path, chat, enable_thinking=False)
    assert (first.id, first.text, first.columns) == (0, "3+4=", {"solution": 7, "level": None})
    assert first.token_ids == chat.encode("3+4=")
    assert (second.id, second.text, second.columns) == (1, messages, {"tags": ["a", {"b": 1}]})
    assert second.token_ids == chat.encode(chat.render(messages, enable_thinking=False))
    assert chat.decode(second.token_ids).endswith("</think>\n\n")
    assert [vars(p) for p in from_rows(rows, chat, enable_thinking=False)] == [vars(first), vars(second)]
    assert rows[0] == {"prompt": "3+4=", "solution": 7, "level": None}  # the caller's rows are left alone


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path, plain):
    text = "a\u2028b\u0085c"
    assert load(write(tmp_path / "d.json", json.dumps({"prompt": text}, ensure_ascii=False)), plain)[0].text == text


def test_gsm8k_rows_become_messages_or_text_and_a_solution(chat, plain):
    conversational, text = load(str(GSM8K), chat), load(str(GSM8K), plain)
    assert len(conversational) == len(text) == 12
    for a, b in zip(conversational, text):
        assert a.text == [{"role": "user", "content": b.text}]
        assert a.columns == b.columns
        assert set(a.columns) == {"answer", "solution"}
        assert a.columns["answer"].endswith("#### " + a.columns["solution"])
    solutions = [p.columns["solution"] for p in text]
    assert solutions == ["22", "80", "1,200", "12.5", "-5", "26", "270", "18", "350", "30", "1320", "16"]


def test_the_arithmetic_of_the_gsm8k_file_is_right():
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        steps = [part.split(">>")[0].split("=") for part in json.loads(line)["answer"].split("<<")[1:]]
        for term, result in steps:
            assert eval(term, {"__builtins__": {}}) == float(result), line
        assert same_answer(json.loads(line)["answer"].rpartition("####")[2], steps[-1][1])


def test_a_solution_column_is_not_overwritten_and_a_prompt_comes_before_a_question(plain):
    rows = [{"question": "q", "answer": "#### 1", "solution": "one"}, {"prompt": "p", "question": "q", "answer": "#### 1"}]
    first, second = from_rows(rows, plain)
    assert first.columns == {"answer": "#### 1", "solution": "one"}
    assert (second.text, second.columns) == ("p", {"question": "q", "answer": "#### 1"})


def test_parquet_gives_what_jsonl_gives(tmp_path, chat):
    pyarrow = pytest.importorskip("pyarrow")  # in the test extra; the package itself runs without it
    import pyarrow.parquet as parquet

    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "solution": str(i + 1)} for i in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    lines = write(tmp_path / "d.jsonl", *(json.dumps(row) for row in rows))
    assert [vars(p) for p in load(str(tmp_path / "d.parquet"), chat)] == [vars(p) for p in load(lines, chat)]
    with pytest.raises(UserError, match=r"d\.parquet, row 1: the prompt has \d+ tokens"):
        load(str(tmp_path / "d.parquet"), chat, max_prompt_length=3)
    (tmp_path / "not.parquet").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"not\.parquet cannot be read as Parquet"):
        load(str(tmp_path / "not.parquet"), chat)


# ---- mistakes ------------------------------------------------------------------------------------------------------------------

GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'a'}", "not JSON"),
        ('{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON .*utf-8"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON .*recursion"),
        ('["a"]', "a row must be an object .* this is a list"),
        ("{}", "no `prompt`"),
        ('{"question": "q", "answer": "42"}', "no `prompt`"),
        ('{"prompt": 3}', "`prompt` must be"),
        ('{"prompt": null}', "`prompt` must be"),
        ('{"prompt": []}', "`prompt` must be"),
        ('{"prompt": ["a"]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user"}]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "`prompt` must be"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "a\\ud800b"}', "cannot be encoded"),
        ('{"prompt": "a", "completions": 1}', "column 'completions'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, chat, line, message):
    path = write(tmp_path / "d.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError, match=message) as caught:
        load(path, chat)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_long_prompt_is_refused_with_its_line_its_length_and_the_limit(tmp_path, plain):
    path = write(tmp_path / "d.jsonl", GOOD, '{"prompt": "@@@@@@"}')
    assert len(load(path, plain, max_prompt_length=6)) == 2
    with pytest.raises(UserError) as caught:
        load(path, plain, max_prompt_length=5)
    assert str(caught.value) == (
        f"{path}:2: the prompt has 6 tokens and max_prompt_length is 5; raise max_prompt_length or remove the row"
    )


def test_files_that_are_no_data_set(tmp_path, chat, plain):
    for path, message in [
        (str(tmp_path / "none.jsonl"), r"none\.jsonl is not a file"),
        (str(tmp_path), "is not a file"),
        (write(tmp_path / "d.csv", "a,b"), "cannot tell the format from '.csv'"),
        (write(tmp_path / "empty.jsonl"), r"empty\.jsonl holds no prompts"),
        (write(tmp_path / "blank.jsonl", "", "  "), r"blank\.jsonl holds no prompts"),
    ]:
        with pytest.raises(UserError, match=message):
            load(path, chat)
    with pytest.raises(UserError, match="holds no prompts"):
        from_rows([], plain)
    with pytest.raises(UserError, match=r"d\.jsonl:1: .* no chat template"):
        load(write(tmp_path / "d.jsonl", '{"prompt": [{"role": "user", "content": "a"}]}'), plain)
    with pytest.raises(UserError, match="row 1: no `prompt`"):
        from_rows([{"prompt": "a"}, {}], plain)


# ---- draw ----------------------------------------------------------------------------------------------------------------------


def prompts(count):
    return [Prompt(id=i, text=str(i), token_ids=[i]) for i in range(count)]


def ids(drawn):
    return [prompt.id for prompt in drawn]


SEEDS = st.integers(-(2**63), 2**64)


@given(count=st.integers(1, 40), n=st.integers(1, 60), seed=SEEDS, epochs=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_every_prompt_once_an_epoch_and_no_prompt_twice_in_a_step(count, n, seed, epochs):
    data = prompts(count)
    steps = [ids(draw(data, n, seed, step)) for step in range(-(-epochs * count // n))]
    sequence = [i for step in steps for i in step]
    for e in range(epochs):
        assert sorted(sequence[e * count : (e + 1) * count]) == list(range(count))
    for step in steps:
        assert len(step) == n
        assert n > count or len(set(step)) == n


@given(count=st.integers(1, 30), n=st.integers(1, 40), seed=SEEDS, order=st.permutations(range(12)))
@settings(max_examples=50, deadline=None)
def test_draw_is_a_pure_function_of_seed_and_step(count, n, seed, order):
    data = prompts(count)
    forward = [ids(draw(data, n, seed, step)) for step in range(12)]
    for step in order:  # in any order, and without what earlier calls left in the cache, as in a resumed process
        _order.cache_clear()
        assert ids(draw(data, n, seed, step)) == forward[step]


def test_the_order_is_the_same_on_every_machine():
    """Written down, so that a change of the stream, which would break resuming, is seen."""
    assert [ids(draw(prompts(7), 3, seed=42, step=s)) for s in range(5)] == [
        [3, 5, 0],
        [4, 1, 6],
        [2, 5, 3],
        [1, 2, 4],
        [6, 0, 1],
    ]


def test_seeds_and_epochs_differ_and_positions_are_fair():
    data = prompts(50)
    assert len({tuple(ids(draw(data, 50, seed, step))) for seed in range(4) for step in range(4)}) == 16
    # 4000 seeds, 5 prompts, steps of 4: step 1 straddles the first boundary, where the order is bent. Still each prompt is as
    # likely at each place: expected 800, standard deviation 25; the bound is 5 of them.
    drawn = [ids(draw(prompts(5), 4, seed, step=1)) for seed in range(4000)]
    for place in range(4):
        seen = Counter(step[place] for step in drawn)
        assert all(abs(seen[i] - 800) < 125 for i in range(5))


def test_drawing_nothing_is_a_bug_of_the_caller():
    for data, n in (([], 1), (prompts(2), 0)):
        with pytest.raises(ValueError, match="cannot draw"):
            draw(data, n, 0, 0)
