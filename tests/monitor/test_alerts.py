"""Alerts: each one begins, lasts as long as its cause, and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.alerts import Alert, AlertKind, Alerts, Severity
from gpumem_tui.monitor.probes import ProbeFigures, ProbeReport, RanOutOfMemory
from gpumem_tui.monitor.snapshot import DeviceState, GpuReading, Instance
from gpumem_tui.monitor.trend import Trend
from gpumem_tui.settings import Settings
from tests.monitor.snapshots import START_S, gpu, machine, memory, process

_UUID = gpu().uuid
_USABLE_GIB = (memory(0).free_bytes) / GIB


class Watch:
    """Feeds alerts one snapshot a second."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.alerts = Alerts(settings)
        self.second = -1

    def __call__(self, *gpus: GpuReading, seconds: int = 1, probes: Any = None, **changes: Any) -> list[Alert]:
        current: tuple[Alert, ...] = ()
        for _ in range(seconds):
            self.second += 1
            current = self.alerts.update(machine(gpus, after_s=self.second, **changes), ProbeReport(probes or {}))
        return list(current)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def _percent(percent: float) -> GpuReading:
    return gpu(used_bytes=round(memory(0).free_bytes * percent / 100), processes=())


def _kinds(alerts: list[Alert]) -> list[AlertKind]:
    return [alert.kind for alert in alerts]


def test_a_calm_machine_has_no_alert(watch: Watch) -> None:
    assert watch(gpu(0), gpu(1), seconds=100) == []


class TestNearFull:
    def test_it_begins_at_the_threshold_and_ends_below_it(self, watch: Watch) -> None:
        assert watch(_percent(94)) == []
        (alert,) = watch(_percent(95.5))
        assert (alert.kind, alert.gpu_uuid, alert.severity) == (AlertKind.NEAR_FULL, _UUID, Severity.WARNING)
        assert alert.message == "GPU 0: 95 % of memory in use, 3.57 GiB free"
        assert alert.since_s == START_S + 1
        (alert,) = watch(_percent(93), seconds=60)  # hysteresis
        assert alert.since_s == START_S + 1
        assert watch(_percent(91), seconds=5) == []
        assert watch(_percent(93), seconds=60) == []

    def test_the_threshold_is_a_setting(self) -> None:
        assert _kinds(Watch(Settings(near_full_percent=50))(_percent(51))) == [AlertKind.NEAR_FULL]

    def test_steady_growth_is_told_before_it_is_too_late(self, watch: Watch) -> None:
        for n in range(240):
            alerts = watch(_percent(43 + n * 0.18))
        (alert,) = alerts
        assert alert.message.startswith("GPU 0: 86 % of memory in use, ")
        assert alert.message.endswith(" free, full in about 78 s")
        assert watch(_percent(86), seconds=70) == []  # it stopped growing

    def test_a_process_that_ends_takes_its_growth_along(self, watch: Watch) -> None:
        both = (process(7, 10 * GIB), process(8, GIB))
        for n in range(240):
            watch(replace(_percent(50 + n * 0.15), processes=both))
        assert "full in about" in watch(replace(_percent(86.2), processes=both))[0].message
        assert watch(replace(_percent(86.4), processes=both[1:]), seconds=4) == []

    def test_loading_a_model_is_no_steady_growth(self, watch: Watch) -> None:
        for n in range(10):
            assert watch(_percent(n * 9)) == []
        assert watch(_percent(90), seconds=90) == []

    def test_a_mig_instance_has_its_own(self, watch: Watch) -> None:
        full = memory(9 * GIB, total_bytes=10 * GIB)
        instance = Instance(2, "MIG-1", "1g.10gb", full, (), Unknown("x"))
        parent = gpu(mig=True, instances=(instance,), memory=Unknown("no permission"))
        (alert,) = watch(parent)
        assert (alert.gpu_uuid, alert.instance) == (_UUID, "MIG-1")
        assert alert.message.startswith("GPU 0 MIG 2: 96 %")

    def test_a_reading_that_fails_for_a_while_does_not_end_it(self, watch: Watch) -> None:
        (before,) = watch(_percent(99))
        blind = gpu(memory=Unknown("timed out"), processes=Unknown("timed out"))
        assert watch(blind, seconds=20) == [before]
        assert watch(blind, seconds=20) == []


