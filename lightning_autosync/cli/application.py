"""The command ``autosync SUBCOMMAND key=value ...``: every subcommand (verb) is a Hydra application."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import lightning_autosync
from lightning_autosync import interrupts
from lightning_autosync.errors import AutoSyncError, DocumentError, UnwritableError, needed_for

VERBS = {
    "bench": "measure contenders side by side, on one machine or on several",
    "cache": "list, show or clear the plans that earlier jobs found and saved",
    "collect": "measure drawn plans, for simulators to learn from",
    "converge": "compare methods by the metric they reach, and how soon",
    "fit": "train simulators on measured plans and compare them",
    "probe": "measure the links and hosts of a job and write a cluster file",
    "predict": "predict the time of a step under a plan, without a cluster",
    "rehearse": "compare samplers on the replay instead of live trials",
    "serve": "run a parameter server for workers on other nodes",
    "report": "write what tuning runs found as one HTML file",
    "tune": "search for the fastest plan by live trials",
    "train": "train a LightningModule with any synchronization",
    "validate": "measure random plans and compare with predictions",
}
"""The verbs and their purposes. A verb's function is in ``cli/VERB.py``, its configuration in ``conf/VERB.yaml``."""

FULL_ERROR = "HYDRA_FULL_ERROR"
TORCHRUN = "hydra/launcher=autosync_torchrun"
"""The launcher that starts this command again in each rank, for which it needs the command line."""
_WRONG_LINE = 2
"""Exit status for a verb or an option that does not exist."""
_UNREAD = 128 + signal.SIGPIPE
"""Exit status if the program that reads the output, such as ``head``, has ended; other programs are killed then."""
_LAUNCHER_TIMEOUT = 10.0
"""Seconds for which a rank waits to be ended, since the first rank of its host has the same error."""


def main() -> None:
    """Run the verb that the command line names. Hydra reads the rest of the line.

    Slow imports follow only after the handler for Ctrl-C is installed.
    """
    interrupts.end_at_once()
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        _print_page(usage())
        sys.exit(0 if len(sys.argv) > 1 else _WRONG_LINE)
    verb = sys.argv[1]
    if verb == "--version":
        print(f"autosync {lightning_autosync.__version__}")
        return
    if verb not in VERBS:
        print(_unknown_verb(verb), file=sys.stderr)
        sys.exit(_WRONG_LINE)
    sys.argv = [f"autosync {verb}", *sys.argv[2:]]
    warnings.showwarning = _shows_warnings(verb, warnings.showwarning)
    logging.raiseExceptions = False  # else a full disk causes a traceback for each line of the log
    try:
        with needed_for("This command"):
            run_verb(verb)
        _flush_output()
    except (AutoSyncError, OSError) as error:
        _exit_with(verb, error)
    except KeyboardInterrupt:  # verbs that save results after a Ctrl-C handle it and print a message themselves
        _exit_interrupted(verb)
    except Exception:
        if not interrupts.received():
            raise
        _exit_interrupted(verb)
    finally:
        interrupts.end_at_once()


def _shows_warnings(verb: str, otherwise: Callable[..., None]) -> Callable[..., None]:
    """A function for ``warnings.showwarning``: warnings of this package become lines, as its other messages."""

    def show(message: Warning | str, category: type[Warning], filename: str, *place: Any, **rest: Any) -> None:
        if Path(filename).is_relative_to(Path(__file__).parents[1]):
            print(f"autosync {verb}: {message}", file=sys.stderr)
        else:
            otherwise(message, category, filename, *place, **rest)

    return show


def _exit_interrupted(verb: str) -> NoReturn:
    interrupts.end_at_once()
    print(f"autosync {verb}: interrupted", file=sys.stderr)
    sys.exit(interrupts.STATUS)


def _exit_with(verb: str, error: AutoSyncError | OSError, status: int = 1) -> NoReturn:
    """Exit with the message of an error, which all ranks of a job may have: of each host, its first rank prints it.

    The others wait until their launcher ends them because the first one failed. A rank that is not ended has an error
    of its own, and prints it.
    """
    if isinstance(error, BrokenPipeError) and not _is_read():
        _discard_output()
        sys.exit(_UNREAD)
    rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    if isinstance(error, DocumentError) and rank != "0":
        try:
            time.sleep(_LAUNCHER_TIMEOUT)
        except KeyboardInterrupt:
            _exit_interrupted(verb)
    message = f"autosync {verb}: {_one_line(error)}"
    if status == 1:
        sys.exit(message)  # which Python prints
    print(message, file=sys.stderr)
    sys.exit(status)


def _unknown_verb(verb: str) -> str:
    from lightning_autosync.documents import did_you_mean

    meant = {verb: f"'{verb}'" for verb in VERBS} | {"help": "'--help'"}
    if near := did_you_mean(verb.lstrip("-"), meant, meant.__getitem__):
        return f"autosync: '{verb}' is not a subcommand; {near} autosync --help lists them"
    return f"autosync: '{verb}' is not a subcommand\n\n{usage()}"


