"""HTTP: sockets, connections, keys and bodies, and the routes to the endpoints."""
