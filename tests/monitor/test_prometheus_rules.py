"""The alerting rules ask for what is exported, by labels that it has; Prometheus takes them, and each of them fires."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpumem_tui.monitor.alerts import AlertKind
from gpumem_tui.monitor.for_prometheus import alerting_rules
from gpumem_tui.settings import Settings
from tests.monitor.test_grafana import PROMTOOL, exported

yaml = pytest.importorskip("yaml")
_METRIC = re.compile(r"\bgpumem_\w+")


def rules(settings: Settings | None = None) -> list[dict[str, Any]]:
    """As Prometheus reads them."""
    [group] = yaml.safe_load(alerting_rules(settings or Settings()))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_a_rule_asks_for_metrics_and_labels_that_are_exported(rule: dict[str, Any]) -> None:
    known, asked = exported(), set(_METRIC.findall(rule["expr"]))
    assert asked
    assert asked <= known.keys()
    for name, selector in re.findall(r"(gpumem_\w+)\{([^}]*)\}", rule["expr"]):
        assert set(re.findall(r"(\w+)[!=]~?\"", selector)) <= known[name]
    first = next(iter(_METRIC.findall(rule["expr"])))
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= known[first]


def test_every_kind_of_alert_has_a_rule() -> None:
    assert {kind.value for kind in AlertKind} <= {rule["labels"]["kind"] for rule in rules()}


def test_thresholds_are_the_settings() -> None:
    text = alerting_rules(Settings(near_full_percent=80, temperature_limit_c=77, temperature_margin_c=3))
    assert "> 0.8" in text
    assert "* 0 + 77)\n          - 3\n" in text
    assert "{{ $labels.host }}" in text


_GPU = 'host="a", gpu="0", uuid="GPU-0", name="A100", mig_instance=""'
_RANK = 'host="a", gpu="0", uuid="GPU-0", device="cuda:0", pid="7", training_job="j", rank="0"'
_FIRES = {
    "GpumemHostAway": {'gpumem_host_up{host="a"}': "0x180"},
    "GpumemNoDriver": {'gpumem_driver{host="a", driver="", cuda=""}': "0x180"},
    "GpumemGpuLost": {f"gpumem_gpu_up{{{_GPU}}}": "0x180"},
    "GpumemGpuStale": {f"gpumem_gpu_age_seconds{{{_GPU}}}": "60x180"},
    "GpumemEccErrors": {f'gpumem_gpu_ecc_errors_total{{{_GPU}, type="uncorrected"}}': "1x180"},
    "GpumemOutOfMemory": {f"gpumem_training_allocator_failures_total{{{_RANK}}}": "0x175 1x10"},
    "GpumemAllocatorRetries": {f"gpumem_training_allocator_retries_total{{{_RANK}}}": "0x175 1x10"},
    "GpumemNearFull": {
        f"gpumem_gpu_memory_used_bytes{{{_GPU}}}": "97x180",
        f'gpumem_gpu_memory_bytes{{{_GPU}, row="free"}}': "3x180",
        f'gpumem_gpu_memory_bytes{{{_GPU}, row="process"}}': "96x180",
    },
    "GpumemMemoryGrows": {
        f"gpumem_training_allocated_bytes{{{_RANK}}}": "10+1x180",
        f"gpumem_gpu_memory_total_bytes{{{_GPU}}}": "1000x180",
    },
    "GpumemSecondGpu": {f"gpumem_gpu_other_ranks{{{_GPU}}}": "7x180"},
    "GpumemHot": {f"gpumem_gpu_temperature_celsius{{{_GPU}}}": "86x180"},
    "GpumemThrottled": {f'gpumem_gpu_throttled{{{_GPU}, reason="hot"}}': "1x180"},
    "GpumemTrainingStopped": {
        f"gpumem_training_step_age_seconds{{{_RANK}}}": "400x180",
        f"gpumem_training_step_seconds{{{_RANK}}}": "1x180",
    },
}
"""The values that make each fire in three hours, a value a minute."""
_QUIET = {
    f"gpumem_gpu_other_ranks{{{_GPU}}}": "0x180",
    f"gpumem_gpu_temperature_celsius{{{_GPU}}}": "86x180",
    f"gpumem_gpu_temperature_limit_celsius{{{_GPU}}}": "95x180",
    f'gpumem_gpu_throttled{{{_GPU}, reason="power cap"}}': "1x180",
    f"gpumem_training_allocated_bytes{{{_RANK}}}": "500x180",
    f"gpumem_gpu_memory_total_bytes{{{_GPU}}}": "1000x180",
    f"gpumem_gpu_memory_used_bytes{{{_GPU}}}": "94x180",
    f'gpumem_gpu_memory_bytes{{{_GPU}, row="free"}}': "6x180",
}
"""Values that make none of them fire."""


def test_what_makes_each_fire_is_written_down() -> None:
    assert _FIRES.keys() == {rule["alert"] for rule in rules()}
    assert {name.partition("{")[0] for series in _FIRES.values() for name in series} <= exported().keys()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed here: Debian's package prometheus has it")
def test_prometheus_itself_fires_each_of_them_and_none_without_cause(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(alerting_rules(Settings()))

    def firing(name: str, *, count: int) -> dict[str, object]:
        samples = [{"labels": f'{{alertstate="firing", alertname="{name}"}}', "value": 1}] * count
        query = f'count by (alertstate, alertname) (ALERTS{{alertstate="firing", alertname="{name}"}})'
        return {"expr": query, "eval_time": "177m", "exp_samples": samples}

    def case(series: dict[str, str], *queries: dict[str, object]) -> dict[str, object]:
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        return {"interval": "1m", "input_series": inputs, "promql_expr_test": list(queries)}

    cases = [case(series, firing(name, count=1)) for name, series in _FIRES.items()]
    cases.append(case(_QUIET, *(firing(name, count=0) for name in _FIRES)))
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": cases}))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
