"""The OpenAI API in front of the pods. Each package imports only packages that are below it in this list.

main           starts the process
gateway        builds the parts, starts and stops them; no request enters it
web            HTTP: sockets and TLS, keys, bodies, routes; the port for operators
endpoints      one module for each path of the API, which turns a request into a reply
answers        the text of each choice, and its JSON, whole or streamed
generation     runs requests on pods: their prompts, the tokens so far, and the pods of each prompt
fleet          the connections to pods, which pods there are, and the models that they serve
requests       the bodies that clients send, their checks, and the parameters for pods that follow from them
settings       flags and environment variables
telemetry      the record of each request, and the metrics and traces made from it
models         the files in a model's folder that the gateway reads: tokenizer, chat template, defaults
tenancy        tenants, their keys, limits and cache salts
routing        chooses the pods of a request and when to send it; plain state and a clock, without network or event loop
tools          tool calls in the text of a model
concurrency    threads and turns, so that no request delays the others; tasks that are restarted when they fail
bounds, json_size, errors    the size limits of a request, and the errors that clients get

Packages that do not import each other share a layer; the contracts in `pyproject.toml` say which.
"""
