"""One module for each path of the API. It turns a parsed request into an answer."""
