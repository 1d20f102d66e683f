"""The HTTP server: sockets, connections, authentication, bodies, and the routes to the endpoints."""