class TestOutOfMemory:
    def test_a_process_that_ends_as_it_fills_the_device(self, watch: Watch) -> None:
        crowd = (process(7, 70 * GIB), process(8, GIB))
        watch(replace(_percent(50), processes=crowd))
        watch(replace(_percent(99), processes=crowd), seconds=3)
        watch(replace(_percent(60), processes=crowd))  # it freed some while it died
        alerts = watch(replace(_percent(1), processes=crowd[1:]))
        (alert,) = (alert for alert in alerts if alert.kind is AlertKind.OOM)
        assert alert.severity is Severity.WARNING
        end = "pid 7 (python) ended as memory filled up, it held 70.00 GiB"
        assert alert.message == f"GPU 0: perhaps out of memory: {end}"
        assert _kinds(watch(_percent(1), seconds=30)) == [AlertKind.OOM]
        assert watch(_percent(1), seconds=40) == []

    def test_one_that_was_not_there_before_fills_it_at_once(self, watch: Watch) -> None:
        watch(_percent(1))
        watch(replace(_percent(99), processes=(process(7, 70 * GIB),)))
        assert AlertKind.OOM in _kinds(watch(_percent(1)))

    def test_not_one_that_ends_long_after_or_held_little(self, watch: Watch) -> None:
        big, small = process(7, 70 * GIB), process(8, GIB)
        watch(replace(_percent(50), processes=(big, small)))
        watch(replace(_percent(99), processes=(big, small)))
        assert AlertKind.OOM not in _kinds(watch(replace(_percent(98), processes=(big,))))
        watch(replace(_percent(60), processes=(big,)), seconds=15)
        assert watch(_percent(0)) == []

    @pytest.mark.parametrize("dip_percent", [98, 40])
    def test_not_one_that_lived_at_the_limit_for_long(self, watch: Watch, dip_percent: float) -> None:
        steady = (process(7, 70 * GIB),)
        watch(replace(_percent(50), processes=steady))
        for _ in range(4):
            watch(replace(_percent(98), processes=steady), seconds=10)
            watch(replace(_percent(dip_percent), processes=steady))
        watch(replace(_percent(98), processes=steady))
        assert AlertKind.OOM not in _kinds(watch(_percent(1)))

    def test_not_one_that_was_there_before_we_looked(self, watch: Watch) -> None:
        watch(replace(_percent(98), processes=(process(7, 70 * GIB),)), seconds=2)
        assert AlertKind.OOM not in _kinds(watch(_percent(1)))

    @pytest.mark.parametrize("silent_s", [0, 2])
    def test_a_probe_says_how_it_ended(self, watch: Watch, silent_s: int) -> None:
        """The driver may list a process for a moment after it has ended."""
        big = (process(7, 70 * GIB),)
        probes = {(_UUID, 7): ProbeFigures(GIB, GIB, 0, 0), (_UUID, 9): ProbeFigures(GIB, GIB, 0, 0)}
        others = {(_UUID, 9): ProbeFigures(GIB, GIB, 0, 0)}
        watch(replace(_percent(50), processes=big), probes=probes)
        watch(replace(_percent(99), processes=big), probes=probes)
        watch(replace(_percent(99), processes=big), probes=others, seconds=silent_s)
        assert AlertKind.OOM not in _kinds(watch(_percent(1), probes=others))

    def test_a_pid_that_is_used_again_is_not_taken_for_the_watched_one(self, watch: Watch) -> None:
        big = (process(7, 70 * GIB),)
        watch(replace(_percent(50), processes=big), probes={(_UUID, 7): ProbeFigures(GIB, GIB, 0, 0)})
        watch(_percent(1), seconds=5)
        watch(replace(_percent(99), processes=big))
        assert AlertKind.OOM in _kinds(watch(_percent(1)))

    def test_not_while_the_list_cannot_be_read(self, watch: Watch) -> None:
        big = process(7, 70 * GIB)
        watch(replace(_percent(50), processes=(big,)))
        watch(replace(_percent(99), processes=(big,)))
        watch(replace(_percent(99), processes=Unknown("no permission")))
        alerts = watch(replace(_percent(99), processes=(big,)))
        assert AlertKind.OOM not in _kinds(alerts)

    def test_retries_and_failures_that_a_probe_counts(self, watch: Watch) -> None:
        def figures(retries: int, ooms: int) -> dict[tuple[str, int], ProbeFigures]:
            return {(_UUID, 7): ProbeFigures(GIB, GIB, retries, ooms), ("GPU-other", 7): ProbeFigures(0, 0, 9, 9)}

        assert watch(gpu(), probes=figures(5, 0)) == []  # what was before we looked
        (alert,) = watch(gpu(), probes=figures(6, 0))
        assert (alert.severity, alert.kind) == (Severity.WARNING, AlertKind.OOM)
        assert alert.message == "GPU 0: pid 7 fits only by freeing its cache (6 times so far)"
        (alert,) = watch(gpu(), probes=figures(6, 1))
        assert (alert.severity, alert.message) == (Severity.CRITICAL, "GPU 0: out of memory in pid 7 (once so far)")
        assert watch(gpu(), probes=figures(6, 1), seconds=59) == [alert]
        assert watch(gpu(), probes=figures(6, 1), seconds=5) == []


