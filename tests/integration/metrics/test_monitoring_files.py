"""The dashboard, the alert rules and the page of metrics name what real scrapes have, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import redfence
from harness.load.session_caller import SessionCaller
from harness.processes.commands import CommandProcesses
from harness.processes.metrics import get, scrape, value
from harness.processes.ports import HOST, free_port
from harness.processes.servers import FormedNodes, Serve, until
from redfence_proto.v1 import lock_pb2
from redfence_server.http2.settings import Transport
from redfence_storage.client import AsyncStorageClient

REPOSITORY = Path(__file__).resolve().parents[3]
RULES = REPOSITORY / "deploy/prometheus/alerts.yml"
DASHBOARD = REPOSITORY / "deploy/grafana/redfence.json"
PAGE = (REPOSITORY / "docs/monitoring.md").read_text()
NAME = "orders/42"
# Prometheus adds these to what it scrapes.
TARGET_LABELS = {"instance", "job"}
_METRIC = re.compile(r"\b((?:redfence|process)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPED = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Return every PromQL expression of both files."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 20
    return queries + [rule["expr"] for rule in rules()]


def outcomes() -> set[str]:
    """Return every outcome that a request may have."""
    enums = lock_pb2.DESCRIPTOR.enum_types_by_name
    found = {"ok", "cancelled", "unanswered", "internal", "found", "not_found"}
    for name in ("AcquireOutcome", "ReleaseOutcome", "LeaseState", "TokenState", "ErrorReason"):
        values = enums[name].values
        prefix = values[0].name.removesuffix("UNSPECIFIED")
        found |= {each.name.removeprefix(prefix).lower() for each in values}
    return found


async def labels_of_metrics(server_port: int, storage_port: int) -> Mapping[str, set[str]]:
    """Return the labels of each sample name that the two processes show."""
    found: dict[str, set[str]] = {}
    for port in (server_port, storage_port):
        for name, labels in await scrape(port):
            found.setdefault(name, set()).update(label for label, _ in labels)
    return found


@pytest.mark.slow
async def test_every_name_and_label_in_files_and_docs_is_in_a_real_scrape(
    fresh_formed_nodes: FormedNodes,
    serve: Serve,
    commands: CommandProcesses,
    tmp_path: Path,
    transport: Transport,
) -> None:
    """A server and a storage get every kind of request; a node is dead, so there are failures too."""
    nodes = await fresh_formed_nodes(3)
    server = await serve(nodes, metrics_listen=f"{HOST}:0")
    storage_port = free_port()
    flags = ("--db", str(tmp_path / "storage.db"), "--listen", f"{HOST}:0")
    storage = commands.start_redfence("storage", *flags, "--metrics-listen", f"{HOST}:{storage_port}")
    address = (await storage.wait_for_line(r"ready on (\S+)"))[1]
    async with AsyncStorageClient(address) as client:
        await client.fence(NAME, token=2)
        with pytest.raises(redfence.StaleTokenError):
            await client.put(NAME, key="k", value=b"v", token=1)
    nodes[2].kill()
    await server.until_states(*[lock_pb2.NODE_STATE_READY] * 2, lock_pb2.NODE_STATE_UNREACHABLE)
    async with SessionCaller(server) as session:
        lease = (await session.acquire(NAME, wait_ms=1_000)).acquire.lease
        await session.release(NAME, lease.lease_id)

    async def ended() -> bool:
        return value(await scrape(server.metrics_port), "redfence_streams_total") == 1

    await until(ended)
    shown = dict(await labels_of_metrics(server.metrics_port, storage_port))
    if transport is not Transport.FAST:
        # They have a name there, but no value.
        for name in ("redfence_connections", "redfence_buffered_bytes"):
            shown |= {name: set(), f"{name}_max": set()}

    async def stale_counted() -> bool:
        # The storage answers a refusal before it counts it.
        put = {"method": "Put", "outcome": "stale_token"}
        return value(await scrape(storage_port), "redfence_requests_total", **put) == 1

    await until(stale_counted)
    assert (await get(storage_port, "/readyz"))[0] == 200

    for expression in expressions():
        metrics = _METRIC.findall(expression)
        assert metrics, expression
        known = set(TARGET_LABELS)
        for name, matchers in metrics:
            assert name in shown, f"{name} in {expression}"
            known |= shown[name]
            for label, values in _MATCHER.findall(matchers):
                assert label in shown[name] | TARGET_LABELS, f"{label} in {expression}"
                if label == "outcome":
                    assert set(values.split("|")) <= outcomes(), expression
        for group in _GROUPED.findall(expression):
            assert set(re.findall(r"\w+", group)) <= known, expression

    families: dict[str, set[str]] = {}
    for port in (server.metrics_port, storage_port):
        for family in text_string_to_metric_families((await get(port, "/metrics"))[1]):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            families.setdefault(name, set()).update(labels)
    documented = {
        name: set(filter(None, labels.replace(" ", "").split(",")))
        for name, labels in re.findall(r"^\| `((?:redfence|process)_\w+)` \| ([\w, ]*)\|", PAGE, re.MULTILINE)
    }
    assert documented == families


def test_every_alert_has_advice_and_the_page_names_no_other() -> None:
    """An alert without advice wakes an operator for nothing."""
    assert set(re.findall(r"^\| `(Redfence\w+)` \|", PAGE, re.MULTILINE)) == {
        rule["alert"] for rule in rules()
    }


def test_prometheus_own_tool_accepts_the_rules(prometheus: Path) -> None:
    command = (prometheus.with_name("promtool"), "check", "rules", RULES)
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_first_event_of_a_kind_raises_its_alert_and_shows_on_the_dashboard(
    prometheus: Path, tmp_path: Path
) -> None:
    """The series of an outcome begins with 1, and `increase` sees no rise in that."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    (panel,) = (each for each in panels if each["title"] == "Stale tokens refused in an hour")
    series = 'redfence_requests_total{instance="a",method="Put",outcome="%s"}'
    firing = 'count by (alertname) (ALERTS{alertstate="firing",alertname!="RedfenceAbsent"})'
    alerts = ("RedfenceInternalErrors", "RedfenceStaleTokenRefused")
    both = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts]

    def expect(expression: str, minute: int, *samples: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}

    world = {
        "interval": "1m",
        "input_series": [
            {"series": series % outcome, "values": "_x9 1x90"} for outcome in ("stale_token", "internal")
        ],
        "promql_expr_test": [
            expect(firing, 5),
            expect(firing, 12, *both),
            expect(firing, 25),
            *(
                expect(panel["targets"][0]["expr"], minute, {"labels": "{}", "value": count})
                for minute, count in ((5, 0), (12, 1), (90, 0))
            ),
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [world]}))
    command = (prometheus.with_name("promtool"), "test", "rules", file)
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
