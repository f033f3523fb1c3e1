"""tests/faults.md names tests that exist."""
import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_table_names_tests_that_exist():
    table = (HERE / "faults.md").read_text()
    named = re.findall(r"\b(test_\w+)::(\w+)", table)
    assert len(named) > 100
    missing = [f"{file}::{part}" for file, part in named if not re.search(
        rf"def test\w*{part}", (HERE / f"{file}.py").read_text())]
    assert not missing
