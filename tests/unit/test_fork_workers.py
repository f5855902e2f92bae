"""Tests in forked workers are reported as pytest reports them in one process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
TESTS = Path(__file__).parent.parent
LONGEST = 200.0
"""Maximum seconds of a run: on a busy machine, most of a minute passes until a new interpreter has imported pytest."""
COMMAND = (sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "fork_workers", "--workers", "2", "-v", "-ra")

OUTCOMES = {
    "test_kinds.py": """
        import os, signal, time, warnings
        import pytest

        def test_passes(tmp_path): print("unseen")
        def test_fails(): print("seen"); assert 1 == 2
        @pytest.mark.skip(reason="not here")
        def test_is_skipped(): pass
        def test_warns(): warnings.warn("beware")
        @pytest.fixture
        def broken(): yield; raise ValueError("late")
        def test_is_torn_down_badly(broken): pass
        @pytest.mark.timeout(1)
        def test_takes_too_long(): time.sleep(60)
    """,
    "test_crash.py": """
        import os, signal
        def test_before(): pass
        def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
        def test_between(): pass
        def test_leaves(): os._exit(0)
        def test_after(): pass
    """,
    "test_last.py": "import os\ndef test_leaves_at_the_end(): os._exit(3)",
}
GROUPS = {
    "conftest.py": """
        import os, pytest
        @pytest.fixture(scope="session")
        def server(): yield os.getpid(); print(f"closed {os.getpid()}", file=open("closed", "a"))
        def pytest_configure(config): config.addinivalue_line("markers", "together(name): one worker")
    """,
    **{
        f"test_{name}.py": f"""
        import os, time, pytest
        from pathlib import Path
        pytestmark = pytest.mark.together("pool")
        @pytest.mark.parametrize("number", range(3))
        def test_it(number, server):
            while not Path("began").exists(): time.sleep(0.01)  # so that the other worker has a test of its own
            assert server == os.getpid()
            print(f"{name} {{number}} {{server}}", file=open("seen", "a"))
        """
        for name in ("first", "second")
    },
    "test_other.py": """
        import os, time
        from pathlib import Path
        def test_side_by_side(tmp_path):
            Path("began").touch()
            while not Path("then").exists(): time.sleep(0.01)
            print(f"other 0 {os.getpid()}", file=open("seen", "a"))
    """,
    "test_then.py": """
        from pathlib import Path
        def test_after_the_pool():
            Path("then").touch()
            assert Path("closed").exists()
    """,
}
INTERRUPTED = """
    import os, pytest, time
    @pytest.fixture
    def thing(): yield; print("closed", file=open("closed", "a"))
    def test_waits(thing): print(os.getpid(), file=open("began", "a")); time.sleep(60)
"""

FAILS = """
    import os, time
    def test_fails():
        while not os.path.exists("began"): time.sleep(0.01)
        assert False
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of which some take seconds to import
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


def test_a_warning_before_a_crash_is_reported_once(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_warns_and_dies="""
        import os, warnings
        def test_warns(): warnings.warn("beware")
        def test_leaves(): os._exit(3)
        def test_after(): pass
        """
    )
    project.run(*COMMAND, timeout=LONGEST).assert_outcomes(passed=2, failed=1, warnings=1)


def test_each_outcome_is_reported_and_a_crash_names_its_test(project: pytest.Pytester) -> None:
    project.makepyfile(**{name.removesuffix(".py"): text for name, text in OUTCOMES.items()})
    result = project.run(*COMMAND, timeout=LONGEST)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=6, failed=5, skipped=1, errors=1, warnings=1)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED test_kinds.py::test_fails - assert 1 == 2",
            "seen",
            "SKIPPED * not here",
            "*UserWarning: beware",
            "ERROR test_kinds.py::test_is_torn_down_badly - ValueError: late",
            "FAILED test_kinds.py::test_takes_too_long - Failed: Timeout*",
            "FAILED test_crash.py::test_is_killed - The worker process of this test was ended by SIGKILL.",
            "FAILED test_crash.py::test_leaves - The worker process of this test ended with status 0.",
            "FAILED test_last.py::test_leaves_at_the_end - The worker process of this test ended with status 3.",
        ]
    )
    result.stdout.no_fnmatch_line("unseen")
    result.stdout.fnmatch_lines_random(["test_crash.py::test_after PASSED*", "test_crash.py::test_between PASSED*"])


def test_tests_together_run_in_one_worker_and_end_fixtures_of_the_session(project: pytest.Pytester) -> None:
    project.makepyfile(**{name.removesuffix(".py"): text for name, text in GROUPS.items()})
    result = project.run(*COMMAND, timeout=LONGEST)
    result.assert_outcomes(passed=8)
    seen = [line.split() for line in (project.path / "seen").read_text().splitlines()]
    pool = [line for line in seen if line[0] != "other"]
    assert [line[:2] for line in pool] == [[name, str(number)] for name in ("first", "second") for number in range(3)]
    (process,) = {line[2] for line in pool}
    assert [line[2] for line in seen if line[0] == "other"] != [process]
    assert (project.path / "closed").read_text() == f"closed {process}\n"


def test_the_first_failure_ends_the_run(project: pytest.Pytester) -> None:
    project.makepyfile(test_one=FAILS, test_two=INTERRUPTED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells do for jobs in their background
    result = project.run(*COMMAND, "-x", timeout=LONGEST)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*stopping after 1 failures*"])
    assert (project.path / "closed").read_text() == "closed\n", "the other worker was interrupted, not killed"


def test_a_ctrl_c_ends_all_workers_and_their_fixtures(project: pytest.Pytester) -> None:
    project.makepyfile(**{f"test_{number}": INTERRUPTED for number in range(2)})
    # Shells let jobs in their background ignore Ctrl-C.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(COMMAND, cwd=project.path, stdout=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        began = project.path / "began"
        while not began.exists() or len(began.read_text().split()) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in printed
    assert (project.path / "closed").read_text() == "closed\n" * 2


def test_threads_that_a_fork_would_lose_are_refused(project: pytest.Pytester) -> None:
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), name='mine', daemon=True).start()\n"
    project.makepyfile(f"{text}def test_it(): pass")
    result = project.run(*COMMAND, timeout=LONGEST)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --workers: tests start threads when they are imported: mine"])
