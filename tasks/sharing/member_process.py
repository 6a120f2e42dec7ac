"""The member that a host runs while its device is idle: `gleaner join`, in a process that the host's starter forks."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from resources.local_starter import StartedProcess, running_starter

log = logging.getLogger(__name__)
PROGRAM = Path(__file__).parents[2] / "gleaner.py"
IMPORTS = ("tasks.sampling.session.join", "tasks.sampling.engines.torch_engine", "transformers.modeling_utils")
END_TIME_LIMIT_S = 60.0


class ProcessMember:
    """See `tasks.sharing.workers.BackfillMember`. The member has no price: the host's bill has the seconds."""

    def __init__(self) -> None:
        self._process: StartedProcess | None = None

    @property
    def is_running(self) -> bool:
        if self._process is None:
            return False
        try:
            code = self._process.wait(0)
        except TimeoutError:
            return True
        if code:
            log.warning("the member that generated on this host ended with %d", code)
        self._process = None
        return False

    def start(self, run_url: str) -> None:
        environment = dict(os.environ)
        self._process = running_starter(environment).start([str(PROGRAM), "join", run_url], environment, IMPORTS)

    def notice(self) -> None:
        if self._process is not None:
            self._process.end()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(TimeoutError):
                self._process.wait(END_TIME_LIMIT_S)
            self._process = None
