"""Records of requests, and the metrics and traces that are made of them."""
