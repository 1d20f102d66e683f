"""`helm test`: one chat with each model, through the gateway's Service."""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

KEY = os.environ.get("API_KEY")
# The certificate is for the external name, which this test does not use. It only checks that the gateway answers.
CONTEXT = ssl._create_unverified_context()


def ask(path, body=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {KEY}"} if KEY else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["URL"] + path, data, headers)
    with urllib.request.urlopen(request, timeout=120, context=CONTEXT) as response:
        return json.load(response)


try:
    models = [model["id"] for model in ask("/v1/models")["data"]]
    for model in models:
        messages = [{"role": "user", "content": "What is Baton?"}]
        answer = ask("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 32})
        print(f"{model}: {answer['choices'][0]['message']['content']}")
except urllib.error.HTTPError as error:
    if error.code == 401 and not KEY:
        print("the gateway requires a key, as it should; set tests.apiKeySecret to test a chat as well")
        sys.exit()
    sys.exit(f"{error.url}: {error.code} {error.read().decode(errors='replace')}")
if not models:
    sys.exit("the gateway serves no model")
