"""The Grafana dashboard for what `monitor.metrics` serves: `grafana.json` beside this module, as Grafana imports it.

The JSON's model: https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def dashboard() -> dict[str, Any]:
    """Return the dashboard as JSON. Prometheus is chosen at its top."""
    read: dict[str, Any] = json.loads(Path(__file__).with_name("grafana.json").read_text("utf-8"))
    return read
