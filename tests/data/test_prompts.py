"""Prompts from files: each kind of record becomes a prompt, and each bad record is reported.

Read next: test_order.py (which prompts a step draws), tests/rewards/test_rewards.py (the other
columns).
"""

import concurrent.futures
import csv
import json
import time
from pathlib import Path

import pytest

from nanogrpo.data import prompts
from nanogrpo.data.prompts import from_record, load_all, system_prompt
from nanogrpo.data.sources import holds_out
from nanogrpo.errors import UserError
from nanogrpo.model.tokenizer import Tokenizer
from nanogrpo.rewards.answers import compare
from tests.model.tokenizer_folder import CHATML, make_folder

GSM8K = Path(__file__).parent / "assets" / "gsm8k_tiny.jsonl"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Tokenizer(make_folder(tmp_path_factory.mktemp("plain"), None))


def load(source, tokenizer, **options):
    return load_all([source], tokenizer, **options)[0]


def fields(prompts):
    """Everything but the ids."""
    return [(p.text, p.token_ids, p.columns) for p in prompts]


def write(path, *lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return str(path)


# --- records ---


def test_plain_and_conversational_records_keep_every_other_column(tmp_path, chat):
    messages = [{"role": "user", "content": "3+4="}]
    rows = [
        {"prompt": "3+4=", "solution": 7, "level": None},
        {"prompt": messages, "tags": ["a", {"b": 1}]},
    ]
    path = write(
        tmp_path / "data.jsonl",
        "\ufeff" + json.dumps(rows[0]),
        "",
        "  ",
        json.dumps(rows[1]) + "\r",
        "",
    )
    first, second = load(path, chat, enable_thinking=False)
    assert (first.id, first.text, first.columns) == (0, "3+4=", {"solution": 7, "level": None})
    assert first.token_ids == chat.encode("3+4=")
    assert (second.id, second.text, second.columns) == (1, messages, {"tags": ["a", {"b": 1}]})
    assert second.token_ids == chat.encode(chat.render(messages, enable_thinking=False))
    assert chat.decode(second.token_ids).endswith("</think>\n\n")
    again = [from_record(row, chat, enable_thinking=False) for row in rows]
    assert fields(again) == fields([first, second])
    # the caller's records are not changed
    assert rows[0] == {"prompt": "3+4=", "solution": 7, "level": None}


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path, plain):
    text = "a\u2028b\u0085c"
    assert (
        load(write(tmp_path / "d.json", json.dumps({"prompt": text}, ensure_ascii=False)), plain)[
            0
        ].text
        == text
    )


def test_gsm8k_records_become_messages_or_text_and_a_solution(chat, plain):
    conversational, text = load(str(GSM8K), chat), load(str(GSM8K), plain)
    assert len(conversational) == len(text) == 12
    for a, b in zip(conversational, text):
        assert a.text == [{"role": "user", "content": b.text}]
        assert a.columns == b.columns
        assert set(a.columns) == {"answer", "solution"}
        assert a.columns["answer"].endswith("#### " + a.columns["solution"])
    solutions = [p.columns["solution"] for p in text]
    assert solutions == [
        "22",
        "80",
        "1,200",
        "12.5",
        "-5",
        "26",
        "270",
        "18",
        "350",
        "30",
        "1320",
        "16",
    ]


def test_the_arithmetic_of_the_gsm8k_file_is_right():
    for line in GSM8K.read_text(encoding="utf-8").splitlines():
        steps = [
            part.split(">>")[0].split("=") for part in json.loads(line)["answer"].split("<<")[1:]
        ]
        for term, result in steps:
            assert eval(term, {"__builtins__": {}}) == float(result), line
        assert compare(json.loads(line)["answer"].rpartition("####")[2], steps[-1][1])


def test_a_solution_column_is_not_overwritten_and_a_prompt_comes_before_a_question(plain):
    rows = [
        {"question": "q", "answer": "#### 1", "solution": "one"},
        {"prompt": "p", "question": "q", "answer": "#### 1"},
    ]
    first, second = (from_record(row, plain) for row in rows)
    assert first.columns == {"answer": "#### 1", "solution": "one"}
    assert (second.text, second.columns) == ("p", {"question": "q", "answer": "#### 1"})


