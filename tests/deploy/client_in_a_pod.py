"""Four clients that ask until stdin ends; then a line of JSON says what they got.

Runs in a pod with nothing but Python: ``kubectl exec -i client -- python3 -c THIS EXPECTED``.
"""

import json
import sys
import threading
import urllib.request

URL = "http://pdmesh:8000/v1/completions"
NUM_CLIENTS = 4
NUM_TOKENS = 150
PROMPTS = ["What is 17 + 25?", "The capital of France", "One, two, three", "Tell me about Vienna."]

over = threading.Event()
expected = json.loads(sys.argv[1])
found = {"whole": 0, "wrong": [], "failed": [], "texts": {}}


def ask(prompt):
    """Return the text of one streamed answer; raises where it is not whole."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        URL, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    text, end = "", None
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            for choice in event["choices"]:
                text += choice["text"]
                end = choice["finish_reason"] or end
    if end != "length":
        raise RuntimeError(f"it ended with {end}")
    return text


def client(prompt):
    while not over.is_set():
        try:
            text = ask(prompt)
        except Exception as error:
            found["failed"].append(f"{type(error).__name__}: {error}")
            over.wait(0.5)
            continue
        if text == expected.get(prompt, text):
            found["whole"] += 1
            found["texts"][prompt] = text
        else:
            found["wrong"].append(text)


threads = [threading.Thread(target=client, args=[prompt]) for prompt in PROMPTS[:NUM_CLIENTS]]
for thread in threads:
    thread.start()
sys.stdin.read()
over.set()
for thread in threads:
    thread.join()
print(json.dumps(found))
