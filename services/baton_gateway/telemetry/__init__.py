"""What is noted of a request, and the metrics and traces that are made of it."""