def test_problems_and_questions_are_read_without_options(chat, plain):
    rows = [
        {"problem": "1+1?", "solution": "It is \\boxed{2}.", "level": 1},
        {"question": "1+1?", "answer": "two"},
    ]
    for row, column in zip(rows, ("problem", "question")):
        message, text = from_record(row, chat), from_record(row, plain)
        assert message.text == [{"role": "user", "content": "1+1?"}]
        assert text.text == "1+1?"
        rest = {name: value for name, value in row.items() if name != column}
        assert message.columns == text.columns == rest


def test_the_columns_of_prompt_and_answer_can_be_named(chat):
    row = {"prompt": "no", "query": "1+1?", "gold": "So\n#### 2 ", "solution": "long"}
    prompt = from_record(row, chat, prompt_column="query", answer_column="gold")
    assert prompt.text == [{"role": "user", "content": "1+1?"}]
    assert prompt.columns == {"prompt": "no", "gold": "So\n#### 2 ", "solution": "2"}
    messages = [{"role": "user", "content": "1+1?"}]
    assert from_record({"chat": messages}, chat, prompt_column="chat").text == messages
    assert from_record({"prompt": "1+1="}, chat, prompt_column="prompt").text == "1+1="
    number = from_record({"prompt": "1+1=", "n": 2}, chat, answer_column="n")
    assert number.columns == {"n": 2, "solution": 2}
    # a column with a name that only reward functions must not see can hold the prompt
    assert from_record({"prompts": "1+1="}, chat, prompt_column="prompts").columns == {}
    for option in ("prompt_column", "answer_column"):
        with pytest.raises(UserError) as caught:
            from_record({"prompt": "a", "b": 1}, chat, **{option: "c"})
        dashed = option.replace("_", "-")
        assert str(caught.value) == (
            f"record: it has no column 'c' but 'prompt', 'b'; name one of these with --{dashed}."
        )


def test_a_system_prompt_comes_before_each_prompt(chat, plain):
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "1+1?"}
    for row in ({"prompt": "1+1?"}, {"question": "1+1?"}, {"prompt": [user]}):
        prompt = from_record(row, chat, system_prompt="Be brief.")
        assert prompt.text == [system, user]
        assert prompt.token_ids == chat.encode(chat.render([system, user]))
        if row["prompt" if "prompt" in row else "question"] != [user]:
            assert from_record(row, plain, system_prompt="Be brief.").text == "Be brief.\n\n1+1?"
    for role in ("system", "developer"):
        row = {"prompt": [{"role": role, "content": "Be long."}, user]}
        with pytest.raises(
            UserError, match=r"have a system message already; leave --system-prompt"
        ):
            from_record(row, chat, system_prompt="Be brief.")
    with pytest.raises(UserError, match="the prompt is empty"):
        from_record({"prompt": ""}, chat, system_prompt="Be brief.")


def test_the_system_prompt_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "system.txt"
    file.write_text("Denke „gut“ nach.\nThen answer.\n\n", encoding="utf-8")
    assert system_prompt(str(file)) == "Denke „gut“ nach.\nThen answer."
    for text in ("", "Be brief.", "no/such/folder", "See notes.txt for it in a.txt", "a\n" * 5000):
        assert system_prompt(text) == text.strip()
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xff")
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for option, message in [
        (str(tmp_path / "none.txt"), r"none\.txt is not a file: correct the path"),
        (str(latin), r"latin cannot be read \(.*: give UTF-8"),
        (str(empty), r"empty\.txt is an empty file"),
        ("  ", "--system-prompt is blank"),
    ]:
        with pytest.raises(UserError, match=message):
            system_prompt(option)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_of_a_record_and_of_the_run_reach_the_chat_template(tmp_path, chat, plain):
    user = [{"role": "user", "content": "1+1?"}]
    want = chat.encode(chat.render(user, tools=[TOOL]))
    assert '"name": "add"' in chat.decode(want)
    filled = {**TOOL, "strict": None}  # as Arrow returns it if another schema has the field
    for row in ({"prompt": user}, {"prompt": "1+1?"}, {"question": "1+1?"}):
        for tools in ([TOOL], [filled], json.dumps([TOOL])):
            own = from_record({**row, "tools": tools}, chat)
            assert (own.token_ids, own.text) == (want, user)
            assert own.columns == {"tools": tools}
        ((given,),) = load_all([[row]], chat, tools=[TOOL])
        assert (given.token_ids, given.columns) == (want, {})
    for none in (None, [], ""):
        assert from_record({"prompt": "1+1=", "tools": none}, chat).text == "1+1="
    with pytest.raises(UserError, match=r"`tools` of its own, but --tools names others"):
        from_record({"prompt": user, "tools": [TOOL]}, chat, tools=[TOOL])
    silent = Tokenizer(make_folder(tmp_path, CHATML))
    for tokenizer in (silent, plain):
        with pytest.raises(UserError, match=r"chat template, if it has one, does not show tools"):
            from_record({"prompt": "1+1?"}, tokenizer, tools=[TOOL])


