"""One module for each path of the API: from a request to the answer that it will have."""
