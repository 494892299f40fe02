"""`report --slurm`: a job's GPU memory and use from recordings, next to what Slurm has of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gpumem_tui.cli.report import report
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import GIB, Unknown
from gpumem_tui.monitor.snapshot import GpuProcess, HostProcess
from gpumem_tui.recording.jobs import JobUse, job_line, job_lines, job_object, slurm_number, smaller_gpus
from gpumem_tui.recording.recording import GpuRecorder
from gpumem_tui.remote.slurm import SlurmJob, slurm_job
from tests.monitor.snapshots import changed, gpu, machine, memory, process
from tests.nvml_stub.machine import FakeMachine
from tests.nvml_stub.scenario import FakeGpu, FakeProcess, Scenario
from tests.waiting import wait_for_file, wait_until

_FIELDS = (
    "JobID", "JobIDRaw", "User", "Account", "State", "Start", "End", "AveCPU", "AveDiskRead", "AveDiskWrite", "AveRSS",
    "AveVMSize", "ElapsedRaw", "ExitCode", "Layout", "MaxRSS", "MaxVMSize", "MinCPU", "ReqCPUS", "ReqMem", "ReqNodes",
    "Reservation", "Submit", "Suspended", "SystemCPU", "TimelimitRaw", "UserCPU", "NodeList", "Partition", "AllocTRES",
    "JobName",
)  # fmt: skip
_SACCT = """\
974724|974724|ec313-autotekst|ec313|COMPLETED|2024-11-13T13:02:56|2024-11-13T13:06:50||||||234|0:0|||||8|64G|1||2024-11-13T12:37:07|00:00:00|00:10.278|22|05:06.252|gpu-10|mig|billing=12,cpu=8,gres/gpu=1,mem=64G,node=1|nsk-transcription-job
974804|974804|ec-eeeee|ec395|TIMEOUT|2024-11-13T13:05:32|2024-11-13T13:08:58||||||206|0:0|||||1|32G|1||2024-11-13T13:05:06|00:00:00|00:04.084|3|03:05.358|gpu-9|accel|billing=19,cpu=1,gres/gpu:a100=1,gres/gpu=1,mem=32G,node=1|gpu_job
974806|974806|ec-ccccc|ec35|CANCELLED by 2101477|2024-11-13T13:06:23|2024-11-13T13:08:30||||||127|0:0|||||20|50G|1||2024-11-13T13:06:23|00:00:00|00:39.637|80|04:03.895|gpu-4|ifi_accel|billing=20,cpu=20,gres/gpu:rtx30=1,gres/gpu=1,mem=50G,node=1|test-cv
973821|973821|ec-aaaaa|ec85|COMPLETED|2024-11-13T11:08:00|2024-11-13T13:07:24||||||7164|0:0|||||6|10000M|1||2024-11-13T08:30:40|00:00:00|22:53.824|400|11:06:33|c1-28|normal|billing=6,cpu=6,mem=10000M,node=1|command
"""  # noqa: E501
"""Lines that the sacct of a cluster printed (NordicHPC/sonar, src/slurm.rs: "Actual sacct output from Fox")."""

_STAND_IN = """#!{python}
import sys
fields, lines = {fields!r}, {lines!r}.splitlines()
options = dict(word.partition("=")[::2] for word in sys.argv[1:])
assert {{"--allocations", "--parsable2", "--noheader"}} <= options.keys(), sys.argv
wanted = options["--jobs"]
for line in lines:
    values = dict(zip(fields, line.split("|", len(fields) - 1)))
    if values["JobID"].split("_")[0] == wanted or values["JobID"] == wanted:
        print("|".join(values[name] for name in options["--format"].split(",")))
