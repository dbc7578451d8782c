"""Jobs in processes beside this one: all are made, in order, whatever becomes of the processes; and none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import active_children, parent_process
from pathlib import Path

import pytest

from forebay.cli.beside import made_beside
from forebay.errors import DoesNotFit
from tests.faults.programs import ENVIRONMENT, until

JOBS = range(6)


def made_by(job: int, seconds: float = 0.2) -> tuple[int, int]:
    time.sleep(seconds)
    return job, os.getpid()


def fatal_elsewhere(job: int) -> int:
    """Ends any process but the first."""
    if parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.4)
    return job


def refused_elsewhere(job: int) -> int:
    if parent_process() is not None:
        raise DoesNotFit(f"no room for {job}", tier="host", needed=job, allowed=-1)
    time.sleep(1.0)
    return job


def note(folder: Path, job: int) -> int:
    """Says which process it is, and takes for ever."""
    (folder / str(os.getpid())).touch()
    time.sleep(1000)
    return job


def test_what_is_soon_made_is_made_here() -> None:
    assert made_beside(partial(made_by, seconds=0.0), JOBS) == [(job, os.getpid()) for job in JOBS]


@pytest.mark.parametrize("most", [1, 3])
def test_all_are_made_in_their_order(most: int) -> None:
    found = made_beside(partial(made_by, seconds=0.5), JOBS, most=most, patience=0.0)
    assert [job for job, _ in found] == list(JOBS)
    processes = {process for _, process in found}
    assert os.getpid() in processes and 1 <= len(processes) <= most and (most == 1 or len(processes) > 1)
    assert not active_children()


def test_what_one_raises_is_raised_here_with_its_fields() -> None:
    with pytest.raises(DoesNotFit, match="no room for") as raised:
        made_beside(refused_elsewhere, JOBS, most=3, patience=0.0)
    assert raised.value.tier == "host" and raised.value.allowed == -1
    assert not active_children()


def test_processes_that_are_killed_leave_their_jobs_to_this_one() -> None:
    assert made_beside(fatal_elsewhere, JOBS, most=3, patience=0.0) == list(JOBS)
    assert not active_children()


def test_processes_that_cannot_be_started_leave_their_jobs_to_this_one() -> None:
    program = (
        "import multiprocessing; multiprocessing.set_executable('/nowhere')\n"
        "from functools import partial\n"
        "from forebay.cli.beside import made_beside\n"
        "from tests.faults.test_beside import JOBS, made_by\n"
        "assert [job for job, _ in made_beside(made_by, JOBS, most=3, patience=0.0)] == list(JOBS)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=ENVIRONMENT)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_none_outlives_the_one_that_has_started_it(tmp_path: Path, how: signal.Signals) -> None:
    program = (
        "import sys; from functools import partial; from pathlib import Path\n"
        "from forebay.cli.beside import made_beside\n"
        "from tests.faults.test_beside import JOBS, note\n"
        "try:\n"
        "    made_beside(partial(note, Path(sys.argv[1])), JOBS, most=3, patience=0.0)\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(130)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, env=ENVIRONMENT) as process:
        assert until(lambda: len(list(tmp_path.iterdir())) == 3)
        if how is signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in said
    assert until(lambda: not any(Path(f"/proc/{file.name}").exists() for file in tmp_path.iterdir()))
