"""What runs inside the training job: standard library and torch, nothing else.

Importing this package imports neither torch nor any other third-party module; torch is imported by the functions that
need it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceanalyzer.collectors.session import Session

__all__ = ["attach"]


def attach(run_dir: str | os.PathLike[str], **options: Any) -> Session:
    """Records this process's communication into the folder ``run_dir``, which all ranks of a run share.

    ``with attach("run.d"): train()`` records the block; a plain call records until the process ends. To be called before
    or after ``init_process_group``. Options are those of a session (session.OPTIONS): ``steps=[10, 12]`` profiles these
    steps, ``dormant=True`` records nothing until a capture is asked for, ``hooks="methods"`` keeps to the cheapest hook.
    A second call while a session is open gives the open one.

    An error of the collector does not reach the job: what cannot be recorded is reported in the run, and where nothing
    can, one line on stderr says so.
    """
    from traceanalyzer.collectors import launch, session

    launch.write_run_json(os.fspath(run_dir), {"started_by": "traceanalyzer.collectors.attach"})
    return session.open_session({"run_dir": os.fspath(run_dir), **options})
