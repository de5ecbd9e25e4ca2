"""Find the final answer in a text, and compare two answers if the comparison needs no algebra.

In: the text of a completion, and a reference answer. Out: `extract_answer` returns the answer as
written, or None; `compare` returns True, False, or None if the decision needs algebra. Most answers
to problems like those of GSM8K are decided here, in about 0.1 ms. The functions are in the order in
which they run: find the answer, normalize its notation, separate number and unit, compare. Read
next: rewards/symbolic.py, which uses math-verify for all other answers.
"""

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 500  # characters; longer answers are compared only as strings

Span = tuple[int, int]

# --- find the answer ---

BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
# Formulas have a maximum length, so the time of the search is linear.
FORMULA = re.compile(
    r"(?<!\\)(?:\$\$((?:\\\$|[^$]){1,500})\$\$|\$((?:\\\$|[^$\n]){1,500})\$)"
    r"|\\\(((?:(?!\\\)).){1,500})\\\)|\\\[((?:(?!\\\]).){1,500})\\\]",
    re.DOTALL,
)
# Matches the text before a formula if this formula is the answer.
# The text includes the opening delimiter of the formula.
ANSWER_IS = re.compile(
    r"answer(?:(?!\bnot\b|\\[(\[])[^$]){0,50}(?:\$\$?|\\[(\[])?\Z", re.IGNORECASE
)
# A formula without delimiters, such as "2\frac{1}{2} hours" after "answer is".
BARE = re.compile(
    r"answer[^$\n]{0,50}?(?:\bis|[:=])[\s:*]*"
    r"((?=[^$\n]{0,50}\\[a-z])(?:(?!\.(?:\s|\Z))[^$\n]){1,300})",
    re.IGNORECASE,
)
# The text between two answers that belong together, such as "or", or ", and maybe x =".
JOIN = re.compile(r"(?:[,;/&]|or|and|alternatively)+")
FILLER = re.compile(
    r"</?answer>|\\(?:boxed|fbox|text|mathrm)\b|\\[,;!]|[\s$*~.!\\(){}\[\]]|\b[a-z]\s*="
    r"|\b(?:maybe|possibly|perhaps|also|even|else|either|it|is|could|be|the)\b"
)


def extract_answer(text: str) -> str | None:
    """Return the final answer in a text, or None.

    The answer is the first of these that exists: the last \\boxed{…}, the last <answer>…</answer>,
    the text after the last #### in its line, and the formula after the last word "answer". A text
    after #### that has words but no number may be a heading, so the formula is preferred. If
    several answers are joined by "or", "and" or a comma, they are returned as one text, such as
    "3, 5", because each of them is only a part of the answer. Text before </think> is ignored, and
    so is text after an unclosed <think>.
    The time is linear in the length of the text, even if a completion repeats an unclosed \\boxed{
    up to the length limit.
    """
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    if spans := _boxes(text) or _spans(TAGGED, text):
        return _groups(text, spans)[-1][1]
    _, mark, rest = text.rpartition("####")
    line = rest.strip().partition("\n")[0].strip()
    has_words = re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{3}", line)  # LaTeX commands are no words
    if mark and not (has_words and measure(line[:MAX_LENGTH]).number is None):
        return line
    for start, answer in reversed(_groups(text, _spans(FORMULA, text))):
        if ANSWER_IS.search(text[max(start - 70, 0) : start]):
            return answer
    return (BARE.findall(text) or [line if mark else None])[-1]


def extract_reference(*texts: str) -> str:
    """Return the reference answer. `texts` are a record's `solution`, its `answer`, or both.

    A box, a tag or a number after #### marks an answer. If the first of the given texts contains no
    marked answer, the shortest text is used. If this text contains no marked answer either, it is
    searched for words and for formulas in delimiters. If it contains both, the last formula is the
    answer. Otherwise, the full text is the answer.
    """
    marked = _boxes(texts[0]) or re.search("</answer>|####[^a-zA-Z]*[0-9]", texts[0])
    text = texts[0] if marked else min(texts, key=len)
    if answer := extract_answer(text):
        return answer
    groups = _groups(text, _spans(FORMULA, text))
    has_words = re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2}", FORMULA.sub("", text))
    return groups[-1][1] if groups and has_words else text.strip()