def test_variables_of_the_chat_template_are_passed_on(tmp_path):
    template = "{{ messages[0].content }} {{ style | default('plain') }}"
    tokenizer = Tokenizer(make_folder(tmp_path, template))
    row = {"prompt": [{"role": "user", "content": "hi"}]}
    styled = from_record(row, tokenizer, template_kwargs={"style": "terse"})
    assert tokenizer.decode(styled.token_ids) == "hi terse"
    assert tokenizer.decode(from_record(row, tokenizer).token_ids) == "hi plain"


# --- files and records ---


def test_records_are_accepted_in_place_of_a_name(plain):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i}+1=", "solution": str(i + 1)} for i in range(4)]
    saved = datasets.Dataset.from_list(rows)
    both = datasets.DatasetDict(train=saved, test=saved.select([2]))
    for source in (rows, tuple(rows), iter(rows), saved, both):
        (prompts,) = load_all([source], plain)
        assert fields(prompts) == fields(from_record(row, plain) for row in rows)
    assert [p.text for p in load(both, plain, split="test")] == ["2+1="]
    assert [holds_out(s, "test") for s in (both, saved, rows)] == [True, False, False]
    assert [p.id for part in load_all([rows, saved], plain) for p in part] == list(range(8))
    for source, message in [
        ([], "data holds no prompts"),
        ([{"prompt": "a"}, {"prompt": 3}], r"^data, row 2: `prompt` must be"),
        (["arithmetic"], "data, row 1: a record must be an object"),
        (3, "data is a int: give names, or an iterable of records"),
        (datasets.DatasetDict(a=saved), "data has no split 'train' but 'a'"),
    ]:
        with pytest.raises(UserError, match=message):
            load(source, plain)


def test_csv_gives_the_same_prompts_as_jsonl(tmp_path, chat):
    rows = [
        {"question": 'Is "1, 2"\na pair?', "answer": "Yes.\n#### 1,200", "level": ""},
        {"question": "ü?", "answer": "7", "level": "3"},
    ]
    with (tmp_path / "d.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    lines = write(tmp_path / "d.jsonl", *(json.dumps(row) for row in rows))
    assert fields(load(str(tmp_path / "d.csv"), chat)) == fields(load(lines, chat))
    for text, message in [
        ("prompt,a\nx,1\n\ny\n", r":4: it has 1 fields but the first line names 2 columns"),
        ("prompt,a\nx,1,2\n", r":2: it has 3 fields but the first line names 2 columns"),
        ("prompt,prompt\nx,1\n", r":1: two columns have the same name"),
        ('prompt,a\nx,"1\n', r":2: not CSV in UTF-8 \(unexpected end of data\)"),
        (b"prompt,a\nx,\xff\n", r"not CSV in UTF-8 .*utf-8"),
        ("prompt,a\n", r"d\.csv holds no prompts"),
        ("", r"d\.csv holds no prompts"),
        ("a,b\n1,2\n", r":2: it has no `prompt`, .* but 'a', 'b'"),
    ]:
        with pytest.raises(UserError, match=message):
            load(write(tmp_path / "d.csv", text), chat)


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path, chat):
    # in the test extra; nanogrpo runs without it
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1="}], "solution": str(i + 1)}
        for i in range(5)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    lines = write(tmp_path / "d.jsonl", *(json.dumps(row) for row in rows))
    assert [vars(p) for p in load(str(tmp_path / "d.parquet"), chat)] == [
        vars(p) for p in load(lines, chat)
    ]
    with pytest.raises(UserError, match=r"d\.parquet, row 1: the prompt has \d+ tokens"):
        load(str(tmp_path / "d.parquet"), chat, max_prompt_length=3)
    (tmp_path / "not.parquet").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"not\.parquet cannot be read as Parquet"):
        load(str(tmp_path / "not.parquet"), chat)