"""


def _program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a sacct that has these lines into PATH, alone."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(tmp_path)

    def install(lines: str = _SACCT) -> None:
        _program(folder, "sacct", _STAND_IN.format(python=sys.executable, fields=_FIELDS, lines=lines))

    return install


def _in_job(pid: int, gib: float, job: str) -> GpuProcess:
    found = process(pid, int(gib * GIB))
    assert isinstance(found.host, HostProcess)
    return replace(found, host=replace(found.host, slurm_job=job))


def _recorded(path: Path, held_gib: Sequence[float], job: str = "974804") -> Path:
    """Record the readings of a node with a GPU that the job holds so much of, and a second GPU of another job."""
    recorder = GpuRecorder(path)
    for second, gib in enumerate(held_gib):
        own = changed(gpu(0, processes=(_in_job(100, gib, job),)), utilization_percent=40 + second)
        other = gpu(1, processes=(_in_job(200, 70, "974001"),))
        snapshot = machine([own, other], after_s=second)
        recorder.add(replace(snapshot, host=replace(snapshot.host, name="gpu-9")))
    recorder.close()
    return path


def _report(*words: str) -> Result:
    return CliRunner().invoke(report, list(words))


def test_the_report_begins_with_the_figure_and_has_what_was_asked(tmp_path: Path, slurm: Callable[..., None]) -> None:
    slurm()
    _recorded(tmp_path / "gpus-974804-gpu-9", [10, 12, 11])
    done = _report("--slurm", "974804")
    assert done.exit_code == 0, done.output
    first, second, *rest = done.output.splitlines()
    assert first == "Slurm job 974804: peak 12.0 of 80.0 GiB on the GPU, mean 11.0; use 41 % on average."
    assert second == (
        "Job 974804 (gpu_job): TIMEOUT after 0:03:26 on gpu-9; asked for 1 GPU (a100), 1 CPU, 32G of host memory."
    )
    text = "\n".join(rest)
    (row,) = (line.split() for line in rest if line.startswith("gpu-9"))
    assert row == ["gpu-9", "0", "NVIDIA", "A100-SXM4-80GB", "12.00", "11.00", "80.0", "41", "%", "42", "%"]
    assert "A smaller GPU would have done" in text
    assert "Room for a larger batch: 67.41 GiB" in text
    assert "Seen on GPUs for 0:00:02 of 0:03:26." in text
    assert "Peaks are those of the readings." in text


def test_the_json_has_the_same_figures(tmp_path: Path, slurm: Callable[..., None]) -> None:
    slurm()
    path = _recorded(tmp_path / "anything", [10, 12, 11])
    found = json.loads(_report("--slurm", "974804", str(path), "--json").output)
    (only,) = found["gpus"]
    assert (only["host"], only["index"], only["peak_bytes"], only["mean_bytes"]) == ("gpu-9", 0, 12 * GIB, 11 * GIB)
    assert (only["mean_use_percent"], only["peak_use_percent"], only["readings"]) == (41.0, 42, 3)
    assert found["asked"]["gpu_types"] == ["a100"]
    assert found["unused_bytes"] == only["total_bytes"] - only["reserved_bytes"] - 12 * GIB


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        ("974724", ("COMPLETED", 234, 1, (), 8, "64G", "gpu-10", "nsk-transcription-job")),
        ("974806", ("CANCELLED by 2101477", 127, 1, ("rtx30",), 20, "50G", "gpu-4", "test-cv")),
        ("973821", ("COMPLETED", 7164, 0, (), 6, "10000M", "c1-28", "command")),
    ],
)
def test_what_sacct_printed_is_read(job: str, wanted: tuple[object, ...], slurm: Callable[..., None]) -> None:
    slurm()
    found = slurm_job(job)
    assert isinstance(found, SlurmJob)
    read = (found.state, found.elapsed_s, found.gpus, found.gpu_types, found.cpus, found.host_memory, found.node_list)
    assert (*read, found.name) == wanted


def test_a_name_may_have_the_separator(slurm: Callable[..., None]) -> None:
    slurm(_SACCT.replace("|gpu_job", "|a|b"))
    found = slurm_job("974804")
    assert isinstance(found, SlurmJob)
    assert found.name == "a|b"


def test_without_accounting_scontrol_is_asked(tmp_path: Path, slurm: Callable[..., None]) -> None:
    slurm()
    _program(tmp_path / "bin", "sacct", "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    line = (
        "JobId=42 JobName=train UserId=ada(1000) GroupId=ada(1000) JobState=RUNNING Reason=None RunTime=1-02:03:04 "
        "TimeLimit=2-00:00:00 Partition=gpu NodeList=gpu-[1-2] NumNodes=2 "
        "ReqTRES=cpu=8,mem=64G,node=2,gres/gpu=4 AllocTRES=cpu=8,mem=64G,node=2,gres/gpu:h100=4,gres/gpu=4"
    )
    _program(tmp_path / "bin", "scontrol", f"#!/bin/sh\necho '{line}'\n")
    found = slurm_job("42")
    assert isinstance(found, SlurmJob)
    assert (found.state, found.elapsed_s, found.gpus, found.nodes) == ("RUNNING", 93784, 4, 2)
    assert found.asked == "4 GPUs (h100), 8 CPUs, 64G of host memory"
    _program(
        tmp_path / "bin", "scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert "accounting storage is disabled" in str(slurm_job("42"))


def _refused(*words: str) -> str:
    done = _report(*words)
    assert isinstance(done.exception, OptionError), done.output
    return str(done.exception)


def test_refusals_are_one_line_with_what_to_type(tmp_path: Path, slurm: Callable[..., None]) -> None:
    assert "`gpumem-tui report --slurm JOB`" in _refused()
    assert _refused("--slurm", "974804") == (
        "--slurm: there is no `sacct` in PATH; run it where Slurm's commands are; there is no recording gpus-974804-* "
        "here either"
    )
    slurm()
    unknown = _refused("--slurm", "999999")
    assert "`sacct` has no job 999999" in unknown
    assert "`sacct` lists your jobs" in unknown
    missing = _refused("--slurm", "974804")
    assert "job 974804 was not recorded" in missing
    assert "gpumem-tui monitor --record gpus-$SLURM_JOB_ID-$SLURMD_NODENAME --quiet &" in missing
    other = _recorded(tmp_path / "other", [1.0], "974001")
    absent = _refused("--slurm", "974804", "other")
    assert "no process of job 974804 on a GPU is in other (jobs there: 974001)" in absent
    assert "no Slurm job" in _refused("--slurm", "me", str(other))
    array = "".join(_SACCT.splitlines()[1].replace("974804|", f"974804_{task}|", 1) + "\n" for task in range(2))
    slurm(array)
    wanted = "job 974804 has 2 parts (tasks of an array, or components); name one, such as "
    assert wanted + "974804_0" in _refused("--slurm", "974804", str(other))
    slurm(array.replace("974804_0", "974804_[7-9]").replace("974804_1", "974804_5"))  # the first tasks wait
    assert wanted + "974804_5" in _refused("--slurm", "974804", str(other))


def test_what_sacct_prints_besides_a_job_is_no_job(tmp_path: Path, slurm: Callable[..., None]) -> None:
    slurm()
    other = _recorded(tmp_path / "other", [1.0], "974001")
    _program(tmp_path / "bin", "sacct", "#!/bin/sh\necho 'sacct: unable to reach the database'\necho\n")
    assert "`sacct` has no job 42; it printed 'sacct: unable to reach the database'" in _refused(
        "--slurm", "42", "other"
    )
    components = '#!/bin/sh\nfor i in 0 1; do echo "42+$i|$((42 + i))|COMPLETED|60|n1|cpu=1,node=1|het"; done\n'
    _program(tmp_path / "bin", "sacct", components)
    assert "name one, such as 42+0" in _refused("--slurm", "42", str(other))


def test_without_slurm_the_recording_still_answers(tmp_path: Path, slurm: Callable[..., None]) -> None:
    assert slurm is not None  # PATH is empty: no sacct, no scontrol
    _recorded(tmp_path / "gpus-974804-gpu-9", [10])
    done = _report("--slurm", "974804")
    assert "peak 10.0 of 80.0 GiB" in done.output
    assert "Asked for: unknown: there is no `sacct` in PATH" in done.output


def test_gpus_and_nodes_that_were_not_seen_are_named(tmp_path: Path, slurm: Callable[..., None]) -> None:
    slurm(_SACCT.replace("gres/gpu:a100=1,gres/gpu=1", "gres/gpu:a100=2,gres/gpu=2"))
    _recorded(tmp_path / "gpus-974804-gpu-9", [79.0])
    assert "1 GPU of 2 had no process of the job." in _report("--slurm", "974804").output
    slurm(_SACCT.replace("mem=32G,node=1|gpu_job", "mem=32G,node=2|gpu_job"))
    said = _report("--slurm", "974804").output
    assert "Recorded on 1 of 2 nodes (gpu-9): give the others' files too." in said
    assert "No smaller GPU of the catalog would have done" in said
    assert "Little room for a larger batch" in said


def test_the_peak_of_a_probe_counts_where_it_is_higher_and_who_shares_is_named() -> None:
    use = JobUse(lambda each: slurm_number(each) == "7")
    shared = gpu(0, processes=(_in_job(1, 10, "7"), _in_job(2, 5, "8")))
    said = {(shared.uuid, 1): {"reserved_bytes": 8 * GIB, "peak_reserved_bytes": 20 * GIB}}
    use.add("a", machine([shared]), said)
    use.add("a", machine([shared]), said)  # the same reading again, as of a host that is away
    (found,) = use.gpus
    assert (found.peak_bytes, found.mean_bytes, found.readings) == (22 * GIB, 10 * GIB, 1)
    assert found.shared
    assert found.by_probe
    assert use.others == {"8"}


def test_a_smaller_gpu_holds_the_peak_with_headroom_and_is_of_the_same_vendor() -> None:
    use = JobUse(lambda each: slurm_number(each) == "7")
    use.add("a", machine([gpu(0, processes=(_in_job(1, 20, "7"),))]), {})
    names = smaller_gpus(use.gpus)
    assert "rtx-4090-24gb" in names
    assert not any(name.startswith(("mi", "rx", "a100")) for name in names)
    use.add("a", machine([gpu(0, processes=(_in_job(1, 23, "7"),))], after_s=1), {})
    assert "rtx-4090-24gb" not in smaller_gpus(use.gpus)
    assert "use" in job_line(job_object("7", Unknown("not asked"), use))


def test_memory_that_the_driver_does_not_give_is_never_0() -> None:
    """As in WSL, or of a MIG instance: the job may have all that other processes do not."""
    use = JobUse(lambda each: slurm_number(each) == "7")
    hidden = replace(_in_job(1, 0, "7"), used_bytes=Unknown("not supported"))
    use.add("a", machine([gpu(0, 50 * GIB, processes=(hidden, _in_job(2, 5, "8")))]), {})
    (found,) = use.gpus
    assert (found.peak_bytes, found.mean_bytes, found.by_device) == (45 * GIB, 45 * GIB, True)
    lines = list(job_lines(job_object("7", Unknown("not asked"), use)))
    assert lines[0].startswith("Slurm job 7: peak 45.0 of 80.0 GiB")
    assert "No smaller GPU" not in lines[0]
    assert any(line.startswith("The driver did not give each process's memory") for line in lines)


def test_a_smaller_gpu_holds_the_highest_peak_of_a_job_on_unlike_gpus() -> None:
    use = JobUse(lambda each: slurm_number(each) == "7")
    small = gpu(1, processes=(_in_job(2, 17, "7"),), memory=memory(17 * GIB, 24 * GIB))
    use.add("a", machine([gpu(0, processes=(_in_job(1, 40, "7"),)), small]), {})
    assert smaller_gpus(use.gpus) == ()
    assert smaller_gpus(use.gpus[1:])


def _readings(machine: FakeMachine) -> int:
    return sum(count for name, count in machine.calls().items() if "ComputeRunningProcesses" in name)


def test_a_command_in_a_job_ends_with_the_jobs_line(fake_machine: FakeMachine, tmp_path: Path) -> None:
    seen, end = tmp_path / "pid", tmp_path / "end"
    code = f"""
import os, time
open({str(seen)!r}, "w").write(str(os.getpid()))
while not os.path.exists({str(end)!r}):
    time.sleep(0.05)
"""
    environ = {**os.environ, **fake_machine.environment, "PATH": os.environ["PATH"], "SLURM_JOB_ID": "974804"}
    environ["GPUMEM_TUI_DIR"] = str(tmp_path / "probes")
    command = [sys.executable, "-m", "gpumem_tui", "run", "--", sys.executable, "-c", code]
    running = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    wait_for_file(seen)
    held = FakeProcess(int(seen.read_text()), 12 * GIB)
    fake_machine.show(Scenario(gpus=[FakeGpu(used_bytes=13 * GIB, processes=[held], utilization_percent=40)]))
    before = _readings(fake_machine)
    wait_until(lambda: _readings(fake_machine) >= before + 4, "four readings of the processes")
    end.touch()
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "Slurm job 974804: peak 12.0 of 80.0 GiB on the GPU, mean 12.0" in errors
    assert "would have done" in errors