def usage() -> str:
    """The usage with one verb per line."""
    lines = [f"  {verb:10} {purpose}" for verb, purpose in VERBS.items()]
    keys = "autosync SUBCOMMAND --help lists the keys."
    return "\n".join(["usage: autosync SUBCOMMAND key=value ...", "       autosync --version", "", *lines, "", keys])


def run_verb(verb: str) -> None:
    """Compose the verb's configuration and call its function: once, or for every combination of a sweep."""
    from lightning_autosync.cli.arguments import prepared, refuse_passwords, with_names, with_override, with_todays_keys
    from lightning_autosync.cli.configuration import check_options, check_overrides, help_text

    if {"-h", "--help"} & set(sys.argv[1:]):
        _print_page(help_text(verb, VERBS[verb]))
        return
    with ExitStack() as folders:
        folder = folders.enter_context(interrupts.temporary_folder())
        if any("://" in argument for argument in sys.argv):
            from lightning_autosync.search.passwords import hide_passwords

            sys.argv[1:] = hide_passwords(sys.argv[1:])
        refuse_passwords(sys.argv[1:])
        try:
            check_options(verb, sys.argv[1:])
        except DocumentError as error:
            _exit_with(verb, error, _WRONG_LINE)
        sys.argv[1:] = prepared(with_todays_keys(verb, with_names(verb, sys.argv[1:])), folder)
        check_overrides(verb, sys.argv[1:])
        if TORCHRUN in sys.argv:
            sys.argv[1:] = with_override(sys.argv[1:], f"hydra.launcher.program=[-m,lightning_autosync.cli,{verb}]")
        _run(verb, folders.close)


def _run(verb: str, composed: Callable[[], None]) -> None:
    """Let Hydra compose the configuration and run the verb; ``composed`` is called when no more is to be composed."""
    import hydra
    from hydra.errors import CompactHydraException
    from omegaconf.errors import OmegaConfBaseException

    from lightning_autosync.cluster import configuration_directory

    application = _application(verb, composed)
    # This variable makes Hydra raise errors, such as a full disk, instead of printing a traceback and exiting.
    given = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = given or "1"
    try:
        interrupts.raise_again()
        hydra.main(version_base="1.3", config_path=str(configuration_directory()), config_name=verb)(application)()
    except (CompactHydraException, OmegaConfBaseException) as error:
        if interrupts.received():
            raise
        cause = error.__cause__
        causes = [cause] if isinstance(cause, OmegaConfBaseException) else []
        print(f"autosync {verb}: {error}", *causes, sep="\n", file=sys.stderr)
        sys.exit(getattr(error, "status", 1))
    finally:
        if given is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = given


def _application(verb: str, composed: Callable[[], None]) -> Callable[[Any], Any]:
    """What Hydra calls with the composed configuration: the verb's function, with its errors handled."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    function: Callable[[dict[str, Any], Path], Any] = getattr(import_module(f"lightning_autosync.cli.{verb}"), verb)

    def application(configuration: Any) -> Any:
        hydra_configuration = HydraConfig.get()
        directory = Path(hydra_configuration.runtime.output_dir)
        if hydra_configuration.mode is RunMode.RUN:
            composed()
        try:
            plain: Any = OmegaConf.to_container(configuration, resolve=True)
            return function(plain, directory)
        except SystemExit as ended:
            if ended.code or not _is_reported(hydra_configuration):
                raise
            return None  # a rank that follows rank 0 ended well; returning lets the callback report it to the launcher
        except (AutoSyncError, OSError) as error:
            if hydra_configuration.mode is RunMode.MULTIRUN or _is_reported(hydra_configuration):
                raise  # the sweeper or the callback reports the failure
            # Exit here, since Hydra would print the overrides before the message.
            _exit_with(verb, error)

    return application


def _one_line(error: AutoSyncError | OSError) -> str:
    """The message of an error with its file, without passwords of databases."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        where = error.filename2 or error.filename or "standard output or a file of the run directory"
        text = f"{where}: {error.strerror}"
    if "://" in text:
        from lightning_autosync.search.passwords import without_passwords

        return without_passwords(text)
    return text


def _flush_output() -> None:
    """Flush standard output, since Python would print its own error message for a failed flush at exit.

    Raises:
        UnwritableError: standard output cannot be written.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(_UNREAD)
    except OSError as cause:
        _discard_output()
        raise UnwritableError(f"standard output: {cause.strerror}") from None


def _print_page(text: str) -> None:
    """Print a text, of which a program such as ``head`` may read only the beginning."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_output()


def _is_read() -> bool:
    """Whether standard output has a reader: no pipe of which the other end is closed."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return not any(events & select.POLLERR for _, events in output.poll(0))


def _discard_output() -> None:
    """Discard standard output from here on, what is still buffered included, so that the flush at exit succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_reported(configuration: Any) -> bool:
    """Whether this is a torchrun job of a sweep, in which a callback reports how each rank ended."""
    return "autosync_report" in (configuration.callbacks or {})


if __name__ == "__main__":
    main()