def _boxes(text: str) -> list[Span]:
    """Return the span of the content of each closed box, sorted by start."""
    spans, opened = [], []
    for brace in BRACES.finditer(text):
        if brace[0].endswith("{"):
            opened.append(brace)
        elif opened and (start := opened.pop())[0] != "{":
            spans.append((start.end(), brace.start()))
    return sorted(spans)


def _spans(pattern: re.Pattern, text: str) -> list[Span]:
    """Return the span of the matched group in each match of a pattern."""
    return [match.span(match.lastindex or 0) for match in pattern.finditer(text)]


def _groups(text: str, spans: list[Span]) -> list[tuple[int, str]]:
    """Return the start of each group of joined answers, and the group's answers as one text."""
    groups: list[tuple[int, dict]] = []  # a dictionary, so that each answer is kept only once
    last = 0
    for start, end in spans:
        if not groups or not JOIN.fullmatch(FILLER.sub("", text[last:start].lower())):
            groups.append((start, {}))
        groups[-1][1][text[start:end].strip()] = True
        last = end
    return [(start, ", ".join(answers)) for start, answers in groups]


# --- normalize its notation ---

COMMANDS = "times cdot cdot div pi infty le ge ne cup cap in emptyset pm theta approx degree"
UNICODE = str.maketrans("−–‐⁄∕", "---//") | str.maketrans(
    {c: rf"\{name} " for c, name in zip("×⋅·÷π∞≤≥≠∪∩∈∅±θ≈°", COMMANDS.split())}
)
FONT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|boldsymbol|bm|mbox)\s*\{([^{}]*)\}"
# The base of a number: 101_{two}, 101_2, 101 base 2.
DIGITS = "zero one two three four five six seven eight nine ten"
BASES = {name: n for n, name in enumerate(DIGITS.split())}
NAME = rf"(\d+|{'|'.join(BASES)})"
BASE = re.compile(
    rf"(?:_ ?(\{{ ?)?(?:base )?| (?:in )?base ){NAME}(?!\w)(?(1) ?\}})", re.IGNORECASE
)
CALCULATION = r"[\d.,(){}^ ]+(?:[-+*/]|\\(?:cdot|times|div))[-+*/\d.,(){}^ ]*"
# Patterns and their replacements, applied in this order.
REWRITES = [
    (r"\{,\}", ","),
    (r"\\?%|\bper cent\b", " percent"),
    (FONT, r" \1 "),
    (FONT, r" \1 "),  # a font in a font
    # LaTeX's spaces and delimiters. A single $ before a number is a currency symbol.
    (
        r"\\(?:left|right|displaystyle|quad|qquad|boxed|fbox)(?![a-zA-Z])|\\[!,;: ()\[\]]|~"
        r"|(?<!\\)\$(?!-?\d[^$]*\Z)",
        " ",
    ),
    (r"\\\$", "$"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", " degrees "),
    (
        r"\\[dtc]?frac *(?:\{ *(-?[\d,]+) *\}|(\d)) *(?:\{ *([\d,]+) *\}|(\d))",
        r" \1\2/\3\4 ",
    ),
    # Twelve periods of a repeating decimal are enough for `compare`.
    # at most 300 digits each, because Python refuses to read numbers of more than 4300 digits
    (r"(\.\d*)\\(?:overline|bar) ?\{? ?(\d{1,300})(?!\d) ?\}?", r"\1" + r"\2" * 12),
    (r"\s+", " "),
    (r"\A[ *_`]+|\s*\.*[ *_`]*\Z", ""),  # removes Markdown and a final full stop
    (r"([$€£¥₹]) ?(-?[\d.,]*\d(?: ?(?:hundred|thousand|[mbtr]+illion)\b)?)", r"\2 \1"),
    # Text before an answer: "The answer is", "Total cost =", "Total:", "f(2) =", "9 * 2 =".
    (
        r"(?i)\A(?:(?:the )?(?:(?:final|correct) )?(?:answer|option|choice)\b(?: is\b)?"
        r"\s*[:=]?\s*(?=\S)|(?:\\?[a-z]+(?: [a-z]{2,})*(?:_\w|_\{\w+\}|\(\w+\))?)? ?"
        r"(?:=|\\approx(?![a-z])|(?<=[a-z]{2}):) ?(?=[-+$\\\d.(])"
        rf"|{CALCULATION}= ?(?=\S))+|(?<=\d) ?={CALCULATION}\Z",
        "",
    ),
]


def latex(text: str) -> str:
    """Replace mathematical Unicode characters, and notations that math-verify cannot read."""
    text = re.sub(r"√\s*(\d+|[a-zA-Z]|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}", text)
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", text)
    text = re.sub("[¼-¾⅐-⅞]", r" \g<0>", text)
    text = re.sub(r"frac ?(\\[a-z]+) ?(\w)", r"frac{\1}{\2}", text)
    text = text.replace(r"\varnothing", "∅")
    return unicodedata.normalize("NFKC", text).translate(UNICODE).rstrip(" .")


def plain(text: str) -> str:
    """Remove font commands, spacing and delimiters, which do not change an answer's meaning."""
    text = latex(text)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return BASE.sub(_base, text)


def _base(match: re.Match) -> str:
    name = match[2].lower()
    return f"_{BASES.get(name, name)}"


def canonical(text: str) -> str:
    """Return a plain answer without unneeded spaces, braces and zeros ("05:30" becomes "5:30")."""
    text = re.sub(r"\{ ?(\w) ?\}", r"\1", text)
    # Spaces between digits stay, because "1 2" is not 12.
    return re.sub(r"(?<!\d) | (?!\d)|\A0(?=\d:)", "", text)


# --- separate number and unit ---


class Measure(NamedTuple):
    """The parts of an answer such as "x = 18 cm"."""

    body: str  # "18"
    number: Fraction | None  # the value of the body; None if the body is not a number
    # The first name of a common unit, such as "cm"; "" for any other word, or for no word.
    # None if the text after the number changes the number, as in "3 squared" or "11_2".
    unit: str | None
    rate: str = ""  # "day" in "dollars per day"; "" for no rate, or for another word


UNITS = {
    name + plural: line.split()[0]
    for line in """
        mm millimeter millimetre
        cm centimeter centimetre
        m meter metre
        km kilometer kilometre kmh kph
        in inch inches
        ft foot feet
        yd yard
        mi mile mph
        mg milligram
        g gram
        kg kilogram
        oz ounce
        pound lb £
        ml milliliter millilitre
        l liter litre
        s sec second
        min minute
        h hr hour
        day
        week
        month
        year
        am
        pm
        degree
        celsius c
        fahrenheit f
        radian rad
        ¢ cent
        $ dollar usd
        € euro
        ¥ yen
        ₹ rupee
        dozen
        percent percentage pct
    """.strip().splitlines()
    for name in line.split()
    for plural in ("", "s")
}
# One answer may lack the unit. So 50% equals both 50 and 0.5, and 2 dozen equals both 2 and 24.
RATIOS = {"percent": Fraction(1, 100), "dozen": Fraction(12)}
FACTORS = """
    hundred=1e2 thousand=1e3 million=1e6 billion=1e9 trillion=1e12
    tenths=1/10 hundredths=1/100 thousandths=1/1000
    halves=1/2 thirds=1/3 fourths=1/4 fifths=1/5 sixths=1/6 eighths=1/8
"""
SCALES = dict(pair.split("=") for pair in FACTORS.split())
SCALE = rf"(?: ?({'|'.join(SCALES)})\b)?"
# minus sign, digits, power of ten, scale
NUMBER = re.compile(
    r"(?:\+|(-|(?:minus|negative) ))? ?"
    r"((?:\d+ )?\d+(?:,\d{3})* ?/ ?[1-9]\d*(?:,\d{3})*"
    r"|\d{1,3}(?:[ ,]\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
    r"(?:(?: ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{? ?|e(?=[+-]?\d))([+-]?\d{1,3}) ?\}?)?" + SCALE,
    re.IGNORECASE,
)
# A number or formula with words after it. "18cm" has a unit; "18m" and "18eggs" may be products.
LONG_UNITS = "|".join(name for name in UNITS if len(name) > 1)
MEASURE = re.compile(
    rf"(?P<body>.*?(?:[\d)}}]{SCALE}|\\pi(?= (?:square |cubic )?(?:{LONG_UNITS})\b)))"
    rf"(?P<words>(?: [a-z(]|_| ?/ ?[a-z]| ?[$€£¥₹¢]|(?:{LONG_UNITS})\b).*)",
    re.IGNORECASE,
)
# Parts of units that are ignored: "^2" in "m^2", "squared" in "meters squared", the dots in "p.m."
TRIMMING = re.compile(
    r"(?<=[a-z]) ?(?:\^ ?\{? ?-?\d ?\}?|squared|cubed)|[.']|\b(?:in|degrees) (?=\w)"
)
# Words after a number usually name what is counted.
# But the words and digits in NO_UNIT change the number or make the number uncertain.
NO_UNIT = re.compile(
    r"\A_|\A or\b|\d|\b(?:or (?:more|less|fewer|so)|not|if|but|maybe|perhaps|possibly|squared|cubed"
    r"|doubled|tripled|halved|factorial|to the power"
    r"|(?:plus|minus|times|to|point|and|over|by) (?:a )?"
    rf"(?:half|{DIGITS.replace(' ', '|')})|{'|'.join(SCALES)})\b(?!-)"
)
# The text between a unit and its rate, such as "per" in "18 dollars per day".
RATE = r"/|\b(?:per|an?|each|every)\b"
# Text that can follow a number without being a unit: the rest of a formula, or another number.
ALGEBRA = re.compile(
    r"[+*=\\^,;]|\b[^\W\d_acfghlms]\b|\ba\Z|\b(?:or|and)\b.*\d"
    rf"|\A (?!(?:{'|'.join(UNITS)})\b)[a-z]{{2}}\b"
)
ARITHMETIC = re.compile(
    rf"(?:[\d.,+\-*/=(){{}}^ ]|\\(?:frac|cdot|times|div)|minus|negative|{'|'.join(SCALES)})*",
    re.IGNORECASE,
)


def measure(text: str) -> Measure:
    """Return the parts of an answer."""
    text = plain(text)
    whole = Measure(text, _number(text), "")
    match = MEASURE.fullmatch(text)
    if whole.number is not None or match is None:
        return whole
    body, words = match["body"], TRIMMING.sub("", match["words"].lower())
    unit, rate = map(_unit, [*re.split(RATE, words, maxsplit=1), ""][:2])
    if ALGEBRA.search(words) or not (unit or ARITHMETIC.fullmatch(body)):
        return whole
    if NO_UNIT.search(words):
        return whole._replace(unit=None)
    return Measure(body, _number(body), unit, rate)


def _unit(words: str) -> str:
    names = re.findall("[a-z]+|[$€£¥₹¢]", words)
    return next((UNITS[name] for name in names if name in UNITS), "")


def _number(text: str) -> Fraction | None:
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits, power, scale = match.groups()
    terms = re.sub(r",| (?=\d{3}\b|/)|(?<=/) ", "", digits).split()  # "1,234", or 1 and 1/2
    value = sum(map(Fraction, terms)) * Fraction(10) ** int(power or 0)
    value *= Fraction(SCALES[scale.lower()] if scale else 1)
    return -value if sign else value


# --- compare ---

# Matches a text that contains several numbers, no number, or an uncertain number.
NO_NUMBER = re.compile(
    r",(?!\d{3})|[;<>]|\b(?:or|and|to|not|than|if)\b|\A[^\d\\]*\Z", re.IGNORECASE
)
# A calculation without its result, such as 3+3 or 2(5). A power counts as a result.
UNFINISHED = re.compile(r"[\d)}] ?(?:[-+*=(]|\\cdot|\\times|\\div)|\)\d|\A[^\^({]*\Z")
# A time of day, and a number in another base.
LITERAL = re.compile(r"\d{1,2}:\d\d|\w+_\w+")
# The label of a choice, and possibly its text: "B", "(B) 12". In "N - 1", N is not a label.
CHOICE = re.compile(r"\(?([A-Z])(?:(?:[).:]+ ?| - (?=[^\W\d_]{2}))(.*))?")
OTHER_CHOICE = re.compile(r"\([A-Z]\)|(?:\b(?:or|and)|[,;/&]) ?\(?[A-Z](?:[).:]|\Z)")
WORDS = re.compile(r"(?:[^\W\d_]|[-'&.]){2,}")


def compare(answer: str, reference: str) -> bool | None:
    """Return whether two answers are equal, or None if the decision needs algebra.

    Numbers are compared exactly, in any notation. A unit may be missing, but different common units
    are not equal: 18 cm equals 18 and "18 centimeters", but not 18 m. The answer 50% equals both 50
    and 0.5. Other answers are compared as strings. Words are compared without regard to upper and
    lower case. A label of a multiple-choice question may be followed by the text of the choice. If
    the reference is a number, a calculation such as 3+3 is wrong, because otherwise a model could
    leave out the last step.
    """
    if not answer or max(len(answer), len(reference)) > MAX_LENGTH:
        return answer.strip() == reference.strip()
    given, wanted = measure(answer), measure(reference)
    if any(u and v and u != v for u, v in zip(given[2:], wanted[2:])):  # unit and rate
        return False
    x, y = given.number, wanted.number
    if x is not None and y is not None:
        is_scaled = x * RATIOS.get(given.unit or "", 1) == y * RATIOS.get(wanted.unit or "", 1)
        # A decimal number with at least six places may be rounded.
        places = re.findall(r"\.(\d{6,})(?!\S)", f"{given.body} {wanted.body}")
        is_rounded = places and abs(x - y) * 10 ** min(map(len, places)) < 1
        return bool(x == y or is_scaled or is_rounded)
    a, b = canonical(given.body), canonical(wanted.body)
    if a == b:
        return True
    if len(a) == len(b) == 1 or (LITERAL.fullmatch(a) and LITERAL.fullmatch(b)):
        return False
    if (given.unit is None and y is not None) or (wanted.unit is None and x is not None):
        return b.startswith(a + "_")  # if the reference is 2014_5, the answer 2014 is enough
    if y is not None:
        is_unfinished = ARITHMETIC.fullmatch(a) and UNFINISHED.search(a)
        return False if is_unfinished or NO_NUMBER.search(given.body) else None
    label = CHOICE.fullmatch(wanted.body)
    if label and label[2]:  # "(B) 12": either part is enough
        return compare(answer, label[1]) or compare(answer, label[2])
    if label:
        chosen = CHOICE.fullmatch(given.body)
        if not chosen or OTHER_CHOICE.search(chosen[2] or ""):
            return False
        return chosen[1] == label[1]
    if WORDS.fullmatch(a) and WORDS.fullmatch(b):
        # Letters may be a product of variables, whose order does not matter.
        may_be_product = len(b) == 2 or (b.islower() and "$" in reference)
        if may_be_product and sorted(a) == sorted(b):
            return None
        return a.casefold() == b.casefold()
    return None


def without_label(reference: str) -> str:
    """Return the text of a choice without its label: "12" for "(B) 12". Other references do not
    change.
    """
    label = CHOICE.fullmatch(measure(reference).body)
    return (label and label[2]) or reference
