r"""Outputs of models with the reference of the data set and the right verdict, judged by hand.

    ROWS = [(output, reference, right), ...]

The tables write down only the verdict False; a row of two is right. The verdict is that of a
teacher who knows the question: is the marked answer equal to the reference? Notation and the name
of a unit do not matter. These are wrong: an answer that names several results where one is asked
for, a calculation that is left to the reader, a result that was only tried while thinking, an
answer that is not finished. If the reference has no unit, the question names it: "2 dozen" may be 2
or 24, but 5 cents are not $5. Answers are marked by \boxed{}, <answer>, ####, or as a formula after
the word "answer".

Read next: test_answers.py, which judges every row, also with TRL's function.
"""

NUMBERS = [
    # plain
    (r"\boxed{18}", "18"),
    (r"So she makes 9 * 2 = $18 per day. \boxed{18}", "18"),
    (r"\boxed{17}", "18", False),
    (r"\boxed{-3}", "-3"),
    (r"\boxed{3}", "-3", False),
    (r"\boxed{+3}", "3"),
    (r"\boxed{−3}", "-3"),
    (r"\boxed{–3}", "-3"),
    (r"\boxed{018}", "18"),
    (r"\boxed{18.0}", "18"),
    (r"\boxed{18.}", "18"),
    (r"\boxed{7.}", "7"),
    (r"\boxed{.5}", "0.5"),
    (r"\boxed{0.50}", "0.5"),
    (r"\boxed{181}", "18", False),
    (r"\boxed{1 8}", "18", False),
    (r"\boxed{18}.", "18"),
    (r"\boxed {18}", "18"),
    (r"\boxed{ 18 }", "18"),
    (r"\boxed{\mathbf{7}}", "7"),
    (r"\boxed{\textbf{7}}", "7"),
    (r"\boxed{\text{7}}", "7"),
    (r"**\boxed{7}**", "7"),
    (r"\[\boxed{7}\]", "7"),
    (r"\fbox{7}", "7"),
    (r"$$\boxed{7}$$", "7"),
    (r"$\boxed{7}$", "$7$"),
    (r"\boxed{$7$}", "7"),
    (r"\boxed{\(7\)}", "7"),
    # thousands
    (r"\boxed{70,000}", "70000"),
    (r"\boxed{70000}", "70,000"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1{,}234{,}567}", "1234567"),
    (r"\boxed{1\,234\,567}", "1234567"),
    (r"\boxed{1,234.50}", "1234.5"),
    (r"\boxed{70,00}", "7000", False),
    (r"\boxed{7,000}", "70000", False),
    # money
    (r"\boxed{\$70{,}000}", "70000"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{$18}", "18"),
    (r"\boxed{\$18.00}", "18"),
    (r"\boxed{18 \text{ euros}}", "18"),
    (r"\boxed{€18}", "18"),
    (r"\boxed{£18.50}", "18.5"),
    # units
    (r"\boxed{18\text{ dollars}}", "18"),
    (r"\boxed{18 \text{ eggs}}", "18"),
    (r"\boxed{18\,\text{cm}}", "18"),
    (r"\boxed{18\ \mathrm{cm}}", "18"),
    (r"\boxed{18~\mathrm{cm}^2}", "18"),
    (r"\boxed{18 cm}", "18"),
    (r"\boxed{18cm}", "18"),
    (r"\boxed{20 minutes}", "20"),
    (r"\boxed{20 \text{ minutes}}", r"20\text{ minutes}"),
    (r"\boxed{60 \text{ miles per hour}}", "60"),
    (r"\boxed{60\text{ km/h}}", "60"),
    (r"\boxed{9.8\ \mathrm{m/s^2}}", "9.8"),
    (r"\boxed{12\text{ square meters}}", "12"),
    (r"\boxed{19 eggs}", "18", False),
    (r"\boxed{18x}", "18", False),
    (r"\boxed{5\text{ cm}}", r"5\text{ m}", False),
    (r"\boxed{5\text{ cm}}", r"5\text{ centimeters}"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{90^{\circ}}", "90"),
    (r"\boxed{90°}", "90"),
    (r"\boxed{90 \text{ degrees}}", r"90^\circ"),
    (r"\boxed{45^\circ}", "90", False),
    (r"\boxed{2\text{ million}}", "2000000"),
    (r"\boxed{2\text{ million}}", "2", False),
    # percent
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", r"50\%"),
    (r"\boxed{50}", r"50\%"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{0.5}", r"50\%"),
    (r"\boxed{\frac{1}{2}}", r"50\%"),
    (r"\boxed{50\%}", r"0.5\%", False),
    (r"\boxed{5\%}", "50", False),
    (r"\boxed{50 percent}", "50"),
    (r"\boxed{12.5\%}", "12.5"),
    # variables
    (r"\boxed{x=18}", "18"),
    (r"\boxed{x = 18}", "x=18"),
    (r"\boxed{18}", "x=18"),
    (r"\boxed{x_1 = 18}", "18"),
    (r"\boxed{f(2) = 18}", "18"),
    (r"\boxed{x=17}", "18", False),
    (r"\boxed{3+4=7}", "7"),
    (r"\boxed{3+4=8}", "7", False),
    (r"\boxed{18 = 9\cdot 2}", "18"),
    (r"\boxed{9 \times 2 = 18}", "18"),
    (r"\boxed{17 = 9\cdot 2}", "18", False),
    (r"\boxed{17 = 18}", "18", False),
    (r"\boxed{18=}", "18", False),
    # powers of ten, and calculations
    (r"\boxed{10^3}", "1000"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{1.5\times10^3}", "1500"),
    (r"\boxed{6.02 \times 10^{23}}", r"6.02\cdot 10^{23}"),
    (r"\boxed{1.5\times10^4}", "1500", False),
    (r"\boxed{3+3}", "6", False),
    (r"\boxed{48/2+48}", "72", False),
    (r"\boxed{12 \times 5}", "60", False),
    (r"\boxed{(12)(5)}", "60", False),
    (r"\boxed{10_2}", "2", False),
    (r"\boxed{10_2}", "10_2"),
    (r"\boxed{10_2}", "10_{2}"),
    # other digits and characters
    (r"\boxed{１８}", "18"),
    (r"\boxed{١٨}", "18"),
    (r"\boxed{१८}", "18"),
    (r"答案是 \boxed{18}。", "18"),
    (r"\boxed{½}", "0.5"),
    (r"\boxed{1½}", "1.5"),
    (r"\boxed{2√3}", r"2\sqrt{3}"),
    (r"\boxed{π}", r"\pi"),
    (r"\boxed{x²}", "x^2"),
]

FRACTIONS = [
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\frac{1}{2}}", r"\frac12"),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\tfrac12}", "1/2"),
    (r"\boxed{\frac23}", r"\frac{2}{3}"),
    (r"\boxed{1/2}", r"\frac{1}{2}"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
    (r"\boxed{\frac{-1}{2}}", r"-\frac{1}{2}"),
    (r"\boxed{\frac{1}{-2}}", "-0.5"),
    (r"\boxed{-\frac{1}{2}}", "-1/2"),
    (r"\boxed{\frac{1}{2}}", r"-\frac{1}{2}", False),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", False),
    (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}"),
    (r"\boxed{1 \frac{1}{2}}", "1.5"),
    (r"\boxed{1 1/2}", "1.5"),
    (r"\boxed{-1\frac{1}{2}}", "-1.5"),
    (r"\boxed{1\frac{1}{2}}", r"\frac{1}{2}", False),
    (r"\boxed{\frac{1}{2}\text{ hour}}", "0.5"),
    (r"\boxed{0.333}", r"\frac{1}{3}", False),
    (r"\boxed{0.333333}", r"\frac{1}{3}"),
    (r"\boxed{0.666667}", r"\frac{2}{3}"),
    (r"\boxed{0.6666666}", r"\frac{2}{3}"),
    (r"\boxed{0.66666}", r"\frac{2}{3}", False),
    (r"\boxed{1.000001}", "1", False),
    (r"\boxed{6.63\times10^{-34}}", r"1.05\times10^{-34}", False),
    (r"\boxed{1.5\times10^{-30}}", "0", False),
    (r"\boxed{1/2,3}", "1/23", False),
    (r"\boxed{3,1/2}", "1/2,3"),
    (r"\boxed{3.14}", r"\pi", False),
    (r"\boxed{\frac{70{,}000}{3}}", r"\frac{70000}{3}"),
    (r"\boxed{\frac{1}{0}}", "0", False),
    (r"\boxed{\frac{7}{12}}", "7/12"),
    (r"\boxed{7:12}", "7:12"),
    (r"\boxed{\frac{x}{2}}", r"\frac{1}{2}x"),
]

ALGEBRA = [
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{x^2+2x+2}", "(x+1)^2", False),
    (r"\boxed{x^{2}}", "x^2"),
    (r"\boxed{x^2 + 3x}", "3x+x^2"),
    (r"\boxed{2x + 3}", "y = 2x+3"),
    (r"\boxed{y = 2x + 3}", "y=2x+3"),
    (r"\boxed{y = 2x - 3}", "y=2x+3", False),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}"),
    (r"\boxed{\sqrt2}", r"\sqrt{2}"),
    (r"\boxed{\sqrt 2}", r"\sqrt{2}"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\sqrt{3}}", r"\sqrt{2}", False),
    (r"\boxed{\sqrt{16}}", "4"),
    (r"\boxed{\sqrt[3]{8}}", "2"),
    (r"\boxed{2\pi}", r"2\pi"),
    (r"\boxed{2 \pi}", r"\pi \cdot 2"),
    (r"\boxed{6.28}", r"2\pi", False),
    (r"\boxed{\pi r^2}", r"r^2\pi"),
    (r"\boxed{3\sqrt{2}\text{ cm}}", r"3\sqrt{2}"),
    (r"\boxed{e^{i\pi}}", "-1"),
    (r"\boxed{3+2i}", "3+2i"),
    (r"\boxed{2i+3}", "3+2i"),
    (r"\boxed{3-2i}", "3+2i", False),
    (r"\boxed{\ln 4}", r"2\ln 2"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{\sin^2 x + \cos^2 x}", "1"),
    (r"\boxed{\frac{x+1}{x-1}}", r"\dfrac{x + 1}{x - 1}"),
    (r"\boxed{\frac{x-1}{x+1}}", r"\frac{x+1}{x-1}", False),
    (r"\boxed{\binom{5}{2}}", "10"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{ab}", "ba"),
    (r"\boxed{x \cdot y \cdot z}", "$xyz$"),
    (r"\boxed{zyx}", "$xyz$"),
    (r"\boxed{n(n+1)/2}", r"\frac{n(n+1)}{2}"),
    (r"\boxed{x}", "X", False),
    (r"\boxed{x = 3, y = 5}", "x=3,y=5"),
    (r"\boxed{-x}", "x", False),
    (r"\boxed{|x|}", r"\left|x\right|"),
    (r"\boxed{2^{100}}", "2^{100}"),
    (r"\boxed{\infty}", r"\infty"),
]

COLLECTIONS = [
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}"),
    (r"\boxed{\{1, 2\}}", r"\{1,2,3\}", False),
    (r"\boxed{1,2,3}", "1, 2, 3"),
    (r"\boxed{3,2,1}", "1,2,3"),
    (r"\boxed{-2, 5}", "5,-2"),
    (r"\boxed{-2,4}", "5,-2", False),
    (r"\boxed{x=-2 \text{ or } x=5}", "-2,5"),
    (r"\boxed{-2 \text{ and } 5}", "-2,5"),
    (r"\boxed{-2}, \boxed{5}", "-2,5"),
    (r"$\boxed{-2}$ and $\boxed{5}$", "-2, 5"),
    (r"\boxed{-2}", "-2,5", False),
    (r"\boxed{\pm 3}", "-3,3"),
    (r"\boxed{\pm 3}", "3", False),
    (r"\boxed{(1,2)}", "(1,2)"),
    (r"\boxed{(1, 2)}", r"\left(1,2\right)"),
    (r"\boxed{(2,1)}", "(1,2)", False),
    (r"\boxed{(0.5, 2)}", r"(\frac{1}{2}, 2)"),
    (r"\boxed{(1,2,3)}", "(1, 2, 3)"),
    (r"\boxed{(1,3,2)}", "(1,2,3)", False),
    (r"\boxed{[1,2]}", "[1,2]"),
    (r"\boxed{[1,2)}", "[1,2]", False),
    (r"\boxed{(-\infty, 2) \cup (3, \infty)}", r"(-\infty,2)\cup(3,\infty)"),
    (r"\boxed{(-\infty,2)\cup(3,\infty)}", r"(3,\infty)\cup(-\infty,2)"),
    (r"\boxed{(-\infty,2]\cup(3,\infty)}", r"(-\infty,2)\cup(3,\infty)", False),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
    (r"\boxed{x > 3}", "3 < x"),
    (r"\boxed{x \geq 3}", r"x \ge 3"),
    (r"\boxed{x > 3}", r"x \ge 3", False),
    (r"\boxed{(3,\infty)}", "x > 3"),
    (r"\boxed{\emptyset}", r"\emptyset"),
    (
        r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    ),
    (
        r"\boxed{\begin{pmatrix}1&2\\ 3&4\end{pmatrix}}",
        r"\begin{pmatrix} 1&2\\3&4 \end{pmatrix}",
    ),
    (
        r"\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        False,
    ),
    (
        r"\boxed{\begin{bmatrix} \frac12 \\ 2 \end{bmatrix}}",
        r"\begin{bmatrix} 0.5 \\ 2 \end{bmatrix}",
    ),
]

CHOICES_AND_TEXTS = [
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{(B)}}", "B"),
    (r"\boxed{(B)}", "B"),
    (r"\boxed{\textbf{(B)}}", "(B)"),
    (r"\boxed{\textbf{(B) }12}", "B"),
    (r"\boxed{B. 12}", "B"),
    (r"\boxed{B)}", "B"),
    (r"\boxed{\mathrm{B}}", "B"),
    (r"\boxed{12}", r"\textbf{(B)}\ 12"),
    (r"\boxed{B}", r"\textbf{(B)}\ 12"),
    (r"\boxed{13}", r"\textbf{(B)}\ 12", False),
    (r"\boxed{C}", "B", False),
    (r"\boxed{\text{(C) }12}", "B", False),
    (r"\boxed{\text{A or B}}", "B", False),
    (r"\boxed{(A) and (B)}", "B", False),
    (r"\boxed{A, B}", "B", False),
    (r"<answer>B</answer>", "B"),
    (r"<answer>(B) Paris</answer>", "B"),
    (r"\boxed{\text{Monday}}", "Monday"),
    (r"\boxed{Monday}", r"\text{Monday}"),
    (r"\boxed{\text{monday}}", "Monday"),
    (r"\boxed{\text{Tuesday}}", "Monday", False),
    (r"\boxed{\text{Yes}}", "yes"),
    (r"\boxed{\text{No}}", r"\text{Yes}", False),
    (r"\boxed{\text{even}}", r"\text{odd}", False),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}"),
    (r"<answer>New York</answer>", "New York"),
    (r"<answer>New Jersey</answer>", "New York", False),
    (r"\boxed{\text{6:30 p.m.}}", r"\text{6:30 p.m.}"),
    (r"\boxed{I do not know}", "18", False),
]

MARKS = [
    # <answer>
    ("<think>a</think><answer>18</answer>", "18"),
    ("<answer>\n18\n</answer>", "18"),
    (r"<answer>\(18\)</answer>", "18"),
    ("<answer>$18$</answer>", "18"),
    ("<answer>$70,000</answer>", "70000"),
    ("<answer>18 eggs</answer>", "18"),
    ("<answer>$18 per day</answer>", "18"),
    ("<answer>Answer: 18</answer>", "18"),
    (r"<answer>\boxed{18}</answer>", "18"),
    (r"<answer>\frac{1}{2}</answer>", "1/2"),
    ("<answer>(x+1)^2</answer>", "x^2+2x+1"),
    ("<answer>17</answer>", "18", False),
    ("<answer></answer>", "18", False),
    ("<answer>1</answer><answer>18</answer>", "18"),
    # ####
    ("She has 9 * 2 = 18.\n#### 18", "18"),
    ("#### $18", "18"),
    ("#### 18.", "18"),
    ("#### 18 dollars", "18"),
    ("#### 1,234", "1234"),
    ("#### **18**", "18"),
    ("#### 18\nThat is all.", "18"),
    ("#### 17", "18", False),
    ("#### ", "18", False),
    # a formula after "answer"
    ("The final answer is $18$.", "18"),
    ("The final answer is $18$. I hope it is correct.", "18"),
    (r"Final answer: \(\frac{1}{2}\)", "0.5"),
    (r"Therefore, the answer is \[ x^2 \]", "x^2"),
    ("The answer is $17$.", "18", False),
    ("The answer is $18$ where $x=3$.", "18"),
    (r"The answer is $\$18$.", "18"),
    (r"The answer is $$\$18$$.", "18"),
    ("The answer is $18$ where $x=3$.", "3", False),
    (r"The answer is \frac{1}{2}.", "1/2"),
    (r"$x = 18$, so we are done.", "18", False),
    ("The answer is $3$ or $5$.", "5", False),
    ("The answers are $-2$ and $5$.", "-2,5"),
    # references that are solutions
    (r"\boxed{18}", "9 * 2 = <<9*2=18>>18\n#### 18"),
    (r"\boxed{18}", r"We get $9 \cdot 2 = \boxed{18}$."),
    ("#### 17", r"We get $9 \cdot 2 = \boxed{18}$.", False),
    (r"\boxed{\frac12}", r"$\frac{1}{2}$"),
    (r"\boxed{2}", r"We get $\boxed 2$."),
    (r"\boxed{0.5}", r"The price is $\$0.5$ per egg."),
    # corrections: the last one counts
    (r"\boxed{1}. No, wait. \boxed{18}", "18"),
    (r"\boxed{18}. No, wait. \boxed{1}", "18", False),
    (r"First \boxed{17}, no, \boxed{18}", "18"),
    (r"\boxed{18} So the answer is \boxed{18}", "18"),
    # hedging
    (r"\boxed{3} or \boxed{5}", "5", False),
    (r"\boxed{3} or \boxed{5}", "3", False),
    (r"\boxed{3}, or maybe \boxed{5}", "5", False),
    (r"$\boxed{3}$ or $\boxed{5}$", "5", False),
    (r"\boxed{3}. Or maybe \boxed{5}.", "5", False),
    (r"\boxed{3}. Or rather, \boxed{5}.", "5"),
    (r"\boxed{3 or 5}", "5", False),
    (r"\boxed{3 \text{ or } 5}", "5", False),
    (r"\boxed{3, 5}", "5", False),
    ("<answer>3 or 5</answer>", "5", False),
    ("<answer>3</answer> or <answer>5</answer>", "5", False),
    ("#### 3 or 5", "5", False),
    # thinking
    (r"<think>\boxed{18}</think> I do not know", "18", False),
    (r"<think>maybe \boxed{7}", "7", False),
    (r"<think>\boxed{17}</think>\boxed{18}", "18"),
    (r"<think>\boxed{18}</think>\boxed{17}", "18", False),
    (r"<think>It is 18.</think> It is \boxed{18}.", "18"),
    (r"It is 18.</think>\boxed{18}", "18"),
    (r"<think>a</think> Well. <think>maybe \boxed{7}", "7", False),
    # unfinished or absent
    (r"so \boxed{18", "18", False),
    ("so <answer>18", "18", False),
    (r"\boxed{}", "18", False),
    ("", "18", False),
    ("18", "18", False),
    ("I think it is 18.", "18", False),
    (r"\boxed{?}", "18", False),
    (r"\boxed{\text{undefined}}", "0", False),
    (r"\boxed{" * 200, "18", False),
    ("1" * 3000, "1", False),
]

UNITS = [
    (r"\boxed{5 \text{ cents}}", r"\$5", False),
    (r"\boxed{5 \text{ cents}}", "5"),
    (r"\boxed{50¢}", "50"),
    (r"\boxed{50¢}", r"\$50", False),
    (r"\boxed{5 \text{ dollars}}", r"\$5"),
    (r"\boxed{\$-5}", "-5"),
    (r"\boxed{-\$5}", "-5"),
    (r"\boxed{€5}", r"\$5", False),
    (r"\boxed{5 \text{ Euro}}", "€5"),
    (r"\boxed{18\text{ US dollars}}", r"\$18"),
    (r"\boxed{\$18 \text{ per day}}", r"\$18"),
    (r"\boxed{\$18 \text{ per day}}", r"18\text{ per day}"),
    (r"\boxed{18\text{ dollars a day}}", "18"),
    (r"\boxed{5\text{ km}}", r"5\text{ m}", False),
    (r"\boxed{5\text{ km/h}}", r"5\text{ mph}", False),
    (r"\boxed{60 \text{ miles per hour}}", r"60\text{ mph}"),
    (r"\boxed{60\text{ km/h}}", r"60\text{ km/s}", False),
    (r"\boxed{60\text{ km/h}}", r"60\text{ kilometers per hour}"),
    (r"\boxed{18\text{ dollars per day}}", r"18\text{ dollars a week}", False),
    (r"\boxed{5 \text{ kg}}", "5000", False),
    (r"\boxed{12\text{ inches}}", r"12\text{ feet}", False),
    (r"\boxed{18\text{ in}}", r"18\text{ cm}", False),
    (r"\boxed{18\text{ in total}}", r"18\text{ cm}"),
    (r"\boxed{5\text{ in the morning}}", "5"),
    (r"\boxed{12 \text{ meters squared}}", "12"),
    (r"\boxed{12\text{ m}^2}", r"12\text{ square meters}"),
    (r"\boxed{15 \text{ sq. ft.}}", "15"),
    (r"\boxed{3\sqrt{2}\text{ cm}}", r"3\sqrt{2}\text{ m}", False),
    (r"\boxed{3\sqrt{2}\text{ cm}}", r"3\sqrt{2}\text{ centimeters}"),
    (r"\boxed{10^3 \text{ meters}}", "1000"),
    (r"\boxed{18m}", "18"),
    (r"\boxed{90\text{ min}}", r"90\text{ minutes}"),
    (r"\boxed{90\text{ minutes}}", r"90\text{ hours}", False),
    (r"\boxed{1.5\text{ hours}}", "90", False),
    (r"\boxed{5\text{ years old}}", r"5\text{ months}", False),
    (r"\boxed{5 \text{ hours } 30 \text{ minutes}}", "5", False),
    (r"\boxed{5 \text{ feet } 3\text{ inches}}", r"5\text{ ft}", False),
    (r"\boxed{5 \text{ feet}}", r"5\text{ feet }3\text{ inches}", False),
    (r"\boxed{2\text{ hours } 30\text{ min}}", r"2\text{ hours }30\text{ min}"),
    (r"\boxed{20^\circ\text{C}}", "20"),
    (r"\boxed{20^\circ\text{C}}", r"20^\circ\text{F}", False),
    (r"\boxed{90\text{ radians}}", r"90^\circ", False),
    (r"\boxed{5\%}", r"\$5", False),
    (r"\boxed{50\text{ percent}}", "0.5"),
    (r"\boxed{50 per cent}", r"50\%"),
    (r"\boxed{25\% \text{ of the eggs}}", "25"),
    (r"\boxed{25}", "0.25", False),
    (r"\boxed{2\text{ dozen}}", "2"),
    (r"\boxed{2\text{ dozen}}", "24"),
    (r"\boxed{2\text{ dozen}}", "12", False),
    (r"\boxed{24 \text{ eggs}}", r"2\text{ dozen}"),
    (r"\boxed{3\text{ quarters}}", "3"),
    (r"\boxed{\$2.5\text{ million}}", "2500000"),
    (r"\boxed{18\text{ thousand dollars}}", "18000"),
    (r"\boxed{18\text{ more apples}}", "18"),
    (r"\boxed{18\text{ apples and oranges}}", "18"),
    (r"\boxed{5\text{ times as many}}", "5"),
    (r"\boxed{5\text{ fifth graders}}", "5"),
    (r"\boxed{18/\text{day}}", "18"),
    (r"\boxed{3+3\text{ eggs}}", "6", False),
]

WORDS = [
    # signs and operations
    (r"\boxed{\text{negative }5}", "-5"),
    (r"\boxed{negative 5}", "-5"),
    (r"\boxed{\text{minus }5}", "-5"),
    (r"\boxed{negative \frac{1}{2}}", "-0.5"),
    (r"\boxed{\text{negative }5}", "5", False),
    (r"\boxed{5 \text{ tenths}}", "0.5"),
    (r"\boxed{5 \text{ tenths}}", "5", False),
    (r"\boxed{2\text{ thirds}}", r"\frac{2}{3}"),
    (r"\boxed{2\text{ thirds}}", "2", False),
    (r"\boxed{3 \text{ squared}}", "3", False),
    (r"\boxed{3\text{ doubled}}", "3", False),
    (r"\boxed{5\text{ factorial}}", "5", False),
    (r"\boxed{3\text{ to the power of two}}", "3", False),
    (r"\boxed{5\text{ plus two}}", "5", False),
    (r"\boxed{3\text{ point five}}", "3", False),
    (r"\boxed{2\text{ and a half}}", "2", False),
    (r"\boxed{\text{half of }6}", "6", False),
    (r"\boxed{\text{twice }6}", "6", False),
    (r"\boxed{5\pi}", "5", False),
    (r"\boxed{3 i}", "3", False),
    (r"\boxed{3 a}", "3", False),
    (r"\boxed{3\text{ hundred-dollar bills}}", "3"),
    # bases and times of day
    (r"\boxed{11_2}", "11", False),
    (r"\boxed{101_{\text{two}}}", "101", False),
    (r"\boxed{11 base 2}", "11", False),
    (r"\boxed{11_3}", "11_2", False),
    (r"\boxed{101_2}", r"101_{\text{two}}"),
    (r"\boxed{101_{\text{two}}}", "101_{2}"),
    (r"\boxed{101_3}", r"101_{\text{two}}", False),
    (r"\boxed{101\text{ base }2}", "101_2"),
    (r"\boxed{101}", r"101_{\text{two}}"),
    (r"\boxed{x_{10} = 18}", "18"),
    (r"\boxed{2014}", "2014_5"),
    (r"\boxed{\text{10:30 pm}}", "10:30 am", False),
    (r"\boxed{\text{10:30 a.m.}}", "10:30 AM"),
    (r"\boxed{10:30}", "10:30 am"),
    (r"\boxed{05:30}", "5:30"),
    (r"\boxed{10:30}", "5:15", False),
    (r"\boxed{3:45}", "225", False),
    (r"\boxed{5\text{ p.m.}}", r"5\text{ a.m.}", False),
    (r"\boxed{5\text{ o'clock}}", "5"),
    # doubt, negation and ranges
    (r"\boxed{\text{not }5}", "5", False),
    (r"\boxed{x \neq 5}", "5", False),
    (r"\boxed{> 5}", "5", False),
    (r"\boxed{\text{more than }5}", "5", False),
    (r"\boxed{5\text{ or more}}", "5", False),
    (r"\boxed{5\text{ apples or more}}", "5", False),
    (r"\boxed{18\text{ apples or oranges}}", "18"),
    (r"\boxed{5\text{ if rounded}}", "5", False),
    (r"\boxed{5\text{, maybe }6}", "5", False),
    (r"\boxed{3-5}", "3", False),
    (r"\boxed{3–5}", "5", False),
    (r"\boxed{3\text{ to }5}", "3", False),
    (r"\boxed{\text{between }3\text{ and }5}", "3", False),
    (r"\boxed{5\pm 1}", "5", False),
    (r"\boxed{5}/\boxed{6}", "6", False),
    ("The answer is not $5$.", "5", False),
    (r"The answer is \textbf{$5$}.", "5"),
    ("The answer could be $5$; maybe $6$.", "6", False),
    # names
    (r"\boxed{= 18}", "18"),
    (r"\boxed{\text{Total cost} = \$18}", "18"),
    (r"\boxed{\theta = 30^\circ}", "30"),
    (r"\boxed{\text{Answer: }18}", "18"),
    (r"\boxed{\text{Total: }18}", "18"),
    ("<answer>Total cost: $18</answer>", "18"),
    ("<answer>Total: 17 or 18</answer>", "18", False),
    ("#### 12 - 7 = 5", "5"),
    ("#### 12 - 7", "5", False),
    ("<answer>The final answer is 18.</answer>", "18"),
    # letters and words
    (r"\boxed{BADC}", "ABCD", False),
    (r"\boxed{ABD}", "ADB", False),
    ("<answer>cat</answer>", "tac", False),
    (r"\boxed{\text{No}}", "no"),
    (r"\boxed{\text{not Monday}}", "Monday", False),
    (r"\boxed{\text{B. 12 or C. 13}}", "B", False),
    (r"\boxed{\text{B) 12, C) 13}}", "B", False),
    ("<answer>B or C</answer>", "B", False),
    (r"\boxed{\text{Not B}}", "B", False),
    (r"\boxed{\text{B. Vitamin C}}", "B"),
    ("<answer>B. George W. Bush</answer>", "B"),
    ("<answer>B - Paris</answer>", "B"),
    ("<answer>Option B</answer>", "B"),
    ("<answer>The correct answer is B</answer>", "B"),
    (r"\boxed{B}", "B. 12"),
    (r"\boxed{\text{(C) }12}", "B. 12", False),
    (r"\boxed{2\sqrt{3}}", r"\textbf{(B)}\ \sqrt{12}"),
    (r"\boxed{2\sqrt{2}}", r"\textbf{(B)}\ \sqrt{12}", False),
    (r"\boxed{1}", "N - 1", False),
    (r"\boxed{N}", "N - 1", False),
    (r"\boxed{N - 1}", "N", False),
    (r"\boxed{-1 + N}", "N - 1"),
    # headings
    ("#### Conclusion\nThe answer is $18$.", "18"),
    ("#### Step 2: Add\nThe answer is $18$.", "18"),
    ("#### 1. Setup\nThe answer is $18$.", "18"),
    ("#### Answer: 18\nThat is all.", "18"),
    ("The answer is $3$.\n#### 18 eggs", "18"),
    ("#### Monday", "Monday"),
    # characters
    (r"\boxed{x² + 1}", "$1+x^2$"),
    (r"\boxed{√12}", r"$2\sqrt{3}$"),
    (r"\boxed{10⁻³}", "0.001"),
    (r"\boxed{x ≤ 3}", r"$x \le 3$"),
]

# References without delimiters, as in the public data sets: each equals itself.
GOLDS = r"""
    \frac{3}{2}\pi
    \left(\frac{3}{5},\frac{8}{3}\right]
    \frac{1}{2}\sqrt{3}
    \frac{x}{2}+\frac{1}{2}
    a \geq \frac{1}{4}
    \left[\frac{1}{2},\infty\right)
    3\frac{1}{2}\text{ hours}
    \frac{5}{6} \pm \frac{\sqrt{13}}{6}
    \begin{pmatrix} \frac{1}{2} & 0 \\ 0 & \frac{1}{3} \end{pmatrix}
    -\frac{3}{4}\ln 2
    \frac{1}{3}\log_2 5
    \left(\frac{1}{2},\frac{\sqrt{3}}{2}\right)
    \frac{\pi}{6}+\frac{1}{4}
    e^{\frac{1}{2}}
    \sqrt{\frac{3}{2}}
    2^{\frac{1}{3}}
    \sin\frac{1}{2}
    \frac{7}{2}\text{ cm}
    \frac{1}{2}\left(1+\sqrt{5}\right)
    \left\{\frac{1}{2},\frac{2}{3}\right\}
    x\in\left(-\infty,\frac{1}{2}\right)\cup(2,\infty)
    y=\frac{1}{2}x+\frac{3}{4}
    -\frac{1}{2} < x < \frac{3}{2}
    \binom{10}{5}\left(\frac{1}{2}\right)^{10}
    \frac{1}{4}e^{2}+\frac{1}{4}
    \frac{1}{2} \text{ and } \frac{1}{3}
    \frac{2}{5}\sqrt{10}\text{ units}
    \left(-\frac{1}{2}, \frac{5}{2}\right)
    \frac{3}{8}i
    \cos\frac{3}{7}
    \frac{9}{4}\pi\text{ cubic inches}
    \arctan\frac{1}{2}
    \dfrac{11}{3}\sqrt{2}
    \left|\frac{1}{2}-x\right|
    x \le -\frac{7}{4}
    \begin{bmatrix} \frac{3}{5} \\ \frac{4}{5} \end{bmatrix}
    \frac{1}{2}, \frac{\pi}{3}
    k\pi+\frac{1}{6}
    \frac{1}{2}n(n+1)
    \frac{1}{1-x}
    \frac{n(n+1)(2n+1)}{6}
    \sqrt{65}
    2\sqrt{13}
    (-\infty,-3]\cup[3,\infty)
    \left(-\infty, 0\right) \cup \left(0, \infty\right)
    \text{(C)}
    \text{Evelyn}
    \textbf{(D)}\ 9
    11\sqrt{2}
    x^2-7x+12
    p - q
    6 - 5i
    -2 + 7i
    \frac{3 \pm \sqrt{17}}{4}
    1 \pm \sqrt{19}
    10080
    \$32,\!348
    5.4 \text{ cents}
    \frac{35}{64}
    4210_5
    2516_8
    (6,31,-1)
    \left(\frac{\sqrt{3}}{2}, \frac{1}{2}\right)
    \{-1,0,2\}
    (0,9)\cup(9,36)
    y = 2x + 3
""".strip().splitlines()

BARE = [(rf"\boxed{{{gold.strip()}}}", gold.strip()) for gold in GOLDS] + [
    # a fraction of the reference is not the reference
    (r"\boxed{\frac{3}{2}}", r"\frac{3}{2}\pi", False),
    (r"\boxed{\frac{3\pi}{2}}", r"\frac{3}{2}\pi"),
    (r"\boxed{8/3, 3/5}", r"\left(\frac{3}{5},\frac{8}{3}\right]", False),
    (r"\boxed{(3/5, 8/3]}", r"\left(\frac{3}{5},\frac{8}{3}\right]"),
    (r"\boxed{\frac12}", r"\frac{1}{2}\sqrt{3}", False),
    (r"\boxed{\frac{\sqrt3}{2}}", r"\frac{1}{2}\sqrt{3}"),
    (r"\boxed{\frac12}", r"\frac{x}{2}+\frac{1}{2}", False),
    (r"\boxed{\frac14}", r"a \geq \frac{1}{4}", False),
    (r"\boxed{\frac12}", r"3\frac{1}{2}\text{ hours}", False),
    (r"\boxed{3.5}", r"3\frac{1}{2}\text{ hours}"),
    (r"\boxed{0.5\text{ hours}}", r"\frac{1}{2} hour"),
    (r"\boxed{\frac13}", r"x=\frac{1}{2} or x=\frac{1}{3}", False),
    (r"\boxed{\frac{1}{2}, \frac{1}{3}}", r"x=\frac{1}{2} or x=\frac{1}{3}"),
    # after the word "answer" and after ####
    (r"The answer is 2\frac{1}{2}.", "5/2"),
    (r"The answer is 2\frac{1}{2}.", "1/2", False),
    (r"The answer is \frac{3}{2}\pi.", r"\frac{3\pi}{2}"),
    (r"The answer is \frac{x}{2} + \frac{1}{2}.", r"\frac{1}{2}", False),
    (r"The answer is \frac{1}{2} or \frac{1}{3}.", "1/3", False),
    (r"The answer is $x+1.$", "1+x"),
    ("My first answer $2$ was wrong.\n#### \\sqrt{5}", r"\sqrt{5}"),
    ("My first answer $2$ was wrong.\n#### \\sqrt{5}", "2", False),
    # notations
    (r"\boxed{x\approx 3.14}", "3.14"),
    (r"\boxed{≈ 3.15}", "3.14", False),
    (r"\boxed{0.1\overline{6}}", r"\frac16"),
    (r"\boxed{0.\overline{3}}", r"\frac{3}{10}", False),
    (r"\boxed{1.5e3}", "1500"),
    (r"\boxed{2e^3}", "2000", False),
    (r"\boxed{\frac\pi 2}", r"\frac{\pi}{2}"),
    (r"\boxed{\varnothing}", r"\emptyset"),
    (r"\boxed{8\pi\text{ cm}}", r"8\pi\text{ inches}", False),
    (r"\boxed{x>3}", r"(3,\infty)"),
    (r"\boxed{x\ge3}", r"(3,\infty)", False),
    (r"\boxed{0\le x\le 1}", "[0,1]"),
    (r"\boxed{0\le x\le 1}", "(0,1)", False),
    # decisions: what is neither converted nor finished is wrong; a name or form is not compared
    (r"\boxed{\$0.75}", r"75\text{ cents}", False),
    (r"\boxed{1/2/3}", r"\frac{1}{6}", False),
    (r"\boxed{x=5}", "y=5"),
    (r"\boxed{(1,2)}", r"\{1,2\}"),
    (r"\boxed{12}", "12 dozen"),
]

OTHERS = FRACTIONS + ALGEBRA + COLLECTIONS + CHOICES_AND_TEXTS + MARKS + UNITS + WORDS + BARE
ROWS = [(*row, True)[:3] for row in NUMBERS + OTHERS]
