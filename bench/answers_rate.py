"""Answers checked per second on one core, for the ordinary case: exact comparison settles it.

    python bench/answers_rate.py

CPU seconds of this process; texts differ, so that nothing is remembered from one to the next.
"""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from answers import correct  # noqa: E402

WORK = "so we carry the one and add the columns up. " * 20  # 880 characters
KINDS = {
    "boxed integer": lambda i: (rf"That makes \boxed{{{i}}}.", str(i + i % 2)),
    "integer behind ####, long work": lambda i: (f"{WORK}\n#### {i:,}", str(i + i % 2)),
    "boxed decimal": lambda i: (rf"It costs \boxed{{\${i}.50}}", f"{i}.5"),
}

if __name__ == "__main__":
    for kind, make in KINDS.items():
        pairs = [make(i) for i in range(1000, 21000)]
        begin = time.process_time()
        right = sum(correct(text, gold) for text, gold in pairs)
        seconds = time.process_time() - begin
        print(f"{kind}: {len(pairs) / seconds:,.0f} per second ({right} of {len(pairs)} right)")
