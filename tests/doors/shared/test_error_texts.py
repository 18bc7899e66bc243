"""The text by which other ranks name the first failure, and the way out of hosts that do not connect."""

from __future__ import annotations

import re
import socket

import pytest
from torch._utils import ExceptionWrapper

from megastrategy._faults.interfaces import add_way_out, interfaces
from megastrategy._faults.recovery import describe

LIMIT = 1000


def error_of_a_worker(error: OSError) -> OSError:
    """The error that a DataLoader raises for one of its worker's: the traceback is in the message."""
    try:
        raise error
    except OSError:
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(OSError, match="Caught") as raised:
        wrapper.reraise()
    return raised.value


def chained(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_failure_of_a_worker_begins_with_its_cause() -> None:
    described = describe(error_of_a_worker(OSError("cannot read sample 29")))
    assert described.startswith("OSError: cannot read sample 29 (Caught OSError in DataLoader worker process 0.")


def test_failure_of_a_chain_begins_with_its_root() -> None:
    """Frameworks of configurations wrap an error that user code has wrapped before."""
    described = describe(chained(RuntimeError("x" * 5000), chained(ValueError("bad row"), KeyError("id"))))
    assert described.startswith("KeyError: 'id', which led to ValueError: bad row, which led to RuntimeError: xxx")
    assert len(described) < LIMIT


def test_failure_of_a_group_begins_with_its_first() -> None:
    described = describe(ExceptionGroup("two of three", [OSError("disk full"), ValueError("late")]))
    assert described == "OSError: disk full, which led to ExceptionGroup: two of three (2 sub-exceptions)"


def test_failure_with_a_long_text_keeps_its_last_line() -> None:
    message = "\n".join(["configuration:", *(f"  key_{number}: {number}" for number in range(500)), "missing: lr"])
    assert describe(ValueError(message)) == "ValueError: missing: lr (configuration:)"


def raised_from(error: OSError, cause: Exception) -> OSError:
    """Both as a worker has raised them: torch prints the traceback of each."""
    try:
        try:
            raise cause
        except Exception as caught:
            raise error from caught
    except OSError as raised:
        return raised


def test_failure_of_a_worker_names_its_own_root() -> None:
    error = raised_from(OSError("loading failed:\nsee above"), ValueError("bad row 29\nof file 3"))
    described = describe(error_of_a_worker(error))
    assert "ValueError: bad row 29\nof file 3, which led to OSError: loading failed:\nsee" in described[:120]


def test_failure_names_the_error_that_was_handled() -> None:
    error = RuntimeError("no sample")
    error.__context__ = KeyError("id")
    assert describe(error) == "RuntimeError: no sample, raised while handling KeyError: 'id'"


@pytest.mark.parametrize(("in_worker", "separator"), [(False, " "), (False, "\n"), (True, "\n")])
def test_failure_with_a_long_message_keeps_its_end(in_worker: bool, separator: str) -> None:
    error = OSError(separator.join(["no sample in", *(f"/data/{number}" for number in range(500)), "disk full"]))
    described = describe(error_of_a_worker(error) if in_worker else error)
    assert "no sample in" in described
    assert "disk full" in described
    assert len(described) < LIMIT


def test_failure_of_a_worker_names_errors_of_a_group() -> None:
    error = raised_from(OSError("loading failed"), ExceptionGroup("two files", [ValueError("bad row"), KeyError("id")]))
    described = describe(error_of_a_worker(error))
    assert described.index("ValueError: bad row") < described.index("which led to OSError: loading failed")
    assert "KeyError: 'id'" in described


# --- hosts that do not connect ---------------------------------------------------------------------------------------


FULL_MESH = "Gloo connectFullMesh failed with [...] Connection refused, remote=[127.0.1.1]:1415$1"


def test_interfaces_are_named_with_their_address() -> None:
    """Users choose GLOO_SOCKET_IFNAME from this list, in the note on gloo's error where hosts do not connect."""
    found = interfaces()
    assert "lo (127.0.0.1)" in found
    assert [text.partition(" ")[0] for text in found] == [name for _, name in socket.if_nameindex()]


def test_way_out_is_added_to_gloos_error_alone() -> None:
    error = RuntimeError(FULL_MESH)
    add_way_out(error)
    [note] = error.__notes__
    assert "Set GLOO_SOCKET_IFNAME on every machine" in note
    assert re.search(rf"and {re.escape(socket.gethostname())} (resolves to [\d.]+|does not resolve)\.", note)
    assert note.endswith(", ".join(interfaces()))
    other = RuntimeError("The client socket has timed out after 60000ms while trying to connect to (host, 29500)")
    add_way_out(other)
    assert not hasattr(other, "__notes__")
