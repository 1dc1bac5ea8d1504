"""Lists a library's tasks: `python -P listing.py FILE`, options as JSON on stdin, one row of JSON a line on stdout.

Invariant: the last line is `{"rows": n}` or has an `error`, with `missing` if FILE imports a module that is not installed.
A list without it is not complete. What a library prints goes to stderr.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.load(sys.stdin)
    ending: dict[str, object]
    try:
        spec = importlib.util.spec_from_file_location("far", Path(sys.argv[1]))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        ending = {"missing": error.name, "error": str(error)}
    else:
        try:
            count = 0
            for row in module.rows(options):
                print(json.dumps(row), file=out)  # noqa: T201
                count += 1
            ending = {"rows": count}
        except module.RefusedError as error:
            ending = {"error": str(error)}
        except Exception as error:  # noqa: BLE001  a library may raise anything; the other side says it
            ending = {"error": f"the library raises {type(error).__name__}: {error}"}
    print(json.dumps(ending), file=out)  # noqa: T201
    out.close()


if __name__ == "__main__":
    main()