class TestThrottled:
    def test_it_must_last_and_it_may_pause(self, watch: Watch) -> None:
        hot = gpu(throttle=("hot",))
        assert watch(hot, seconds=5) == []
        (alert,) = watch(hot)
        assert (alert.severity, alert.message) == (Severity.WARNING, "GPU 0: clocks lowered: hot")
        assert alert.since_s == START_S
        assert _kinds(watch(gpu(), seconds=10)) == [AlertKind.THROTTLED]
        assert watch(gpu()) == []

    def test_a_moment_is_no_alert(self, watch: Watch) -> None:
        watch(gpu(throttle=("hot",)))
        assert watch(gpu(), seconds=30) == []

    def test_the_power_cap_is_a_note(self, watch: Watch) -> None:
        (alert,) = watch(gpu(throttle=("power cap",)), seconds=10)
        assert alert.severity is Severity.NOTE


def test_uncorrected_errors_stay_until_they_are_gone(watch: Watch) -> None:
    (alert,) = watch(gpu(ecc_uncorrected=2))
    assert (alert.severity, alert.kind) == (Severity.CRITICAL, AlertKind.ECC)
    assert alert.message == "GPU 0: 2 uncorrected ECC errors since the driver was loaded"
    assert watch(gpu(ecc_uncorrected=2), seconds=500) == [alert]
    assert watch(gpu()) == []
    assert watch(gpu(ecc_uncorrected=Unknown("not supported"))) == []


class TestHot:
    def test_near_the_drivers_limit(self, watch: Watch) -> None:
        assert watch(gpu(temperature_c=83)) == []
        (alert,) = watch(gpu(temperature_c=84))
        assert (alert.kind, alert.message) == (AlertKind.HOT, "GPU 0: 84 °C, limit 89 °C")
        assert _kinds(watch(gpu(temperature_c=81), seconds=60)) == [AlertKind.HOT]
        assert watch(gpu(temperature_c=80), seconds=6) == []

    def test_where_the_driver_names_no_limit(self) -> None:
        watch = Watch(Settings(temperature_margin_c=0, temperature_limit_c=70))
        nameless = gpu(temperature_limit_c=Unknown("not supported"), temperature_c=70)
        assert [alert.message for alert in watch(nameless)] == ["GPU 0: 70 °C, limit 70 °C"]


