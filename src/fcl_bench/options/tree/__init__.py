"""A tree of aggregators between the clients and the server."""
