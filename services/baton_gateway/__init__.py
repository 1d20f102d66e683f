"""The OpenAI API in front of the pods. Each package imports only packages that stand below it in this list.

main           starts the process
gateway        builds the parts, starts and stops them; no request enters it
web            HTTP: sockets and TLS, keys, bodies, routes; the port for operators
endpoints      one module for each path of the API: from a request to the reply that it will have
answers        the text of each choice, and its JSON, whole or streamed
generation     requests while they run on pods: prompts, their tokens so far, and the pods that they run on
fleet          the connections to pods, which pods there are, and the models that they serve
requests       the bodies that clients send, their checks, and the parameters for pods that follow from them
settings       flags and environment variables
telemetry      what is noted of each request, and the metrics and traces that are made of it
models         what the gateway reads from the folder of a model: tokenizer, chat template, defaults
tenancy        tenants, their keys, limits and cache salts
routing        which pods a request goes to, and when; plain state and a clock, without network or event loop
tools          calls of functions in the text of a model
concurrency    threads and turns, so that no request holds up the others; tasks that are kept running
bounds, json_size, errors    how much a request may hold, and what clients get when something is wrong

Those that do not import each other share a layer; the contracts in `pyproject.toml` say which.
"""