def test_a_silent_gpu_says_since_when_and_a_lost_one_that_it_is_lost(watch: Watch) -> None:
    stale = gpu(state=DeviceState.STALE, age_s=4.2, state_reason="nvmlDeviceGetPowerUsage has not returned for 4 s")
    (alert,) = watch(stale, gpu(1))
    assert alert.kind is AlertKind.STALE
    assert alert.message == "GPU 0: stale 4 s: nvmlDeviceGetPowerUsage has not returned for 4 s"
    (alert,) = watch(gpu(state=DeviceState.LOST, state_reason="GPU is lost"))
    assert (alert.severity, alert.message) == (Severity.CRITICAL, "GPU 0: lost: GPU is lost")
    assert watch(gpu()) == []


def test_no_driver(watch: Watch) -> None:
    (alert,) = watch(problem="no NVIDIA driver on this machine: install it")
    assert (alert.kind, alert.gpu_uuid, alert.severity) == (AlertKind.NO_DRIVER, "", Severity.CRITICAL)
    assert watch() == []


def test_a_driver_that_stops_comes_before_the_gpus_that_it_takes_along(watch: Watch) -> None:
    gone = [gpu(index, state=DeviceState.LOST, state_reason="the driver does not run") for index in (0, 1)]
    watch(*gone)
    alerts = watch(*gone, problem="NVIDIA driver and library versions differ: reboot")
    assert _kinds(alerts) == [AlertKind.NO_DRIVER, AlertKind.LOST, AlertKind.LOST]


def test_what_just_happened_comes_before_what_lasts(watch: Watch) -> None:
    big, lasts = (process(7, 70 * GIB),), gpu(1, state=DeviceState.STALE, age_s=4.2, state_reason="it hangs")
    watch(replace(_percent(50), processes=big), lasts)
    assert _kinds(watch(replace(_percent(99), processes=big), lasts)) == [AlertKind.STALE, AlertKind.NEAR_FULL]
    assert _kinds(watch(_percent(1), lasts)) == [AlertKind.OOM, AlertKind.STALE, AlertKind.NEAR_FULL]


def test_the_worst_comes_first(watch: Watch) -> None:
    watch(gpu(0, throttle=("power cap",)), seconds=10)
    watch(gpu(0, throttle=("power cap",), temperature_c=95))
    alerts = watch(gpu(0, throttle=("power cap",), temperature_c=95), gpu(1, ecc_uncorrected=1))
    assert _kinds(alerts) == [AlertKind.ECC, AlertKind.HOT, AlertKind.THROTTLED]


def test_the_same_snapshot_again_changes_nothing() -> None:
    alerts = Alerts()
    snapshot = machine([_percent(99)])
    first = alerts.update(snapshot)
    assert _kinds(list(first)) == [AlertKind.NEAR_FULL]
    assert alerts.update(snapshot) == first


def test_a_clock_that_is_set_back_keeps_alerts_alive_no_longer(watch: Watch) -> None:
    watch(gpu(temperature_c=95), seconds=1000)
    watch.second = 10
    (alert,) = watch(gpu(temperature_c=95))
    assert alert.since_s <= START_S + 11
    assert watch(gpu(), seconds=7) == []


SIZE = 80 * GIB


def _forecasts(share: Callable[[int], float], seconds: int = 1200) -> list[tuple[int, float]]:
    """Return at which second an alert told how many are left, for a device that is in use so far."""
    trend, found = Trend(), []
    for second in range(seconds):
        trend.add(second, round(SIZE * share(second)))
        left_s = trend.seconds_to(SIZE) if second % 5 == 0 else None
        if left_s is not None:
            found.append((second, left_s))
    return found


