#!/usr/bin/env bash
# The API with nothing but curl: what is served, an answer, a stream of events, token ids.
set -euo pipefail

url=${PDMESH_URL:-http://127.0.0.1:8000}

ask() { # path, body
  curl --silent --show-error --fail-with-body "$url$1" \
    --header "Authorization: Bearer ${PDMESH_API_KEY:-none}" \
    --header "Content-Type: application/json" \
    ${2:+--data "$2"}
  echo
}

ask /v1/models
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}'
# Each event is a line "data: {...}"; the last one is "data: [DONE]". --no-buffer shows them as
# they come.
curl --silent --show-error --fail-with-body --no-buffer "$url/v1/completions" \
  --header "Authorization: Bearer ${PDMESH_API_KEY:-none}" \
  --data '{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "stream": true}'
ask /tokenize '{"prompt": "Once upon a time"}'
