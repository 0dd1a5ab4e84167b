"""Help is quick: it imports neither torch nor transformers, and of the commands only the one that is asked about."""

from __future__ import annotations

import subprocess
import sys

from deepen.cli import COMMANDS

HEAVY = ("deepen.program", "torch", "transformers", "numpy", "matplotlib", "jinja2", "safetensors")

SCRIPT = f"""
import sys
from deepen.cli import main
names = {[name for name, *_ in COMMANDS]}
assert main(["--help"]) == 0
loaded = [name for name in names if "deepen.cli." + name in sys.modules]
assert not loaded, loaded
for name in names:
    assert main([name, "--help"]) == 0
heavy = [name for name in {HEAVY} if name in sys.modules]
assert not heavy, heavy
assert main(["methods"]) == 0 and main(["families"]) == 0
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
assert not heavy, heavy
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, _, line in COMMANDS:
        assert f"deepen {name}" in done.stdout
        assert line.split()[0] in done.stdout
    for option in ("--json", "--device", "--dtype", "--form"):
        assert done.stdout.count(option) >= len(COMMANDS)
