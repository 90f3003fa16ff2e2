"""A fault of a node is logged when it begins, changes and ends, however many commands fail."""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from redfence_server.nodes.fault_log import FaultLog


class _Clock:
    ms = 0.0

    def now_ms(self) -> float:
        return self.ms


def _fault_log() -> tuple[FaultLog, _Clock]:
    clock = _Clock()
    return FaultLog(clock=clock, log=structlog.get_logger()), clock


def test_a_fault_is_logged_when_it_begins_changes_and_ends_with_a_count() -> None:
    with capture_logs() as logs:
        faults, clock = _fault_log()
        for number in range(2_000):
            clock.ms += 1
            faults.failed("OOM no memory" if number < 1_500 else "MISCONF no disk")
            if number % 500 == 0:
                faults.examined("OOM no memory")
        assert faults.problem == "MISCONF no disk"
        for _ in range(20):
            clock.ms += 500
            faults.examined("")
    assert faults.problem == ""
    told = [(entry["event"], entry["failures"], entry["lasted_s"]) for entry in logs]
    assert told == [
        ("node_command_failed", 1, 0.0),
        ("node_command_failed", 1_504, 1.5),
        ("node_commands_recovered", 2_004, 2.0),
    ]


def test_a_long_fault_is_logged_once_a_minute_with_the_count_so_far() -> None:
    with capture_logs() as logs:
        faults, clock = _fault_log()
        for _ in range(361):
            faults.failed("OOM no memory")
            clock.ms += 500
    told = [(entry["event"], entry["failures"], entry["lasted_s"]) for entry in logs]
    assert told == [("node_command_failed", 120 * minute + 1, 60.0 * minute) for minute in range(4)]


def test_rare_failures_of_many_kinds_are_one_fault_with_few_lines() -> None:
    with capture_logs() as logs:
        faults, clock = _fault_log()
        for number in range(120):
            clock.ms += 500
            if number % 4 == 0:
                faults.failed(f"KIND{number} of error")
            faults.examined("")
    assert [entry["event"] for entry in logs] == ["node_command_failed"] * 8
