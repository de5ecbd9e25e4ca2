r"""Outputs of models with the reference of the data set and the right verdict, judged by hand.

    ROWS = [(output, reference, right), ...]

A line of the tables is `output == reference` if the output is right, and `output != reference` if
it is wrong; ⏎ stands for a new line, and a line that begins with "# " is a heading. The verdict is
that of a teacher who knows the question: is the marked answer equal to the reference? Notation and
the name of a unit do not matter. These are wrong: an answer that names several results where one is
asked for, a calculation that is left to the reader, a result that was only tried while thinking, an
answer that is not finished. If the reference has no unit, the question names it: "2 dozen" may be 2
or 24, but 5 cents are not $5. Answers are marked by \boxed{}, <answer>, ####, or as a formula after
the word "answer".

Read next: test_answers.py, which judges every row.
"""

import re


def rows(table: str) -> list[tuple[str, str, bool]]:
    """Return the rows of a table."""
    lines = [line for line in table.strip("\n").split("\n") if not line.startswith("# ")]
    parts = [re.split(" ([=!]=) ", line.replace("⏎", "\n")) for line in lines]
    return [(output, reference, sign == "==") for output, sign, reference in parts]


NUMBERS = rows(r"""
# plain
\boxed{18} == 18
So she makes 9 * 2 = $18 per day. \boxed{18} == 18
\boxed{17} != 18
\boxed{-3} == -3
\boxed{3} != -3
\boxed{+3} == 3
\boxed{−3} == -3
\boxed{–3} == -3
\boxed{018} == 18
\boxed{18.0} == 18
\boxed{18.} == 18
\boxed{7.} == 7
\boxed{.5} == 0.5
\boxed{0.50} == 0.5
\boxed{181} != 18
\boxed{1 8} != 18
\boxed{18}. == 18
\boxed {18} == 18
\boxed{ 18 } == 18
\boxed{\mathbf{7}} == 7
\boxed{\textbf{7}} == 7
\boxed{\text{7}} == 7
**\boxed{7}** == 7
\[\boxed{7}\] == 7
\fbox{7} == 7
$$\boxed{7}$$ == 7
$\boxed{7}$ == $7$
\boxed{$7$} == 7
\boxed{\(7\)} == 7
# thousands
\boxed{70,000} == 70000
\boxed{70000} == 70,000
\boxed{1{,}234} == 1234
\boxed{1{,}234{,}567} == 1234567
\boxed{1\,234\,567} == 1234567
\boxed{1,234.50} == 1234.5
\boxed{70,00} != 7000
\boxed{7,000} != 70000
# money
\boxed{\$70{,}000} == 70000
\boxed{\$18} == 18
\boxed{$18} == 18
\boxed{\$18.00} == 18
\boxed{18 \text{ euros}} == 18
\boxed{€18} == 18
\boxed{£18.50} == 18.5
# units
\boxed{18\text{ dollars}} == 18
\boxed{18 \text{ eggs}} == 18
\boxed{18\,\text{cm}} == 18
\boxed{18\ \mathrm{cm}} == 18
\boxed{18~\mathrm{cm}^2} == 18
\boxed{18 cm} == 18
\boxed{18cm} == 18
\boxed{20 minutes} == 20
\boxed{20 \text{ minutes}} == 20\text{ minutes}
\boxed{60 \text{ miles per hour}} == 60
\boxed{60\text{ km/h}} == 60
\boxed{9.8\ \mathrm{m/s^2}} == 9.8
\boxed{12\text{ square meters}} == 12
\boxed{19 eggs} != 18
\boxed{18x} != 18
\boxed{5\text{ cm}} != 5\text{ m}
\boxed{5\text{ cm}} == 5\text{ centimeters}
\boxed{90^\circ} == 90
\boxed{90^{\circ}} == 90
\boxed{90°} == 90
\boxed{90 \text{ degrees}} == 90^\circ
\boxed{45^\circ} != 90
\boxed{2\text{ million}} == 2000000
\boxed{2\text{ million}} != 2
# percent
\boxed{50\%} == 50
\boxed{50\%} == 50\%
\boxed{50} == 50\%
\boxed{50\%} == 0.5
\boxed{0.5} == 50\%
\boxed{\frac{1}{2}} == 50\%
\boxed{50\%} != 0.5\%
\boxed{5\%} != 50
\boxed{50 percent} == 50
\boxed{12.5\%} == 12.5
# variables
\boxed{x=18} == 18
\boxed{x = 18} == x=18
\boxed{18} == x=18
\boxed{x_1 = 18} == 18
\boxed{f(2) = 18} == 18
\boxed{x=17} != 18
\boxed{3+4=7} == 7
\boxed{3+4=8} != 7
\boxed{18 = 9\cdot 2} == 18
\boxed{9 \times 2 = 18} == 18
\boxed{17 = 9\cdot 2} != 18
\boxed{17 = 18} != 18
\boxed{18=} != 18
# powers of ten, and calculations
\boxed{10^3} == 1000
\boxed{2^{10}} == 1024
\boxed{1.5\times10^3} == 1500
\boxed{6.02 \times 10^{23}} == 6.02\cdot 10^{23}
\boxed{1.5\times10^4} != 1500
\boxed{3+3} != 6
\boxed{48/2+48} != 72
\boxed{12 \times 5} != 60
\boxed{(12)(5)} != 60
\boxed{10_2} != 2
\boxed{10_2} == 10_2
\boxed{10_2} == 10_{2}
# other digits and characters
\boxed{１８} == 18
\boxed{١٨} == 18
\boxed{१८} == 18
答案是 \boxed{18}。 == 18
\boxed{½} == 0.5
\boxed{1½} == 1.5
\boxed{2√3} == 2\sqrt{3}
\boxed{π} == \pi
\boxed{x²} == x^2
""")

