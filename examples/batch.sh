#!/usr/bin/env bash
# Answer a file of requests in OpenAI's batch format. A second run skips the requests that have an answer.
set -euo pipefail
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

for name in json.dumps math.gcd os.path.join; do
  echo '{"custom_id": "'$name'", "method": "POST", "url": "/v1/chat/completions",' \
       '"body": {"messages": [{"role": "user", "content": "What is '$name'?"}], "max_tokens": 40}}'
done > "$out/requests.jsonl"

quire run-batch -i "$out/requests.jsonl" -o "$out/answers.jsonl"
cat "$out/answers.jsonl"