# --- mistakes ---


def test_a_template_that_does_not_end_is_stopped_and_its_row_is_named(tmp_path, monkeypatch):
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    template = "{% if messages[0].content == 'b' %}" + loops + "{% endif %}x"
    tokenizer = Tokenizer(make_folder(tmp_path / "chat", template))
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in "abc"]
    path = write(tmp_path / "d.jsonl", *map(json.dumps, rows))
    monkeypatch.setattr(prompts, "TIME_LIMIT", 1.0)
    with pytest.raises(
        UserError,
        match=r"d\.jsonl:2: the chat template and the tokenizer take more than 1 s for this "
        r"prompt; shorten it, or correct the template\.$",
    ):
        load(path, tokenizer)


def test_a_text_that_takes_too_long_to_tokenize_is_stopped_and_its_row_is_named(
    tmp_path, plain, monkeypatch
):
    """The tokenizer would take about two seconds. It goes on, but nobody waits for it."""
    path = write(tmp_path / "d.jsonl", GOOD, json.dumps({"prompt": "how many apples" * 10**5}))
    assert len(load(path, plain)) == 2
    monkeypatch.setattr(prompts, "TIME_LIMIT", 0.3)
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"d\.jsonl:2: .* take more than 0\.3 s for this prompt"):
        load(path, plain)
    assert time.monotonic() - begun < 60


def test_rows_have_no_time_limit_outside_of_the_main_thread(tmp_path, plain):
    path = write(tmp_path / "d.jsonl", GOOD)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert len(pool.submit(load, path, plain).result()) == 1


