"""Makes a nursery of an interpreter that was started as if to run the user's script.

Python imports `sitecustomize` when all is set up, just before the script. The nursery works in
here; in a forked rank the import returns, and Python itself goes on to run the script. So nothing
of how a script is run is imitated: arguments, `__main__`, tracebacks, exit codes are Python's own.

Whatever goes wrong in here ends this process: a nursery that went on would train.
"""

from __future__ import annotations

import importlib
import os
import sys


def _begin() -> None:
    at_start = frozenset(sys.modules)
    role = os.environ.pop("EVERSTEP_NURSERY")
    original = os.environ.pop("EVERSTEP_NURSERY_PYTHONPATH", None)
    if original is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = original
    if role == "probe":
        os.write(1, b"probe")
        os._exit(0)
    _import_the_users()

    from everstep.launch.warm import nursery

    nursery.run(int(role), at_start)


def _import_the_users() -> None:
    """Import the `sitecustomize` that this one stands before, if there is one."""
    here = os.path.dirname(__file__)  # noqa: PTH120  no pathlib before the user's own imports
    sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as exc:
        if exc.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours  # the import system insists on one


try:
    if "EVERSTEP_NURSERY" in os.environ:  # else somebody only reads this file
        _begin()
except BaseException:  # noqa: BLE001  see above
    import traceback

    traceback.print_exc()
    os._exit(70)
