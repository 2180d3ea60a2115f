"""The commands, gathered, and what becomes of an error: one line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from gradfit import __version__
from gradfit.cli.audit_command import audit
from gradfit.cli.build_native_command import build_native
from gradfit.cli.console import (
    ResultNotPrinted,
    let_go_of_stdout,
    print_result,
    results_at_the_end,
)
from gradfit.cli.demo_command import demo
from gradfit.cli.estimate_command import estimate
from gradfit.cli.plan_command import plan
from gradfit.cli.profile_command import profile
from gradfit.cli.run_command import own_arguments, run_script
from gradfit.cli.selftest_command import selftest
from gradfit.cli.train_command import train
from gradfit.errors import BudgetInfeasible, GradfitError, MisuseError, StateNotWritten

EXIT_FAILED, EXIT_USAGE, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 1, 2, 3, 130
# typer has its own copy of click in some versions
_ClickException: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="gradfit",
    help=(
        "Train any PyTorch model, at any batch size, in the memory there is, with the same"
        " gradients."
    ),
    epilog="Begin with: gradfit demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gradfit {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which this is.")
    ] = False,
) -> None:
    pass


_EXAMPLES: dict[Callable[..., None], str] = {
    profile: "gradfit profile gpt --report profile.html",
    plan: "gradfit plan gpt --memory '200 MiB'",
    estimate: "gradfit estimate gpt --hardware t4 --batch-size 512",
    train: "gradfit train gpt --memory '200 MiB' --steps 100 --out runs/gpt",
    audit: "gradfit audit gpt --memory '200 MiB'",
    selftest: "gradfit selftest --out .",
    demo: "gradfit demo --report demo.html",
    build_native: "gradfit build-native",
}


class _Interrupted(Exception):
    """Ctrl-C, as an error like others: of KeyboardInterrupt click makes an exit without a word."""


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose job may do anything: what would end the process is an error that is reported,
    too.
    """

    @functools.wraps(command)
    def run_command(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            raise _Interrupted from None
        except SystemExit as ended:
            raise GradfitError(
                f"The job's code called sys.exit({ended.code!r}) while gradfit was running it."
                " Raise an exception where it cannot go on."
            ) from ended
        except Exception:
            raise
        except BaseException as error:  # of the job's own: it would pass everything below
            raise GradfitError(f"The job's code raised {type(error).__name__}: {error}.") from error

    return run_command


for _command, _example in _EXAMPLES.items():
    app.command(epilog=f"Example: {_example}")(_guarded(_command))


# What comes after the script is the script's; and how it ends, with `sys.exit` too, is its own.
app.command(
    "run",
    epilog="Example: gradfit run --memory 8GiB train.py --epochs 3",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(run_script)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; no exception leaves this, except with --debug. With --json there is one
    document on stdout, always.
    """
    whole = list(sys.argv[1:] if arguments is None else arguments)
    given = own_arguments(whole)
    try:
        with (
            # what a script prints is its own
            results_at_the_end(alone=given[:1] != ["run"])
            if "--json" in given
            else contextlib.nullcontext()
        ):
            code = typer.main.get_command(app).main(
                whole, prog_name="gradfit", standalone_mode=False
            )
        return code if isinstance(code, int) else 0
    except BrokenPipeError:  # the reader of our output is gone, as in `gradfit profile gpt | head`
        let_go_of_stdout()
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort, _Interrupted):
        return _fail("Interrupted.", EXIT_INTERRUPTED, given)
    except Exception as error:
        if "--debug" in given:
            if "--json" not in given:
                raise
            traceback.print_exc()
        return _explain(error, given)


def _explain(error: Exception, given: list[str]) -> int:
    """One line for an error, and its exit code."""
    if isinstance(error, _ClickException):
        return _explain_usage(error, given)
    if isinstance(error, BudgetInfeasible):
        details = {"min_bytes": error.min_bytes, "breakdown": error.breakdown}
        return _fail(str(error), EXIT_INFEASIBLE, given, **details)
    if isinstance(error, MisuseError | StateNotWritten):
        code = EXIT_USAGE if isinstance(error, MisuseError) else EXIT_FAILED
        return _fail(str(error), code, given)
    name = "" if isinstance(error, GradfitError) else f"{type(error).__name__}: "
    return _fail(f"{name}{error} (--debug shows where.)", EXIT_FAILED, given)


def _explain_usage(error: Any, given: list[str]) -> int:
    usage = getattr(error, "ctx", None)
    command = usage.command_path if usage is not None else "gradfit"
    said = error.format_message().rstrip(".")
    return _fail(f"{said}. See '{command} --help'.", EXIT_USAGE, given) if said else EXIT_USAGE


def _fail(message: str, code: int, given: list[str], **details: Any) -> int:
    line = " ".join(message.split())
    if "--json" in given:
        with contextlib.suppress(ResultNotPrinted, BrokenPipeError):  # it is on stderr, at least
            print_result(json.dumps({"error": line, "exit_code": code, **details}))
    print(f"gradfit: {line}", file=sys.stderr)
    return code
