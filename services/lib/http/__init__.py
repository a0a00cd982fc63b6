"""An HTTP server: its settings, its port and certificate, and where requests may come from."""
