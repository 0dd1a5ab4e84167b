"""The command `deepen`: one file a command, imported only when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepen import __version__
from deepen.errors import DeepenError, UsageError

if TYPE_CHECKING:
    from cyclopts import App

# Name, where it lives, one line of help: enough to print the list without importing any of them.
COMMANDS = (
    ("show", "deepen.cli.show:show", "Layers, program, parameters, FLOPs, cache and a drawing; reads no weights."),
    ("run", "deepen.cli.run:run", "Generate text with a program; writes no file."),
    ("eval", "deepen.cli.eval:evaluate", "How good and how fast programs are: on a text, on tasks of lm-eval."),
    ("search", "deepen.cli.search:search", "The best program under a budget, on your text."),
    ("score", "deepen.cli.score:score", "Which layers matter: published scores side by side."),
    ("heal", "deepen.cli.heal:heal", "Train a cut or looped checkpoint back on your text; saves it as what it was."),
    ("check-scaling", "deepen.cli.check_scaling:check_scaling", "How training depends on depth, by parametrisation."),
    ("train", "deepen.cli.train:train", "Train a stack as a recipe says; writes a folder that deepen run opens."),
    ("data", "deepen.cli.prepare:prepare", "Write texts as token ids for training."),
    ("compare", "deepen.cli.compare:compare", "Variants of a recipe under one budget, seed by seed, with intervals."),
    ("report", "deepen.cli.report:report", "One HTML page of the results that --keep collected in a folder."),
    ("apply", "deepen.cli.apply:apply", "Write a checkpoint that has the program."),
    ("families", "deepen.cli.families:families", "The model families deepen knows."),
    ("methods", "deepen.cli.methods:methods", "The published methods deepen implements."),
    ("demo", "deepen.cli.demo:demo", "Cut, repeat and parallelise a real model; writes one HTML page."),
)
OK, FAILED, WRONG_COMMAND_LINE, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141


def app() -> App:
    """The command line, without any of its commands imported."""
    from cyclopts import App

    made = App(
        name="deepen",
        help="A network's depth is a program: run it, measure it, write it. Quote programs with single quotes.",
        version=__version__,
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for order, (name, place, line) in enumerate(COMMANDS):
        made.command(place, name=name, help=line, sort_key=order)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    0 done; 1 bad input or an unsupported request; 2 a wrong command line; 130 interrupted; 141 the reader of the
    output went away. Anything else that goes wrong is a bug of deepen and keeps its traceback.
    """
    from cyclopts import CycloptsError

    # A terminal that cannot show a character gets a question mark, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="replace")
    # Its advice is about calls that deepen makes, not about what the user asked for.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    given = list(sys.argv[1:] if arguments is None else arguments)
    from deepen.cli.output import called

    called.set(tuple(given))
    try:
        app()(given, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(f"{error}\nTry: {_help_command(given)}", WRONG_COMMAND_LINE)
    except UsageError as error:
        return _fail(str(error), WRONG_COMMAND_LINE)
    except DeepenError as error:
        return _fail(str(error), FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _silence(sys.stdout)
        return CLOSED_PIPE
    return OK


def _fail(message: str, status: int) -> int:
    try:
        print(message, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _silence(sys.stderr)
    return status


def _help_command(given: Sequence[str]) -> str:
    known = [name for name, *_ in COMMANDS]
    return f"deepen {given[0]} --help" if given and given[0] in known else "deepen --help"


def _silence(stream: Any) -> None:
    """Python flushes the standard streams once more at exit; let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
