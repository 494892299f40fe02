"""A Grafana dashboard for what `monitor.metrics` serves, as the JSON that Grafana imports.

The JSON's model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_SCHEMA = 39

_GPU = '{host=~"$host", gpu=~"$gpu", mig_instance=""}'
_RANK = '{host=~"$host", training_job=~"$training_job", rank=~"$rank"}'
_BY_GPU = "{{host}} {{gpu}}"
_BY_RANK = "{{host}} rank {{rank}} pid {{pid}}"
_USED_SHARE = f"gpumem_gpu_memory_used_bytes{_GPU} / gpumem_gpu_memory_total_bytes{_GPU}"
_PEAK = f"gpumem_training_peak_allocated_bytes{_RANK}"
_STEPS = f"gpumem_training_steps_total{_RANK}"


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: each with the words of its legend. `unit`: as Grafana calls it."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "none"
    kind: str = "timeseries"
    words: str = ""
    stacked: bool = False

    def as_json(self, number: int, place: dict[str, int]) -> dict[str, Any]:
        """As Grafana has it."""
        line = {
            "fillOpacity": 70 if self.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if self.stacked else "none"},
        }
        table = {"format": "table", "instant": True} if self.kind == "table" else {}
        return {
            "id": number,
            "title": self.title,
            "description": self.words,
            "type": self.kind,
            "datasource": _SOURCE,
            "gridPos": place,
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, "custom": line if self.kind == "timeseries" else {}},
                "overrides": [],
            },
            "targets": [
                {"datasource": _SOURCE, "expr": query, "legendFormat": legend, "refId": chr(ord("A") + place), **table}
                for place, (query, legend) in enumerate(self.queries)
            ],
        }


@dataclass(frozen=True)
class Section:
    """Lines of panels under a title. `lines`: the height of each, and its panels, which share its width."""

    title: str
    lines: Sequence[tuple[int, Sequence[Panel]]] = field(default_factory=tuple)


SECTIONS = (
    Section("GPUs", (
        (4, (
            Panel("GPUs that answer", [(f"sum(gpumem_gpu_up{_GPU})", "")], kind="stat"),
            Panel("Free", [(f'sum(gpumem_gpu_memory_bytes{_GPU[:-1]}, row="free"}})', "")], "bytes", "stat"),
            Panel("Fullest GPU", [(f"max({_USED_SHARE})", "")], "percentunit", "stat"),
            Panel("Hosts away", [('count(gpumem_host_up{host=~"$host"} == 0) or vector(0)', "")], kind="stat"),
        )),
        (8, (
            Panel("Memory in use", [(_USED_SHARE, _BY_GPU)], "percentunit"),
            Panel("Memory by row of the ledger", [(f"sum by (row) (gpumem_gpu_memory_bytes{_GPU})", "{{row}}")],
                  "bytes", words="Of the chosen GPUs; the rows sum to their memory.", stacked=True),
        )),
        (7, (
            Panel("Utilization", [(f"gpumem_gpu_utilization_ratio{_GPU}", _BY_GPU)], "percentunit"),
            Panel("Power", [(f"gpumem_gpu_power_watts{_GPU}", _BY_GPU)], "watt"),
            Panel("Temperature", [(f"gpumem_gpu_temperature_celsius{_GPU}", _BY_GPU)], "celsius"),
        )),
    )),
    Section("Training processes with a probe", (
        (8, (
            Panel("Memory by bucket", [(f"sum by (bucket) (gpumem_training_memory_bytes{_RANK})", "{{bucket}}")],
                  "bytes", words="Between two steps, over the chosen ranks.", stacked=True),
            Panel("At the peak, by bucket",
                  [(f"sum by (bucket) (gpumem_training_peak_memory_bytes{_RANK})", "{{bucket}}")],
                  "bytes", words="Over the chosen ranks.", stacked=True),
        )),
        (8, (
            Panel("Peak of each rank", [(_PEAK, _BY_RANK)], "bytes"),
            Panel("Spread between the ranks' peaks",
                  [(f"max by (training_job) ({_PEAK}) - min by (training_job) ({_PEAK})", "{{training_job}}")],
                  "bytes"),
        )),
        (7, (
            Panel("Steps a second", [(f"rate({_STEPS}[$__rate_interval])", _BY_RANK)], "ops"),
            Panel("Steps behind the first rank",
                  [(f"max by (training_job) ({_STEPS}) - on (training_job) group_right () {_STEPS}", _BY_RANK)]),
            Panel("Allocator: cache emptied, requests failed", [
                (f"increase(gpumem_training_allocator_retries_total{_RANK}[$__rate_interval])",
                 "emptied, rank {{rank}} pid {{pid}}"),
                (f"increase(gpumem_training_allocator_failures_total{_RANK}[$__rate_interval])",
                 "failed, rank {{rank}} pid {{pid}}"),
            ]),
        )),
    )),
    Section("Processes", (
        (10, (
            Panel("Processes that hold most",
                  [('topk(20, gpumem_process_memory_bytes{host=~"$host", gpu=~"$gpu"})', "")], "bytes", "table"),
        )),
        (4, (
            Panel("Processes and training processes beyond the bound of what is exported",
                  [('sum(gpumem_processes_left_out{host=~"$host"})', "processes"),
                   ('sum(gpumem_training_processes_left_out{host=~"$host"})', "training processes")], kind="stat"),
        )),
    )),
)  # fmt: skip

_VARIABLES = {
    "host": "label_values(gpumem_host_up, host)",
    "gpu": 'label_values(gpumem_gpu_up{host=~"$host"}, gpu)',
    "training_job": 'label_values(gpumem_training_steps_total{host=~"$host"}, training_job)',
    "rank": 'label_values(gpumem_training_steps_total{host=~"$host", training_job=~"$training_job"}, rank)',
}
"""What can be chosen at the top; the data source too."""


def dashboard() -> dict[str, Any]:
    """The dashboard as JSON. Prometheus is chosen at its top."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "gpumem-tui: GPU memory",
        "uid": "gpumem-tui",
        "tags": ["gpu"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *(_variable(name, query) for name, query in _VARIABLES.items())]},
        "panels": list(_placed(SECTIONS)),
    }


def _placed(sections: Iterable[Section]) -> Iterable[dict[str, Any]]:
    number, y = 0, 0
    for section in sections:
        number += 1
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        yield {"id": number, "title": section.title, "type": "row", "collapsed": False, "gridPos": place, "panels": []}
        y += 1
        for height, panels in section.lines:
            width = _COLUMNS // len(panels)
            for column, panel in enumerate(panels):
                number += 1
                yield panel.as_json(number, {"x": column * width, "y": y, "w": width, "h": height})
            y += height


def _variable(name: str, query: str) -> dict[str, Any]:
    """One whose choices a query finds, all of them chosen at first."""
    return {
        "name": name,
        "label": name.replace("_", " "),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
