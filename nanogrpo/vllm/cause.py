"""Find out why a server ended, from its log.

In: the text of serve.log. Out: the message of one exception, such as "ValueError: No available
memory", or "" if the log contains none.

vLLM consists of several processes. If one of them fails, it logs a traceback, and then each process
that depends on it logs one of its own, which only refers to a "root cause above". The lines of the
processes may alternate, so each process is followed separately. Used by server.py.
"""

from __future__ import annotations

import re

# "(Worker pid=7) ERROR 11-22 04:43:15 [core.py:1750] ", or only a part of it, or nothing
PREFIX = re.compile(r"((?:\([\w-]+ pid=\d+\) )?)(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\] ?)?")
# An exception with such a message was raised because another process had failed.
REFERS = re.compile("root cause|stack trace", re.IGNORECASE)
# The HTTP process reports the end of the engine. Exceptions after this line are consequences.
DEATH = re.compile("Engine core initialization failed|EngineCore encountered an issue")
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
LONGEST = 300  # characters of a message


def root_cause(text: str) -> str:
    """Return the message of the exception that ended the server, or "" if the log has none.

    If that exception was raised because of another one, the first of the chain follows in
    parentheses.
    """
    chains: list[list[str]] = []  # messages of exceptions, each raised because of the one before
    chain_of: dict[str, list[str]] = {}  # process → the last chain that it logged
    tracing: set[str] = set()  # processes whose last line was part of a traceback
    detailing: set[str] = set()  # processes whose last line was part of an exception's message
    linked: set[str] = set()  # processes whose next traceback continues their last chain
    for line in text.splitlines():
        match = PREFIX.match(line)
        process, rest = (match[1], line[match.end() :]) if match else ("", line)
        if rest.startswith("Traceback (most recent call last)"):
            tracing.add(process)
            if process not in linked:
                chains.append([])
                chain_of[process] = chains[-1]
            linked.discard(process)
        elif process in tracing and rest and not rest[0].isspace():  # the exception's message
            tracing.discard(process)
            detailing.add(process)
            chain_of[process].append(rest)
            if DEATH.search(rest):
                break
        elif process in detailing and rest[:1].isspace() and process not in tracing:
            # such as pydantic's list of wrong values
            chain_of[process][-1] = f"{chain_of[process][-1]} {rest.strip()}".strip()
        elif rest.startswith(CHAINED) and process in chain_of:
            linked.add(process)
            detailing.discard(process)
        elif rest.strip():
            detailing.discard(process)
    found = [[m for m in chain if not REFERS.search(m)] for chain in chains]
    found = [chain for chain in found if chain]
    if not found:
        return ""
    first, last = found[-1][0], found[-1][-1]
    return last[:LONGEST] + (f" (caused by {first[:LONGEST]})" if first != last else "")
