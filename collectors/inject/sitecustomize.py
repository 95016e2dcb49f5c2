"""Python runs this at start where the launcher put this folder first on PYTHONPATH: the collector's way into a job.

It does nothing unless TRACEANALYZER_RUN_DIR is set, imports no torch, and hands over to the ``sitecustomize`` that would
have run without it. The collector that runs is the launcher's own, wherever the job's Python has or has not got one.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _package(name: str, folder: str, search: str) -> None:
    """The package of this name from this folder; what is there already is left."""
    import importlib.util

    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[search]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} holds no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def enter() -> None:
    """Starts watching for torch.distributed in this process. Never raises."""
    try:
        if not os.environ.get("TRACEANALYZER_RUN_DIR"):
            return
        if sys.version_info < (3, 11):  # noqa: UP036 - the job's Python is not ours to choose
            if os.environ.get("RANK") == "0":
                sys.stderr.write("traceanalyzer: no collector in this job: it needs Python 3.11 or newer\n")
            return
        collectors = os.path.dirname(_HERE)
        parent = os.path.dirname(collectors)
        # Installed, collectors is inside the package; in a checkout it stands beside it.
        inside = os.path.isfile(os.path.join(parent, "__init__.py"))
        package = parent if inside else os.path.join(parent, "traceanalyzer")
        _package("traceanalyzer", package, package)
        _package("traceanalyzer.collectors", collectors, collectors)
        setattr(sys.modules["traceanalyzer"], "collectors", sys.modules["traceanalyzer.collectors"])  # noqa: B010 - as an import does
        from traceanalyzer.collectors import bootstrap

        bootstrap.start()
    except Exception as error:  # noqa: BLE001 - the job starts, whatever is wrong with us
        import contextlib

        with contextlib.suppress(Exception):  # there may be no stderr
            sys.stderr.write(f"traceanalyzer: no collector in this process: {type(error).__name__}: {error}\n")


def chain() -> None:
    """Runs the sitecustomize that comes next on the path, as itself; its errors are its own."""
    import importlib.machinery
    import importlib.util

    path = [entry for entry in sys.path if os.path.realpath(entry or ".") != os.path.realpath(_HERE)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    ours = sys.modules.get("sitecustomize")
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        raise


if __name__ == "sitecustomize":
    enter()
    chain()
