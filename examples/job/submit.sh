#!/usr/bin/env bash
# Run search.py on a Ray cluster, with this folder as its working directory:
#
#     RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 examples/job/submit.sh --trials 8 --epochs 5
#
# A cluster with tokens (all of cluster/ have them) wants RAY_AUTH_MODE=token here, and its token in ~/.ray/auth_token.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
exec ray job submit --working-dir . --runtime-env runtime_env.json -- python search.py "$@"
