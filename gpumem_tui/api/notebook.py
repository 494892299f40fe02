"""The magics of notebooks: `%%gpumem` on a cell, `%gpumem watch`; loaded by `%load_ext gpumem_tui`.

IPython is whoever calls this, so it is never a requirement.
"""

from __future__ import annotations

import ast
import atexit
import linecache
import os
import shlex
import threading
from typing import Any, NoReturn

from gpumem_tui.errors import OptionError, RunError, UserError, own_error
from gpumem_tui.memory import Bucket
from gpumem_tui.report.shown import ledger_html, places_html

_USAGE = "write `%%gpumem` or `%%gpumem --gpu sim:rtx-4090` above a cell, `%gpumem watch`, or `%gpumem stop`"
_magic: Magic | None = None


def load_ipython_extension(shell: Any) -> None:
    """Offer the magics: IPython calls this at `%load_ext gpumem_tui`."""
    global _magic
    unload_ipython_extension(shell)
    _magic = Magic(shell)
    shell.register_magic_function(_magic.gpumem, "line_cell", "gpumem")


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics back: IPython calls this at `%unload_ext gpumem_tui`."""
    global _magic
    if _magic is not None:
        _magic.stop()
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("gpumem", None)
    _magic = None


class Magic:
    """The magics of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._watch: _Watch | None = None

    def gpumem(self, line: str, cell: str | None = None) -> object:
        """Run a cell and show the memory that it takes, or watch the GPUs.

        `%%gpumem` runs the cell and shows what it took on the GPU, by bucket and line. `%%gpumem --gpu sim:rtx-4090`
        shows what it would take there: no value is computed, and the notebook's variables stay as they are. `%gpumem
        watch` shows the GPUs' ledger live, `%gpumem stop` ends that.
        """
        try:
            return self._run(shlex.split(line), cell)
        except UserError as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> NoReturn:
        from IPython.core.error import UsageError

        raise UsageError(reason)

    def _run(self, words: list[str], cell: str | None) -> object:
        if cell is None:
            act = {"watch": self.watch, "stop": self.stop}.get(" ".join(words))
            if act is None:
                raise OptionError(f"%gpumem {' '.join(words)}: {_USAGE}")
            act()
            return None
        if words[:1] == ["--gpu"] and len(words) == 2:
            return self._simulated(words[1], cell)
        if words:
            raise OptionError(f"%%gpumem {' '.join(words)}: {_USAGE}")
        return self._measured(cell)

    # A cell

    def _simulated(self, gpu: str, cell: str) -> object:
        from gpumem_tui.api.steps import predict

        def run() -> None:
            self._execute(cell, dict(self._shell.user_ns))

        run.__name__ = "cell"
        return predict(run, gpu if gpu.startswith("sim:") else f"sim:{gpu}")

    def _measured(self, cell: str) -> object:
        simulated = "`%%gpumem --gpu sim:rtx-4090` shows what it would take on one"
        try:
            import torch
        except ImportError as error:
            raise RunError("torch is not installed here: `pip install torch`") from error
        if not torch.cuda.is_available():
            raise RunError(f"no GPU is here to measure the cell on; {simulated}")
        from gpumem_tui.probe.look import BlockLook
        from gpumem_tui.watch.printed import LookLine

        torch.cuda.init()
        look = BlockLook()
        if reason := look.start([]):
            raise RunError(f"the cell cannot be measured: {reason}; {simulated}")
        try:
            self._execute(cell, self._shell.user_ns)
        finally:
            found = look.ended()
        return LookLine.of(None, found)

    def _execute(self, cell: str, names: dict[str, Any]) -> None:
        """Run a cell, and show its last expression as IPython does. Its lines are called ``In[5]:2`` and so on."""
        shell, file = self._shell, f"In[{self._shell.execution_count}]"
        text = f"\n{shell.transform_cell(cell)}"  # the magic's own line is the first
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        tree = shell.transform_ast(ast.parse(text, file))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(shell.compile(tree, file, "exec"), names)  # noqa: S102 - the user's own cell
        if last is not None:
            exec(shell.compile(ast.Interactive([last]), file, "single"), names)  # noqa: S102

    # The GPUs, live

    def watch(self) -> None:
        """Show the ledger of the GPUs below the cell, each second, until `stop` or the end of the kernel."""
        self.stop()
        self._watch = _Watch()

    def stop(self) -> None:
        """Update it no more; no thread is left."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None


class _Watch:
    """A display that a thread updates."""

    def __init__(self) -> None:
        from IPython.display import HTML, DisplayHandle

        from gpumem_tui.monitor.report import NoDriverAnswer, complete
        from gpumem_tui.monitor.sampler import Sampler
        from gpumem_tui.probe.entry import attach
        from gpumem_tui.watch.live import ask_probes

        attach()  # not the package's, which is the room of that name where the command line was imported
        self._html, self._ask, self._source = HTML, ask_probes(), Sampler(interval_s=1.0)
        self._ended = threading.Event()
        self._source.start()
        try:
            self._last = complete(self._source)
        except NoDriverAnswer as error:
            self._source.stop()
            raise RunError(str(error)) from error
        if self._last.problem:
            self._source.stop()
            raise RunError(self._last.problem)
        self._handle = DisplayHandle()
        self._handle.display(HTML(self._shown()))
        self._thread = threading.Thread(target=self._update, name="gpumem watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _update(self) -> None:
        try:
            while not self._ended.is_set():
                snapshot = self._source.wait(self._last, 1.0)
                if snapshot is not None and snapshot is not self._last:
                    self._last = snapshot
                    self._handle.update(self._html(self._shown()))
        except Exception as error:  # noqa: BLE001 - what nobody expected is shown where the ledger was
            self._handle.update(self._html(places_html((), own_error(error))))

    def _shown(self) -> str:
        """Return each GPU's ledger, and what this process has on it by its probe."""
        from gpumem_tui.monitor.report import ledger_sizes

        said, parts = self._ask(self._last).said, []
        for gpu in self._last.gpus:
            rows = {kind.value: size for kind, size in ledger_sizes(gpu).items() if isinstance(size, int)}
            parts.append(ledger_html(f"GPU {gpu.index}: {gpu.name}", rows))
            mine: Any = said.get((gpu.uuid, os.getpid()), {})
            if buckets := mine.get("buckets"):
                held = [(Bucket(key).title, size) for key, size in buckets.items() if size]
                parts.append(places_html(held, f"this notebook after step {mine.get('step')}"))
        return "".join(parts)

    def stop(self) -> None:
        """End the thread and the readings."""
        atexit.unregister(self.stop)
        self._ended.set()
        self._source.stop()
        self._thread.join()
