"""The reason why a server ended, from logs as vLLM 0.32 writes them (shortened).

The same with a real server: test_recovery.py.
"""

from __future__ import annotations

import pytest

from nanogrpo.vllm.cause import root_cause


def log(process: str, text: str) -> list[str]:
    """Return lines as a process of vLLM logs them: every line has its prefix."""
    prefix = f"({process} pid=7) ERROR 11-22 04:43:15 [core.py:1063] " if process else ""
    return [prefix + line for line in text.splitlines()]


def raised(message: str) -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{message}'


DIRECT = "\n\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
MEMORY = "ValueError: Available memory on node 0 (20.28/23.54 GiB) on startup is less than desired"
WORKER = "Exception: WorkerProc initialization failed due to an exception in a background process. "
WORKER += "See stack trace for root cause."
ENGINE = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s)"
)
OFFSET = "RuntimeError: CPU Generator does not use offset"
FAILED = (
    f"RuntimeError: Worker failed with error '{OFFSET}', please check the stack trace above for "
)
FAILED += "the root cause"
DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace "
)
DEAD += "(above) for the root cause."


def test_a_start_that_fails_in_a_worker():
    lines = [
        "serve: vLLM 0.32.0, base",
        *log("Worker", "WorkerProc failed to start.\n" + raised(MEMORY)),
        *log("EngineCore", "EngineCore failed to start.\n" + raised(WORKER)),
        *log("", raised(ENGINE)),
        *log("", raised("OSError: a consequence")),
    ]
    assert root_cause("\n".join(lines)) == MEMORY


def test_an_engine_that_dies_while_it_samples():
    lines = [
        # an earlier request failed, and the server continued
        *log("Worker", raised("TypeError: bad request")),
        *log("EngineCore", raised(FAILED)),
        *log("Worker", "WorkerProc hit an exception.\n" + raised(OFFSET) + "\n" + raised(OFFSET)),
        *log("EngineCore", "EngineCore encountered a fatal error.\n" + raised(FAILED)),
        *log("APIServer", "AsyncLLM output_handler failed.\n" + raised(DEAD)),
        *log("APIServer", raised("ZMQError: a consequence")),
    ]
    assert root_cause("\n".join(lines)) == OFFSET


def test_the_lines_of_several_processes_may_alternate():
    worker, engine = log("Worker", raised(MEMORY)), log("EngineCore", raised(WORKER))
    mixed = [line for pair in zip(worker, engine, strict=True) for line in pair]
    assert root_cause("\n".join(mixed)) == MEMORY


@pytest.mark.parametrize("link", [DIRECT, DURING])
def test_the_first_exception_of_a_chain_is_added(link):
    text = raised("KeyError: 'x'") + link + raised("OSError: y") + link + raised("ValueError: z")
    for process in ("", "EngineCore"):
        found = root_cause("\r\n".join(log(process, text + "\nINFO: the end")))
        assert found == "ValueError: z (caused by KeyError: 'x')"


def test_details_on_the_following_lines_belong_to_the_message():
    text = raised("ValidationError: 1 error for ModelConfig\n  Value error, no such architecture")
    expected = "ValidationError: 1 error for ModelConfig Value error, no such architecture"
    assert (
        root_cause("\n".join(log("APIServer", f"{text}\n\n  indented, but not its details")))[
            : len(expected)
        ]
        == expected
    )


@pytest.mark.parametrize("text", ["", "serve: vLLM", raised(ENGINE), "Traceback (most recent call"])
def test_a_log_without_a_cause_gives_nothing(text):
    assert root_cause(text) == ""


def test_a_long_message_is_cut():
    assert len(root_cause(raised("ValueError: " + "x" * 10_000))) == 300
