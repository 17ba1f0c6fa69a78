"""One HTML page with all tables and figures."""