GOOD = '{"prompt": "a"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'a'}", "not JSON"),
        ('{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON .*utf-8"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "not JSON .*recursion"),
        ('["a"]', "a record must be an object .* not a list"),
        ("{}", "it has no `prompt`, `question` or `problem` but no columns at all; name the"),
        ('{"query": "q", "a": 1}', "it has no `prompt`.* but 'query', 'a'; .* --prompt-column"),
        ('{"question": ""}', "the prompt is empty"),
        ('{"problem": 3}', "`problem` must be"),
        ('{"prompt": "a", "tools": "hammer"}', "`tools` must be a list of JSON schemas"),
        ('{"prompt": "a", "tools": [3]}', "`tools` must be a list of JSON schemas"),
        ('{"prompt": 3}', "`prompt` must be"),
        ('{"prompt": null}', "`prompt` must be"),
        ('{"prompt": []}', "`prompt` must be"),
        ('{"prompt": ["a"]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user"}]}', "`prompt` must be"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "it has a picture, but"),
        ('{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}', "`prompt` must be"),
        ('{"prompt": ""}', "the prompt is empty"),
        ('{"prompt": "a\\ud800b"}', "cannot be encoded"),
        ('{"prompt": "a", "completions": 1}', "argument 'completions'"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, chat, line, message):
    path = write(tmp_path / "d.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError, match=message) as caught:
        load(path, chat)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_a_long_prompt_is_reported_with_its_line_its_length_and_the_limit(tmp_path, plain):
    path = write(tmp_path / "d.jsonl", GOOD, '{"prompt": "@@@@@@"}')
    assert len(load(path, plain, max_prompt_length=6)) == 2
    with pytest.raises(UserError) as caught:
        load(path, plain, max_prompt_length=5)
    assert str(caught.value) == (
        f"{path}:2: the prompt has 6 tokens but the limit is 5; raise --max-prompt-length, remove "
        "the record, or use --long-prompts drop."
    )


def test_a_file_that_is_not_a_data_set_is_reported(tmp_path, chat, plain):
    for path, message in [
        (str(tmp_path / "none.jsonl"), r"none\.jsonl is not a file"),
        (write(tmp_path / "d.tsv", "a,b"), "the format '.tsv' is unknown"),
        (write(tmp_path / "empty.jsonl"), r"empty\.jsonl holds no prompts"),
        (write(tmp_path / "blank.jsonl", "", "  "), r"blank\.jsonl holds no prompts"),
    ]:
        with pytest.raises(UserError, match=message):
            load(path, chat)
    with pytest.raises(UserError, match=r"d\.jsonl:1: .* no chat template"):
        load(write(tmp_path / "d.jsonl", '{"prompt": [{"role": "user", "content": "a"}]}'), plain)


def test_long_prompts_are_dropped_on_request_and_counted(tmp_path, plain, caplog):
    path = write(tmp_path / "d.jsonl", GOOD, '{"prompt": "@@@@@@"}', '{"prompt": "b"}')
    with caplog.at_level("INFO"):
        kept = load(path, plain, max_prompt_length=5, long_prompts="drop")
    # an id is a position in the file, so the random numbers of the others do not change
    assert [(p.id, p.text) for p in kept] == [(0, "a"), (2, "b")]
    assert caplog.messages == [f"{path}: 1 of 3 prompts have more than 5 tokens and are dropped."]
    with pytest.raises(
        UserError,
        match=r"d\.jsonl: all 3 prompts have more than 0 tokens; raise --max-prompt-length",
    ):
        load(path, plain, max_prompt_length=0, long_prompts="drop")


# --- several sources, and folders of `datasets` ---


def test_ids_are_unique_and_stable_over_sources(tmp_path, plain):
    a = write(tmp_path / "a.jsonl", *(json.dumps({"prompt": f"a{i}"}) for i in range(3)))
    b = write(
        tmp_path / "b.jsonl",
        "",
        *(json.dumps({"prompt": f"b{i}" * (1 + 9 * (i == 0))}) for i in range(2)),
    )
    alone, both = load_all([a], plain), load_all([a, b], plain)
    assert [p.id for part in both for p in part] == list(range(5))
    assert [vars(p) for p in both[0]] == [vars(p) for p in alone[0]]
    dropped = load_all([b, a], plain, max_prompt_length=4, long_prompts="drop")
    assert [(p.id, p.text) for part in dropped for p in part] == [
        (1, "b1"),
        (2, "a0"),
        (3, "a1"),
        (4, "a2"),
    ]


def test_a_saved_data_set_gives_the_records_that_datasets_reads(tmp_path, chat):
    # it comes with TRL; nanogrpo reads the folders without it
    datasets = pytest.importorskip("datasets")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}+1="}],
            "solution": str(i + 1),
            "tags": ["a"] * i,
            "n": {"x": i, "y": None},
        }
        for i in range(7)
    ]
    whole = datasets.Dataset.from_list(rows)
    whole.shuffle(seed=3).select(range(5)).save_to_disk(tmp_path / "some", num_shards=2)
    theirs = datasets.load_from_disk(tmp_path / "some").to_list()
    ours = load(str(tmp_path / "some"), chat)
    assert fields(ours) == fields(from_record(row, chat) for row in theirs)
    assert [p.id for p in ours] == list(range(5))
    assert [row["solution"] for row in theirs] != [str(i + 1) for i in range(5)]  # shuffled
    datasets.DatasetDict(train=whole, test=whole.select([2, 4])).save_to_disk(tmp_path / "both")
    both = str(tmp_path / "both")
    assert [p.columns["solution"] for p in load(both, chat, split="test")] == ["3", "5"]
    assert fields(load(both, chat)) == fields(from_record(row, chat) for row in rows)
    assert [holds_out(both, split) for split in ("test", "train", "eval")] == [True, True, False]
    assert not holds_out(str(tmp_path / "some"), "test")
    assert holds_out("arithmetic", "any")

    with pytest.raises(UserError, match=r"both has no split 'eval' but 'train', 'test'"):
        load(both, chat, split="eval")
    with pytest.raises(UserError, match=r"some, row 1: the prompt has \d+ tokens"):
        load(str(tmp_path / "some"), chat, max_prompt_length=3)
    (tmp_path / "some" / "data-00001-of-00002.arrow").write_bytes(b"hello")
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow cannot be read as Arrow"):
        load(str(tmp_path / "some"), chat)
    (tmp_path / "some" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow cannot be read as Arrow"):
        load(str(tmp_path / "some"), chat)
    for content, message in (
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"_data_files": [3]}', "names no data files"),
    ):
        (tmp_path / "some" / "state.json").write_text(content)
        with pytest.raises(UserError, match=message):
            load(str(tmp_path / "some"), chat)
    for content in ("{", '{"splits": 3}'):
        (tmp_path / "both" / "dataset_dict.json").write_text(content)
        with pytest.raises(
            UserError, match=r"dataset_dict\.json (is not valid JSON|names no splits)"
        ):
            load(both, chat)