class TestTrend:
    @pytest.mark.parametrize(
        "share",
        [
            pytest.param(lambda t: 0.3 + t / 1000, id="steadily"),
            pytest.param(lambda t: 0.3 + (t // 4) * 4 / 1000, id="in steps, as segments are taken"),
            pytest.param(lambda t: 0.3 + t / 1000 + 0.1 * (t % 35) / 35, id="with a cache that is emptied each 35 s"),
            pytest.param(lambda t: 0.3 + t / 1000 + (0.05 if t % 7 == 1 else 0), id="with bursts"),
        ],
    )
    def test_a_leak_is_told_with_the_time_that_is_left(self, share: Callable[[int], float]) -> None:
        full = next(second for second in range(1200) if share(second) >= 0.999)
        found = [(second, left_s) for second, left_s in _forecasts(share, full) if second > full - 150]
        assert len(found) > 28
        assert all(left_s == pytest.approx(full - second, abs=35) for second, left_s in found)

    @pytest.mark.parametrize("period_s", [3, 20, 47, 90, 150, 200])
    @pytest.mark.parametrize("least", [0.5, 0.8])
    def test_a_training_loop_that_empties_its_cache_fills_nothing(self, period_s: int, least: float) -> None:
        found = _forecasts(lambda t: least + (0.97 - least) * (t % period_s) / period_s)
        assert found == []

    def test_one_that_is_emptied_at_odd_times_fills_nothing(self) -> None:
        ends = [0, 60, 95, 230, 260, 400, 455, 570, 590, 700, 830, 900, 1010, 1100]
        assert _forecasts(lambda t: 0.6 + 0.0025 * (t - max(end for end in ends if end <= t))) == []

    @pytest.mark.parametrize(
        "share",
        [lambda _: 0.5, lambda t: 0.9 - t / 2000, lambda t: 0.5 if t < 100 else 0.9, lambda t: min(0.9, t / 200)],
    )
    def test_no_growth_no_answer(self, share: Callable[[int], float]) -> None:
        assert _forecasts(share, 600) == []

    def test_too_little_to_tell_and_too_far_to_matter(self) -> None:
        assert _forecasts(lambda t: 0.5 + t / 500, 225) == []
        assert _forecasts(lambda t: 0.1 + t / 100_000, 400) == []
        trend = Trend()
        for second in range(300):
            trend.add(second, second)
        assert trend.seconds_to(310) is not None
        trend.add(10, 5)  # the clock was set back
        assert trend.seconds_to(310) is None


class TestWatchedOutOfMemory:
    """Told by the probe."""

    def test_a_process_that_just_ended_is_an_alert_for_a_while(self) -> None:
        alerts = Alerts()
        ended = ProbeReport(ended=(RanOutOfMemory(_UUID, START_S, "PID 7 (python train.py) ran out of memory"),))
        assert alerts.update(machine([gpu()])) == ()
        (alert,) = alerts.update(machine([gpu()], after_s=1), ended)
        assert (alert.kind, alert.severity, alert.gpu_uuid) == (AlertKind.OOM, Severity.CRITICAL, _UUID)
        assert alert.message == "GPU 0: PID 7 (python train.py) ran out of memory"
        assert alerts.update(machine([gpu()], after_s=60), ended), "it is until it was likely read"
        assert alerts.update(machine([gpu()], after_s=150), ended) == ()

    def test_one_that_ended_long_ago_is_none(self) -> None:
        ended = ProbeReport(ended=(RanOutOfMemory(_UUID, START_S - 3600, "PID 7 ran out of memory"),))
        assert Alerts().update(machine([gpu()]), ended) == ()

    def test_where_the_gpu_is_not_known_it_is_the_machines(self) -> None:
        elsewhere = RanOutOfMemory("GPU-x", START_S - 1, "PID 6")
        ended = ProbeReport(ended=(RanOutOfMemory("", START_S, "PID 7 ran out of memory"), elsewhere))
        (alert,) = Alerts().update(machine([gpu()]), ended)
        assert (alert.gpu_uuid, alert.message) == ("", "PID 7 ran out of memory")
