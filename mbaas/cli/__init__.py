"""The command ``mbaas``: serve, status, stop, analyze, what-if, plan, simulate, bench, cluster.

Exit codes: 0 success, 1 an error of the service (`mbaas.MbaasError`), 2 an invalid command line or file, 130
interrupted by Ctrl-C. Results go to stdout, everything else to stderr. Ray and Arrow are imported by the commands that
need them, never for ``--help``.
"""

from mbaas.cli.main import app

__all__ = ["app"]