OTHERS = rows(r"""
# fractions
\boxed{\frac{1}{2}} == 0.5
\boxed{\frac{1}{2}} == \frac12
\boxed{\dfrac{1}{2}} == \frac{1}{2}
\boxed{\tfrac12} == 1/2
\boxed{\frac23} == \frac{2}{3}
\boxed{1/2} == \frac{1}{2}
\boxed{0.5} == \frac{1}{2}
\boxed{\frac{2}{4}} == \frac{1}{2}
\boxed{\frac{-1}{2}} == -\frac{1}{2}
\boxed{\frac{1}{-2}} == -0.5
\boxed{-\frac{1}{2}} == -1/2
\boxed{\frac{1}{2}} != -\frac{1}{2}
\boxed{\frac{1}{3}} != \frac{1}{2}
\boxed{1\frac{1}{2}} == \frac{3}{2}
\boxed{1 \frac{1}{2}} == 1.5
\boxed{1 1/2} == 1.5
\boxed{-1\frac{1}{2}} == -1.5
\boxed{1\frac{1}{2}} != \frac{1}{2}
\boxed{\frac{1}{2}\text{ hour}} == 0.5
\boxed{0.333} != \frac{1}{3}
\boxed{0.333333} == \frac{1}{3}
\boxed{0.666667} == \frac{2}{3}
\boxed{0.6666666} == \frac{2}{3}
\boxed{0.66666} != \frac{2}{3}
\boxed{1.000001} != 1
\boxed{6.63\times10^{-34}} != 1.05\times10^{-34}
\boxed{1.5\times10^{-30}} != 0
\boxed{1/2,3} != 1/23
\boxed{3,1/2} == 1/2,3
\boxed{3.14} != \pi
\boxed{\frac{70{,}000}{3}} == \frac{70000}{3}
\boxed{\frac{1}{0}} != 0
\boxed{\frac{7}{12}} == 7/12
\boxed{7:12} == 7:12
\boxed{\frac{x}{2}} == \frac{1}{2}x
# algebra
\boxed{(x+1)^2} == x^2+2x+1
\boxed{x^2+2x+1} == (x+1)^2
\boxed{x^2+2x+2} != (x+1)^2
\boxed{x^{2}} == x^2
\boxed{x^2 + 3x} == 3x+x^2
\boxed{2x + 3} == y = 2x+3
\boxed{y = 2x + 3} == y=2x+3
\boxed{y = 2x - 3} != y=2x+3
\boxed{\sqrt{12}} == 2\sqrt{3}
\boxed{\sqrt2} == \sqrt{2}
\boxed{\sqrt 2} == \sqrt{2}
\boxed{\frac{\sqrt{2}}{2}} == \frac{1}{\sqrt{2}}
\boxed{\sqrt{3}} != \sqrt{2}
\boxed{\sqrt{16}} == 4
\boxed{\sqrt[3]{8}} == 2
\boxed{2\pi} == 2\pi
\boxed{2 \pi} == \pi \cdot 2
\boxed{6.28} != 2\pi
\boxed{\pi r^2} == r^2\pi
\boxed{3\sqrt{2}\text{ cm}} == 3\sqrt{2}
\boxed{3+2i} == 3+2i
\boxed{2i+3} == 3+2i
\boxed{3-2i} != 3+2i
\boxed{\ln 4} == 2\ln 2
\boxed{\log_2 8} == 3
\boxed{\sin^2 x + \cos^2 x} == 1
\boxed{\frac{x+1}{x-1}} == \dfrac{x + 1}{x - 1}
\boxed{\frac{x-1}{x+1}} != \frac{x+1}{x-1}
\boxed{\binom{5}{2}} == 10
\boxed{5!} == 120
\boxed{ab} == ba
\boxed{x \cdot y \cdot z} == $xyz$
\boxed{zyx} == $xyz$
\boxed{n(n+1)/2} == \frac{n(n+1)}{2}
\boxed{x} != X
\boxed{x = 3, y = 5} == x=3,y=5
\boxed{-x} != x
\boxed{|x|} == \left|x\right|
\boxed{2^{100}} == 2^{100}
\boxed{\infty} == \infty
# collections
\boxed{\{1,2,3\}} == \{3,2,1\}
\boxed{\{1, 2\}} != \{1,2,3\}
\boxed{1,2,3} == 1, 2, 3
\boxed{3,2,1} == 1,2,3
\boxed{-2, 5} == 5,-2
\boxed{-2,4} != 5,-2
\boxed{x=-2 \text{ or } x=5} == -2,5
\boxed{-2 \text{ and } 5} == -2,5
\boxed{-2}, \boxed{5} == -2,5
$\boxed{-2}$ and $\boxed{5}$ == -2, 5
\boxed{-2} != -2,5
\boxed{\pm 3} == -3,3
\boxed{\pm 3} != 3
\boxed{(1,2)} == (1,2)
\boxed{(1, 2)} == \left(1,2\right)
\boxed{(2,1)} != (1,2)
\boxed{(0.5, 2)} == (\frac{1}{2}, 2)
\boxed{(1,2,3)} == (1, 2, 3)
\boxed{(1,3,2)} != (1,2,3)
\boxed{[1,2]} == [1,2]
\boxed{[1,2)} != [1,2]
\boxed{(-\infty, 2) \cup (3, \infty)} == (-\infty,2)\cup(3,\infty)
\boxed{(-\infty,2)\cup(3,\infty)} == (3,\infty)\cup(-\infty,2)
\boxed{(-\infty,2]\cup(3,\infty)} != (-\infty,2)\cup(3,\infty)
\boxed{x \in [1,2]} == [1,2]
\boxed{x > 3} == 3 < x
\boxed{x \geq 3} == x \ge 3
\boxed{x > 3} != x \ge 3
\boxed{(3,\infty)} == x > 3
\boxed{\emptyset} == \emptyset
\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}} == \begin{pmatrix}1&2\\3&4\end{pmatrix}
\boxed{\begin{pmatrix}1&2\\ 3&4\end{pmatrix}} == \begin{pmatrix} 1&2\\3&4 \end{pmatrix}
\boxed{\begin{pmatrix}1&3\\2&4\end{pmatrix}} != \begin{pmatrix}1&2\\3&4\end{pmatrix}
\boxed{\begin{bmatrix} \frac12 \\ 2 \end{bmatrix}} == \begin{bmatrix} 0.5 \\ 2 \end{bmatrix}
# choices and texts
\boxed{B} == B
\boxed{\text{(B)}} == B
\boxed{(B)} == B
\boxed{\textbf{(B)}} == (B)
\boxed{\textbf{(B) }12} == B
\boxed{B. 12} == B
\boxed{B)} == B
\boxed{\mathrm{B}} == B
\boxed{12} == \textbf{(B)}\ 12
\boxed{B} == \textbf{(B)}\ 12
\boxed{13} != \textbf{(B)}\ 12
\boxed{C} != B
\boxed{\text{(C) }12} != B
\boxed{\text{A or B}} != B
\boxed{(A) and (B)} != B
\boxed{A, B} != B
<answer>B</answer> == B
<answer>(B) Paris</answer> == B
\boxed{\text{Monday}} == Monday
\boxed{Monday} == \text{Monday}
\boxed{\text{monday}} == Monday
\boxed{\text{Tuesday}} != Monday
\boxed{\text{Yes}} == yes
\boxed{\text{No}} != \text{Yes}
\boxed{\text{even}} != \text{odd}
\boxed{\text{Evelyn}} == \text{Evelyn}
<answer>New York</answer> == New York
<answer>New Jersey</answer> != New York
\boxed{\text{6:30 p.m.}} == \text{6:30 p.m.}
\boxed{I do not know} != 18
# <answer>
<think>a</think><answer>18</answer> == 18
<answer>⏎18⏎</answer> == 18
<answer>\(18\)</answer> == 18
<answer>$18$</answer> == 18
<answer>$70,000</answer> == 70000
<answer>18 eggs</answer> == 18
<answer>$18 per day</answer> == 18
<answer>Answer: 18</answer> == 18
<answer>\boxed{18}</answer> == 18
<answer>\frac{1}{2}</answer> == 1/2
<answer>(x+1)^2</answer> == x^2+2x+1
<answer>17</answer> != 18
<answer></answer> != 18
<answer>1</answer><answer>18</answer> == 18
# ####
She has 9 * 2 = 18.⏎#### 18 == 18
#### $18 == 18
#### 18. == 18
#### 18 dollars == 18
#### 1,234 == 1234
#### **18** == 18
#### 18⏎That is all. == 18
#### 17 != 18
####  != 18
# a formula after "answer"
The final answer is $18$. == 18
The final answer is $18$. I hope it is correct. == 18
Final answer: \(\frac{1}{2}\) == 0.5
Therefore, the answer is \[ x^2 \] == x^2
The answer is $17$. != 18
The answer is $18$ where $x=3$. == 18
The answer is $\$18$. == 18
The answer is $$\$18$$. == 18
The answer is $18$ where $x=3$. != 3
The answer is \frac{1}{2}. == 1/2
$x = 18$, so we are done. != 18
The answer is $3$ or $5$. != 5
The answers are $-2$ and $5$. == -2,5
# references that are solutions
\boxed{18} == 9 * 2 = <<9*2=18>>18⏎#### 18
\boxed{18} == We get $9 \cdot 2 = \boxed{18}$.
#### 17 != We get $9 \cdot 2 = \boxed{18}$.
\boxed{\frac12} == $\frac{1}{2}$
\boxed{2} == We get $\boxed 2$.
\boxed{0.5} == The price is $\$0.5$ per egg.
# corrections: the last one counts
\boxed{1}. No, wait. \boxed{18} == 18
\boxed{18}. No, wait. \boxed{1} != 18
First \boxed{17}, no, \boxed{18} == 18
\boxed{18} So the answer is \boxed{18} == 18
# hedging
\boxed{3} or \boxed{5} != 5
\boxed{3} or \boxed{5} != 3
\boxed{3}, or maybe \boxed{5} != 5
$\boxed{3}$ or $\boxed{5}$ != 5
\boxed{3}. Or maybe \boxed{5}. != 5
\boxed{3}. Or rather, \boxed{5}. == 5
\boxed{3 or 5} != 5
\boxed{3 \text{ or } 5} != 5
\boxed{3, 5} != 5
<answer>3 or 5</answer> != 5
<answer>3</answer> or <answer>5</answer> != 5
#### 3 or 5 != 5
# thinking
<think>\boxed{18}</think> I do not know != 18
<think>maybe \boxed{7} != 7
<think>\boxed{17}</think>\boxed{18} == 18
<think>\boxed{18}</think>\boxed{17} != 18
<think>It is 18.</think> It is \boxed{18}. == 18
It is 18.</think>\boxed{18} == 18
<think>a</think> Well. <think>maybe \boxed{7} != 7
# unfinished or absent
so \boxed{18 != 18
so <answer>18 != 18
\boxed{} != 18
18 != 18
I think it is 18. != 18
\boxed{?} != 18
\boxed{\text{undefined}} != 0
# units
\boxed{5 \text{ cents}} != \$5
\boxed{5 \text{ cents}} == 5
\boxed{50¢} == 50
\boxed{50¢} != \$50
\boxed{5 \text{ dollars}} == \$5
\boxed{\$-5} == -5
\boxed{-\$5} == -5
\boxed{€5} != \$5
\boxed{5 \text{ Euro}} == €5
\boxed{18\text{ US dollars}} == \$18
\boxed{\$18 \text{ per day}} == \$18
\boxed{\$18 \text{ per day}} == 18\text{ per day}
\boxed{18\text{ dollars a day}} == 18
\boxed{5\text{ km}} != 5\text{ m}
\boxed{5\text{ km/h}} != 5\text{ mph}
\boxed{60 \text{ miles per hour}} == 60\text{ mph}
\boxed{60\text{ km/h}} != 60\text{ km/s}
\boxed{60\text{ km/h}} == 60\text{ kilometers per hour}
\boxed{18\text{ dollars per day}} != 18\text{ dollars a week}
\boxed{5 \text{ kg}} != 5000
\boxed{12\text{ inches}} != 12\text{ feet}
\boxed{18\text{ in}} != 18\text{ cm}
\boxed{18\text{ in total}} == 18\text{ cm}
\boxed{5\text{ in the morning}} == 5
\boxed{12 \text{ meters squared}} == 12
\boxed{12\text{ m}^2} == 12\text{ square meters}
\boxed{15 \text{ sq. ft.}} == 15
\boxed{3\sqrt{2}\text{ cm}} != 3\sqrt{2}\text{ m}
\boxed{3\sqrt{2}\text{ cm}} == 3\sqrt{2}\text{ centimeters}
\boxed{10^3 \text{ meters}} == 1000
\boxed{18m} == 18
\boxed{90\text{ min}} == 90\text{ minutes}
\boxed{90\text{ minutes}} != 90\text{ hours}
\boxed{1.5\text{ hours}} != 90
\boxed{5\text{ years old}} != 5\text{ months}
\boxed{5 \text{ hours } 30 \text{ minutes}} != 5
\boxed{5 \text{ feet } 3\text{ inches}} != 5\text{ ft}
\boxed{5 \text{ feet}} != 5\text{ feet }3\text{ inches}
\boxed{2\text{ hours } 30\text{ min}} == 2\text{ hours }30\text{ min}
\boxed{20^\circ\text{C}} == 20
\boxed{20^\circ\text{C}} != 20^\circ\text{F}
\boxed{90\text{ radians}} != 90^\circ
\boxed{5\%} != \$5
\boxed{50\text{ percent}} == 0.5
\boxed{50 per cent} == 50\%
\boxed{25\% \text{ of the eggs}} == 25
\boxed{25} != 0.25
\boxed{2\text{ dozen}} == 2
\boxed{2\text{ dozen}} == 24
\boxed{2\text{ dozen}} != 12
\boxed{24 \text{ eggs}} == 2\text{ dozen}
\boxed{3\text{ quarters}} == 3
\boxed{\$2.5\text{ million}} == 2500000
\boxed{18\text{ thousand dollars}} == 18000
\boxed{18\text{ more apples}} == 18
\boxed{18\text{ apples and oranges}} == 18
\boxed{5\text{ times as many}} == 5
\boxed{5\text{ fifth graders}} == 5
\boxed{18/\text{day}} == 18
\boxed{3+3\text{ eggs}} != 6
# signs and operations
\boxed{\text{negative }5} == -5
\boxed{negative 5} == -5
\boxed{\text{minus }5} == -5
\boxed{negative \frac{1}{2}} == -0.5
\boxed{\text{negative }5} != 5
\boxed{5 \text{ tenths}} == 0.5
\boxed{5 \text{ tenths}} != 5
\boxed{2\text{ thirds}} == \frac{2}{3}
\boxed{2\text{ thirds}} != 2
\boxed{3 \text{ squared}} != 3
\boxed{3\text{ doubled}} != 3
\boxed{5\text{ factorial}} != 5
\boxed{3\text{ to the power of two}} != 3
\boxed{5\text{ plus two}} != 5
\boxed{3\text{ point five}} != 3
\boxed{2\text{ and a half}} != 2
\boxed{\text{half of }6} != 6
\boxed{\text{twice }6} != 6
\boxed{5\pi} != 5
\boxed{3 i} != 3
\boxed{3 a} != 3
\boxed{3\text{ hundred-dollar bills}} == 3
# bases and times of day
\boxed{11_2} != 11
\boxed{101_{\text{two}}} != 101
\boxed{11 base 2} != 11
\boxed{11_3} != 11_2
\boxed{101_2} == 101_{\text{two}}
\boxed{101_{\text{two}}} == 101_{2}
\boxed{101_3} != 101_{\text{two}}
\boxed{101\text{ base }2} == 101_2
\boxed{101} == 101_{\text{two}}
\boxed{x_{10} = 18} == 18
\boxed{2014} == 2014_5
\boxed{\text{10:30 pm}} != 10:30 am
\boxed{\text{10:30 a.m.}} == 10:30 AM
\boxed{10:30} == 10:30 am
\boxed{05:30} == 5:30
\boxed{10:30} != 5:15
\boxed{3:45} != 225
\boxed{5\text{ p.m.}} != 5\text{ a.m.}
\boxed{5\text{ o'clock}} == 5
# doubt, negation and ranges
\boxed{\text{not }5} != 5
\boxed{x \neq 5} != 5
\boxed{> 5} != 5
\boxed{\text{more than }5} != 5
\boxed{5\text{ or more}} != 5
\boxed{5\text{ apples or more}} != 5
\boxed{18\text{ apples or oranges}} == 18
\boxed{5\text{ if rounded}} != 5
\boxed{5\text{, maybe }6} != 5
\boxed{3-5} != 3
\boxed{3–5} != 5
\boxed{3\text{ to }5} != 3
\boxed{\text{between }3\text{ and }5} != 3
\boxed{5\pm 1} != 5
\boxed{5}/\boxed{6} != 6
The answer is not $5$. != 5
The answer is \textbf{$5$}. == 5
The answer could be $5$; maybe $6$. != 6
# names
\boxed{= 18} == 18
\boxed{\text{Total cost} = \$18} == 18
\boxed{\theta = 30^\circ} == 30
\boxed{\text{Answer: }18} == 18
\boxed{\text{Total: }18} == 18
<answer>Total cost: $18</answer> == 18
<answer>Total: 17 or 18</answer> != 18
#### 12 - 7 = 5 == 5
#### 12 - 7 != 5
<answer>The final answer is 18.</answer> == 18
# letters and words
\boxed{BADC} != ABCD
\boxed{ABD} != ADB
<answer>cat</answer> != tac
\boxed{\text{No}} == no
\boxed{\text{not Monday}} != Monday
\boxed{\text{B. 12 or C. 13}} != B
\boxed{\text{B) 12, C) 13}} != B
<answer>B or C</answer> != B
\boxed{\text{Not B}} != B
\boxed{\text{B. Vitamin C}} == B
<answer>B. George W. Bush</answer> == B
<answer>B - Paris</answer> == B
<answer>Option B</answer> == B
<answer>The correct answer is B</answer> == B
\boxed{B} == B. 12
\boxed{\text{(C) }12} != B. 12
\boxed{2\sqrt{3}} == \textbf{(B)}\ \sqrt{12}
\boxed{2\sqrt{2}} != \textbf{(B)}\ \sqrt{12}
\boxed{1} != N - 1
\boxed{N} != N - 1
\boxed{N - 1} != N
\boxed{-1 + N} == N - 1
# headings
#### Conclusion⏎The answer is $18$. == 18
#### Step 2: Add⏎The answer is $18$. == 18
#### 1. Setup⏎The answer is $18$. == 18
#### Answer: 18⏎That is all. == 18
The answer is $3$.⏎#### 18 eggs == 18
#### Monday == Monday
# characters
\boxed{x² + 1} == $1+x^2$
\boxed{√12} == $2\sqrt{3}$
\boxed{10⁻³} == 0.001
\boxed{x ≤ 3} == $x \le 3$
# a fraction of the reference is not the reference
\boxed{\frac{3}{2}} != \frac{3}{2}\pi
\boxed{\frac{3\pi}{2}} == \frac{3}{2}\pi
\boxed{8/3, 3/5} != \left(\frac{3}{5},\frac{8}{3}\right]
\boxed{(3/5, 8/3]} == \left(\frac{3}{5},\frac{8}{3}\right]
\boxed{\frac12} != \frac{1}{2}\sqrt{3}
\boxed{\frac{\sqrt3}{2}} == \frac{1}{2}\sqrt{3}
\boxed{\frac12} != \frac{x}{2}+\frac{1}{2}
\boxed{\frac14} != a \geq \frac{1}{4}
\boxed{\frac12} != 3\frac{1}{2}\text{ hours}
\boxed{3.5} == 3\frac{1}{2}\text{ hours}
\boxed{0.5\text{ hours}} == \frac{1}{2} hour
\boxed{\frac13} != x=\frac{1}{2} or x=\frac{1}{3}
\boxed{\frac{1}{2}, \frac{1}{3}} == x=\frac{1}{2} or x=\frac{1}{3}
# after the word "answer" and after ####
The answer is 2\frac{1}{2}. == 5/2
The answer is 2\frac{1}{2}. != 1/2
The answer is \frac{3}{2}\pi. == \frac{3\pi}{2}
The answer is \frac{x}{2} + \frac{1}{2}. != \frac{1}{2}
The answer is \frac{1}{2} or \frac{1}{3}. != 1/3
The answer is $x+1.$ == 1+x
My first answer $2$ was wrong.⏎#### \sqrt{5} == \sqrt{5}
My first answer $2$ was wrong.⏎#### \sqrt{5} != 2
# notations
\boxed{x\approx 3.14} == 3.14
\boxed{≈ 3.15} != 3.14
\boxed{0.1\overline{6}} == \frac16
\boxed{0.\overline{3}} != \frac{3}{10}
\boxed{1.5e3} == 1500
\boxed{2e^3} != 2000
\boxed{\frac\pi 2} == \frac{\pi}{2}
\boxed{\varnothing} == \emptyset
\boxed{8\pi\text{ cm}} != 8\pi\text{ inches}
\boxed{x>3} == (3,\infty)
\boxed{x\ge3} != (3,\infty)
\boxed{0\le x\le 1} == [0,1]
\boxed{0\le x\le 1} != (0,1)
# decisions: what is neither converted nor finished is wrong; a name or form is not compared
\boxed{\$0.75} != 75\text{ cents}
\boxed{1/2/3} != \frac{1}{6}
\boxed{x=5} == y=5
\boxed{(1,2)} == \{1,2\}
\boxed{12} == 12 dozen
# the last closed mark of the strongest kind
so \boxed{1}, no, \boxed{ 42 }. == 42
\boxed{\frac{1}{\sqrt{2}}} == \frac{1}{\sqrt{2}}
\boxed{\{1, 2\}} == \{1, 2\}
\boxed{5} and an unclosed \boxed{6 == 5
{ \boxed{ unclosed around \boxed{5} == 5
\boxed{1} <answer>2</answer> #### 3 == 1
<answer>1</answer><answer>⏎ 2 ⏎</answer> == 2
<answer>1 != 1
It is 7.⏎#### 7⏎as said == 7
<think>\boxed{1}</think> I do not know != 1
<think>\boxed{1}</think>\boxed{2} == 2
thoughts \boxed{1}</think>#### 2 == 2
# the same in both directions
\boxed{-1,234,567.50} == -1234567.5
\boxed{-1234567.5} == -1,234,567.50
\boxed{-\dfrac{1}{2}} == -.5
\boxed{-.5} == -\dfrac{1}{2}
\boxed{1\,234} == 1234
\boxed{1234} == 1\,234
\boxed{  x +  1 } == x+1
\boxed{x+1} ==   x +  1
\boxed{50\%} != 0.5\%
\boxed{0.5\%} != 50\%
\boxed{1 2} != 12
\boxed{12} != 1 2
\boxed{1/0} != 0
\boxed{0} != 1/0
\boxed{1/0} == 1/0
\boxed{nan} == nan
""")

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

NINES = "9" * 5000
SPECIAL = [
    (rf"\boxed{{{NINES}}}", NINES, True),
    ("", "18", False),
    (r"\boxed{" * 200, "18", False),
    ("1" * 3000, "1", False),
]
BARE = [(rf"\boxed{{{gold.strip()}}}", gold.strip(), True) for gold in GOLDS]
# right, but judged to be wrong
MISTAKEN = (r"\boxed{e^{i\pi}}", "-1")
ROWS = NUMBERS + OTHERS + BARE + SPECIAL
